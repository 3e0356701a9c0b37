// BullMQ, one job a hold, with node-postgres.
//
// `concurrency` as high as the work can use and `removeOnComplete`, both from its guide ("Concurrency",
// "Auto-removal of jobs"); jobs are added in bulk; the statement is a prepared one. A worker's connection needs
// maxRetriesPerRequest null ("Going to production").
import { readFileSync } from 'node:fs';
import { Queue, Worker } from 'bullmq';
import IORedis from 'ioredis';
import pg from 'pg';

const AT_ONCE = 1000;
const NAME = 'expire';
const connection = new IORedis(process.env.REDIS_URL, { maxRetriesPerRequest: null });

async function fill(path) {
  const queue = new Queue(NAME, { connection });
  await queue.waitUntilReady();
  const holds = readFileSync(path, 'utf8').split('\n').filter(Boolean).map((line) => line.split('\t'));
  const started = performance.now();
  for (let first = 0; first < holds.length; first += AT_ONCE) {
    const now = Date.now();
    await queue.addBulk(
      holds.slice(first, first + AT_ONCE).map(([id, generation, dueMs]) => ({
        name: NAME,
        data: { id, generation },
        opts: {
          jobId: `${id}-${generation}`,
          timestamp: now,
          delay: Math.max(Number(dueMs) - now, 0),
          removeOnComplete: true,
        },
      })),
    );
  }
  console.log(JSON.stringify({ n: holds.length, seconds: (performance.now() - started) / 1000 }));
  await queue.close();
  connection.disconnect();
}

function work() {
  const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 20, idleTimeoutMillis: 0 });
  const statement = { name: NAME, text: process.env.EXPIRE_SQL };
  const worker = new Worker(
    NAME,
    async (job) => {
      for (let tries = 0; tries < 100; tries += 1) {
        const { rowCount } = await pool.query({ ...statement, values: [job.data.id, job.data.generation] });
        if (rowCount) return;
        console.log('early');
        await new Promise((resolve) => setTimeout(resolve, 1));
      }
    },
    { connection, concurrency: 100 },
  );
  worker.on('error', (error) => console.error(error));
  process.on('SIGTERM', () => worker.close().finally(() => process.exit(0)));
}

if (process.argv[2] === 'fill') await fill(process.argv[3]);
else work();
