-- A token bucket shared by a fleet, as a library: a script puts this text in front of its own body
-- and takes permits in the same call as the work they are for:
--
--   local now_us = bucket.now_us()                      -- once per script, then passed on
--   local granted, wait_us = bucket.take(KEYS[2], want, floor_per_s, now_us)
--   bucket.refund(KEYS[2], granted - used, floor_per_s, now_us)
--
-- Every operation returns (outcome, wait_us, state). floor_per_s is the caller's own setting;
-- without now_us it reads TIME itself. One hash per bucket; one HMGET and at most one HSET per
-- operation. bucket.py has the same arithmetic in Python, bucket_postgres.py in SQL, step by step.
--
-- Units: rates in milli-permits/s, times in µs, tokens and debt in nano-permits, which is
-- milli-permits/s x µs. A refill is a product of integers, never a fraction, and every number kept
-- stays below 2^53 (rates up to 1,000,000/s): a double holds it, and Redis writes all its digits.
local bucket = {}

do
  local PERMIT = 1e9                -- nano-permits
  local BURST_US = 250000           -- the bucket holds 0.25 s of allowance, or one permit
  local DEBT_US = 1000000           -- debt is at most 1 s of allowance, or one permit
  local STEP_BACK_US = 1000000      -- a clock further back than this has been set, not slewed
  local IDLE_US = 3600000000        -- more idle time than this counts as this: all is full by then
  local UNMET_US = 250000           -- whoever is short comes back within this, or does not want any more
  local UNMET_MAX = 1000000         -- permits; a longer want waits for UNMET_US all the same

  local function burst(rate)
    if rate == 0 then return 0 end  -- paused: nothing may pile up for the resume
    return math.max(PERMIT, rate * BURST_US)
  end

  -- The published allowance, or the floor once that has lapsed; milli-permits/s.
  function bucket.in_force(s)
    if s.micros < s.lapse then return s.rate end
    return s.floor
  end

  -- What exceeds the bounds of the rate in force is dropped, after a refill and after an operation.
  local function clamp(s)
    local rate = bucket.in_force(s)
    s.tokens = math.min(s.tokens, burst(rate))
    s.debt = math.min(s.debt, math.max(PERMIT, rate * DEBT_US))
  end

  -- Debt is repaid from what exceeds the floor only, so that it never starves the caller of take.
  local function flow(s, elapsed_us, rate)
    if elapsed_us <= 0 then return end
    elapsed_us = math.min(elapsed_us, IDLE_US)
    local repaid = math.min(s.debt, elapsed_us * math.max(rate - s.floor, 0))
    s.debt = s.debt - repaid
    s.tokens = math.min(burst(rate), s.tokens + elapsed_us * rate - repaid)
  end

  local function load(key, floor_per_s, now_us)
    now_us = tonumber(now_us) or bucket.now_us()
    local v = redis.call('HMGET', key,
      'tokens', 'debt', 'micros', 'rate', 'floor', 'until', 'cut_until', 'epoch', 'spent', 'unmet',
      'unmet_until')
    local floor = math.floor(floor_per_s * 1000 + 0.5)
    local s = {
      tokens = tonumber(v[1]), debt = tonumber(v[2]), micros = tonumber(v[3]),
      rate = tonumber(v[4]), floor = tonumber(v[5]), lapse = tonumber(v[6]),
      cut_until = tonumber(v[7]), epoch = tonumber(v[8]) or 0, spent = tonumber(v[9]) or 0,
      unmet = tonumber(v[10]) or 0, unmet_until = tonumber(v[11]) or 0,
    }
    local whole = s.tokens and s.debt and s.rate and s.floor and s.lapse and s.cut_until
    if not whole or not s.micros or now_us < s.micros - STEP_BACK_US then
      -- New, lost, or its clock was set back: empty, at the floor, until somebody publishes again.
      return {
        tokens = 0, debt = 0, micros = now_us, rate = 0, floor = floor, lapse = 0, cut_until = 0,
        epoch = s.epoch, spent = 0, unmet = 0, unmet_until = 0,
      }
    end
    now_us = math.max(now_us, s.micros)
    s.unmet = s.unmet + math.max(0, math.min(now_us, s.unmet_until) - s.micros)
    local split = math.min(math.max(s.lapse, s.micros), now_us)
    flow(s, split - s.micros, s.rate)
    flow(s, now_us - split, s.floor)
    s.micros, s.floor = now_us, floor
    clamp(s)
    return s
  end

  local function save(key, s)
    redis.call('HSET', key, 'tokens', s.tokens, 'debt', s.debt, 'micros', s.micros, 'rate', s.rate,
      'floor', s.floor, 'until', s.lapse, 'cut_until', s.cut_until, 'epoch', s.epoch,
      'spent', s.spent, 'unmet', s.unmet, 'unmet_until', s.unmet_until)
  end

  -- µs until a whole permit is there. Tokens grow by max(t x rate - debt, t x min(rate, floor))
  -- before the lapse, by the floor after.
  local function wait_us(s)
    local need, left, lapse_us = PERMIT - s.tokens, s.lapse - s.micros, 0
    if need <= 0 then return 0 end
    if left > 0 and s.rate > 0 then
      local slow = math.min(s.rate, s.floor)
      local wait = math.min(math.ceil((need + s.debt) / s.rate), math.ceil(need / slow))
      if wait <= left then return wait end
      need = need - math.max(left * s.rate - s.debt, left * slow)
    end
    if left > 0 then lapse_us = left end
    return lapse_us + math.ceil(need / s.floor)
  end

  local function finish(key, s, outcome)
    clamp(s)
    save(key, s)
    return outcome, wait_us(s), s
  end

  -- The clock of the bucket, µs since 1970: Redis's own, so that no worker's clock matters.
  function bucket.now_us()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
  end

  -- outcome: permits granted, 0..want. priority 0 is the first; 1..3 leave so many quarters of the
  -- burst, and get nothing while a request of the first is unmet.
  function bucket.take_at(key, want, priority, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    local rate = bucket.in_force(s)
    local spared = math.floor(math.max(0, burst(rate) - PERMIT) * priority / 4)
    local there = math.floor(math.max(0, s.tokens - spared) / PERMIT)
    local granted = math.max(0, math.min(math.floor(want), there))
    if priority > 0 and s.micros < s.unmet_until then granted = 0 end
    if granted < want and priority == 0 then
      local wait = UNMET_US
      if rate > 0 then
        wait = math.min(UNMET_US, math.ceil(math.min(want - granted, UNMET_MAX) * PERMIT / rate))
      end
      s.unmet_until = math.max(s.unmet_until, s.micros + wait)
    end
    s.tokens, s.spent = s.tokens - granted * PERMIT, s.spent + granted
    return finish(key, s, granted)
  end

  -- The same for the first priority: what a claim script calls.
  function bucket.take(key, want, floor_per_s, now_us)
    return bucket.take_at(key, tonumber(want), 0, floor_per_s, now_us)
  end

  -- Gives back n permits that were granted and not used; what exceeds the burst is lost.
  function bucket.refund(key, n, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    n = math.max(0, math.floor(n))
    s.tokens, s.spent = s.tokens + n * PERMIT, s.spent - n
    return finish(key, s, 0)
  end

  -- Books n transitions that asked for no permit. The floor's own share of the tokens is spared and
  -- the rest becomes debt, or steady charges would starve take.
  function bucket.charge(key, n, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    n = math.max(0, math.floor(n))
    local owed = n * PERMIT
    local spared = burst(math.min(bucket.in_force(s), s.floor))
    local paid = math.min(owed, math.max(0, s.tokens - spared))
    s.tokens, s.debt, s.spent = s.tokens - paid, s.debt + owed - paid, s.spent + n
    return finish(key, s, 0)
  end

  -- outcome: 1 accepted, 0 refused (it has seen a higher epoch, or it is later than by_us; 0 = never).
  -- Within the dead time of a cut the allowance may fall, not rise: it was decided without knowing of it.
  function bucket.publish(key, allowance_milli_per_s, ttl_us, epoch, by_us, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    if epoch < s.epoch or (by_us > 0 and s.micros > by_us) then return finish(key, s, 0) end
    local cap = s.micros < s.cut_until and math.max(s.rate, s.floor) or allowance_milli_per_s
    s.rate, s.lapse, s.epoch = math.min(allowance_milli_per_s, cap), s.micros + ttl_us, epoch
    return finish(key, s, 1)
  end

  -- outcome: 1 lowered, 0 not (within the dead time of another cut, or nothing above the floor).
  function bucket.cut(key, factor_ppm, dead_us, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    local rate = bucket.in_force(s)
    local target = math.max(s.floor, math.floor(rate * factor_ppm / 1000000))
    if s.micros < s.cut_until or target >= rate then return finish(key, s, 0) end
    s.rate, s.cut_until = target, s.micros + dead_us
    return finish(key, s, 1)
  end

  -- The state as it is now; writes nothing.
  function bucket.read(key, floor_per_s, now_us)
    local s = load(key, floor_per_s, now_us)
    return 0, wait_us(s), s
  end
end
