"""Processes that a test starts: none outlives it, and their output stands in its report when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.services import wait_until

_OUTPUT_SHOWN = 20_000  # characters of a process' output in the report of a failed test


class Spawned:
    """A process that a test has started: the leader of its own group, with its output in a file."""

    def __init__(self, args: list[str], *, output: Path, env: dict[str, str], cwd: Path | None) -> None:
        self.args = args
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                process_group=0,
            )
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self, text: str, *, within: float) -> str:
        """Wait until its output holds the text; return the output."""
        __tracebackhide__ = True

        def said() -> str:
            ended = not self.running  # looked at first: what it wrote before its end counts
            if text in (output := self.output):
                return output
            assert not ended, f"{self} ended with {self._process.returncode} before it said {text!r}"
            return ""

        return wait_until(said, within=within, what=f"{self} says {text!r}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, not to its group."""
        self._process.send_signal(number)

    def wait(self, *, within: float) -> int:
        """Wait for its end; return its code, which is negative for a signal."""
        __tracebackhide__ = True
        wait_until(lambda: not self.running, within=within, what=f"{self} ends")
        return int(self._process.returncode)

    def end(self, *, patience: float = 10.0) -> None:
        """End it, if it runs: TERM, after `patience` seconds KILL; then whatever it has left behind."""
        started = self._descendants()
        if self._process.returncode is None:  # asked without reaping: so long its number is its own
            os.kill(self.pid, signal.SIGTERM)
            os.kill(self.pid, signal.SIGCONT)  # a stopped process sees the other when it goes on
            self._await_zombie(patience)
        # The group keeps its number as long as a member lives. None does: no such process, or, where only
        # zombies are left, EPERM on macOS.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for process in started:  # those that have left the group
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _descendants(self) -> list[psutil.Process]:
        try:
            reaped = self._process.returncode is not None
            return [] if reaped else psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _await_zombie(self, patience: float) -> None:
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with suppress(AssertionError):
            wait_until(lambda: os.waitid(os.P_PID, self.pid, flags), within=patience, what="it ends")

    def __str__(self) -> str:
        return f"{' '.join(self.args)} (pid {self.pid})"


class Spawner:
    """Starts processes and knows them, so that none outlives its test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Spawned] = []

    def __call__(
        self, *args: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
    ) -> Spawned:
        """Start a process; `env` is added to the environment of the test, None takes a variable away."""
        merged = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        output = self._folder / f"output-{len(self.started)}"
        process = Spawned(
            [str(arg) for arg in args],
            output=output,
            env={name: value for name, value in merged.items() if value is not None},
            cwd=cwd,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """End every process, the last one first."""
        with ExitStack() as stack:  # goes on where one cannot be ended
            for process in self.started:
                stack.callback(process.end)

    def reports(self) -> list[tuple[str, str]]:
        """Return a title and the end of the output of each process."""
        return [(f"output of {process}", process.output[-_OUTPUT_SHOWN:]) for process in self.started]
