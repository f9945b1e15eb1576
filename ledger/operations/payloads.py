"""The payloads of tenure's own operations, as closed types.

Text fields are bounded by the payload's size alone, except where a column bounds them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..limits import MAX_CHILDREN, MAX_DEPTH
from ..states import Outcome

Count = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]  # `$` would let a line feed follow
Json = Any


class Closed(Struct, forbid_unknown_fields=True):
    """A payload with no fields but the declared ones."""


class SessionCreate(Closed):
    """Constructor facts of a session."""

    source: Annotated[str, Meta(min_length=1, max_length=64)]
    model: Name | None = None
    model_config: dict[str, Json] | None = None
    system_prompt: str | None = None


class Message(Closed):
    """One message of a transcript."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str | list[Json] | dict[str, Json] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    tool_calls: list[Json] | None = None
    metadata: dict[str, Json] | None = None


class TranscriptAppend(Closed):
    """Messages to append, in order."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=1000)]


class UsageRecord(Closed):
    """What one call of a model used. `cost` is in US dollars, kept to a billionth."""

    model: Name
    input_tokens: Count = 0
    output_tokens: Count = 0
    cache_read_tokens: Count = 0
    cache_write_tokens: Count = 0
    reasoning_tokens: Count = 0
    cost: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    task: str | None = None


class StepRecord(Closed):
    """The result of a durable step."""

    name: Name
    input_digest: Digest
    result: Json


Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:@-]{1,128}$")]


class ChildWork(Closed):
    """A workflow for the child to run, and what its worker derives the child's secret from."""

    workflow: Id
    arguments: str
    key: Id
    label: Id
    queue: Id | None = None


class ChildLimits(Closed):
    """Caps for this reservation and for everything below the child; they can narrow the configured ones only."""

    max_concurrent_children: Annotated[int, Meta(ge=0, le=MAX_CHILDREN)] = MAX_CHILDREN
    max_spawn_depth: Annotated[int, Meta(ge=0, le=MAX_DEPTH)] = MAX_DEPTH


class ChildReserve(Closed):
    """By which secret the child will be held: its digest, as `ledger.secret_digest` makes it.

    With `work` the child is sent to the work queue; without, its parent's process holds it.
    """

    secret_digest: Digest
    work: ChildWork | None = None
    limits: ChildLimits | None = None


class SessionEnd(Closed):
    """Why the session ends."""

    end_reason: Name


class ExecutionFinish(Closed):
    """How the execution ends and what it leaves to whoever asks."""

    outcome: Outcome = Outcome.COMPLETED
    result: Json = None
