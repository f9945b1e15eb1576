"""Delegation: minted, capped, gathered in order as values, lost and delegated again, retired with the parent."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tenure.ledger import Limits, Outcome, Refusal, Status
from tenure.ledger.errors import ConfigurationError, InvalidParams
from tenure.workflows import Run, workflow
from tenure.workflows.delegation import Delegated
from tenure.workflows.errors import ChildrenLive, ForeignChild
from tests.services import wait_until
from tests.workflows.bench import all_of, assert_lawful, operations, said, stands, user, workbench

gate = threading.Event()
entered: list[str] = []


@pytest.fixture(autouse=True)
def _closed_gate(bench):
    gate.clear()
    entered.clear()
    yield
    gate.set()


@pytest.fixture
def wide(tmp_path, migrated):
    with workbench(tmp_path / "wide", migrated, limits=Limits(2, 1)) as made:
        try:
            yield made
        finally:
            gate.set()
        assert_lawful(made)


@workflow(name="delegation.tenfold")
def tenfold(run: Run, number: int) -> int:
    run.append(user(f"child {number}"))
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * 10


@workflow(name="delegation.waits", queue="slow")
def waits(run: Run, name: str) -> str:
    entered.append(name)
    gate.wait(20)
    run.append(user("after the gate"))
    return name


def children_of(bench: Any, parent: str) -> list[Any]:
    return [x for x in all_of(bench) if x.parent_execution_id == parent]


def root_of(bench: Any) -> Any:
    (root,) = [x for x in all_of(bench) if x.parent_execution_id is None]
    return root


def test_results_come_in_the_order_they_are_asked_for_and_failures_are_values(bench):
    @workflow(name="delegation.mixed")
    def mixed(run: Run) -> list[Any]:
        handles = [run.delegate(tenfold, number) for number in (3, -1, 2)]
        assert all(isinstance(handle, Delegated) for handle in handles)
        found = run.gather(handles[::-1])
        assert run.gather(handles) == found[::-1]
        assert run.gather([]) == []
        return [[r.completed, r.outcome.value, r.reason, r.value, r.execution_id, r.session_id] for r in found]

    told = bench.run(mixed).result
    failure = {"error": {"type": "ValueError", "message": "-1 is negative"}}
    assert [row[:4] for row in told] == [
        [True, "completed", "finished", 20],
        [False, "failed", "finished", failure],
        [True, "completed", "finished", 30],
    ]
    assert [said(bench, row[5]) for row in told] == [["child 2"], ["child -1"], ["child 3"]]
    assert {row[4] for row in told} == {x.execution_id for x in children_of(bench, root_of(bench).execution_id)}


def test_each_result_is_kept_as_it_comes(bench):
    @workflow(name="delegation.partly")
    def partly(run: Run) -> Any:
        quick, slow = run.delegate(tenfold, 1), run.delegate(waits, "slow")
        assert run.gather([quick])[0].value == 10
        assert slow.result is None
        with pytest.raises(TimeoutError) as told:
            run.gather([slow, quick], within=0.05)
        assert "1 children" in str(told.value)
        assert quick.result.value == 10
        gate.set()
        return [result.value for result in run.gather([slow, quick])]

    assert bench.run(partly).result == ["slow", 10]


def test_a_child_goes_to_its_workflows_queue(bench):
    orders = []
    send = bench.client.owner.send
    bench.client.owner.send = lambda sent: orders.extend(sent) or send(sent)
    gate.set()

    @workflow(name="delegation.queues")
    def queues(run: Run) -> None:
        run.gather([run.delegate(waits, "a"), run.delegate(tenfold, 1)])

    bench.run(queues)
    assert [order.queue for order in orders] == ["", "slow", ""]
    assert [bool(order.parent) for order in orders] == [False, True, True]


def test_arguments_that_do_not_fit_or_are_not_json_are_refused_before_a_child_is_minted(bench):
    @workflow(name="delegation.unfit")
    def unfit(run: Run) -> None:
        with pytest.raises(InvalidParams) as not_json:
            run.delegate(tenfold, {1})
        assert "delegation.tenfold" in not_json.value.detail
        with pytest.raises(ConfigurationError) as not_fitting:
            run.delegate(tenfold, 1, 2)
        assert "delegation.tenfold" in not_fitting.value.detail

    assert bench.run(unfit).outcome is Outcome.COMPLETED
    assert children_of(bench, root_of(bench).execution_id) == []


# The caps.


def test_over_the_cap_the_refusal_tells_cap_and_count(wide):
    @workflow(name="delegation.full")
    def full(run: Run) -> Any:
        for name in "ab":
            assert isinstance(run.delegate(waits, name), Delegated)
        refused = run.delegate(waits, "c")
        assert isinstance(refused, Refusal)
        run.finish(result=[refused.reason, refused.facts])

    assert wide.run(full).result == ["delegation_capacity", {"max_concurrent_children": 2, "live_children": 2}]
    assert len(children_of(wide, root_of(wide).execution_id)) == 2


def test_over_the_cap_a_caller_may_wait_for_a_slot(wide):
    most: list[int] = []

    @workflow(name="delegation.counted")
    def counted(run: Run, number: int) -> int:
        most.append(sum(x.status is not Status.TERMINAL and x.depth == 1 for x in all_of(wide)))
        return number

    @workflow(name="delegation.queueing")
    def queueing(run: Run) -> list[int]:
        handles = [run.delegate(counted, number, on_full="wait") for number in range(7)]
        return [result.value for result in run.gather(handles)]

    wide.crash_at("after_send", nth=9)
    assert wide.run(queueing).result == list(range(7)) or wide.crashes
    assert max(most) <= 2


def test_a_wait_that_no_slot_can_end_is_a_refusal(tmp_path, migrated):
    @workflow(name="delegation.hopeless")
    def hopeless(run: Run) -> Any:
        refused = run.delegate(tenfold, 1, on_full="wait")
        return refused.reason

    with workbench(tmp_path / "none", migrated, limits=Limits(0, 1)) as bench:
        assert bench.run(hopeless).result == "delegation_capacity"
    with workbench(tmp_path / "flat", migrated, limits=Limits(3, 0)) as bench:
        assert bench.run(hopeless).result == "delegation_depth_exceeded"
    with workbench(tmp_path / "drained", migrated) as bench:

        @workflow(name="delegation.drained")
        def drained(run: Run) -> Any:
            bench.ledger.drain("an upgrade")
            refused = run.delegate(tenfold, 1, on_full="wait")
            return [refused.reason, refused.facts]

        assert bench.run(drained).result == ["runtime_draining", {"detail": "an upgrade"}]


def test_depth_is_capped_by_the_configuration(tmp_path, migrated):
    @workflow(name="delegation.deeper")
    def deeper(run: Run) -> Any:
        child = run.delegate(deeper)
        if isinstance(child, Refusal):
            return [child.reason, child.facts]
        return run.gather([child])[0].value

    with workbench(tmp_path / "deep", migrated, limits=Limits(1, 2)) as bench:
        assert bench.run(deeper).result == ["delegation_depth_exceeded", {"max_spawn_depth": 2, "depth": 2}]
        assert sorted(x.depth for x in all_of(bench)) == [0, 1, 2]
        assert_lawful(bench)


# Somebody else's.


def test_somebody_elses_child_cannot_be_gathered(bench):
    kept: list[Any] = []

    @workflow(name="delegation.lender")
    def lender(run: Run) -> None:
        kept.append(run.delegate(tenfold, 1))
        run.gather(kept)

    @workflow(name="delegation.borrower")
    def borrower(run: Run) -> list[str]:
        mine = run.delegate(tenfold, 2)
        told = []
        for other in (kept[0], Refusal("delegation_capacity", {})):
            with pytest.raises(ForeignChild) as foreign:
                run.gather([mine, other])
            told.append(foreign.value.detail)
        assert mine.result is None
        run.gather([mine])
        return told

    bench.run(lender)
    told = bench.run(borrower).result
    assert kept[0].parent in told[0]
    assert "delegation_capacity" in told[1]


# Lost ones.


def crashing(bench: Any, retries: int, crashes: int) -> Any:
    """Run a parent whose child's process crashes so many times."""
    left = [crashes]

    @workflow(name="delegation.fragile")
    def fragile(run: Run) -> str:
        run.append(user("begun"))
        if left[0]:
            left[0] -= 1
            with bench._lock:
                bench._planned["before_journal", bench._reached["before_journal"] + 1] += 1
        run.append(user("ended"))
        return "made it"

    @workflow(name="delegation.patient")
    def patient(run: Run) -> Any:
        (result,) = run.gather([run.delegate(fragile, retries=retries)])
        return [result.outcome.value, result.reason, result.value]

    return bench.run(patient)


def test_a_lost_child_is_a_value_too(bench):
    assert crashing(bench, retries=0, crashes=1).result == ["interrupted", "process_dead", None]


def test_a_lost_child_is_delegated_again_as_often_as_it_may_be(bench):
    assert crashing(bench, retries=2, crashes=2).result == ["completed", "finished", "made it"]
    lost = [x for x in children_of(bench, root_of(bench).execution_id) if x.status_reason == "process_dead"]
    assert len(lost) == 2
    assert {said(bench, x.session_id)[0] for x in lost} == {"begun"}


def test_a_child_that_is_lost_once_too_often_is_told(bench):
    assert crashing(bench, retries=1, crashes=2).result == ["interrupted", "process_dead", None]


def test_a_child_that_fails_by_itself_is_not_delegated_again(bench):
    @workflow(name="delegation.failing")
    def failing(run: Run) -> Any:
        return run.gather([run.delegate(tenfold, -1, retries=3)])[0].outcome.value

    assert bench.run(failing).result == "failed"
    assert len(children_of(bench, root_of(bench).execution_id)) == 1


def test_a_lost_child_that_may_not_be_minted_again_is_told_with_the_refusal(bench):
    @workflow(name="delegation.unlucky")
    def unlucky(run: Run) -> Any:
        handle = run.delegate(waits, "lost", retries=1)
        wait_until(lambda: entered, within=20, what="the child runs")
        bench.ledger.drain("an upgrade")
        bench.client.owner.bury(stands(bench, handle.execution_id).identity, "no_such_process")
        gate.set()
        (result,) = run.gather([handle])
        return [result.outcome.value, result.reason, result.value, result.execution_id == handle.execution_id]

    assert bench.run(unlucky).result == ["failed", "runtime_draining", {"detail": "an upgrade"}, True]


# The end of a parent.


@workflow(name="delegation.leaves")
def leaves(run: Run, children: str | None) -> Any:
    handle = run.delegate(waits, "left")
    wait_until(lambda: entered, within=20, what="the child runs")
    if children is not None:
        if children == "wait":
            threading.Timer(0.05, gate.set).start()
        run.finish(children=children, result=handle.execution_id)
    return handle.execution_id


@pytest.mark.parametrize("children", [None, "retire"])
def test_the_end_of_a_parent_retires_its_tree_and_a_running_child_stops_at_its_next_operation(bench, children):
    state = bench.run(leaves, children)
    child = stands(bench, state.result)
    assert (child.status, child.outcome, child.status_reason) == (
        Status.TERMINAL,
        Outcome.INTERRUPTED,
        "parent_finished",
    )
    gate.set()
    wait_until(lambda: all(order.done() for order in bench._orders), within=20, what="the child notices")
    assert [order.result() for order in bench._orders] == ["completed", "stale_generation"]
    assert said(bench, child.session_id) == []
    assert operations(bench, child.execution_id) == []


def test_a_parent_may_wait_for_its_children_first(bench):
    state = bench.run(leaves, "wait")
    child = stands(bench, state.result)
    assert (child.outcome, child.status_reason) == (Outcome.COMPLETED, "finished")
    assert said(bench, child.session_id) == ["after the gate"]


def test_a_parent_may_refuse_to_leave_live_children(bench):
    @workflow(name="delegation.refuses")
    def refuses(run: Run) -> Any:
        handle = run.delegate(waits, "left")
        with pytest.raises(ChildrenLive) as live:
            run.finish(children="refuse")
        assert not run.finished
        gate.set()
        run.gather([handle])
        run.finish(children="refuse", result=[live.value.data["live"], [handle.execution_id]])

    named, expected = bench.run(refuses).result
    assert named == expected


def test_a_failing_parent_retires_its_children(bench):
    @workflow(name="delegation.fails")
    def fails(run: Run) -> None:
        run.delegate(waits, "left")
        raise LookupError

    assert bench.run(fails).outcome is Outcome.FAILED
    (child,) = children_of(bench, root_of(bench).execution_id)
    assert child.status_reason == "parent_finished"


def test_a_child_goes_on_while_its_parent_is_taken_over(bench):
    @workflow(name="delegation.crashes")
    def crashes(run: Run) -> Any:
        handle = run.delegate(waits, "goes on")
        wait_until(lambda: entered, within=20, what="the child runs")
        run.append(user("crash here"))
        gate.set()
        return run.gather([handle])[0].value

    bench.crash_at("before_journal", nth=2)
    assert bench.run(crashes).result == "goes on"
    assert bench.crashes == 1
    assert entered == ["goes on"]
