"""Submitting a workflow, and asking what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ledger import Outcome, Status
from ..tasks.client import ANSWER_SECONDS, Client
from ..tasks.wire import Control
from .process import current_client
from .waiting import Pauses

if TYPE_CHECKING:
    from .registry import Workflow


@dataclass(frozen=True, slots=True)
class WorkflowState:
    """How a submitted workflow stands. `status` is None while no worker has begun it."""

    status: Status | None
    outcome: Outcome | None
    reason: str
    result: Any


@dataclass(frozen=True, slots=True)
class Submission:
    """A workflow that was submitted: it will run once, whoever submitted it and how often."""

    client: Client
    request_id: str
    execution_id: str
    session_id: str

    def state(self, *, within: float = ANSWER_SECONDS) -> WorkflowState:
        """Return how it stands now.

        Raises:
            TimeoutError: no owner answered within so many seconds.
        """
        told = self.client.ask(Control.LOOKUP, {"request": self.request_id}, within=within)
        return WorkflowState(
            Status(told["status"]) if told["status"] else None,
            Outcome(told["outcome"]) if told["outcome"] else None,
            told["reason"],
            told["result"],
        )

    def wait(self, within: float) -> WorkflowState:
        """Return how it ended.

        Raises:
            TimeoutError: it has not ended within so many seconds; it goes on.
        """
        deadline = time.monotonic() + within
        pauses = Pauses()
        while (state := self.state()).status is not Status.TERMINAL:
            if time.monotonic() + pauses.next > deadline:
                raise TimeoutError(f"request {self.request_id!r} has not ended within {within} s")
            pauses.take()
        return state


def submit(workflow: Workflow, request_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Submission:
    """Hand a workflow to the owner, which keeps it and has it started; see `Workflow.submit`."""
    client = current_client()
    body = {
        "request": request_id,
        "workflow": workflow.name,
        "arguments": workflow.arguments(args, kwargs),
        "queue": workflow.queue or "",
        "profile": workflow.profile,
        "attempts": workflow.max_attempts,
    }
    told = client.ask(Control.SUBMIT, body)
    return Submission(client, request_id, told["execution_id"], told["session_id"])
