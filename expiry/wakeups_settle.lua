-- Settle a claim: what is done leaves, the rest comes again at a score of its own, unused permits go back.
-- The bucket's library stands in front of this text.
--
-- KEYS[1] sorted set · KEYS[2] bucket · ARGV[1] floor, permits/s · ARGV[2] permits to give back
-- ARGV[3] number of done ids · their ids · then score, id, ... of those to come again
local done = tonumber(ARGV[3])
for first = 4, 3 + done, 1000 do
  local last, bodies = math.min(3 + done, first + 999), {}
  for i = first, last do
    bodies[i - first + 1] = 'arq:job:' .. ARGV[i]
  end
  redis.call('ZREM', KEYS[1], unpack(ARGV, first, last))
  redis.call('UNLINK', unpack(bodies))
end
for i = 4 + done, #ARGV, 2 do
  redis.call('ZADD', KEYS[1], 'XX', ARGV[i], ARGV[i + 1])
end
if tonumber(ARGV[2]) > 0 then
  bucket.refund(KEYS[2], tonumber(ARGV[2]), tonumber(ARGV[1]))
end
return redis.status_reply('OK')
