"""Retention: ended work is pruned once it is old enough, a whole tree of sessions at a time.

A tree goes when its root session and every session below it have ended, and every execution on them has, all before the
cutoff. What is busy is stepped over. Rows go in the order that foreign keys need, ledger rows before sessions.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, or_, select

from . import schema
from .states import Status
from .transaction import Transaction

TREES = 100  # pruned in one pass, so that no pass holds the ledger for long
_s, _x = schema.sessions, schema.worker_executions


def prune(tx: Transaction, retention: timedelta) -> list[str]:
    """Delete up to a hundred trees that ended longer ago than `retention`; returns their root sessions' ids."""
    cutoff = tx.now - retention
    roots = tx.execute(
        select(_s.c.session_id)
        .where(_s.c.parent_session_id.is_(None), _s.c.ended_at < cutoff)
        .order_by(_s.c.ended_at)
        .limit(TREES)
    ).scalars()
    return [root for root in roots.all() if _prune_tree(tx, root, cutoff)]


def _prune_tree(tx: Transaction, root: str, cutoff: object) -> bool:
    tree = select(_s.c.session_id).where(_s.c.session_id == root).cte("tree", recursive=True)
    tree = tree.union(select(_s.c.session_id).where(_s.c.parent_session_id == tree.c.session_id))
    sessions = list(tx.execute(select(tree.c.session_id)).scalars())
    inside = _x.c.session_id.in_(sessions)
    busy = select(_x.c.execution_id).where(inside, or_(_x.c.status != Status.TERMINAL, _x.c.ended_at >= cutoff))
    open_ = select(_s.c.session_id).where(
        _s.c.session_id.in_(sessions), or_(_s.c.ended_at.is_(None), _s.c.ended_at >= cutoff)
    )
    if tx.execute(busy.limit(1)).first() or tx.execute(open_.limit(1)).first():
        return False
    executions = list(tx.execute(select(_x.c.execution_id).where(inside)).scalars())
    for table in (schema.messages, schema.usage_records, schema.session_models, schema.steps):
        tx.execute(delete(table).where(table.c.session_id.in_(sessions)))
    for table in (
        schema.worker_receipts,
        schema.execution_transitions,
        schema.operation_attempts,
        schema.submissions,
        _x,
    ):
        tx.execute(delete(table).where(table.c.execution_id.in_(executions)))
    tx.execute(delete(_s).where(_s.c.session_id.in_(sessions)))
    tx.evict(executions, sessions)
    return True
