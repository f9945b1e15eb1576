"""Workflows by name: what the decorator makes, and what a worker looks up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from ..ledger.canonical import canonical
from ..ledger.errors import ConfigurationError
from ..ledger.executions import check_id
from .errors import UnknownWorkflow

if TYPE_CHECKING:
    from .submission import Submission

_known: dict[str, Workflow] = {}


@dataclass(frozen=True, slots=True)
class Workflow:
    """A function that owns a session while it runs. Its first parameter is the handle."""

    name: str
    function: Callable[..., Any]
    queue: str | None  # None: the work queue
    profile: str
    max_attempts: int  # processes that may die of it before it is given up

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function, with the asynchronous handle."""
        return inspect.iscoroutinefunction(self.function)

    def __call__(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it stands, with a handle that the caller has."""
        return self.function(run, *args, **kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return call arguments as canonical JSON.

        Raises:
            InvalidParams: they are not JSON.
            ConfigurationError: they do not fit the function.
        """
        try:
            inspect.signature(self.function).bind(None, *args, **kwargs)
        except TypeError as error:
            raise ConfigurationError(f"workflow {self.name}: {error}") from None
        return canonical({"args": list(args), "kwargs": kwargs}, name=f"arguments of workflow {self.name!r}")

    def submit(self, request_id: str, /, *args: Any, **kwargs: Any) -> Submission:
        """Have it run once for this request, however often the request is submitted.

        Raises:
            AdmissionConflict: the request was submitted with another workflow or other arguments.
            TimeoutError: no owner answered; submit again.
        """
        from .submission import submit  # noqa: PLC0415 (a submission knows workflows)

        return submit(self, check_id("request_id", request_id), args, kwargs)


@overload
def workflow(name: Callable[..., Any]) -> Workflow: ...
@overload
def workflow(
    name: str | None = None, *, queue: str | None = None, profile: str = "default", max_attempts: int = 5
) -> Callable[[Callable[..., Any]], Workflow]: ...
def workflow(
    name: str | Callable[..., Any] | None = None,
    *,
    queue: str | None = None,
    profile: str = "default",
    max_attempts: int = 5,
) -> Any:
    """Make a durable workflow of a function, which is then also a Celery task of that name.

        @workflow
        def check(run: Run, number: int) -> dict[str, object]: ...

    Raises:
        ConfigurationError: the name is taken by another function.
    """
    if callable(name):
        return _register(name, None, queue, profile, max_attempts)
    return lambda function: _register(function, name, queue, profile, max_attempts)


def _register(
    function: Callable[..., Any], name: str | None, queue: str | None, profile: str, max_attempts: int
) -> Workflow:
    from .worker import add_task  # noqa: PLC0415 (the worker knows workflows)

    found = name or f"{function.__module__}.{function.__qualname__}"
    made = Workflow(check_id("workflow", found), function, queue, profile, max_attempts)
    before = _known.get(found)
    if before is not None and _place(before.function) != _place(function):
        raise ConfigurationError(f"workflow {found}: the name is taken by {'.'.join(_place(before.function))}")
    _known[found] = made
    if before is None:  # the task looks its workflow up; Celery keeps the first task of a name
        add_task(made)
    return made


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """Return where a function is defined: a module that is loaded again defines the same ones anew."""
    return function.__module__, function.__qualname__


def find(name: str) -> Workflow:
    """Return the workflow of that name.

    Raises:
        UnknownWorkflow: this process has not imported it.
    """
    if name not in _known:
        raise UnknownWorkflow(f"workflow {name!r} is not known here; TENURE_IMPORTS names the modules to import")
    return _known[name]
