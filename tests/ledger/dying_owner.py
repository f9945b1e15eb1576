"""An owner that dies while it applies an operation, as often as it is asked to.

    python -m tests.ledger.dying_owner URL WORKER TIMES WHERE

WORKER is a JSON object of the worker's fields; WHERE is one of `Where`. Each death is a process of its own, killed
by no one but itself, at once and without a word to the database.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from enum import StrEnum
from typing import Any

import msgspec

from tenure.ledger import Ledger, Operation, Work, operation
from tests.ledger.kit import Worker


class Where(StrEnum):
    """Where in an operation its process dies."""

    HANDLER = "handler"
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A payload that has no fields."""


def deadly(handler: Any) -> Operation[Nothing]:
    """Make the operation `test.deadly` of what it does in this process."""

    @operation("test.deadly")
    def deadly(work: Work, payload: Nothing) -> dict[str, Any]:
        work.session.model = "half-written"
        work.touch()
        result: dict[str, Any] = handler()
        return result

    return deadly


def die() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def apply(url: str, worker: dict[str, Any], where: Where) -> None:
    """Apply the worker's next operation with care, and die there."""
    ledger = Ledger.open(url, operations=[deadly(die if where is Where.HANDLER else dict)])
    commits, dialect = 0, ledger.store.engine.dialect
    commit = dialect.do_commit

    def do_commit(connection: Any) -> None:
        nonlocal commits
        commits += 1
        if commits == 2 and where is Where.BEFORE_COMMIT:  # the first is that of the attempt
            die()
        commit(connection)
        if commits == 2 and where is Where.AFTER_COMMIT:
            die()

    dialect.do_commit = do_commit  # type: ignore[method-assign]
    Worker(ledger, **worker).apply("test.deadly", careful=True)


def main(url: str, worker: str, times: str, where: str) -> None:
    for _ in range(int(times)):
        pid = os.fork()  # before this process has opened anything
        if pid == 0:
            apply(url, json.loads(worker), Where(where))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write("died\n" if os.WIFSIGNALED(status) else f"ended with {status}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
