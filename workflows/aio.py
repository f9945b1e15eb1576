"""The handle for asyncio programs: the same methods, awaited. Each runs in a thread; the event loop goes on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from . import steps
from .delegation import Delegation
from .execution import Execution
from .run import Run
from .steps import StepOptions

R = TypeVar("R")


def _awaited(method: Callable[..., R]) -> Callable[..., Coroutine[Any, Any, R]]:
    """Return the asynchronous flavour of a method of the handle."""

    async def call(self: AsyncRun, /, *args: Any, **kwargs: Any) -> R:
        return await asyncio.to_thread(method, self.run, *args, **kwargs)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class AsyncRun:
    """A workflow's handle in an event loop. `run` is the handle behind it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def execution_id(self) -> str:
        """The execution's id."""
        return self.run.execution_id

    @property
    def session_id(self) -> str:
        """The session that it holds."""
        return self.run.session_id

    apply = _awaited(Execution.apply)
    append = _awaited(Execution.append)
    record_usage = _awaited(Execution.record_usage)
    create_session = _awaited(Execution.create_session)
    end_session = _awaited(Execution.end_session)
    children = _awaited(Execution.children)
    flush = _awaited(Execution.flush)
    narrow = _awaited(Execution.narrow)
    delegate = _awaited(Delegation.delegate)
    gather = _awaited(Delegation.gather)
    finish = _awaited(Run.finish)

    async def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        retries: int = 0,
        backoff: float = 0.5,
        timeout: float | None = None,  # noqa: ASYNC109 (recorded with the step, not a cancellation scope)
        **kwargs: Any,
    ) -> Any:
        """Do as `Run.step`; a coroutine function runs in this event loop, any other in a thread."""
        options = StepOptions(name or steps.name_of(function), retries, backoff, timeout)
        given = steps.input_digest(options.name, args, kwargs)
        past = await asyncio.to_thread(self.run.begin_step, options.name, given)
        if past is not None:
            return steps.unpack(options.name, past)
        threaded = not inspect.iscoroutinefunction(function)
        outcome = await steps.run_tries_async(options, lambda: function(*args, **kwargs), threaded=threaded)
        return await asyncio.to_thread(self.run.end_step, options.name, given, outcome)
