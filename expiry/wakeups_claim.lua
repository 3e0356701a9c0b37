-- Claim due wake-ups and take their permits in one call. The bucket's library stands in front of this text.
--
-- KEYS[1] sorted set · KEYS[2] bucket · KEYS[3] sorted set of what is not ours
-- ARGV[1] want · ARGV[2] lease, ms · ARGV[3] database clock - Redis clock, ms · ARGV[4] floor, permits/s
-- Returns {now_ms (database's clock), permit wait in us, allowance in milli-permits/s, moved aside, head score
-- or false, how many of the ids were claimed before, id, id, ...}.
--
-- A claim is a lease: the score moves to now + lease, so what a killed worker claimed comes due again by
-- itself. A leased score ends in .5, so that claiming it again is known to be an expired lease.
local now_us = bucket.now_us()
local now_ms = now_us / 1000 + ARGV[3]
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.3f', now_ms), 'WITHSCORES',
  'LIMIT', 0, ARGV[1])

local ids, leased_before, aside = {}, {}, 0
for i = 1, #due, 2 do
  local generation = string.match(due[i], '^expire:%x+%-%x+%-%x+%-%x+%-%x+:(%d+)$')
  if generation and #generation <= 18 and #due[i] == 44 + #generation then
    ids[#ids + 1] = due[i]
    leased_before[#ids] = string.sub(due[i + 1], -2) == '.5' and 1 or 0
  else
    -- Not ours: never run, never lost. Its body must not expire while nobody looks.
    redis.call('ZADD', KEYS[3], due[i + 1], due[i])
    redis.call('ZREM', KEYS[1], due[i])
    redis.call('PERSIST', 'arq:job:' .. due[i])
    aside = aside + 1
  end
end

local granted, wait_us, state = bucket.take(KEYS[2], #ids, ARGV[4], now_us)
local leased = string.format('%.0f.5', now_ms + ARGV[2])
local answer, again = {string.format('%.3f', now_ms), wait_us, bucket.in_force(state), aside, false, 0}, 0
for first = 1, granted, 1000 do
  local moves = {}
  for i = first, math.min(granted, first + 999) do
    moves[#moves + 1], moves[#moves + 2] = leased, ids[i]
    answer[6 + i] = ids[i]
    again = again + (leased_before[i] or 0)
  end
  redis.call('ZADD', KEYS[1], 'XX', unpack(moves))
end
local head = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
answer[5], answer[6] = head[2] or false, again
return answer
