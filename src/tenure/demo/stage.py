"""What the processes of one demonstration share: its plan, and a file of events that each appends to."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

POLL_SECONDS = 0.02
WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the seed decides, and what is played."""

    seed: int
    parent: str
    child: str
    lost_receipt: int  # which of the parent's appends loses its acknowledgement, counted from 1
    halfway: int  # after how many messages the parent lets the owner be killed
    child_halfway: tuple[int, int]  # the same for its first two children
    thinking: float  # seconds an agent takes for a message

    @classmethod
    def make(cls, seed: int, parent: Path, child: Path, lengths: tuple[int, int]) -> Self:
        """Draw a plan."""
        draw = random.Random(seed)  # noqa: S311 (a script, not a secret)
        own, theirs = lengths
        halfway = draw.randint(own // 3 + 1, max(own // 3 + 1, 2 * own // 3))
        return cls(
            seed=seed,
            parent=str(parent),
            child=str(child),
            lost_receipt=draw.randint(2, halfway),
            halfway=halfway,
            child_halfway=(draw.randint(1, theirs - 2), draw.randint(1, theirs - 2)),
            thinking=round(draw.uniform(0.02, 0.05), 3),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, told by one of the processes."""

    at: float
    who: str
    what: str
    text: str


class Stage:
    """The folder in which the processes of one demonstration meet."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"

    def tell(self, who: str, what: str, text: str) -> None:
        """Append an event; one write, so that lines of several processes do not mix."""
        line = json.dumps([time.time(), who, what, text]) + "\n"
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[Event]:
        """Return every event so far."""
        if self.file.exists():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                yield Event(*json.loads(line))

    def has(self, what: str, *, who: str | None = None) -> bool:
        """Whether such an event has happened."""
        return any(event.what == what and who in {None, event.who} for event in self.events())


def wait_for(condition: Callable[[], bool], what: str, *, within: float = WAIT_SECONDS) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: it did not within so many seconds.
    """
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within:g} s")
        time.sleep(POLL_SECONDS)
