"""Submissions: workflows that were asked for, kept until they have ended.

A message of the work queue may be lost or come twice. The row stays: what nobody has begun, or what died on the way, is
due to be sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, insert, or_, select, update
from sqlalchemy.engine import Row

from . import schema
from .canonical import canonical, digest, parse
from .errors import AdmissionConflict, InvalidParams, NotFound, PermissionDenied, RuntimeDraining
from .executions import check_id, discard
from .states import Reason, Status
from .transaction import Execution, Transaction

if TYPE_CHECKING:
    from .operations.payloads import ChildWork

PATIENCE = timedelta(seconds=60)  # for a worker to begin what was sent, doubled with each sending
MAX_PATIENCE = timedelta(hours=1)
BATCH = 500
_t = schema.submissions
_x = schema.worker_executions


@dataclass(frozen=True, slots=True)
class Submission:
    """A workflow to run once for one request of one principal."""

    request_id: str
    workflow: str
    arguments: str  # canonical JSON
    queue: str  # "" is the work queue
    profile: str
    principal: str
    max_attempts: int


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be sent to the work queue now."""

    request_id: str
    workflow: str
    arguments: str
    queue: str
    profile: str
    key: str
    execution_id: str
    session_id: str
    parent_execution_id: str | None


@dataclass(frozen=True, slots=True)
class Standing:
    """How a submitted workflow stands; `status` is None while nobody has begun it."""

    execution_id: str
    session_id: str
    status: str | None
    outcome: str | None
    reason: str
    result: Any


def check(request: Submission) -> Submission:
    """Return the request if it is well formed.

    Raises:
        InvalidParams: `detail` names the field.
    """
    for name in ("request_id", "workflow", "profile", "principal"):
        check_id(name, getattr(request, name))
    if request.queue:
        check_id("queue", request.queue)
    if canonical(parse(request.arguments, name="arguments"), name="arguments") != request.arguments:
        raise InvalidParams("arguments: not canonical JSON")
    if type(request.max_attempts) is not int or not 1 <= request.max_attempts <= 1000:
        raise InvalidParams("max_attempts: a whole number from 1 to 1000 is allowed")
    return request


def submit(tx: Transaction, request: Submission) -> Standing:
    """Keep a request; the same one again is answered with how it stands.

    Raises:
        AdmissionConflict: it was made before, of another workflow or with other arguments.
        PermissionDenied: it is another principal's.
        RuntimeDraining: an operator drains the runtime.
    """
    stored = tx.execute(select(_t).where(_t.c.request_id == request.request_id)).first()
    given = digest(request.workflow, request.arguments)
    if stored is not None:
        if stored.principal != request.principal:
            raise PermissionDenied("other_principal")
        if stored.digest != given:
            raise AdmissionConflict("request_reused", {"workflow": stored.workflow})
        return standing(tx.connection, request.request_id, request.principal)
    if tx.drain_reason is not None:
        raise RuntimeDraining(tx.drain_reason)
    # The ids follow from the request, so that nothing has to be kept before the row is.
    execution_id = digest("tenure.request", request.principal, request.request_id)[:32]
    tx.execute(
        insert(_t).values(
            request_id=request.request_id,
            workflow=request.workflow,
            arguments=request.arguments,
            digest=given,
            queue=request.queue,
            profile=request.profile,
            principal=request.principal,
            key=execution_id,
            execution_id=execution_id,
            session_id=f"{execution_id}.session",
            parent_execution_id=None,
            max_attempts=request.max_attempts,
            submitted_at=tx.now,
            sent_at=None,
            sent_count=0,
            sent_for=0,
            closed_at=None,
        )
    )
    return Standing(execution_id, f"{execution_id}.session", None, None, "submitted", None)


def standing(connection: Connection, request_id: str, principal: str) -> Standing:
    """Return how a request stands.

    Raises:
        NotFound: there is none of that id of this principal.
    """
    columns = (_t.c.execution_id, _t.c.session_id, _x.c.status, _x.c.outcome, _x.c.status_reason, _x.c.result)
    joined = _t.outerjoin(_x, _x.c.execution_id == _t.c.execution_id)
    row = connection.execute(
        select(*columns).select_from(joined).where(_t.c.request_id == request_id, _t.c.principal == principal)
    ).first()
    if row is None:
        raise NotFound("request")
    result = None if row.result is None else parse(row.result, name="result")
    return Standing(row.execution_id, row.session_id, row.status, row.outcome, row.status_reason or "submitted", result)


def add_child(tx: Transaction, child: Execution, work: ChildWork) -> None:
    """Keep what a reserved child is to run."""
    tx.insert(
        _t,
        request_id=child.execution_id,
        workflow=work.workflow,
        arguments=work.arguments,
        digest=digest(work.workflow, work.arguments),
        queue=work.queue or "",
        profile=child.profile,
        principal=child.principal,
        key=work.key,
        execution_id=child.execution_id,
        session_id=child.session_id,
        parent_execution_id=child.parent_execution_id,
        max_attempts=1,
        submitted_at=tx.now,
        sent_at=None,
        sent_count=0,
        sent_for=0,
        closed_at=None,
    )


def take_due(tx: Transaction) -> list[Due]:
    """Return what is to be sent now and note that it is; close what has ended.

    Due is a root that nobody has begun, a root whose process is proven gone, and a child that no process has attached;
    each again after a patience that doubles, should the message be lost.
    """
    _close_ended(tx)
    sent: list[Row[Any]] = []
    for row in _candidates(tx):
        if row.status == Status.UNKNOWN and row.generation >= row.max_attempts:
            discard(tx, row.execution_id, reason=Reason.ATTEMPTS_EXHAUSTED, by=f"limit of {row.max_attempts} attempts")
        else:
            sent.append(row)
    if sent:
        tx.execute(
            update(_t)
            .where(_t.c.request_id == bindparam("request"))
            .values(sent_at=tx.now, sent_count=_t.c.sent_count + 1, sent_for=bindparam("generation")),
            [{"request": row.request_id, "generation": row.generation or 0} for row in sent],
        )
    return [_due(row) for row in sent]


def not_sent(tx: Transaction, request_ids: list[str]) -> None:
    """Note that the broker did not take these: they are due again at once."""
    tx.execute(update(_t).where(_t.c.request_id.in_(request_ids)).values(sent_at=None))


def _close_ended(tx: Transaction) -> None:
    ended = select(_x.c.execution_id).where(_x.c.execution_id == _t.c.execution_id, _x.c.status == Status.TERMINAL)
    tx.execute(update(_t).where(_t.c.closed_at.is_(None), ended.exists()).values(closed_at=tx.now))


def _candidates(tx: Transaction) -> Sequence[Row[Any]]:
    """Return what is due, the oldest first. The database says what is: those that wait must not hide the others."""
    not_begun = _x.c.execution_id.is_(None)
    gone = and_(_x.c.status == Status.UNKNOWN, _x.c.status_reason.in_([Reason.PROCESS_DEAD, Reason.PROCESS_STOPPED]))
    not_attached = and_(_t.c.parent_execution_id.is_not(None), _x.c.attached_at.is_(None))
    statement = (
        select(_t, _x.c.status, _x.c.status_at, _x.c.generation)
        .select_from(_t.outerjoin(_x, _x.c.execution_id == _t.c.execution_id))
        .where(_t.c.closed_at.is_(None), or_(not_begun, gone, not_attached))
        .where(or_(_t.c.sent_at.is_(None), and_(gone, _t.c.sent_for < _x.c.generation), _overdue(tx.now)))
        .order_by(_t.c.submitted_at)
        .limit(BATCH)
    )
    return tx.execute(statement).all()


def _overdue(now: datetime) -> ColumnElement[bool]:
    """Return whether the patience with what was sent is over."""
    cases, sendings, patience = [], 1, PATIENCE
    while patience < MAX_PATIENCE:
        cases.append(and_(_t.c.sent_count == sendings, _t.c.sent_at <= now - patience))
        sendings, patience = sendings + 1, patience * 2
    return or_(*cases, and_(_t.c.sent_count >= sendings, _t.c.sent_at <= now - MAX_PATIENCE))


def _due(row: Row[Any]) -> Due:
    return Due(
        row.request_id,
        row.workflow,
        row.arguments,
        row.queue,
        row.profile,
        row.key,
        row.execution_id,
        row.session_id,
        row.parent_execution_id,
    )
