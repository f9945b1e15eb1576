"""How long it takes until another process goes on with a workflow whose process was killed, or stands still.

    python -m tests.bench.takeover --runs 20 --json takeover.json

Real workers of the prefork pool, a real owner, Redis and PostgreSQL; a database of each of its own, gone afterwards.
The time runs from the signal to the first line of the next step that another process has run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tenure.config import Settings
from tenure.ledger.migrate import upgrade
from tenure.workflows import Client, Outcome, Submission
from tenure.workflows.process import using
from tests.bench.workload import count
from tests.isolation import PostgresRun, redis_database
from tests.processes import Spawned, Spawner
from tests.services import POSTGRES, REDIS, wait_until
from tests.tasks.live import START_SECONDS, Fleet

ROOT = Path(__file__).resolve().parents[2]
LEASE_SECONDS = 1.0
STEPS = 30
WITHIN = 40.0  # seconds for anything to happen at all
_CELERY = (sys.executable, "-m", "celery", "-A", "tenure.workflows")


@dataclass(frozen=True)
class Line:
    """One step that was run, as its process told the side file."""

    step: int
    pid: int
    at: float  # on the wall clock, which all processes of a machine share


@dataclass(frozen=True)
class Job:
    """One workflow that is being run, the side file of its steps, and the process that runs it at first."""

    submission: Submission
    side: Path
    pid: int

    def lines(self) -> list[Line]:
        return _lines(self.side)

    def by_another(self) -> list[Line]:
        """Return the steps that another process than the first has run."""
        return [line for line in self.lines() if line.pid != self.pid]


class Deployment:
    """One owner and two workers of one process each."""

    def __init__(self, spawn: Spawner, folder: Path, ledger: str, broker: str) -> None:
        self.spawn, self.folder = spawn, folder
        self.fleet = Fleet(
            spawn,
            folder,
            ledger=ledger,
            broker=broker,
            lease_seconds=LEASE_SECONDS,
            resend_seconds=None,
            imports="tests.bench.workload",
        )
        self.fleet.add_to_path(ROOT)
        self._jobs = 0
        self.fleet.owner()
        self.workers = {name: self._spawned(name) for name in ("a", "b")}
        for worker in self.workers.values():
            worker.says(" ready.", within=START_SECONDS)

    def _spawned(self, name: str) -> Spawned:
        queue = self.fleet.settings.work_queue
        options = ("-Q", queue, "-P", "prefork", "-c", "1", "-n", f"{name}@%h", "-l", "INFO")
        quiet = ("--without-gossip", "--without-mingle")
        return self.spawn(*_CELERY, "worker", *options, *quiet, env=self.fleet.env, cwd=self.folder)

    def job(self) -> Job:
        """Submit a workflow and return it once it is somewhere in the middle."""
        self._jobs += 1
        side = self.folder / f"steps-{self._jobs}"
        submission = count.submit(f"job-{self._jobs}", str(side), STEPS)
        reached = random.randint(3, STEPS // 3)
        wait_until(lambda: len(_lines(side)) >= reached, within=WITHIN, what="it has begun")
        return Job(submission, side, _lines(side)[-1].pid)

    def worker_of(self, pid: int) -> str:
        """Return the name of the worker whose process this is."""
        parent = psutil.Process(pid).ppid()
        return next(name for name, worker in self.workers.items() if worker.pid == parent)

    def kill_worker(self, name: str) -> None:
        """Kill a worker with all its processes, and start it again."""
        os.killpg(self.workers[name].pid, signal.SIGKILL)
        self.workers[name].wait(within=WITHIN)
        self.workers[name] = self._spawned(name)

    def receipts(self, job: Job) -> list[tuple[int, int]]:
        """Return the sequence and the generation of each receipt."""
        statement = "SELECT sequence, generation FROM worker_receipts WHERE execution_id = :id ORDER BY sequence"
        return [(row.sequence, row.generation) for row in self.fleet.rows(statement, id=job.submission.execution_id)]

    def finish(self, job: Job) -> None:
        """Wait until the workflow has ended well, and both workers are ready for the next one."""
        state = job.submission.wait(WITHIN)
        assert state.outcome is Outcome.COMPLETED, state
        for worker in self.workers.values():
            worker.says(" ready.", within=START_SECONDS)


def _lines(side: Path) -> list[Line]:
    text = side.read_text(encoding="utf-8") if side.exists() else ""
    return [Line(**json.loads(line)) for line in text.splitlines()]


def killed(deployment: Deployment, *, whole_worker: bool) -> tuple[float, int]:
    """Kill what runs a workflow; returns the seconds to its next step, and the steps that were done twice over."""
    job = deployment.job()
    name = deployment.worker_of(job.pid)
    began = time.time()
    if whole_worker:
        deployment.kill_worker(name)
    else:
        os.kill(job.pid, signal.SIGKILL)
    wait_until(job.by_another, within=WITHIN, what="another process goes on")
    deployment.finish(job)
    return job.by_another()[0].at - began, _duplicates(deployment, job)


def _duplicates(deployment: Deployment, job: Job) -> int:
    """Count the steps that the first process had a receipt for and another one has run again."""
    # A step and its message take two sequences.
    had = {sequence // 2 + 1 for sequence, generation in deployment.receipts(job) if generation == 1 and sequence % 2}
    assert had, "the first process had no receipt"
    return sum(line.step in had for line in job.by_another())


def stopped(deployment: Deployment) -> tuple[float, int]:
    """Stop what runs a workflow, let it go on later; returns the seconds to the next step, and what it then wrote."""
    job = deployment.job()
    zombie = deployment.workers[deployment.worker_of(job.pid)]
    began = time.time()
    os.kill(job.pid, signal.SIGSTOP)
    try:
        wait_until(job.by_another, within=WITHIN, what="another process goes on")
    finally:
        os.kill(job.pid, signal.SIGCONT)
    refused = f"{job.submission.execution_id}: stopped: stale_generation"
    zombie.says(refused, within=WITHIN)
    deployment.finish(job)
    return job.by_another()[0].at - began, _zombie_writes(deployment, job)


def _zombie_writes(deployment: Deployment, job: Job) -> int:
    """Count what the first process has written after the first receipt of its successor."""
    receipts = deployment.receipts(job)
    first = min(sequence for sequence, generation in receipts if generation > 1)
    stale = [sequence for sequence, generation in receipts if generation == 1 and sequence >= first]
    texts = deployment.fleet.transcript(job.submission.session_id)
    # A message names the process of its step, whose sequence is the one before: from here on, `first` or later.
    named = [text for text in texts[first // 2 :] if text.endswith(f" by {job.pid}")]
    return len(stale) + len(named)


def measure(deployment: Deployment, runs: int, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Run each way of dying so often; returns the figures."""
    kills, stops = [], []
    for number in range(runs):
        kills.append(killed(deployment, whole_worker=number % 2 == 1))
        tell(f"SIGKILL of the {'worker' if number % 2 else 'process'}: {kills[-1][0]:.2f} s")
    for _ in range(runs):
        stops.append(stopped(deployment))
        tell(f"SIGSTOP: {stops[-1][0]:.2f} s")
    deployment.fleet.assert_lawful()
    return {
        "sigkill": {
            "median_s": round(median(seconds for seconds, _ in kills), 3),
            "worst_s": round(max(seconds for seconds, _ in kills), 3),
            "duplicate_steps": sum(again for _, again in kills),
        },
        "sigstop": {
            "median_s": round(median(seconds for seconds, _ in stops), 3),
            "zombie_writes": sum(writes for _, writes in stops),
        },
    }


@contextmanager
def deployed(folder: Path, ledger: str, broker: str) -> Iterator[Deployment]:
    """Start everything, with this process as the one that submits; end it all afterwards."""
    spawn = Spawner(folder)
    try:
        deployment = Deployment(spawn, folder, ledger, broker)
        with Client.connect(Settings.from_environ(deployment.fleet.env)) as client, using(client):
            yield deployment
    except BaseException:
        for title, output in spawn.reports():
            sys.stderr.write(f"--- {title}\n{output}\n")
        raise
    finally:
        spawn.end()


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> dict[str, Any]:
    """Measure as the command line says; returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs of each signal")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        postgres = PostgresRun(POSTGRES.url, upgrade)
        stack.callback(postgres.close)
        ledger = stack.enter_context(postgres.database())
        broker = stack.enter_context(redis_database(REDIS.url))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-bench-")))
        figures = measure(stack.enter_context(deployed(folder, ledger, broker)), given.runs, _tell)
    text = json.dumps(figures, indent=2)
    _tell(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    return figures


if __name__ == "__main__":
    main(sys.argv[1:])
