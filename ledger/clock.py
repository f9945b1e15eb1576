"""The one clock that records, leases and graces are measured by."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Something that knows the time; tests set their own."""

    def __call__(self) -> datetime:
        """Return the aware UTC time."""


def utc_now() -> datetime:
    """Return the machine's time."""
    return datetime.now(UTC)
