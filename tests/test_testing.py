"""The testing kit: a workbench on which workflows run, crash and are taken over."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tenure.ledger import Limits, Outcome, Refusal
from tenure.ledger.reads import executions, transcript
from tenure.testing import POINTS, SettableClock, Workbench
from tenure.workflows import Run, workflow
from tenure.workflows.errors import UnknownWorkflow
from tenure.workflows.process import using
from tenure.workflows.registry import Workflow


@workflow(name="testing.count")
def count(run: Run, upto: int) -> int:
    for number in range(1, upto + 1):
        run.append([{"role": "user", "content": str(number)}])
    return upto


def test_a_workflow_runs_on_a_folder_and_nothing_else(tmp_path):
    with Workbench(tmp_path) as bench:
        state = bench.run(count, 3)
        assert (state.outcome, state.result) == (Outcome.COMPLETED, 3)
        assert bench.crashes == 0
        with bench.ledger.read() as connection:
            (execution,) = executions(connection)
            assert [m["content"] for m in transcript(connection, execution.session_id)] == ["1", "2", "3"]


def test_a_request_id_may_be_given(tmp_path):
    with Workbench(tmp_path) as bench:
        first = bench.run(count, 1, request_id="r1")
        assert bench.run(count, 1, request_id="r1") == first
        with bench.ledger.read() as connection:
            assert len(list(executions(connection))) == 1


@pytest.mark.parametrize("point", POINTS)
def test_each_point_is_reached_and_its_crash_is_counted_and_survived(tmp_path, point):
    with Workbench(tmp_path) as bench:
        bench.crash_at(point, nth=2)
        assert bench.run(count, 3).result == 3
        assert bench.crashes == 1
        with bench.ledger.read() as connection:
            (execution,) = executions(connection)
            said = [m["content"] for m in transcript(connection, execution.session_id)]
        assert said == ["1", "2", "3"]
        assert execution.host.startswith("workbench-")


def test_the_nth_is_counted_over_all_workers_and_each_plan_is_one_crash(tmp_path):
    with Workbench(tmp_path) as bench:
        bench.crash_at("before_journal")
        bench.crash_at("before_journal", nth=2)
        bench.crash_at("before_journal", nth=1000)
        assert bench.run(count, 2).result == 2
        assert bench.crashes == 2


def test_an_unknown_point_is_refused_with_those_there_are(tmp_path):
    with (
        Workbench(tmp_path) as bench,
        pytest.raises(ValueError, match=r"(?s)'after_lunch'.*before_journal.*after_send"),
    ):
        bench.crash_at("after_lunch")


def test_disks_take_turns(tmp_path):
    with Workbench(tmp_path, disks=2) as bench:
        bench.crash_at("before_journal", nth=2)
        bench.run(count, 2)
    assert {path.name for path in tmp_path.glob("disk-*")} == {"disk-0", "disk-1"}


def test_limits_are_the_ledgers(tmp_path):
    @workflow(name="testing.alone")
    def alone(run: Run) -> bool:
        return isinstance(run.delegate(count, 1), Refusal)

    with Workbench(tmp_path, limits=Limits(0, 0)) as bench:
        assert bench.run(alone).result is True


def test_a_workflow_that_does_not_end_in_time_is_told(tmp_path):
    import threading

    let_go = threading.Event()

    @workflow(name="testing.endless")
    def endless(run: Run) -> None:
        let_go.wait(20)

    with Workbench(tmp_path) as bench:
        try:
            with pytest.raises(TimeoutError):
                bench.run(endless, within=0.05)
        finally:
            let_go.set()


def test_what_a_worker_raises_itself_is_raised_at_the_end(tmp_path):
    nowhere = Workflow("testing.nowhere", count.function, None, "default", 5)
    with pytest.raises(UnknownWorkflow), Workbench(tmp_path):
        nowhere.submit("r1", 1)


def test_an_error_of_the_test_is_not_hidden_by_one_of_a_worker(tmp_path):
    nowhere = Workflow("testing.nowhere", count.function, None, "default", 5)

    def fails() -> None:
        with Workbench(tmp_path):
            nowhere.submit("r1", 1)
            raise LookupError

    with pytest.raises(LookupError):
        fails()


def test_the_client_of_the_process_is_the_workbenchs_and_afterwards_the_one_before(tmp_path):
    from tenure.workflows.process import current_client

    with Workbench(tmp_path) as outer, using(outer.client):
        (tmp_path / "inner").mkdir()
        with Workbench(tmp_path / "inner") as inner:
            assert current_client() is inner.client
        assert current_client() is outer.client


def test_its_clock_stands_until_it_is_moved(tmp_path):
    clock = SettableClock(datetime(2031, 1, 1, tzinfo=UTC))
    clock.advance(days=1, seconds=2)
    assert clock() == clock() == datetime(2031, 1, 2, 0, 0, 2, tzinfo=UTC)
    with Workbench(tmp_path, clock=clock) as bench:
        bench.run(count, 1)
        with bench.ledger.read() as connection:
            (execution,) = executions(connection)
        assert execution.created_at == clock.now
