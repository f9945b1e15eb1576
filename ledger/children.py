"""Children: minted under the cap, retired with their parent.

The cap is counted in the transaction that mints, which holds the epoch row; so no two reservations are
ever counted at the same time.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, func, null, select, update

from . import schema
from .canonical import canonical
from .claims import claim_digest
from .limits import Limits
from .states import CHILD_SESSION_END, Kind, Outcome, Reason, Status
from .transaction import Execution, Session, Transaction

SOURCE = "subagent"
MARKER = "_delegate_from"
IDS_PER_STATEMENT = 10_000  # SQLite takes 32,766 parameters, PostgreSQL 65,535
_x = schema.worker_executions


def live_children(tx: Transaction, execution_id: str) -> int:
    """Return how many children of the execution have not ended."""
    statement = select(func.count()).where(_x.c.parent_execution_id == execution_id, _x.c.status != Status.TERMINAL)
    return int(tx.execute(statement).scalar_one())


def limits_of(tx: Transaction, parent: Execution, asked: Limits | None) -> Limits:
    """Return the caps on a reservation: the configured ones, as narrowed by ancestors and by the parent itself."""
    limits = tx.limits.narrowed(
        max_concurrent_children=parent.max_concurrent_children, max_spawn_depth=parent.max_spawn_depth
    )
    if asked is None:
        return limits
    return limits.narrowed(max_concurrent_children=asked.max_concurrent_children, max_spawn_depth=asked.max_spawn_depth)


def refusal(tx: Transaction, parent: Execution, limits: Limits) -> dict[str, Any] | None:
    """Return why the parent may not have another child now, or None. A drain is told first, then depth."""
    if tx.drain_reason is not None:
        return {"refused": "runtime_draining", "detail": tx.drain_reason}
    if parent.depth >= limits.max_spawn_depth:
        return {
            "refused": "delegation_depth_exceeded",
            "max_spawn_depth": limits.max_spawn_depth,
            "depth": parent.depth,
        }
    live = live_children(tx, parent.execution_id)
    if live >= limits.max_concurrent_children:
        return {
            "refused": "delegation_capacity",
            "max_concurrent_children": limits.max_concurrent_children,
            "live_children": live,
        }
    return None


def mint(tx: Transaction, parent: Execution, sequence: int, secret_digest: str, limits: Limits) -> Execution:
    """Make a child session and a running child execution that its parent's process holds for now."""
    origin = tx.session(parent.session_id)
    assert origin is not None  # a foreign key says so
    session = new_session(tx, session_id=uuid4().hex, source=SOURCE, profile=parent.profile, parent=parent.session_id)
    session.model_config = canonical({MARKER: parent.session_id})
    tx.add(session)
    child = Execution(
        execution_id=uuid4().hex,
        session_id=session.session_id,
        kind=Kind.CHILD,
        status=Status.RUNNING,
        parent_execution_id=parent.execution_id,
        reserved_sequence=sequence,
        depth=parent.depth + 1,
        max_concurrent_children=_if_narrower(limits.max_concurrent_children, tx.limits.max_concurrent_children),
        max_spawn_depth=_if_narrower(limits.max_spawn_depth, tx.limits.max_spawn_depth),
        profile=parent.profile,
        principal=parent.principal,
        epoch=tx.epoch,
        generation=session.generation,
        last_sequence=0,
        claim_digest="",
        host=parent.host,
        boot=parent.boot,
        pid=parent.pid,
        birth=parent.birth,
        username=parent.username,
        outcome=None,
        result=None,
        status_at=tx.now,
        status_reason=Reason.RESERVED,
        status_by=parent.execution_id,
        created_at=tx.now,
        attached_at=None,
        ended_at=None,
    )
    child.claim_digest = claim_of(child, secret_digest)
    tx.add(child)
    tx.record_move(child.execution_id, None, Status.RUNNING, reason=Reason.RESERVED, by=parent.execution_id)
    return child


def _if_narrower(cap: int, configured: int) -> int | None:
    return cap if cap < configured else None


def claim_of(execution: Execution, secret_digest: str) -> str:
    """Return the claim that a holder of the secret has on this execution as it stands."""
    return claim_digest(
        profile=execution.profile,
        session_id=execution.session_id,
        execution_id=execution.execution_id,
        generation=execution.generation,
        identity=execution.identity,
        secret_digest=secret_digest,
        principal=execution.principal,
    )


def new_session(tx: Transaction, *, session_id: str, source: str, profile: str, parent: str | None = None) -> Session:
    """Return a fresh session of generation 1, not yet added to the transaction."""
    return Session(
        session_id=session_id,
        source=source,
        profile=profile,
        parent_session_id=parent,
        model=None,
        model_config=None,
        system_prompt=None,
        generation=1,
        revision=0,
        message_count=0,
        **dict.fromkeys(schema.COUNTERS, 0),
        created_at=tx.now,
        ended_at=None,
        end_reason=None,
    )


def retire_descendants(tx: Transaction, ancestors: list[str], *, reason: str, by: str) -> list[str]:
    """End every live descendant of the executions, and their sessions. Returns the ids that were ended."""
    if not ancestors:
        return []
    tree = (
        select(_x.c.execution_id)
        .where(_x.c.parent_execution_id.in_(ancestors), _x.c.status != Status.TERMINAL)
        .cte("tree", recursive=True)
    )
    below = select(_x.c.execution_id).where(
        _x.c.parent_execution_id == tree.c.execution_id, _x.c.status != Status.TERMINAL
    )
    tree = tree.union(below)
    # The ids are read first: the statements below change what the tree is found by.
    ids = list(tx.execute(select(tree.c.execution_id)).scalars())
    retired: list[str] = []
    for first in range(0, len(ids), IDS_PER_STATEMENT):
        some = _x.c.execution_id.in_(ids[first : first + IDS_PER_STATEMENT])
        retired.extend(retire(tx, some, reason=reason, by=by))
    return retired


def retire(tx: Transaction, which: ColumnElement[bool], *, reason: str, by: str) -> list[str]:
    """End the live children that match, and their sessions, set by set. Returns their ids."""
    chosen = which & (_x.c.kind == Kind.CHILD) & (_x.c.status != Status.TERMINAL)
    found = tx.execute(select(_x.c.execution_id, _x.c.session_id).where(chosen)).all()
    ids = [row.execution_id for row in found]
    if not ids:
        return ids
    tx.evict(ids, (row.session_id for row in found))
    end_sessions(tx, chosen)
    tx.record_moves(chosen, Status.TERMINAL, reason=reason, by=by)
    tx.execute(
        update(_x)
        .where(chosen)
        .values(
            status=Status.TERMINAL,
            outcome=Outcome.INTERRUPTED,
            result=null(),
            ended_at=tx.now,
            status_at=tx.now,
            status_reason=reason,
            status_by=by,
        )
    )
    return ids


def end_sessions(tx: Transaction, chosen: ColumnElement[bool]) -> None:
    """End the sessions of the chosen executions, where they have not ended."""
    s = schema.sessions
    tx.execute(
        update(s)
        .where(s.c.session_id.in_(select(_x.c.session_id).where(chosen)), s.c.ended_at.is_(None))
        .values(ended_at=tx.now, end_reason=CHILD_SESSION_END, revision=s.c.revision + 1)
    )
