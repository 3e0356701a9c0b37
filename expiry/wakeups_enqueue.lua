-- Enqueue wake-ups, many in one call, in arq's format: a member of the sorted set and its `arq:job:` key.
--
-- KEYS[1] sorted set · ARGV[1] job body · ARGV[2] ms a body outlives its deadline · then score, id, ...
-- Returns how many were not there already (whose score stays). A body that was lost, or a set that was lost alone, is
-- mended by enqueuing again.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local queued = redis.call('ZADD', KEYS[1], 'NX', unpack(ARGV, 3))
for i = 3, #ARGV, 2 do
  local ttl_ms = math.max(ARGV[i] - now_ms, 0) + ARGV[2]
  redis.call('SET', 'arq:job:' .. ARGV[i + 1], ARGV[1], 'NX', 'PX', string.format('%.0f', ttl_ms))
end
return queued
