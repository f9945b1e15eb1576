"""Durable steps: a function's result is recorded once, and handed out again when the workflow runs again.

A step that raises is tried again as often as it may, and then recorded as failed: the workflow sees
`StepFailed`, now and at every replay. What runs twice is only a step whose process died before its result was
recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..ledger.canonical import MAX_BYTES, canonical, shown
from ..ledger.errors import InvalidParams, TenureError
from .errors import StepFailed, StepInStep, StepTimeout

_in_step: ContextVar[str | None] = ContextVar("tenure_step", default=None)
MAX_PAUSE_SECONDS = 60.0
MAX_NAME_CHARS = 256
ROOM_BYTES = 4096  # of an operation's payload, for what stands around a step's result


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is tried. `backoff` is the first pause in seconds, doubled each time; `timeout` is for one try.

    Raises:
        InvalidParams: one is out of range.
    """

    name: str
    retries: int = 0
    backoff: float = 0.5
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_CHARS:
            raise InvalidParams(f"step: a name of 1 to {MAX_NAME_CHARS} characters is allowed")
        if type(self.retries) is not int or self.retries < 0:
            raise InvalidParams(f"retries of step {self.name!r}: {shown(self.retries)} given, 0 or more is allowed")
        if not 0 <= self.backoff < float("inf"):
            raise InvalidParams(f"backoff of step {self.name!r}: {shown(self.backoff)} given, 0 or more is allowed")
        if self.timeout is not None and not 0 < self.timeout <= threading.TIMEOUT_MAX:
            raise InvalidParams(f"timeout of step {self.name!r}: {shown(self.timeout)} given, more than 0 is allowed")

    def pause(self, attempt: int) -> float:
        """Return how long to wait after so many attempts, with some spread."""
        spread = random.uniform(0.8, 1.2)  # noqa: S311 (a pause, not a secret)
        return float(min(self.backoff * 2 ** (attempt - 1), MAX_PAUSE_SECONDS) * spread)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which a function's steps are recorded."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def input_digest(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the digest of a step's arguments.

    Raises:
        InvalidParams: they are not JSON, so that a replay could not tell whether they are the same.
    """
    text = canonical([list(args), kwargs], name=f"arguments of step {name!r}")
    return hashlib.sha256(text.encode()).hexdigest()


def refuse_nesting(what: str) -> None:
    """Check that no step runs here already, in which `what` would be done.

    Raises:
        StepInStep: one does.
    """
    if outer := _in_step.get():
        raise StepInStep(f"{what} inside step {outer!r}")


def recorded(options: StepOptions, value: Any) -> dict[str, Any]:
    """Return what is recorded of a result.

    Raises:
        InvalidParams: it is not JSON, or too big.
    """
    canonical(value, name=f"result of step {options.name!r}", max_bytes=MAX_BYTES - ROOM_BYTES)
    return {"value": value}


def recorded_failure(error: Exception, attempts: int) -> dict[str, Any]:
    """Return what is recorded of a step that failed for good."""
    kind = "timeout" if isinstance(error, TimeoutError) else "error"
    return {kind: told(error) | {"attempts": attempts}}


def told(error: Exception) -> dict[str, Any]:
    """Return an exception's type and message as JSON can carry them."""
    text = error.explain() if isinstance(error, TenureError) else str(error)
    message = text[:2000].replace("\0", "").encode("utf-8", "replace").decode()
    return {"type": type(error).__name__, "message": message}


def unpack(name: str, result: dict[str, Any]) -> Any:
    """Return a recorded result.

    Raises:
        StepFailed, StepTimeout: it is a recorded failure.
    """
    for kind, error in (("error", StepFailed), ("timeout", StepTimeout)):
        if kind in result:
            facts = result[kind]
            raise error(f"step {name!r}: {facts['type']}: {facts['message']}", facts)
    return result["value"]


def run_tries(options: StepOptions, call: Callable[[], Any]) -> dict[str, Any]:
    """Call until it succeeds or may not be tried again; returns what is to be recorded."""
    for attempt in range(1, options.retries + 2):
        try:
            return recorded(options, _once(options, call))
        except InvalidParams:  # trying again cannot help
            raise
        except Exception as error:  # noqa: BLE001 (whatever a step raises is its outcome, and is recorded)
            if attempt > options.retries:
                return recorded_failure(error, attempt)
            time.sleep(options.pause(attempt))
    raise AssertionError("unreachable")


async def run_tries_async(options: StepOptions, call: Callable[[], Any], *, threaded: bool) -> dict[str, Any]:
    """Do as `run_tries` in an event loop. With `threaded` the call itself runs in a thread, as it may block."""
    for attempt in range(1, options.retries + 2):
        token = _in_step.set(options.name)
        try:
            tried = _awaited_in_thread(call) if threaded else _awaited(call)
            return recorded(options, await asyncio.wait_for(tried, options.timeout))
        except InvalidParams:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a step raises is its outcome, and is recorded)
            if attempt > options.retries:
                return recorded_failure(error, attempt)
        finally:
            _in_step.reset(token)
        await asyncio.sleep(options.pause(attempt))
    raise AssertionError("unreachable")


async def _awaited(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


async def _awaited_in_thread(call: Callable[[], Any]) -> Any:
    result = await asyncio.to_thread(call)
    return await result if inspect.isawaitable(result) else result


def _once(options: StepOptions, call: Callable[[], Any]) -> Any:
    if options.timeout is None:
        return _inside(options.name, call)
    promise: Future[Any] = Future()

    def run() -> None:
        try:
            promise.set_result(_inside(options.name, call))
        except BaseException as error:  # noqa: BLE001 (it is handed to the thread that waits)
            promise.set_exception(error)

    # A thread cannot be ended from outside: a step that overruns goes on by itself, its result is dropped.
    threading.Thread(target=run, name=f"tenure-step-{options.name}", daemon=True).start()
    try:
        return promise.result(options.timeout)
    except TimeoutError:
        if promise.done():
            raise
        raise TimeoutError(f"took longer than {options.timeout} s") from None


def _inside(name: str, call: Callable[[], Any]) -> Any:
    token = _in_step.set(name)
    try:
        result = call()
        return asyncio.run(_awaited(lambda: result)) if inspect.isawaitable(result) else result
    finally:
        _in_step.reset(token)
