"""A workflow that runs again: what it did before is handed out, in order, and changed code is told."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tenure.ledger import Outcome, Refusal, operation
from tenure.ledger.operations import Work
from tenure.ledger.reads import children, steps
from tenure.testing import POINTS, Workbench
from tenure.workflows import AsyncRun, Run, remembering, workflow
from tenure.workflows.errors import StepFailed, WorkflowChanged
from tenure.workflows.replay import Past, Replay
from tests.workflows.bench import all_of, assert_lawful, operations, reasons, said, stands, user, workbench


def past(sequence: int, operation: str, digest: str = "d", step: Any = None, **result: Any) -> Past:
    return Past(sequence, operation, digest, result, step)


class TestReplay:
    def test_an_empty_past_is_over(self) -> None:
        replay = Replay()
        assert not replay.active
        assert replay.take("transcript.append", "d") is None
        assert replay.take_step("fetch", "i") is None
        assert replay.next_label is None

    def test_operations_come_back_in_order_until_the_past_is_over(self) -> None:
        first, second = past(1, "transcript.append", "a"), past(2, "step.record", "b", ("fetch", "i", {"value": 1}))
        replay = Replay([first, second])
        assert replay.take("transcript.append", "a") is first
        assert replay.active
        assert replay.take_step("fetch", "i") is second
        assert not replay.active
        assert replay.take("transcript.append", "a") is None

    def test_a_recorded_step_is_also_the_operation_that_recorded_it(self) -> None:
        assert Replay([past(1, "step.record", "b", ("fetch", "i", {}))]).take("step.record", "b") is not None

    @pytest.mark.parametrize(
        ("before", "take", "now"),
        [
            (past(1, "usage.record"), lambda r: r.take("transcript.append", "d"), "transcript.append"),
            (past(1, "usage.record"), lambda r: r.take("usage.record", "e"), "usage.record with another payload"),
            (past(1, "usage.record"), lambda r: r.take_step("fetch", "i"), "step 'fetch'"),
            (
                past(1, "step.record", step=("load", "i", {})),
                lambda r: r.take("usage.record", "d"),
                "usage.record",
            ),
            (past(1, "step.record", step=("load", "i", {})), lambda r: r.take_step("fetch", "i"), "step 'fetch'"),
            (
                past(1, "step.record", step=("fetch", "j", {})),
                lambda r: r.take_step("fetch", "i"),
                "step 'fetch' with other arguments",
            ),
        ],
    )
    def test_something_else_at_a_place_is_told_each_time_it_is_asked_for(
        self, before: Past, take: Callable[[Replay], Any], now: str
    ) -> None:
        replay = Replay([before])
        for _ in range(2):
            with pytest.raises(WorkflowChanged) as told:
                take(replay)
            was = f"step {before.step[0]!r}" if before.step else before.operation
            assert told.value.data == {"sequence": 1, "before": was, "now": now}
            assert told.value.detail == f"at sequence 1 it did {was} before, now {now}"
        assert replay.active

    def test_what_is_abandoned_is_handed_out_no_more(self) -> None:
        replay = Replay([past(1, "usage.record"), past(2, "usage.record")])
        replay.abandon()
        assert not replay.active

    def test_the_next_label_is_of_a_delegation_only(self) -> None:
        replay = Replay([past(1, "child.reserve", label="1.0"), past(2, "invoice.add", label="2.0")])
        assert replay.next_label == "1.0"
        assert replay.take("child.reserve", "d") is not None
        assert replay.next_label is None


# Every crash point.


calls: list[str] = []


def make_up(what: str) -> str:
    """Return something else each time: run twice, it shows."""
    calls.append(what)
    return f"{what}-{uuid.uuid4().hex[:6]}"


@workflow(name="replay.page")
def page(run: Run, number: int) -> int:
    run.append(user(f"page {number}"))
    return number * 10


@workflow(name="replay.book")
def book(run: Run, start: int) -> dict[str, Any]:
    first = run.step(make_up, "first")
    run.append(user(f"first is {first}"))
    second = run.step(make_up, "second")
    handles = [run.delegate(page, start + number, retries=3) for number in range(3)]
    pages = [child.value for child in run.gather(handles)]
    run.append(user(f"second is {second}"))
    return {"first": first, "second": second, "third": run.step(make_up, "third"), "pages": pages}


@workflow(name="replay.async_book")
async def async_book(run: AsyncRun, start: int) -> dict[str, Any]:
    first = await run.step(make_up, "first")
    await run.append(user(f"first is {first}"))
    second = await run.step(make_up, "second")
    handles = [await run.delegate(page, start + number, retries=3) for number in range(3)]
    pages = [child.value for child in await run.gather(handles)]
    await run.append(user(f"second is {second}"))
    return {"first": first, "second": second, "third": await run.step(make_up, "third"), "pages": pages}


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def check_book(bench: Workbench, state: Any, point: str) -> None:
    """Check that the crashes cost time and nothing else."""
    assert (state.outcome, state.reason) == (Outcome.COMPLETED, "finished")
    (root,) = [x for x in all_of(bench) if x.parent_execution_id is None]
    with bench.ledger.read() as connection:
        kept = {step.name: step.result["value"] for step in steps(connection, root.execution_id)}
        ended = children(connection, root.execution_id)
        recorded = [step.result["value"] for step in steps(connection, root.execution_id)]
    assert recorded == [state.result[name] for name in ("first", "second", "third")]
    assert kept == {"make_up": state.result["third"]}
    assert state.result["pages"] == [0, 10, 20]
    assert said(bench, root.session_id) == [f"{n} is {state.result[n]}" for n in ("first", "second")]
    completed = [child for child in ended if child.outcome is Outcome.COMPLETED]
    assert sorted(said(bench, child.session_id)[0] for child in completed) == ["page 0", "page 1", "page 2"]
    assert all(len(said(bench, child.session_id)) <= 1 for child in ended)
    lost = [child.status_reason for child in ended if child.outcome is not Outcome.COMPLETED]
    assert set(lost) <= {"process_dead"}
    assert len(lost) <= bench.crashes
    # What had its receipt, or was journalled on a disk that the successor has, did not run again. Between a
    # step's call and its journal nothing can know of it.
    again = sum(Counter(calls).values()) - 3
    assert 0 <= again <= (bench.crashes if point == "before_journal" else 0)
    assert_lawful(bench)


@pytest.mark.parametrize("flavour", [book, async_book], ids=["sync", "async"])
@pytest.mark.parametrize("point", POINTS)
def test_whatever_crashes_a_workflow_comes_to_its_right_end(point, flavour, tmp_path, migrated, subtests):
    nth, stride = 1, 1 if flavour is book else 3
    while True:
        calls.clear()
        with subtests.test(nth=nth), workbench(tmp_path / f"bench-{nth}", migrated) as bench:
            bench.crash_at(point, nth=nth)
            check_book(bench, bench.run(flavour, 0), point)
        if bench.crashes == 0:
            break
        nth += stride
    # 8 appends, steps and reservations, 3 of the children's, 4 ends; in front of them, a hold or an attachment each.
    assert nth > (14 if "journal" in point else 18)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("disks", [1, 2, 100])
def test_crash_upon_crash_upon_crash(point, disks, tmp_path, migrated):
    with workbench(tmp_path / "bench", migrated, disks=disks) as bench:
        for nth in (2, 4, 7, 8):
            bench.crash_at(point, nth=nth)
        state = bench.run(book, 0)
        assert bench.crashes == 4
        if disks == 1:
            check_book(bench, state, point)
        assert (state.outcome, state.result["pages"]) == (Outcome.COMPLETED, [0, 10, 20])
        assert_lawful(bench)


def test_an_order_that_crashes_before_it_is_taken_comes_again_and_again(bench):
    for nth in (1, 2, 3):
        bench.crash_at("before_send", nth=nth)

    @workflow(name="replay.short")
    def short(run: Run) -> int:
        return 1

    assert bench.run(short).result == 1
    assert bench.crashes == 3


def test_what_was_journalled_elsewhere_and_done_otherwise_since_is_void(tmp_path, migrated):
    """On disk 1 a step is journalled; disk 0 does it otherwise; back on disk 1 the first is not mixed in."""
    with workbench(tmp_path / "bench", migrated, disks=2) as bench:

        @workflow(name="replay.there_and_back")
        def there_and_back(run: Run) -> str:
            value = run.step(make_up, "value")
            run.append(user(value))
            return str(value)

        bench.crash_at("after_journal", nth=1)  # the step, on disk 1
        bench.crash_at("after_journal", nth=3)  # the append, on disk 0
        state = bench.run(there_and_back)
        (execution,) = all_of(bench)
        assert (bench.crashes, execution.generation, execution.host) == (2, 3, "workbench-3")
        assert state.outcome is Outcome.COMPLETED
        assert said(bench, execution.session_id) == [state.result]
        assert calls == ["value", "value"]
        assert_lawful(bench)


# What is handed out.


def test_a_failed_step_fails_again_without_being_called(bench):
    def broken() -> None:
        calls.append("broken")
        raise ValueError("no")

    @workflow(name="replay.fails")
    def fails(run: Run) -> list[Any]:
        told = []
        for _ in range(2):
            with pytest.raises(StepFailed) as failed:
                run.step(broken, retries=1, backoff=0)
            told.append([failed.value.detail, failed.value.data])
        return told

    bench.crash_at("after_send", nth=3)  # the hold, the first step, the second
    state = bench.run(fails)
    assert bench.crashes == 1
    assert calls == ["broken"] * 4
    assert state.result[0] == state.result[1]
    assert state.result[0][1]["attempts"] == 2


def test_a_refusal_is_handed_out_as_it_was(bench):
    @workflow(name="replay.refused")
    def refused(run: Run) -> list[Any]:
        run.end_session("done")
        told = [run.apply("transcript.append", {"messages": user("late")}).result]
        calls.append("replaying" if run.replaying else "new")
        run.step(make_up, "x")
        return told

    bench.crash_at("before_send", nth=4)
    assert bench.run(refused).result == [{"refused": "session_ended", "end_reason": "done"}]
    assert calls[:2] == ["new", "x"]
    assert bench.crashes == 1


def test_a_past_of_many_pages_is_recalled_whole(bench, monkeypatch):
    monkeypatch.setattr(remembering, "HISTORY_PAGE", 3)

    @workflow(name="replay.long")
    def long(run: Run) -> list[int]:
        return [run.step(lambda n=number: calls.append(str(n)) or n, name=f"s{number}") for number in range(9)]

    bench.crash_at("before_journal", nth=10)  # after nine, which fill three pages
    assert bench.run(long).result == list(range(9))
    assert bench.crashes == 1
    assert calls == [str(number) for number in range(9)]


def test_a_label_in_the_receipt_of_an_applications_operation_is_no_delegation(tmp_path, migrated):
    @operation("replay.tag")
    def tag(work: Work, payload: dict[str, Any]) -> dict[str, Any]:
        return {"label": "1.0"}

    @workflow(name="replay.tagged")
    def tagged(run: Run) -> Any:
        handle = run.delegate(page, 1, retries=1)
        run.apply("replay.tag", {})
        return [child.value for child in run.gather([handle])]

    with workbench(tmp_path / "bench", migrated) as bench:
        bench.ledger.registry._known["replay.tag"] = tag
        bench.crash_at("before_journal", nth=4)  # of the finish, or of the child
        assert bench.run(tagged).result == [10]


# Changed code.


def changed(bench: Any, first: Callable[[Run], Any], second: Callable[[Run], Any]) -> Any:
    """Run a workflow that crashes at its second journal and is other code when it runs again."""
    versions = iter([first, second])

    @workflow(name="replay.versions")
    def versioned(run: Run) -> Any:
        return next(versions)(run)

    bench.crash_at("before_journal", nth=2)
    state = bench.run(versioned)
    assert bench.crashes == 1
    return state


def one_step(run: Run) -> None:
    run.step(make_up, "a", name="a")
    run.append(user("b"))


CHANGES: dict[str, tuple[Callable[[Run], Any], str]] = {
    "another step": (lambda run: run.step(make_up, "a", name="other"), "step 'other'"),
    "other arguments": (lambda run: run.step(make_up, "b", name="a"), "step 'a' with other arguments"),
    "no step": (lambda run: run.append(user("b")), "transcript.append"),
    "another operation": (lambda run: run.end_session("done"), "session.end"),
    "a delegation": (lambda run: run.delegate(page, 1), "child.reserve"),
    "an earlier end": (lambda run: None, "execution.finish"),
    "an earlier end of its own": (lambda run: run.finish(), "execution.finish"),
}


@pytest.mark.parametrize(("second", "now"), CHANGES.values(), ids=CHANGES)
def test_changed_code_is_told_and_nothing_of_it_is_mixed_in(bench, second, now):
    state = changed(bench, one_step, second)
    assert state.outcome is Outcome.FAILED
    message = f"workflow_changed: at sequence 1 it did step 'a' before, now {now}"
    assert state.result == {"error": {"type": "WorkflowChanged", "message": message}}
    (execution,) = all_of(bench)
    assert operations(bench, execution.execution_id) == ["step.record", "execution.finish"]
    assert calls == ["a"]


def test_code_that_passes_over_the_error_still_mixes_nothing_in(bench):
    def stubborn(run: Run) -> None:
        for write in (lambda: run.append(user("b")), lambda: run.step(make_up, "c"), lambda: run.append(user("d"))):
            with pytest.raises(WorkflowChanged):
                write()

    state = changed(bench, one_step, stubborn)
    assert state.outcome is Outcome.FAILED
    (execution,) = all_of(bench)
    assert operations(bench, execution.execution_id) == ["step.record", "execution.finish"]


def test_another_payload_at_a_place_is_told(bench):
    state = changed(
        bench, lambda run: [run.append(user(text)) for text in ("a", "b")], lambda run: run.append(user("c"))
    )
    assert "transcript.append with another payload" in state.result["error"]["message"]


def test_code_that_goes_further_behind_its_past_is_no_change(bench):
    def longer(run: Run) -> str:
        one_step(run)
        return str(run.step(make_up, "more"))

    assert changed(bench, one_step, longer).outcome is Outcome.COMPLETED


def test_the_history_of_a_takeover_tells_what_happened(bench):
    bench.crash_at("after_journal", nth=2)
    bench.run(book, 0)
    (root,) = [x for x in all_of(bench) if x.parent_execution_id is None]
    assert reasons(bench, root.execution_id) == [
        "registered",
        "first_receipt",
        "process_dead",
        "taken_over",
        "finished",
    ]
    assert stands(bench, root.execution_id).generation == 2


def test_a_refused_delegation_is_refused_again_with_the_same_facts(tmp_path, migrated):
    from tenure.ledger import Limits

    @workflow(name="replay.no_room")
    def no_room(run: Run) -> list[Any]:
        refused = run.delegate(page, 1)
        assert isinstance(refused, Refusal)
        calls.append("replayed" if run.replaying else "new")
        return [refused.reason, refused.facts]

    with workbench(tmp_path / "bench", migrated, limits=Limits(0, 1)) as bench:
        bench.crash_at("before_journal", nth=2)
        state = bench.run(no_room)
        assert bench.crashes == 1
    assert state.result == ["delegation_capacity", {"max_concurrent_children": 0, "live_children": 0}]
