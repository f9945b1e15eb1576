"""How far delegation may go."""

from __future__ import annotations

from dataclasses import dataclass

from .canonical import shown
from .errors import ConfigurationError

MAX_CHILDREN = 1000
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps on delegation; 0 in either means none.

    Raises:
        ConfigurationError: a value is not a whole number in range.
    """

    max_concurrent_children: int = 3
    max_spawn_depth: int = 1

    def __post_init__(self) -> None:
        for name, most in (("max_concurrent_children", MAX_CHILDREN), ("max_spawn_depth", MAX_DEPTH)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise ConfigurationError(f"{name}: {shown(value)} given, a whole number from 0 to {most} is allowed")

    def narrowed(self, *, max_concurrent_children: int | None, max_spawn_depth: int | None) -> Limits:
        """Return these limits, each lowered to what is given; nothing given can widen them."""
        return Limits(
            min(self.max_concurrent_children, _or(max_concurrent_children, MAX_CHILDREN)),
            min(self.max_spawn_depth, _or(max_spawn_depth, MAX_DEPTH)),
        )


def _or(value: int | None, most: int) -> int:
    return most if value is None else value
