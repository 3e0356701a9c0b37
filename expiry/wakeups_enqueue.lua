-- Enqueue wake-ups, many in one call, in arq's format: a member of the sorted set and its `arq:job:` key.
--
-- KEYS[1] sorted set · ARGV[1] job body · ARGV[2] ms a body outlives its deadline · then id, score, ...
-- Returns 1 (queued) or 0 (was there already; its score stays) for each. The set decides, so a body that
-- was lost or a set that was lost alone is mended by enqueuing again.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i = 3, #ARGV, 2 do
  local id, score = ARGV[i], ARGV[i + 1]
  local queued = redis.call('ZADD', KEYS[1], 'NX', score, id)
  if queued == 1 then
    local ttl_ms = math.max(score - now_ms, 0) + ARGV[2]
    redis.call('SET', 'arq:job:' .. id, ARGV[1], 'PX', string.format('%.0f', ttl_ms))
  end
  answers[#answers + 1] = queued
end
return answers
