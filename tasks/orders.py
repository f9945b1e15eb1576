"""Orders: what an owner sends to the work queue so that a workflow is run, or run on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from ..ledger.submissions import Due


@dataclass(frozen=True, slots=True)
class Order:
    """One message of the work queue. `key` is what the worker derives the execution's secret from."""

    request: str
    workflow: str
    queue: str  # "" is the work queue
    arguments: str  # canonical JSON, opaque to the broker
    execution: str
    session: str
    key: str
    profile: str
    epoch: int
    parent: str  # "" for a root

    @classmethod
    def of(cls, due: Due, epoch: int) -> Self:
        """Make the order for what is due."""
        return cls(
            due.request_id,
            due.workflow,
            due.queue,
            due.arguments,
            due.execution_id,
            due.session_id,
            due.key,
            due.profile,
            epoch,
            due.parent_execution_id or "",
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Rebuild it."""
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)
