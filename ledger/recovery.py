"""Recovery: what an owner does about executions that nobody can be holding any more.

Idempotent: a second pass finds nothing left to do. It never guesses: an execution of the current epoch is
touched only when its process is proven dead, and every change keeps its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, insert, select, update

from . import children, schema
from .canonical import canonical
from .claims import Identity
from .executions import discard
from .retention import prune
from .states import Kind, Reason, Status
from .transaction import Transaction

PASSES_KEPT = 1000
STOPPED = "stopped"  # evidence that a process lives and yet has stood still for a whole lease
_x = schema.worker_executions


@dataclass(frozen=True, slots=True)
class Death:
    """Proof, gathered outside the ledger, that the process that held an execution is gone."""

    execution_id: str
    identity: Identity
    evidence: str  # such as `no_such_process`


@dataclass(frozen=True, slots=True)
class Report:
    """What one pass did, by execution id."""

    epoch: int
    unknown: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)  # root sessions

    @property
    def empty(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.unknown or self.retired or self.discarded or self.pruned)

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def recover(
    tx: Transaction,
    *,
    deaths: Sequence[Death] = (),
    unknown_grace: timedelta | None = None,
    retention: timedelta | None = None,
) -> Report:
    """Settle what earlier epochs and dead processes left, and record the pass.

    `unknown_grace` is how long an execution may stay `unknown` before it is discarded, `retention` how long ended
    work is kept; None is for ever.
    """
    by = f"recovery of epoch {tx.epoch}"
    older = and_(_x.c.epoch < tx.epoch, _x.c.status != Status.TERMINAL)
    report = Report(tx.epoch)
    report.retired.extend(children.retire(tx, older, reason=Reason.OWNER_RESTARTED, by=by))
    report.unknown.extend(_lose(tx, older, reason=Reason.OWNER_RESTARTED, by=by))
    for death in deaths:
        _bury(tx, death, report)
    if unknown_grace is not None:
        _discard_expired(tx, unknown_grace, report)
    if retention is not None:
        report.pruned.extend(prune(tx, retention))
    _record(tx, report)
    return report


def _lose(tx: Transaction, which: ColumnElement[bool], *, reason: str, by: str) -> list[str]:
    """Make the writable roots that match `unknown`, set by set; returns their ids."""
    chosen = which & (_x.c.kind != Kind.CHILD) & _x.c.status.in_([Status.REGISTERED, Status.RUNNING])
    found = tx.execute(select(_x.c.execution_id).where(chosen)).scalars().all()
    if not found:
        return []
    tx.record_moves(chosen, Status.UNKNOWN, reason=reason, by=by)
    tx.execute(
        update(_x).where(chosen).values(status=Status.UNKNOWN, status_at=tx.now, status_reason=reason, status_by=by)
    )
    tx.evict(found, ())
    return list(found)


def _bury(tx: Transaction, death: Death, report: Report) -> None:
    """Settle one execution whose process is proven dead, if that process still holds it."""
    execution = tx.execution(death.execution_id)
    if execution is None or execution.identity != death.identity:
        return
    one = _x.c.execution_id == death.execution_id
    reason = Reason.PROCESS_STOPPED if death.evidence == STOPPED else Reason.PROCESS_DEAD
    if execution.status is Status.UNKNOWN and execution.status_reason == Reason.OWNER_RESTARTED:
        # It is unknown already; now it is known, too, that its process will not adopt it.
        execution.status_at, execution.status_reason, execution.status_by = tx.now, reason, death.evidence
    elif not execution.status.writable:
        return
    elif execution.kind is Kind.CHILD:
        below = children.retire_descendants(tx, [death.execution_id], reason=Reason.PARENT_FINISHED, by=death.evidence)
        report.retired.extend(below + children.retire(tx, one, reason=reason, by=death.evidence))
    else:
        report.unknown.extend(_lose(tx, one, reason=reason, by=death.evidence))


def _discard_expired(tx: Transaction, grace: timedelta, report: Report) -> None:
    expired = select(_x.c.execution_id).where(_x.c.status == Status.UNKNOWN, _x.c.status_at <= tx.now - grace)
    for execution_id in tx.execute(expired).scalars().all():
        discard(tx, execution_id, reason=Reason.GRACE_EXPIRED, by=f"policy of {grace.total_seconds():.0f} s")
        report.discarded.append(execution_id)


def _record(tx: Transaction, report: Report) -> None:
    passes = schema.recovery_passes
    tx.execute(insert(passes).values(epoch=tx.epoch, at=tx.now, report=canonical(_counts(report))))
    newest = tx.execute(select(passes.c.id).order_by(passes.c.id.desc()).limit(1)).scalar_one()
    tx.execute(passes.delete().where(passes.c.id <= newest - PASSES_KEPT))
    e = schema.epochs
    tx.execute(update(e).where(e.c.epoch == tx.epoch, e.c.recovered_at.is_(None)).values(recovered_at=tx.now))


def _counts(report: Report) -> dict[str, Any]:
    """Return the report with at most a hundred ids of each, beside their number."""
    lists = {name: ids for name, ids in asdict(report).items() if isinstance(ids, list)}
    return {name: {"count": len(ids), "first": ids[:100]} for name, ids in lists.items()}
