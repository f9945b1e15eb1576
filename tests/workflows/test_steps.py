"""Durable steps: once, with retries and a timeout, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tenure.ledger import Outcome
from tenure.ledger.canonical import MAX_BYTES
from tenure.ledger.errors import InvalidParams, Unavailable
from tenure.ledger.reads import steps as recorded_steps
from tenure.workflows import Run, steps, workflow
from tenure.workflows.errors import StepFailed, StepInStep, StepTimeout
from tests.workflows.bench import all_of, operations


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, which take no time."""
    taken: list[float] = []
    monkeypatch.setattr(steps, "time", SimpleNamespace(sleep=taken.append))
    return taken


def answer(run: Run, function: Any, *args: Any, **options: Any) -> Any:
    """Run one step and tell what came of it as JSON."""
    try:
        return run.step(function, *args, **options)
    except (StepFailed, InvalidParams, StepInStep) as error:
        return [type(error).__name__, error.detail, error.data]


def run_one(bench: Any, function: Any, *args: Any, **options: Any) -> Any:
    """Run a workflow of one step; returns what came of it."""

    @workflow(name="steps.one")
    def one(run: Run) -> Any:
        return answer(run, function, *args, **options)

    state = bench.run(one)
    assert state.outcome is Outcome.COMPLETED, state
    return state.result


def recorded(bench: Any) -> list[Any]:
    (execution,) = all_of(bench)
    with bench.ledger.read() as connection:
        return recorded_steps(connection, execution.execution_id)


def test_a_step_is_called_once_with_its_arguments_and_its_result_is_kept(bench):
    calls: list[Any] = []

    def add(a: int, *, b: int) -> dict[str, int]:
        calls.append((a, b))
        return {"sum": a + b}

    assert run_one(bench, add, 1, b=2, name="add") == {"sum": 3}
    assert calls == [(1, 2)]
    (step,) = recorded(bench)
    assert (step.sequence, step.name, step.result) == (1, "add", {"value": {"sum": 3}})


def test_a_step_has_the_functions_name_unless_it_is_given_another(bench):
    run_one(bench, len, "abc")
    assert [step.name for step in recorded(bench)] == ["len"]
    assert steps.name_of(test_a_step_has_the_functions_name_unless_it_is_given_another) == (
        "test_a_step_has_the_functions_name_unless_it_is_given_another"
    )


def test_a_callable_without_a_name_has_its_types():
    class Fetch:
        def __call__(self) -> int:
            return 1

    assert steps.name_of(Fetch()).endswith("Fetch")


def test_a_coroutine_function_is_run_to_its_end(bench):
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return n * 2

    assert run_one(bench, double, 21) == 42


def test_a_step_that_raises_is_tried_again_after_a_pause_that_doubles(bench, pauses, monkeypatch):
    monkeypatch.setattr(steps.random, "uniform", lambda _low, _high: 1.0)
    tries: list[int] = []

    def flaky() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise OSError("not yet")
        return "at last"

    assert run_one(bench, flaky, retries=3, backoff=0.25) == "at last"
    assert pauses == [0.25, 0.5, 1.0]
    assert len(recorded(bench)) == 1


def test_a_pause_is_spread_and_has_a_bound():
    found = {steps.StepOptions("s", backoff=1.0).pause(3) for _ in range(50)}
    assert len(found) > 1
    assert all(0.8 * 4 <= pause <= 1.2 * 4 for pause in found)
    assert steps.StepOptions("s", backoff=1.0).pause(1000) <= steps.MAX_PAUSE_SECONDS * 1.2


def test_a_step_that_fails_for_good_is_recorded_with_what_it_raised(bench, pauses):
    def broken() -> None:
        raise ValueError("no \0such \udcff thing")

    kind, detail, data = run_one(bench, broken, retries=2, name="broken")
    assert kind == "StepFailed"
    assert detail == "step 'broken': ValueError: no such ? thing"
    assert data == {"type": "ValueError", "message": "no such ? thing", "attempts": 3}
    (step,) = recorded(bench)
    assert step.result == {"error": data}


def test_an_error_of_tenure_is_recorded_with_its_detail(bench):
    def away() -> None:
        raise Unavailable("the disk is full")

    kind, _detail, data = run_one(bench, away)
    assert (kind, data["message"]) == ("StepFailed", "unavailable: the disk is full")


def test_a_long_message_is_cut(bench):
    def wordy() -> None:
        raise ValueError("x" * 10_000)

    assert len(run_one(bench, wordy)[2]["message"]) == 2000


def test_a_step_that_overruns_is_recorded_as_a_timeout_and_its_late_result_is_dropped(bench):
    let_go = threading.Event()

    def slow() -> str:
        let_go.wait(20)
        return "late"

    try:
        kind, detail, data = run_one(bench, slow, timeout=0.05, name="slow")
    finally:
        let_go.set()
    assert kind == "StepTimeout"
    assert "longer than 0.05 s" in detail
    assert data["attempts"] == 1
    (step,) = recorded(bench)
    assert set(step.result) == {"timeout"}


def test_each_try_has_the_timeout_anew(bench, pauses):
    let_go, tries = threading.Event(), []

    def slow_once() -> str:
        tries.append(1)
        if len(tries) == 1:
            let_go.wait(20)
        return "done"

    try:
        assert run_one(bench, slow_once, timeout=0.2, retries=1) == "done"
    finally:
        let_go.set()
    assert len(tries) == 2


def test_a_step_in_time_returns_its_result_and_raises_its_own_error(bench):
    assert run_one(bench, len, "ab", timeout=20) == 2

    def broken() -> None:
        raise KeyError("k")

    assert run_one(bench, broken, timeout=20)[2]["type"] == "KeyError"


@pytest.mark.parametrize("value", [{1, 2}, (1, 2), {1: 2}, float("nan"), b"x", 2**64, "a\0"])
def test_a_result_that_is_not_json_is_refused_by_the_steps_name_and_nothing_is_kept(bench, value):
    kind, detail, _data = run_one(bench, lambda: value, name="fetch", retries=3)
    assert kind == "InvalidParams"
    assert detail.startswith("result of step 'fetch'")
    assert recorded(bench) == []


@pytest.mark.parametrize("size", [MAX_BYTES - 100, MAX_BYTES + 1])
def test_a_result_that_is_too_big_is_refused_by_the_steps_name(bench, size):
    kind, detail, _data = run_one(bench, lambda: "x" * size, name="fetch")
    assert kind == "InvalidParams"
    assert detail.startswith("result of step 'fetch'")
    assert "bytes" in detail
    assert recorded(bench) == []


def test_the_biggest_result_that_is_allowed_is_kept(bench):
    kept = "x" * (MAX_BYTES - steps.ROOM_BYTES - 2)

    @workflow(name="steps.big")
    def big(run: Run) -> int:
        return len(run.step(lambda: kept, name="ä" * steps.MAX_NAME_CHARS))

    assert bench.run(big).result == len(kept)


def test_arguments_that_are_not_json_are_refused_and_the_step_is_not_called(bench):
    calls: list[Any] = []
    kind, detail, _data = run_one(bench, calls.append, {1, 2}, name="keep")
    assert kind == "InvalidParams"
    assert detail.startswith("arguments of step 'keep'")
    assert calls == []


OPTIONS: list[dict[str, Any]] = [
    {"retries": -1},
    {"retries": 1.5},
    {"backoff": -0.1},
    {"backoff": float("inf")},
    {"timeout": 0},
    {"timeout": -1},
    {"name": "x" * 257},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_option_out_of_range_is_refused_and_the_step_is_not_called(bench, options):
    calls: list[Any] = []
    kind, detail, _data = run_one(bench, calls.append, 1, **options)
    assert kind == "InvalidParams"
    assert "step" in detail
    assert calls == []


@pytest.mark.parametrize("timeout", [None, 20])
def test_what_is_written_inside_a_step_is_refused_as_no_replay_would_write_it_again(bench, timeout):
    @workflow(name="steps.nested")
    def nested(run: Run) -> Any:
        def inner() -> Any:
            told = [answer(run, len, "abc", name="inner")]
            for write in (
                lambda: run.append([{"role": "user", "content": "x"}]),
                run.finish,
                lambda: run.delegate(nested),
            ):
                with pytest.raises(StepInStep) as refused:
                    write()
                told.append(refused.value.detail)
            return told

        return run.step(inner, name="outer", timeout=timeout)

    told = bench.run(nested).result
    assert told[0][:2] == ["StepInStep", "step 'inner' inside step 'outer'"]
    assert told[1:] == [
        f"{name} inside step 'outer'" for name in ("transcript.append", "execution.finish", "child.reserve")
    ]
    (execution,) = all_of(bench)
    assert operations(bench, execution.execution_id) == ["step.record", "execution.finish"]


def test_after_a_step_that_raised_another_one_may_run(bench):
    @workflow(name="steps.after")
    def after(run: Run) -> int:
        with pytest.raises(StepFailed):
            run.step(int, "x")
        with pytest.raises(StepTimeout):
            run.step(threading.Event().wait, 5.0, name="waits", timeout=0.01)
        return int(run.step(len, "abc"))

    assert bench.run(after).result == 3


def test_what_ends_the_process_is_no_outcome_of_a_step(bench):
    @workflow(name="steps.exit")
    def leaves(run: Run) -> None:
        def leave() -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            run.step(leave)

    assert bench.run(leaves).outcome is Outcome.COMPLETED
    assert recorded(bench) == []
