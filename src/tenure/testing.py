"""A kit to test workflows with: owner, ledger and workers in one process, in milliseconds, with pytest or without.

    def test_it_survives(tmp_path):
        with Workbench(tmp_path) as bench:
            bench.crash_at("after_journal", nth=2)
            state = bench.run(check, 17)
        assert state.result == {"total": 3}

A crash ends what stands for a worker's process at a named point: nothing in it runs on. Another one then takes its
execution over, as it would on a fleet.

    before_journal, after_journal    around making an operation durable in the outbox
    before_send, after_send          around handing it to the owner; after it, the ledger has it unknown to the worker
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from tenure.ledger import Ledger, Limits
from tenure.ledger.migrate import upgrade
from tenure.ledger.submissions import MAX_PATIENCE
from tenure.tasks.client import Client
from tenure.tasks.orders import Order
from tenure.workflows.process import using
from tenure.workflows.registry import Workflow
from tenure.workflows.submission import WorkflowState
from tenure.workflows.worker import run_order

POINTS = ("before_journal", "after_journal", "before_send", "after_send")


class Crash(BaseException):
    """The end of what stands for a worker's process. Only the workbench catches it."""


class SettableClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self.now = now

    def __call__(self) -> datetime:
        """Return the time it was set to."""
        return self.now

    def advance(self, **by: float) -> None:
        """Move it on, by `timedelta`'s keywords."""
        self.now += timedelta(**by)


class Workbench:
    """An owner on a SQLite ledger of its own, and as many workers as there are orders."""

    def __init__(
        self,
        folder: Path,
        *,
        limits: Limits | None = None,
        clock: SettableClock | None = None,
        workers: int = 8,
        disks: int = 1,
    ) -> None:
        """`workers` is how many run at the same time; in turn they get one of so many `disks` for their outboxes.

        On the disk of the worker that crashed, its successor finds what was journalled; on another it does not.
        """
        url = f"sqlite:///{folder / 'ledger.sqlite3'}"
        upgrade(url)
        self.clock = clock or SettableClock()
        self.ledger = Ledger.open(url, limits=limits or Limits(), clock=self.clock)
        self.client = Client.direct(self.ledger, folder, resend_seconds=0.05)
        self.crashes = 0
        self._folder, self._disks = folder, disks
        self._numbers = itertools.count(1)
        self._planned: Counter[tuple[str, int]] = Counter()
        self._reached: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()  # orders, by execution
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(workers, "tenure-workbench")
        self._orders: list[Future[str]] = []
        self.client.owner.send = self._send
        self._using = using(self.client)

    def __enter__(self) -> Self:
        self._using.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._using.__exit__(kind, error, trace)
        wait(self._orders)
        self._pool.shutdown()
        self.client.close()
        self.ledger.close()
        if kind is None:
            for order in self._orders:
                order.result()  # what a worker raised that is no workflow's failure is the test's to know

    def crash_at(self, point: str, *, nth: int = 1) -> None:
        """Have the worker that reaches this point for the nth time, counted over all workers, crash there.

        Raises:
            ValueError: there is no such point.
        """
        if point not in POINTS:
            raise ValueError(f"{point!r} is no crash point; {', '.join(POINTS)} are")
        self._planned[point, nth] += 1

    def run(
        self, workflow: Workflow, *args: Any, request_id: str | None = None, within: float = 20, **kwargs: Any
    ) -> WorkflowState:
        """Submit a workflow and return how it ended.

        Raises:
            TimeoutError: it has not ended within so many seconds.
        """
        return workflow.submit(request_id or uuid4().hex, *args, **kwargs).wait(within)

    def _send(self, orders: list[Order]) -> list[str]:
        for order in orders:
            self._sent[order.execution] += 1
            self._orders.append(self._pool.submit(self._work, order))
        return []

    def _work(self, order: Order) -> str:
        """Be a worker's process: of its own identity, until its work is done or it crashes."""
        here = self.client.identity
        # On a host of its own, so that nobody looks it up in this machine's process table.
        number = next(self._numbers)
        identity = replace(here, host=f"workbench-{number}")
        worker = self.client.beside(identity, fault=self._reach)
        worker.state_dir = self._folder / f"disk-{number % self._disks}"
        try:
            return run_order(worker, order)
        except Crash:
            worker.abandon()
            with self._lock:
                self.crashes += 1
            sent = self._sent[order.execution]
            self.client.owner.bury(identity, "crashed")
            if self._sent[order.execution] == sent:
                # What it had not even taken hold of yet comes again once the owner's patience is over.
                self.clock.advance(seconds=MAX_PATIENCE.total_seconds())
                self.client.owner.recover(unknown_grace=None)
            return "crashed"

    def _reach(self, point: str) -> None:
        with self._lock:
            self._reached[point] += 1
            crashes = self._planned[point, self._reached[point]]
        if crashes:
            raise Crash(point)
