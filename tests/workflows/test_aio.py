"""The handle in an event loop: the same methods, awaited, while the loop goes on."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import Any

import pytest

from tenure.ledger import Outcome
from tenure.ledger.errors import InvalidParams
from tenure.workflows import AsyncRun, Run, workflow
from tenure.workflows.errors import StepFailed, StepInStep, StepTimeout
from tests.workflows.bench import all_of, operations, said, user

WRITES = [
    "append",
    "apply",
    "children",
    "create_session",
    "delegate",
    "end_session",
    "finish",
    "flush",
    "gather",
    "record_usage",
]


@workflow(name="aio.child")
async def child(run: AsyncRun, number: int) -> int:
    return number + 1


def test_it_has_the_handles_methods_awaited_and_documented():
    for name in (*WRITES, "step"):
        method = getattr(AsyncRun, name)
        assert inspect.iscoroutinefunction(method), name
        assert method.__name__ == name
        assert method.__doc__ == getattr(Run, name).__doc__ or name == "step"


def test_a_workflow_that_is_a_coroutine_function_has_it_and_does_everything(bench):
    @workflow(name="aio.all")
    async def everything(run: AsyncRun) -> dict[str, Any]:
        assert isinstance(run, AsyncRun)
        await run.create_session(source="worker", model="m")
        told = {"positions": await run.append(user("a")), "session": run.session_id, "execution": run.execution_id}
        await run.record_usage("m", input_tokens=1)
        receipt = await run.apply("usage.record", {"model": "m"})
        handle = await run.delegate(child, 1)
        told["gathered"] = [result.value for result in await run.gather([handle])]
        told["children"] = [one.execution_id == handle.execution_id for one in await run.children()]
        told["applied"] = receipt.result
        await run.flush()
        told["ended"] = await run.end_session("done")
        await run.finish(result=told)
        return {}

    assert everything.is_async
    told = bench.run(everything).result
    root = next(x for x in all_of(bench) if x.parent_execution_id is None)
    assert told == {
        "positions": [1],
        "session": root.session_id,
        "execution": root.execution_id,
        "gathered": [2],
        "children": [True],
        "applied": {"recorded": True},
        "ended": True,
    }
    assert said(bench, root.session_id) == ["a"]


def test_a_coroutine_function_runs_in_the_loop_and_a_blocking_one_does_not_stop_it(bench):
    @workflow(name="aio.loop")
    async def loop(run: AsyncRun) -> list[Any]:
        let_go = threading.Event()

        async def here() -> bool:
            return threading.current_thread() is main

        def blocks() -> bool:
            return let_go.wait(20) and threading.current_thread() is not main

        main = threading.current_thread()
        asyncio.get_running_loop().call_later(0.01, let_go.set)
        return [await run.step(here), await run.step(blocks)]

    assert bench.run(loop).result == [True, True]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_step_that_overruns_is_a_timeout_whether_it_awaits_or_blocks(bench, blocking):
    let_go = threading.Event()

    @workflow(name="aio.slow")
    async def slow(run: AsyncRun) -> str:
        async def never() -> None:
            await asyncio.Event().wait()

        began = time.monotonic()
        with pytest.raises(StepTimeout) as told:
            await run.step(let_go.wait if blocking else never, *([20.0] if blocking else []), timeout=0.05)
        assert time.monotonic() - began < 10
        let_go.set()
        return str(told.value.data["type"])

    assert bench.run(slow).result == "TimeoutError"


def test_a_step_is_tried_again_and_recorded_as_failed(bench):
    tries: list[int] = []

    @workflow(name="aio.fails")
    async def fails(run: AsyncRun) -> Any:
        async def broken() -> None:
            tries.append(1)
            raise ValueError("no")

        with pytest.raises(StepFailed) as failed:
            await run.step(broken, retries=2, backoff=0)
        return failed.value.data

    assert bench.run(fails).result == {"type": "ValueError", "message": "no", "attempts": 3}
    assert len(tries) == 3


def test_a_step_in_a_step_and_a_result_that_is_not_json_are_refused(bench):
    @workflow(name="aio.refused")
    async def refused(run: AsyncRun) -> None:
        async def outer() -> str:
            with pytest.raises(StepInStep):
                await run.step(len, "a")
            with pytest.raises(StepInStep):
                await run.append(user("a"))
            return "refused both"

        assert await run.step(outer) == "refused both"
        with pytest.raises(InvalidParams):
            await run.step(lambda: {1}, name="set")
        with pytest.raises(InvalidParams):
            await run.step(len, "a", retries=-1)

    assert bench.run(refused).outcome is Outcome.COMPLETED
    (execution,) = all_of(bench)
    assert operations(bench, execution.execution_id) == ["step.record", "execution.finish"]


def test_after_a_crash_its_steps_come_back(bench):
    calls: list[str] = []

    @workflow(name="aio.again")
    async def again(run: AsyncRun) -> str:
        async def fetch() -> str:
            calls.append("fetch")
            return "kept"

        value = await run.step(fetch)
        await run.append(user(value))
        return str(value)

    bench.crash_at("before_journal", nth=2)
    assert bench.run(again).result == "kept"
    assert (bench.crashes, calls) == (1, ["fetch"])
