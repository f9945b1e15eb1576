"""A lost child is delegated again even where another one has taken its slot meanwhile."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select

from tenure import Limits, Run, workflow
from tenure.ledger.schema import worker_receipts
from tenure.testing import Crash, Workbench
from tests.services import wait_until


class Scene:
    """What the steps below do: the first child's process dies once, the second child's stays until it is in the way."""

    bench: Workbench
    lost = 0

    def die_once(self) -> str:
        self.lost += 1
        if self.lost == 1:
            raise Crash
        return "done again"

    def stay(self) -> str:
        wait_until(self._refused_since, within=10, what="the first child is refused the slot that this one has")
        return "done"

    def _refused_since(self) -> bool:
        """Whether the newest reservation was refused: the one before it is this child's."""
        c = worker_receipts.c
        newest = select(c.result).where(c.operation == "child.reserve").order_by(c.created_at.desc(), c.sequence.desc())
        with self.bench.ledger.read() as connection:
            result = connection.execute(newest.limit(1)).scalar_one()
        return "refused" in json.loads(result)


scene = Scene()


@workflow("test.redelegation.first")
def first(run: Run) -> str:
    return run.step(scene.die_once, name="die_once")


@workflow("test.redelegation.second")
def second(run: Run) -> str:
    return run.step(scene.stay, name="stay")


@workflow("test.redelegation.parent")
def parent(run: Run) -> list[str]:
    handles = [run.delegate(first, retries=1), run.delegate(second, on_full="wait")]
    return [result.value if result.completed else result.reason for result in run.gather(handles)]


@pytest.mark.timeout(30)
def test_a_lost_child_waits_for_a_slot(tmp_path):
    with Workbench(tmp_path, limits=Limits(max_concurrent_children=1)) as bench:
        scene.bench, scene.lost = bench, 0
        state = bench.run(parent)
    assert state.result == ["done again", "done"]
    assert bench.crashes == 1
