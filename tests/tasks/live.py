"""Owners, beats and workers as the real processes they are: how a test starts them, and what the ledger then holds."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import psycopg
from sqlalchemy import make_url, select, text

from tenure.config import Settings
from tenure.ledger import Ledger
from tenure.ledger.laws import audit
from tenure.ledger.schema import metadata, owner_lease
from tenure.tasks import replies
from tenure.tasks.keys import create
from tenure.workflows import Client, Execution
from tests.processes import Spawned, Spawner
from tests.services import libpq_url, redis_client, wait_until

START_SECONDS = 30.0  # for a process to start on a busy machine
PREFIX = "tenure:"  # of every key that our application has in Redis

# A worker in a process of its own, to be killed: it holds an execution with a child, says so, and waits.
HOLDER = """
import os, sys, threading
from tenure.config import Settings
from tenure.workflows import Client, Execution
with Client.connect(Settings.from_environ(os.environ)) as client:
    run = Execution.start(client, sys.argv[1])
    run.append([{"role": "user", "content": "hello"}])
    child = run.reserve_child()
    child.append([{"role": "user", "content": "hello, child"}])
    print("holds", run.execution_id, child.execution_id, child.session_id, "end", flush=True)
    threading.Event().wait()
"""


class Fleet:
    """The processes of one deployment, and the settings that they share."""

    def __init__(
        self, spawn: Spawner, folder: Path, *, ledger: str, broker: str | None, **settings: str | float | None
    ) -> None:
        """`settings` are named like the fields of `Settings`; without `broker` the embedded one is used."""
        self._spawn, self.folder = spawn, folder
        self.state_dir = folder / "state"
        given = {"state_dir": self.state_dir, "ledger_url": ledger, "broker_url": broker, "resend_seconds": 0.5}
        self.env = {
            f"TENURE_{name.upper()}": str(value) for name, value in (given | settings).items() if value is not None
        }
        self.settings = Settings.from_environ(self.env)
        create(self.settings.keys, self.settings.principal)
        self._names = 0

    def module(self, name: str, source: str) -> None:
        """Have the processes that are started from now on import a module."""
        folder = self.folder / "modules"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        self.add_to_path(folder)
        self.env["TENURE_IMPORTS"] = name

    def add_to_path(self, folder: Path) -> None:
        """Have the processes that are started from now on find what is in a folder."""
        known = os.environ.get("PYTHONPATH")
        self.env["PYTHONPATH"] = os.pathsep.join([str(folder), known] if known else [str(folder)])

    def celery(self, *args: str, env: Mapping[str, str] | None = None) -> Spawned:
        """Start `celery -A tenure.tasks ...`."""
        return self._start(
            "-m", "celery", "-A", "tenure.tasks", *args, env={"PYTHONWARNINGS": "ignore"} | dict(env or {})
        )

    def _start(self, *args: str, env: Mapping[str, str] | None = None) -> Spawned:
        process = self._spawn(sys.executable, *args, env=self.env | dict(env or {}), cwd=self.folder)
        process.end = partial(process.end, patience=0.0)  # what is left at a test's end need not end in good order
        return process

    def worker(self, *args: str, env: Mapping[str, str] | None = None) -> Spawned:
        """Start a worker of the owner queue; it need not come to own."""
        self._names += 1
        queue = () if "-Q" in args else ("-Q", self.settings.owner_queue)
        quiet = ("--without-gossip", "--without-mingle", "-n", f"owner-{self._names}@%h", "-l", "INFO")
        return self.celery("worker", *queue, *quiet, *args, env=env)

    def owner(self, *args: str, env: Mapping[str, str] | None = None) -> Spawned:
        """Start an owner and wait until it consumes."""
        process = self.worker(*args, env=env)
        process.says(" ready.", within=START_SECONDS)
        return process

    def standby(self, *, env: Mapping[str, str] | None = None) -> Spawned:
        """Start an owner while there is another, and wait until it stands by."""
        process = self.worker(env=env)
        process.says("standing by: another owner is at work", within=START_SECONDS)
        return process

    def beat(self) -> Spawned:
        """Start a beat, with a schedule file of its own."""
        self._names += 1
        return self.celery("beat", "-l", "INFO", "--pidfile=", "-s", str(self.folder / f"schedule-{self._names}"))

    def runner(self, name: str, *, env: Mapping[str, str] | None = None) -> Spawned:
        """Start a worker of the work queue and wait until it consumes."""
        options = ("-Q", self.settings.work_queue, "-P", "prefork", "-c", "1", "-n", f"{name}@%h", "-l", "INFO")
        process = self._start("-m", "celery", "-A", "tenure.workflows", "worker", *options, env=env)
        process.says(" ready.", within=START_SECONDS)
        return process

    def probe(self, host: str) -> Spawned:
        """Start a host's probe and wait until the owner has heard of it."""
        process = self._start("-m", "tenure", "probe", env={"TENURE_HOST_ID": host})
        wait_until(lambda: self.rows("SELECT host FROM hosts"), within=START_SECONDS, what="the probe is known")
        return process

    def holder(self, session: str, *, env: Mapping[str, str] | None = None) -> Holder:
        """Start a worker that holds a session, with a child, until it is killed."""
        process = self._start("-c", HOLDER, session, env=env)
        words = process.says(" end", within=START_SECONDS).partition("holds ")[2].split()
        return Holder(process, *words[:3])

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Connect this process as a worker's."""
        with patch.object(replies, "_POLL_SECONDS", 0.1), Client.connect(self.settings) as client:  # it closes sooner
            yield client

    @contextmanager
    def run(self, session: str = "s", *, within: float = 30.0) -> Iterator[Execution]:
        """Hold an execution from this process."""
        with self.client() as client, Execution.start(client, session, within=within) as run:
            yield run

    def rows(self, statement: str, **values: Any) -> list[Any]:
        """Read the ledger's tables as they are."""
        with Ledger.open(self.settings.ledger_url) as ledger, ledger.read() as connection:
            return list(connection.execute(text(statement), values))

    def value(self, statement: str, **values: Any) -> Any:
        """Return the one value of the one row."""
        ((value,),) = self.rows(statement, **values)
        return value

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self.value("SELECT epoch FROM runtime_epoch"))

    def transcript(self, session: str = "s") -> list[Any]:
        """Return the content of a session's messages."""
        statement = "SELECT body FROM messages WHERE session_id = :session ORDER BY position"
        return [json.loads(body)["content"] for (body,) in self.rows(statement, session=session)]

    def status(self, execution: str) -> tuple[str, str]:
        """Return status and reason."""
        statement = "SELECT status, status_reason FROM worker_executions WHERE execution_id = :execution"
        (row,) = self.rows(statement, execution=execution)
        return row.status, row.status_reason

    def released(self, epoch: int) -> bool:
        """Whether the owner of that epoch left in good order."""
        return self.value("SELECT released_at FROM epochs WHERE epoch = :epoch", epoch=epoch) is not None

    def snapshot(self) -> dict[str, list[Any]]:
        """Return everything the ledger holds; the lease is a hint and no part of it."""
        with Ledger.open(self.settings.ledger_url) as ledger, ledger.read() as connection:
            tables = [table for table in metadata.sorted_tables if table is not owner_lease]
            return {table.name: sorted(map(repr, connection.execute(select(table)))) for table in tables}

    def freeze(self, process: Spawned) -> None:
        """Stop an owner where it is in no transaction: in one, it would hold the ledger and not only its lease."""

        def frozen() -> bool:
            process.signal(signal.SIGSTOP)
            wait_until(lambda: psutil.Process(process.pid).status() == "stopped", within=5, what="it is stopped")
            if self._writable():
                return True
            process.signal(signal.SIGCONT)
            return False

        wait_until(frozen, within=20, what=f"{process} is stopped outside a transaction")

    def _writable(self) -> bool:
        """Whether nobody holds the rows that an owner locks."""
        url = make_url(self.settings.ledger_url)
        if url.get_backend_name() == "sqlite":
            with closing(sqlite3.connect(str(url.database), timeout=0.1)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    return False
                return True
        with psycopg.connect(libpq_url(self.settings.ledger_url)) as connection:
            for table in ("runtime_epoch", "owner_lease"):
                if not connection.execute(f"SELECT 1 FROM {table} FOR UPDATE SKIP LOCKED").fetchall():
                    return False
            return True

    def assert_lawful(self) -> None:
        """Check every law of the ledger."""
        with Ledger.open(self.settings.ledger_url) as ledger, ledger.read() as connection:
            assert list(audit(connection, ledger.limits)) == []

    def waiting(self) -> int:
        """Return how many messages wait in the owner queue of a Redis."""
        assert self.settings.broker_url is not None
        with redis_client(self.settings.broker_url) as client:
            return int(client.llen(PREFIX + self.settings.owner_queue))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Holder:
    """A worker's process, and what it holds."""

    process: Spawned
    execution: str
    child: str
    child_session: str

    def kill(self) -> None:
        """Kill it, and wait until nothing is left of it."""
        self.process.signal(signal.SIGKILL)
        assert self.process.wait(within=5) == -signal.SIGKILL


def says(run: Execution, *contents: str) -> None:
    """Append a message for each content, one after the other."""
    for content in contents:
        run.append([message(content)])


def message(content: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": "user", "content": content}


def numbered(count: int, start: int = 0) -> list[str]:
    """Return that many contents, all different."""
    return [f"message {number}" for number in range(start, start + count)]


def submit(run: Execution, contents: Iterable[str]) -> list[Any]:
    """Journal an append for each content and wait for none."""
    return [run.submit("transcript.append", {"messages": [message(content)]}) for content in contents]


def kill(process: Spawned) -> None:
    """End a process at once and wait until it is gone."""
    process.signal(signal.SIGKILL)
    assert process.wait(within=10) == -signal.SIGKILL
