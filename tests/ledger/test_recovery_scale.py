"""Recovery of a fleet: set by set, in seconds, whatever its size."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from sqlalchemy import insert, select

from tenure.ledger import Ledger
from tenure.ledger.schema import execution_transitions, recovery_passes, sessions, worker_executions
from tests.ledger.kit import Worker, row


def a_fleet(ledger: Ledger, epoch: int, *, roots: int, children: int) -> None:
    """Write executions as register and reserve would, without their receipts."""
    worker = Worker(ledger, epoch).register()
    child = worker.reserve()
    worker_row, child_row = (
        dict(row(ledger, worker_executions, execution_id=found.execution_id)._mapping) for found in (worker, child)
    )
    session_rows = [dict(row(ledger, sessions, session_id=found.session_id)._mapping) for found in (worker, child)]
    made: dict[str, list[dict[str, Any]]] = {"sessions": [], "executions": []}
    for number in range(roots):
        root_id = f"root-{number}"
        made["sessions"].append(session_rows[0] | {"session_id": root_id})
        made["executions"].append(worker_row | {"execution_id": root_id, "session_id": root_id, "last_sequence": 0})
        for below in range(children):
            own = f"{root_id}-{below}"
            made["sessions"].append(session_rows[1] | {"session_id": own, "parent_session_id": root_id})
            made["executions"].append(
                child_row | {"execution_id": own, "session_id": own, "parent_execution_id": root_id}
            )
    with ledger.store.write() as connection:
        connection.execute(insert(sessions), made["sessions"])
        connection.execute(insert(worker_executions), made["executions"])


def test_a_fleet_of_two_thousand_roots_is_settled_in_seconds(emptied_url, clock):
    with Ledger.open(emptied_url, clock=clock) as ledger:
        epoch = ledger.begin_epoch("owner")
        a_fleet(ledger, epoch, roots=2000, children=2)
        now = ledger.begin_epoch("the second owner")
        began = time.monotonic()
        report = ledger.recover(now, unknown_grace=timedelta(hours=1))
        assert time.monotonic() - began < 5
        assert (len(report.unknown), len(report.retired)) == (2001, 4001)
        kept = json.loads(row(ledger, recovery_passes).report)
        assert {name: (told["count"], len(told["first"])) for name, told in kept.items()} == {
            "unknown": (2001, 100),
            "retired": (4001, 100),
            "discarded": (0, 0),
            "pruned": (0, 0),
        }
        with ledger.read() as connection:
            statuses = connection.execute(select(worker_executions.c.kind, worker_executions.c.status).distinct())
            assert set(map(tuple, statuses)) == {("compute", "unknown"), ("child", "terminal")}
            open_sessions = select(sessions.c.source).where(sessions.c.ended_at.is_(None)).distinct()
            assert connection.execute(open_sessions).scalars().all() == ["worker"]
            moved = select(execution_transitions.c.id).where(execution_transitions.c.reason == "owner_restarted")
            assert len(connection.execute(moved).all()) == 6002
        began = time.monotonic()
        assert ledger.recover(now).empty
        assert time.monotonic() - began < 1
