"""The handle of a workflow: an execution that remembers what it has done, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ledger import Outcome
from ..ledger.errors import InvalidParams
from . import steps
from .delegation import Delegation
from .errors import ChildrenLive
from .steps import StepOptions


class Run(Delegation):
    """What a workflow's function gets.

    When the workflow runs again after its process has died, every method returns what it returned before, as far
    as it had come; nothing is written twice.
    """

    def step(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        name: str | None = None,
        retries: int = 0,
        backoff: float = 0.5,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the function once and keep its result; when the workflow runs again, return what was kept.

        `retries` is how often it is tried again when it raises, after `backoff` seconds, doubled each time;
        `timeout` is how many seconds one try may take. A coroutine function is run to its end.

        Raises:
            StepFailed, StepTimeout: it raised, or overran, each time it was tried; this too is kept.
            InvalidParams: an argument or the result is not JSON, or too big, or an option is out of range; nothing
                is kept.
            WorkflowChanged: the code did something else at this place before.
            StepInStep: another step is running.
        """
        options = StepOptions(name or steps.name_of(function), retries, backoff, timeout)
        given = steps.input_digest(options.name, args, kwargs)
        past = self.begin_step(options.name, given)
        if past is not None:
            return steps.unpack(options.name, past)
        outcome = steps.run_tries(options, lambda: function(*args, **kwargs))
        return self.end_step(options.name, given, outcome)

    def begin_step(self, name: str, given: str) -> dict[str, Any] | None:
        """Return what was recorded of this step, or None when it is to be run now."""
        self.check_open()
        steps.refuse_nesting(f"step {name!r}")
        past = self._replay.take_step(name, given)
        if past is None:
            return None
        assert past.step is not None  # take_step returns steps
        recorded: dict[str, Any] = past.step[2]
        return recorded

    def end_step(self, name: str, given: str, outcome: dict[str, Any]) -> Any:
        """Record a step's outcome and return, or raise, it."""
        self.record_step(name, given, outcome)
        return steps.unpack(name, outcome)

    def finish(
        self, *, outcome: Outcome = Outcome.COMPLETED, result: Any = None, children: str = "retire"
    ) -> list[str]:
        """End this execution; returns the ids of the children that this ended.

        `children` says what becomes of those that are live: `retire` ends them, `wait` waits for them first,
        `refuse` does not finish.

        Raises:
            ChildrenLive: children are live, and `refuse` was asked for.
            InvalidParams: `children` is none of the three.
        """
        self.check_open()
        if children not in {"retire", "wait", "refuse"}:
            raise InvalidParams(f"children: {children!r} given; retire, wait or refuse is allowed")
        if not self._replay.active and children != "retire":
            live = self.live_children()
            if live and children == "refuse":
                raise ChildrenLive(f"{len(live)} children are live", {"live": live})
            self.wait_for_children()
        return super().finish(outcome=outcome, result=result)
