"""Reading the ledger. Reads are never operations: they take no sequence and no lock.

Each function takes a connection of `Ledger.read()`; what one transaction reads is one snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, func, not_, or_, select

from . import schema
from .canonical import parse
from .errors import NotFound
from .executions import check_id
from .recovery import Death
from .states import Kind, Reason, Status
from .transaction import Execution, Session

__all__ = [
    "Connection",
    "Move",
    "Past",
    "Runtime",
    "Step",
    "children",
    "execution",
    "executions",
    "held_on",
    "history",
    "receipts",
    "runtime",
    "session",
    "steps",
    "transcript",
    "tree",
]

_x = schema.worker_executions
_s = schema.sessions
_t = schema.submissions


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime as a whole."""

    epoch: int
    began_at: datetime | None
    drain_reason: str | None
    drain_since: datetime | None
    live: int


@dataclass(frozen=True, slots=True)
class Step:
    """A recorded step."""

    sequence: int
    name: str
    input_digest: str
    result: Any


@dataclass(frozen=True, slots=True)
class Past:
    """One receipt, for a workflow that runs again."""

    sequence: int
    operation: str
    digest: str
    result: dict[str, Any]
    step: Step | None


@dataclass(frozen=True, slots=True)
class Move:
    """One change of an execution's status."""

    execution_id: str
    before: Status | None
    after: Status
    at: datetime
    reason: str
    by: str
    epoch: int


def runtime(connection: Connection) -> Runtime:
    """Return the current epoch, whether it drains, and how many executions have not ended."""
    row = connection.execute(select(schema.runtime_epoch)).one()
    live = connection.execute(select(func.count()).select_from(_x).where(_x.c.status != Status.TERMINAL)).scalar_one()
    return Runtime(row.epoch, row.began_at, row.drain_reason, row.drain_since, live)


def session(connection: Connection, session_id: str) -> Session:
    """Return a session.

    Raises:
        InvalidParams: it cannot be an id.
        NotFound: there is none.
    """
    check_id("session_id", session_id)
    row = connection.execute(select(_s).where(_s.c.session_id == session_id)).mappings().first()
    if row is None:
        raise NotFound("session")
    return Session.of(row)


def execution(connection: Connection, execution_id: str) -> Execution:
    """Return an execution.

    Raises:
        InvalidParams: it cannot be an id.
        NotFound: there is none.
    """
    check_id("execution_id", execution_id)
    row = connection.execute(select(_x).where(_x.c.execution_id == execution_id)).mappings().first()
    if row is None:
        raise NotFound("execution")
    return Execution.of(row)


def executions(connection: Connection, *, live_only: bool = False) -> Iterator[Execution]:
    """Return executions, oldest first; a child comes after its parent."""
    statement = select(_x).order_by(_x.c.created_at, _x.c.depth, _x.c.reserved_sequence, _x.c.execution_id)
    if live_only:
        statement = statement.where(_x.c.status != Status.TERMINAL)
    return (Execution.of(row) for row in connection.execute(statement).mappings())


def tree(executions: Iterable[Execution]) -> list[Execution]:
    """Return executions with every child right below its parent, siblings in the order given."""
    below: dict[str | None, list[Execution]] = defaultdict(list)
    known = {x.execution_id: x for x in executions}
    for x in known.values():
        parent = x.parent_execution_id if x.parent_execution_id in known else None
        below[parent].append(x)

    def down(parent: str | None) -> Iterator[Execution]:
        for x in below[parent]:
            yield x
            yield from down(x.execution_id)

    return list(down(None))


def children(connection: Connection, execution_id: str) -> list[Execution]:
    """Return the children of an execution in the order of their reservation, ended ones included."""
    statement = select(_x).where(_x.c.parent_execution_id == execution_id).order_by(_x.c.reserved_sequence)
    return [Execution.of(row) for row in connection.execute(statement).mappings()]


def receipts(connection: Connection, execution_id: str, *, after: int, limit: int) -> list[Past]:
    """Return up to `limit` receipts of an execution behind sequence `after`, in order, with the steps they recorded."""
    r, s = schema.worker_receipts, schema.steps
    joined = r.outerjoin(s, and_(s.c.execution_id == r.c.execution_id, s.c.sequence == r.c.sequence))
    rows = connection.execute(
        select(
            r.c.sequence, r.c.operation, r.c.digest, r.c.result, s.c.name, s.c.input_digest, s.c.result.label("step")
        )
        .select_from(joined)
        .where(r.c.execution_id == execution_id, r.c.sequence > after)
        .order_by(r.c.sequence)
        .limit(limit)
    )
    return [
        Past(
            row.sequence,
            row.operation,
            row.digest,
            parse(row.result, name="receipt"),
            None if row.name is None else Step(row.sequence, row.name, row.input_digest, parse(row.step, name="step")),
        )
        for row in rows
    ]


def transcript(connection: Connection, session_id: str) -> Iterator[dict[str, Any]]:
    """Return a session's messages in order.

    Raises:
        InvalidParams, NotFound: there is no such session.
    """
    session(connection, session_id)
    m = schema.messages
    rows = connection.execute(select(m.c.body).where(m.c.session_id == session_id).order_by(m.c.position))
    return (parse(body, name="message") for body in rows.scalars())


def steps(connection: Connection, execution_id: str) -> list[Step]:
    """Return the recorded steps of an execution in order."""
    t = schema.steps
    rows = connection.execute(select(t).where(t.c.execution_id == execution_id).order_by(t.c.sequence))
    return [Step(r.sequence, r.name, r.input_digest, parse(r.result, name="step")) for r in rows]


def history(connection: Connection, execution_id: str) -> list[Move]:
    """Return every change of an execution's status, oldest first."""
    t = schema.execution_transitions
    rows = connection.execute(select(t).where(t.c.execution_id == execution_id).order_by(t.c.id))
    return [
        Move(
            r.execution_id,
            Status(r.from_status) if r.from_status else None,
            Status(r.to_status),
            r.at,
            r.reason,
            r.by,
            r.epoch,
        )
        for r in rows
    ]


def held_on(connection: Connection, host: str) -> list[Death]:
    """Return the executions whose process on `host` may write, or adopt, as deaths that still lack their evidence.

    A child that waits on the work queue is held by nobody yet, and so cannot lose its process.
    """
    waiting = select(_t.c.request_id).where(_t.c.execution_id == _x.c.execution_id).exists()
    statement = select(_x).where(
        _x.c.host == host,
        or_(
            _x.c.status.in_([Status.REGISTERED, Status.RUNNING]),
            and_(_x.c.status == Status.UNKNOWN, _x.c.status_reason == Reason.OWNER_RESTARTED),
        ),
        or_(_x.c.kind != Kind.CHILD, _x.c.attached_at.is_not(None), not_(waiting)),
    )
    found = (Execution.of(row) for row in connection.execute(statement).mappings())
    return [Death(x.execution_id, x.identity, "") for x in found]
