"""What a handler works on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import CursorResult, Executable, Table

from ..transaction import Execution, Session, Transaction

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An expected "no". It is a receipt: it consumes the sequence and replays identically."""

    reason: str
    facts: dict[str, Any] = field(default_factory=dict)

    def result(self) -> Result:
        """Return the stored form."""
        return {"refused": self.reason, **self.facts}


class Work:
    """One operation's view of the transaction it runs in.

    A handler validates first and changes afterwards, may not commit, and may be run again: what it did
    is undone whenever the transaction does not commit.
    """

    def __init__(self, tx: Transaction, execution: Execution, session: Session, sequence: int) -> None:
        self._tx = tx
        self.execution = execution
        self.session = session
        self.sequence = sequence
        self.changed = False

    @property
    def tx(self) -> Transaction:
        """The transaction, for operations that are part of tenure."""
        return self._tx

    @property
    def now(self) -> datetime:
        """The time of this transaction, the same for all its operations."""
        return self._tx.now

    def insert(self, table: Table, **row: Any) -> None:
        """Insert a row; rows of one table are written together. Marks the session as changed."""
        self.changed = True
        self._tx.insert(table, **row)

    def execute(self, statement: Executable, rows: Iterable[dict[str, Any]] | None = None) -> CursorResult[Any]:
        """Run a statement in this transaction. Call `touch` if it changes something durable."""
        return self._tx.execute(statement, rows)

    def touch(self) -> None:
        """Say that something durable has changed: the session's revision moves by one."""
        self.changed = True
