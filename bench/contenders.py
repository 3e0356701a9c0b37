"""Who takes part, with which settings, and how each is started."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = Path(__file__).parent / "peers"
CACHE = Path(__file__).parents[1] / ".bench"  # environments of the peers, made when they are first needed
INSTALL_S_MAX = 600
EVERYTHING = 10**9


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of the tables."""

    name: str
    title: str
    settings: str  # in words, for docs/benchmarks.md; why is said where they are set
    begins: str = "at once"  # or `by score`: at a time that its wake-ups tell; `when told`: on its input
    folder: str = ""  # of the peer's own environment
    work: Sequence[str] = ()
    fill: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    processes: int = 1
    counted: bool = False  # works on holds of counted resources
    baseline: str = "bare"

    @property
    def in_redis(self) -> bool:
        """Whether its queue is in Redis."""
        return self.folder not in ("pgqueuer", "procrastinate")

    def filling(self) -> list[str]:
        """Answer the command that enqueues; the file of holds comes after it. Empty: there is no queue."""
        return [*self._program(), "fill"] if self.folder else list(self.fill)

    def working(self) -> list[str]:
        """Answer the command that works until it is ended."""
        return [*self._program(), "work"] if self.folder else list(self.work)

    def _program(self) -> list[str]:
        folder = FOLDERS / self.folder
        if (folder / "package.json").exists():
            return ["node", str(_node(folder) / "peer.mjs")]
        return [str(_venv(folder) / "bin/python"), str(folder / "peer.py")]


def _here(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _reaper(statement: str, batch: int) -> list[str]:
    return [sys.executable, "-m", "bench.bare", statement, str(batch)]


# The limiter must not decide here, so its allowance is fixed and its highest. The holds are overdue by minutes before
# the start, so the sweep is told to leave them to the queue, which is what is measured. All else as it comes:
# sweep, promoter, prune, metrics and the log (JSON, info) are on.
OPEN = {
    "GOVERNOR_MODE": "off",
    "GOVERNOR_CEILING_PER_S": "1000000",
    "EXPIRY_SWEEP_GRACE_S": "3600",
    "EXPIRY_METRICS_PORT": "0",
}
AS_IT_COMES = {"EXPIRY_METRICS_PORT": "0"}
WORKER = (_here("expiry"), "worker")
FILL = (sys.executable, "-m", "bench.ours", "fill")


def _ours(name: str, title: str, settings: str, **rest: object) -> Contender:
    return Contender(name, title, settings, "by score", "", WORKER, FILL, **rest)  # type: ignore[arg-type]


BARE = Contender(
    "bare",
    "bare SQL, batch 500",
    "one statement in a loop, ids by array",
    "when told",
    work=_reaper("array", 500),
)
DRAIN = [
    _ours("ours", "expiry", "allowance fixed at 1,000,000/s, grace 3600 s, else as it comes", env=OPEN),
    _ours("ours2", "expiry, 2 processes", "the same, twice", env=OPEN, processes=2),
    _ours(
        "ours-counted", "expiry, 1,000 counters", "the same", env=OPEN, counted=True, baseline="bare-counted"
    ),
    _ours(
        "ours2-counted",
        "expiry, 1,000 counters, 2 processes",
        "the same, twice",
        env=OPEN,
        processes=2,
        counted=True,
        baseline="bare-counted",
    ),
    Contender(
        "bare-join",
        "bare SQL, batch 500, planner's choice",
        "the same, ids by a join",
        "when told",
        work=_reaper("join", 500),
    ),
    Contender(
        "bare-once",
        "bare SQL, everything at once",
        "the same statement without a limit",
        "when told",
        work=_reaper("join", EVERYTHING),
    ),
]
BASELINES = {
    "bare": BARE,
    "bare-counted": Contender(
        "bare-counted",
        "bare SQL, batch 500, 1,000 counters",
        "the statement of the baseline that also updates the counters",
        "when told",
        work=_reaper("counters", 500),
        counted=True,
        baseline="bare-counted",
    ),
}


def _peer(name: str, title: str, settings: str, folder: str = "", **env: str) -> Contender:
    return Contender(name, title, settings, folder=folder or name, env=env)


PEERS = {
    peer.name: peer
    for peer in (
        _peer("bullmq", "BullMQ", "concurrency 100, removeOnComplete, addBulk"),
        _peer("pgqueuer", "PgQueuer", "batch_size 100"),
        _peer("saq", "SAQ", "concurrency 50, hiredis"),
        _peer("streaq", "streaQ", "concurrency 100, prefetch 100, ttl 0, silent, uvloop"),
        _peer("arq", "arq, tuned", "max_jobs 100, queue_read_limit 1000, poll_delay 0.02, keep_result 0"),
        _peer(
            "arq-stock",
            "arq, as it comes",
            "max_jobs 10, poll_delay 0.5, keep_result 3600",
            "arq",
            SETTINGS="stock",
        ),
        _peer("celery", "Celery", "prefork, 4 processes, acks_late, prefetch 128"),
        _peer(
            "celery-threads",
            "Celery, threads",
            "10 threads, else the same",
            "celery",
            POOL="threads",
            CONCURRENCY="10",
        ),
        _peer("procrastinate", "procrastinate", "concurrency 30, delete_jobs successful"),
    )
}
# Two more for the idle part: arq with short polls, alone and beside a worker that has 100 jobs in
# flight, which stay at the head of the queue and are looked at in every poll.
ARQ_POLLING = _peer(
    "arq-0.1",
    "arq, polls of 0.1 s",
    "poll_delay 0.1, else as it comes",
    "arq",
    SETTINGS="stock",
    POLL_DELAY_S="0.1",
)
ARQ_BESIDE = _peer(
    "arq-beside",
    "arq, polls of 0.1 s, 100 jobs in flight elsewhere",
    "the same",
    "arq",
    SETTINGS="stock",
    POLL_DELAY_S="0.1",
    IN_FLIGHT="100",
)
OURS = _ours("ours", "expiry", "as it comes", env=AS_IT_COMES)
ZADD = Contender(
    "zadd", "ZADD alone", "1,000 members a command", fill=(sys.executable, "-m", "bench.ours", "zadd")
)

DRAIN += PEERS.values()
LAG = [
    OURS,
    *(PEERS[name] for name in ("celery", "celery-threads", "bullmq", "pgqueuer", "arq", "arq-stock")),
]
ENQUEUE = [OURS, ZADD, *(peer for name, peer in PEERS.items() if name not in ("arq-stock", "celery-threads"))]
IDLE = [OURS, ARQ_POLLING, ARQ_BESIDE, *PEERS.values()]


def _venv(folder: Path) -> Path:
    """Answer an environment with exactly what the peer's requirements.txt pins."""
    wanted = (folder / "requirements.txt").read_bytes()
    home = CACHE / f"{folder.name}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        print(f"installing {folder.name} ...", flush=True)
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "-r", str(folder / "requirements.txt")])
        (home / "complete").touch()
    return home


def _node(folder: Path) -> Path:
    """Answer a copy of the peer's folder with exactly what its package-lock.json pins."""
    wanted = b"".join(p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file())
    home = CACHE / f"{folder.name}-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        print(f"installing {folder.name} ...", flush=True)
        shutil.copytree(folder, home)
        _run(["npm", "ci", "--silent", "--no-audit", "--no-fund", "--prefix", str(home)])
        (home / "complete").touch()
    return home


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_S_MAX, stdout=subprocess.DEVNULL)
