"""One fenced transaction: rows are read once, changed in memory, and written together.

Everything that changes the ledger goes through `Transaction`, which begins by locking the epoch row and
comparing it. The next epoch has to update that row, so it waits; a transaction of an older epoch either
commits before the new one begins, or finds itself superseded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Generic, Self, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    RowMapping,
    Table,
    Text,
    bindparam,
    insert,
    literal,
    select,
    update,
)

from . import schema
from .claims import Identity
from .errors import OwnerSuperseded
from .limits import Limits
from .states import Kind, Outcome, Status


@dataclass(slots=True)
class Execution:
    """A row of `worker_executions`."""

    execution_id: str
    session_id: str
    kind: Kind
    status: Status
    parent_execution_id: str | None
    reserved_sequence: int | None
    depth: int
    max_concurrent_children: int | None
    max_spawn_depth: int | None
    profile: str
    principal: str
    epoch: int
    generation: int
    last_sequence: int
    claim_digest: str
    host: str
    boot: str
    pid: int
    birth: str
    username: str
    outcome: Outcome | None
    result: str | None
    status_at: datetime
    status_reason: str
    status_by: str
    created_at: datetime
    attached_at: datetime | None
    ended_at: datetime | None

    @classmethod
    def of(cls, row: RowMapping) -> Self:
        """Build it from a row."""
        return cls(**_typed(row))

    @property
    def identity(self) -> Identity:
        """The process that holds it."""
        return Identity(self.host, self.boot, self.pid, self.birth, self.username)


@dataclass(slots=True)
class Session:
    """A row of `sessions`."""

    session_id: str
    source: str
    profile: str
    parent_session_id: str | None
    model: str | None
    model_config: str | None
    system_prompt: str | None
    generation: int
    revision: int
    message_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    cost_nanos: int
    created_at: datetime
    ended_at: datetime | None
    end_reason: str | None

    @classmethod
    def of(cls, row: RowMapping) -> Self:
        """Build it from a row."""
        return cls(**row)


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """What a replay is answered from."""

    operation: str
    digest: str
    result: str


E = TypeVar("E", Execution, Session)


def _typed(row: RowMapping) -> dict[str, Any]:
    values = dict(row)
    values["kind"] = Kind(values["kind"])
    values["status"] = Status(values["status"])
    values["outcome"] = Outcome(values["outcome"]) if values["outcome"] else None
    return values


def _snapshot(entity: Execution | Session) -> dict[str, Any]:
    return {f.name: getattr(entity, f.name) for f in fields(entity)}


class _Entities(Generic[E]):
    """The rows of one table that this transaction has read, and which of their columns it changed."""

    def __init__(self, table: Table, key: str, of: Callable[[RowMapping], E]) -> None:
        self.table, self.key = table, key
        self.of: Callable[[RowMapping], E] = of
        self.loaded: dict[str, E] = {}
        self.before: dict[str, dict[str, Any]] = {}

    def get(self, connection: Connection, key: str) -> E | None:
        if key not in self.loaded:
            row = connection.execute(select(self.table).where(self.table.c[self.key] == key)).mappings().first()
            if row is None:
                return None
            self.loaded[key] = self.of(row)
            self.before[key] = _snapshot(self.loaded[key])
        return self.loaded[key]

    def add(self, entity: E) -> None:
        self.loaded[getattr(entity, self.key)] = entity
        self.before[getattr(entity, self.key)] = {}

    def evict(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.loaded.pop(key, None)

    def flush(self, connection: Connection) -> None:
        changes: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        new = []
        for key, entity in self.loaded.items():
            now, before = _snapshot(entity), self.before[key]
            if not before:
                new.append(now)
            elif changed := tuple(name for name in now if now[name] != before[name]):
                changes[changed].append({"key_": key} | {name: now[name] for name in changed})
            self.before[key] = now
        if new:
            connection.execute(insert(self.table), new)
        for columns, rows in changes.items():
            statement = (
                update(self.table)
                .where(self.table.c[self.key] == bindparam("key_"))
                .values({name: bindparam(name) for name in columns})
            )
            connection.execute(statement, rows)


class Transaction:
    """A writing transaction that holds the current epoch."""

    def __init__(self, connection: Connection, *, now: datetime, limits: Limits) -> None:
        row = connection.execute(select(schema.runtime_epoch).with_for_update()).mappings().one()
        self.connection = connection
        self.now = now
        self.limits = limits
        self.epoch: int = row["epoch"]
        self.drain_reason: str | None = row["drain_reason"]
        self._executions = _Entities(schema.worker_executions, "execution_id", Execution.of)
        self._sessions = _Entities(schema.sessions, "session_id", Session.of)
        self._inserts: dict[Table, list[dict[str, Any]]] = defaultdict(list)

    def require(self, epoch: int) -> None:
        """Check that the owner that opened this transaction is the current one.

        Raises:
            OwnerSuperseded: a newer epoch has begun.
        """
        if epoch != self.epoch:
            raise OwnerSuperseded("owner_superseded", {"presented": epoch, "epoch": self.epoch})

    def execution(self, execution_id: str) -> Execution | None:
        """Return the execution, the same object each time."""
        return self._executions.get(self.connection, execution_id)

    def session(self, session_id: str) -> Session | None:
        """Return the session, the same object each time."""
        return self._sessions.get(self.connection, session_id)

    def receipt(self, execution_id: str, sequence: int) -> StoredReceipt | None:
        """Return the stored receipt of one operation."""
        for row in self._inserts[schema.worker_receipts]:
            if row["execution_id"] == execution_id and row["sequence"] == sequence:
                return StoredReceipt(row["operation"], row["digest"], row["result"])
        t = schema.worker_receipts
        found = self.connection.execute(
            select(t.c.operation, t.c.digest, t.c.result).where(
                t.c.execution_id == execution_id, t.c.sequence == sequence
            )
        ).first()
        return StoredReceipt(*found) if found else None

    def add(self, entity: Execution | Session) -> None:
        """Insert a new execution or session when the transaction is flushed."""
        if isinstance(entity, Execution):
            self._executions.add(entity)
        else:
            self._sessions.add(entity)

    def insert(self, table: Table, **row: Any) -> None:
        """Insert a row when the transaction is flushed; all rows of a table are written together."""
        self._inserts[table].append(row)

    def move(self, execution: Execution, to: Status, *, reason: str, by: str) -> None:
        """Change an execution's status and record when, why and by whom."""
        self.record_move(execution.execution_id, execution.status, to, reason=reason, by=by)
        execution.status = to
        execution.status_at, execution.status_reason, execution.status_by = self.now, reason, by

    def record_move(self, execution_id: str, before: Status | None, to: Status, *, reason: str, by: str) -> None:
        """Add a line to the history of an execution's status."""
        self.insert(
            schema.execution_transitions,
            execution_id=execution_id,
            from_status=before,
            to_status=to,
            at=self.now,
            reason=reason,
            by=by,
            epoch=self.epoch,
        )

    def record_moves(self, which: ColumnElement[bool], to: Status, *, reason: str, by: str) -> None:
        """Add a line to the history of every execution that matches, in one statement, before they are changed."""
        x = schema.worker_executions
        moves = select(
            x.c.execution_id,
            x.c.status,
            literal(to.value, Text),
            literal(self.now, schema.UtcDateTime),
            literal(reason, Text),
            literal(by, Text),
            literal(self.epoch),
        ).where(which)
        columns = ["execution_id", "from_status", "to_status", "at", "reason", "by", "epoch"]
        self.execute(insert(schema.execution_transitions).from_select(columns, moves))

    def execute(self, statement: Executable, rows: Iterable[dict[str, Any]] | None = None) -> CursorResult[Any]:
        """Run a statement that sees everything this transaction has done so far."""
        self.flush()
        if rows is None:
            return self.connection.execute(statement)
        return self.connection.execute(statement, list(rows))

    def evict(self, executions: Iterable[str], sessions: Iterable[str]) -> None:
        """Read these rows anew when they are next asked for: a statement has changed them in the database."""
        self._executions.evict(executions)
        self._sessions.evict(sessions)

    def flush(self) -> None:
        """Write everything that has changed in memory, in the order that foreign keys need."""
        self._sessions.flush(self.connection)
        self._executions.flush(self.connection)
        pending, self._inserts = self._inserts, defaultdict(list)
        for table in schema.metadata.sorted_tables:
            if rows := pending.pop(table, None):
                self.connection.execute(insert(table), rows)
        for table, rows in pending.items():  # tables of an application
            self.connection.execute(insert(table), rows)
