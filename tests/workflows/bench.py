"""What the tests of workflows work with: a workbench on a ledger that was migrated once, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tenure.ledger.laws import audit
from tenure.ledger.reads import execution, executions, history, receipts, transcript
from tenure.testing import Workbench
from tests.isolation import copy_sqlite
from tests.tasks.kit import quick


def workbench(folder: Path, migrated: Path, **options: Any) -> Workbench:
    """Return a workbench of a folder of its own, without waiting for its migration or for any disk."""
    folder.mkdir(mode=0o700)
    copy_sqlite(migrated, folder / "ledger.sqlite3")
    made = Workbench(folder, **options)
    quick(made.ledger.store.engine)
    return made


def user(text: str) -> list[dict[str, Any]]:
    """Return one message of a user."""
    return [{"role": "user", "content": text}]


def said(bench: Workbench, session_id: str) -> list[Any]:
    """Return what a session's transcript says."""
    with bench.ledger.read() as connection:
        return [message["content"] for message in transcript(connection, session_id)]


def stands(bench: Workbench, execution_id: str) -> Any:
    """Return an execution's row."""
    with bench.ledger.read() as connection:
        return execution(connection, execution_id)


def all_of(bench: Workbench) -> list[Any]:
    """Return every execution."""
    with bench.ledger.read() as connection:
        return list(executions(connection))


def reasons(bench: Workbench, execution_id: str) -> list[str]:
    """Return why an execution changed its status, each time."""
    with bench.ledger.read() as connection:
        return [move.reason for move in history(connection, execution_id)]


def operations(bench: Workbench, execution_id: str) -> list[str]:
    """Return the operations that have a receipt, in order."""
    with bench.ledger.read() as connection:
        return [past.operation for past in receipts(connection, execution_id, after=0, limit=1000)]


def assert_lawful(bench: Workbench) -> None:
    """Check the ledger against every law."""
    with bench.ledger.read() as connection:
        assert list(audit(connection, bench.ledger.limits)) == []
