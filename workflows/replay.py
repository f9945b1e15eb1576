"""What an execution did before, handed out again in the same order.

Every durable thing a workflow does is an operation with a dense sequence. When the workflow runs again, in whatever
process, its first operations are compared with those receipts: the same operation gets the stored result without
being sent, a different one means that the code has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import WorkflowChanged


@dataclass(frozen=True, slots=True)
class Past:
    """One receipt; of a step also its name, its input's digest and its result."""

    sequence: int
    operation: str
    digest: str
    result: dict[str, Any]
    step: tuple[str, str, Any] | None = None


class Replay:
    """The receipts that have not been handed out yet."""

    def __init__(self, past: Iterable[Past] = ()) -> None:
        self._past = list(past)
        self._next = 0

    @property
    def active(self) -> bool:
        """Whether the workflow is still where it has been before."""
        return self._next < len(self._past)

    @property
    def next_label(self) -> str | None:
        """The label of the delegation that comes next, where one does."""
        past = self._past[self._next] if self.active else None
        label = past.result.get("label") if past and past.operation == "child.reserve" else None
        return label if isinstance(label, str) else None

    def abandon(self) -> None:
        """Hand out nothing more."""
        self._next = len(self._past)

    def take(self, operation: str, digest: str) -> Past | None:
        """Return the receipt of this operation, or None when the past is over.

        Raises:
            WorkflowChanged: another operation, or another payload, stands at this place.
        """
        if not self.active:
            return None
        past = self._past[self._next]
        if past.operation != operation:
            raise _changed(past, operation)
        if past.digest != digest:
            raise _changed(past, f"{operation} with another payload")
        self._next += 1
        return past

    def take_step(self, name: str, input_digest: str) -> Past | None:
        """Return the recorded step, or None when the past is over.

        Raises:
            WorkflowChanged: another operation, another step or another input stands at this place.
        """
        if not self.active:
            return None
        past = self._past[self._next]
        if past.step is None:
            raise _changed(past, f"step {name!r}")
        if past.step[0] != name:
            raise _changed(past, f"step {name!r}")
        if past.step[1] != input_digest:
            raise _changed(past, f"step {name!r} with other arguments")
        self._next += 1
        return past


def _changed(past: Past, now: str) -> WorkflowChanged:
    before = f"step {past.step[0]!r}" if past.step else past.operation
    detail = f"at sequence {past.sequence} it did {before} before, now {now}"
    return WorkflowChanged(detail, {"sequence": past.sequence, "before": before, "now": now})
