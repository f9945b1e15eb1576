"""After the play: every law over the ledger, each transcript against its file, and whether it all happened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tenure.ledger import Ledger, Outcome, Status, reads
from tenure.ledger.laws import audit as audit_laws
from tenure.ledger.reads import Connection
from tenure.ledger.states import Reason
from tenure.ledger.transaction import Execution

from .stage import Plan
from .trajectory import load


def audit(ledger: Ledger, session: str, plan: Plan) -> Iterator[str]:
    """Return one line for everything that is not as it must be."""
    with ledger.read() as connection:
        for violation in audit_laws(connection, ledger.limits):
            yield f"law {violation.law}: {violation.table} {violation.key}: {violation.detail}"
        yield from _transcript(connection, session, Path(plan.parent))
        executions = list(reads.executions(connection))
        for execution in executions:
            yield from _ended(execution)
        yield from _children(connection, [x for x in executions if x.parent_execution_id], plan)
        if reads.runtime(connection).epoch < 2:
            yield "story: there was no second epoch"


def _transcript(connection: Connection, session: str, file: Path) -> Iterator[str]:
    stored = reads.transcript(connection, session)
    for number, (found, wanted) in enumerate(zip_longest(stored, load(file)), 1):
        if found != wanted:
            shown = f"{_short(found)}, {_short(wanted)}"
            yield f"transcript {session}: message {number} is not that of {file.name}: {shown}"


def _ended(execution: Execution) -> Iterator[str]:
    if execution.status is not Status.TERMINAL:
        yield f"story: execution {execution.execution_id} has not ended, it is {execution.status}"


def _children(connection: Connection, children: list[Execution], plan: Plan) -> Iterator[str]:
    completed = [x for x in children if x.outcome is Outcome.COMPLETED]
    retired = [x for x in children if x.status_reason == Reason.OWNER_RESTARTED]
    if len(completed) != 2 or len(retired) != 2:
        yield f"story: {len(completed)} children completed and {len(retired)} were retired, 2 and 2 were to be"
    for child in completed:
        yield from _transcript(connection, child.session_id, Path(plan.child))
    for child in retired:
        yield from _prefix(connection, child.session_id, Path(plan.child))


def _prefix(connection: Connection, session: str, file: Path) -> Iterator[str]:
    """A retired child's transcript is kept, as far as it got."""
    stored = list(reads.transcript(connection, session))
    if not stored or stored != load(file)[: len(stored)]:
        yield f"transcript {session}: what the retired child had written is not kept"


def _short(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"
