"""Starting tenure's roles as processes of this machine, watching them and ending them.

Each role is the plain Celery command that a user could type. On Linux a role ends with its supervisor, however
that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from tenure.config import Settings
from tenure.tasks.broker_server import with_parent

STOP_SECONDS = 15.0
_RESTART_SECONDS = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # the pause before each restart in a row
_STEADY_SECONDS = 30.0  # a role that ran so long begins anew


@dataclass(frozen=True, slots=True)
class Role:
    """One process to keep running."""

    name: str
    command: list[str]


def owner_command(settings: Settings, name: str = "owner") -> list[str]:
    """Return the command of an owner."""
    options = ["-Q", settings.owner_queue, "-P", "threads", "-c", "1", "-n", f"{name}@%h"]
    return _celery("tenure.tasks", "worker", *options, "--without-gossip", "--without-mingle", *_level(settings))


def beat_command(settings: Settings) -> list[str]:
    """Return the command of beat. Its schedule is thrown away at each start: recovery may run once too often."""
    folder = settings.state_dir / "beat"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in folder.glob("schedule*"):
        left.unlink()
    options = ["--schedule", str(folder / "schedule"), "--pidfile="]
    return _celery("tenure.tasks", "beat", *options, *_level(settings))


def worker_command(settings: Settings, *, app: str = "tenure.workflows", concurrency: int = 2) -> list[str]:
    """Return the command of a worker of the work queue."""
    options = ["-Q", settings.work_queue, "-P", "prefork", "-c", str(concurrency), "-n", "worker@%h"]
    return _celery(app, "worker", *options, "--without-gossip", "--without-mingle", *_level(settings))


def flower_command(port: int) -> list[str] | None:
    """Return the command of Flower, bound to this machine alone, or None where it is not installed."""
    if find_spec("flower") is None:
        return None
    return _celery("tenure.tasks", "flower", "--address=127.0.0.1", f"--port={port}", "--persistent=False")


def _celery(app: str, *rest: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", app, *rest]


def _level(settings: Settings) -> list[str]:
    return ["--loglevel", settings.log_level]


@dataclass
class _Running:
    role: Role
    process: subprocess.Popen[bytes]
    started: float
    failures: int = 0
    restart_at: float | None = None


@dataclass
class Supervisor:
    """Keeps roles running: one that ends is started again, after a pause that grows while it keeps ending."""

    log_dir: Path
    environ: Mapping[str, str]
    tell: Callable[[str], None]
    _running: dict[str, _Running] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, role: Role) -> int:
        """Start a role; returns its process id. Its output goes to a log named for it."""
        process = self._spawn(role)
        self._running[role.name] = _Running(role, process, time.monotonic())
        return process.pid

    def pid(self, name: str) -> int:
        """Return the process id of a role, as it runs now."""
        return self._running[name].process.pid

    def log(self, name: str) -> Path:
        """Return the log of a role."""
        return self.log_dir / f"{name}.log"

    def watch(self) -> None:
        """Start again what has ended and is due; call it now and then."""
        now = time.monotonic()
        for running in self._running.values():
            status = running.process.poll()
            if status is not None:
                self._revive(running, status, now)

    def _revive(self, running: _Running, status: int, now: float) -> None:
        if running.restart_at is None:
            steady = now - running.started > _STEADY_SECONDS
            running.failures = 0 if steady else running.failures
            pause = _RESTART_SECONDS[min(running.failures, len(_RESTART_SECONDS) - 1)]
            running.restart_at = now + pause
            running.failures += 1
            self.tell(f"{running.role.name} ended with status {status}; starting it again in {pause:g} s")
        if now >= running.restart_at:
            running.process = self._spawn(running.role)
            running.started, running.restart_at = now, None

    def _spawn(self, role: Role) -> subprocess.Popen[bytes]:
        with self.log(role.name).open("ab") as log:
            return subprocess.Popen(  # noqa: S603 (the command is ours)
                with_parent(role.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environ),
                start_new_session=True,  # an interrupt at the terminal is for the supervisor alone
            )

    def stop(self) -> None:
        """End every role: SIGTERM to all, and SIGKILL to what has not ended in time."""
        running = list(self._running.values())
        for one in running:
            if one.process.poll() is None:
                one.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for one in running:
            try:
                one.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.tell(f"{one.role.name} did not end within {STOP_SECONDS:g} s and is killed")
                one.process.kill()
                one.process.wait()
        self._running.clear()


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return this process' environment with these settings of tenure and no others."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")} | dict(settings)
