"""Delegation: children that the owner mints, that run anywhere on the fleet, and whose results are gathered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..ledger import Outcome, Refusal, Status, secret_digest
from .errors import ForeignChild
from .execution import Child
from .registry import Workflow
from .remembering import Remembering
from .waiting import Pauses

LOST = frozenset({"owner_restarted", "process_dead", "process_stopped"})  # ended by no fault of the child's own


@dataclass(slots=True)
class Delegated:
    """A child that was asked for."""

    parent: str
    number: int  # of this parent's delegations, from 1
    workflow: Workflow
    arguments: str
    retries: int  # how often it may still be delegated again when it is lost
    attempt: int = 0
    execution_id: str = ""
    session_id: str = ""
    result: ChildResult | None = None


@dataclass(frozen=True, slots=True)
class ChildResult:
    """What became of a delegated child. `value` is what its workflow returned, or its failure's facts."""

    execution_id: str
    session_id: str
    outcome: Outcome
    reason: str
    value: Any

    @property
    def completed(self) -> bool:
        """Whether it did what it was asked for."""
        return self.outcome is Outcome.COMPLETED


class Delegation(Remembering):
    """The delegating half of a workflow's handle."""

    _delegations = 0

    def delegate(
        self,
        workflow: Workflow,
        *args: Any,
        on_full: Literal["refuse", "wait"] = "refuse",
        retries: int = 0,
        **kwargs: Any,
    ) -> Delegated | Refusal:
        """Have the owner mint a child that runs a workflow somewhere on the fleet.

        At the cap, `refuse` returns the refusal, which tells cap and count; `wait` waits for a child to end and
        asks again. `retries` is how often the child is delegated again when an owner's restart or its process'
        death ends it.

        Raises:
            InvalidParams, ConfigurationError: the arguments are not JSON, or do not fit the workflow.
            TenureError: as `Execution.apply`.
        """
        self._delegations += 1
        arguments = workflow.arguments(args, kwargs)
        asked = Delegated(self.execution_id, self._delegations, workflow, arguments, retries)
        refused = self._mint_when_free(asked) if on_full == "wait" else self._mint(asked)
        return refused or asked

    def _mint_when_free(self, asked: Delegated) -> Refusal | None:
        """Reserve a child for it as soon as there is a slot, or return why there never will be."""
        while refused := self._mint(asked):
            cap = refused.facts.get("max_concurrent_children", 0)
            if refused.reason != "delegation_capacity" or cap == 0:
                return refused
            self._wait_for_slot(cap)
        return None

    def _mint(self, asked: Delegated) -> Refusal | None:
        """Reserve a child for it, or return why not."""
        label = f"{asked.number}.{asked.attempt}"
        key = f"{self.execution_id}:{label}"
        work = {"workflow": asked.workflow.name, "arguments": asked.arguments, "key": key, "label": label}
        if asked.workflow.queue:
            work["queue"] = asked.workflow.queue
        digest = secret_digest(self.client.principal.derive(key))
        receipt = self.apply("child.reserve", {"secret_digest": digest, "work": work} | self._limits)
        asked.attempt += 1
        if receipt.refused:
            return Refusal(receipt.refused, {k: v for k, v in receipt.result.items() if k not in {"refused", "label"}})
        asked.execution_id, asked.session_id = receipt.result["execution_id"], receipt.result["session_id"]
        return None

    def _wait_for_slot(self, cap: int) -> None:
        """Wait until asking again may help; while replaying, what was asked before is answered as before."""
        pauses = Pauses()
        while not self.replaying and len(self.live_children()) >= cap:
            pauses.take()

    def gather(self, handles: Sequence[Delegated | Refusal], *, within: float | None = None) -> list[ChildResult]:
        """Wait until each of these children has ended; returns what became of them, in order.

        A failure comes back as a value too, and each result is kept as it comes.

        Raises:
            ForeignChild: a handle is of another execution's child, or none, as a refusal is.
            TimeoutError: not all have ended within so many seconds; those that have are kept in their handles.
        """
        self.check_open()
        mine = [handle for handle in handles if isinstance(handle, Delegated) and handle.parent == self.execution_id]
        if len(mine) < len(handles):
            other = next(handle for handle in handles if handle not in mine)
            raise ForeignChild(f"{other!r:.200} is not a child of execution {self.execution_id}")
        deadline = None if within is None else time.monotonic() + within
        pauses = Pauses()
        while waiting := [handle for handle in mine if handle.result is None]:
            if self._collect(waiting):
                pauses = Pauses()
                continue
            if deadline is not None and time.monotonic() + pauses.next > deadline:
                raise TimeoutError(f"{len(waiting)} children have not ended within {within} s")
            pauses.take()
        return [handle.result for handle in mine if handle.result is not None]

    def _collect(self, waiting: list[Delegated]) -> bool:
        """Take in what has ended since; returns whether anything has."""
        if again := self._replayed(waiting):
            self._delegate_again(again)
            return True
        ended = {child.execution_id: child for child in self.children() if child.status is Status.TERMINAL}
        found = [handle for handle in waiting if handle.execution_id in ended]
        for handle in found:
            child = ended[handle.execution_id]
            if child.reason in LOST and handle.retries > 0 and not self.replaying:
                self._delegate_again(handle)
            else:
                handle.result = _result(child)
        return bool(found)

    def _replayed(self, waiting: list[Delegated]) -> Delegated | None:
        """Return which of these was delegated again next, when the workflow did this before."""
        number = (self._replay.next_label or "").partition(".")[0]
        return next((handle for handle in waiting if str(handle.number) == number), None)

    def _delegate_again(self, handle: Delegated) -> None:
        handle.retries -= 1
        lost = (handle.execution_id, handle.session_id)
        # It had a slot, which another child may have taken since.
        if refused := self._mint_when_free(handle):
            handle.result = ChildResult(*lost, Outcome.FAILED, refused.reason, refused.facts)

    def live_children(self) -> list[str]:
        """Return the ids of the children that have not ended."""
        return [child.execution_id for child in self.children() if child.status is not Status.TERMINAL]

    def wait_for_children(self) -> None:
        """Wait until no child is live."""
        pauses = Pauses()
        while self.live_children():
            pauses.take()


def _result(child: Child) -> ChildResult:
    assert child.outcome is not None  # a terminal execution has one
    return ChildResult(child.execution_id, child.session_id, child.outcome, child.reason, child.result)
