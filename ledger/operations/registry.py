"""Which operations a ledger knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from ..canonical import shown
from ..errors import ConfigurationError, InvalidParams
from .work import Refusal, Result, Work

P = TypeVar("P")
ENTRY_POINTS = "tenure.operations"
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


@dataclass(frozen=True, slots=True)
class Operation(Generic[P]):
    """A name, the closed type of its payload, and what it does."""

    name: str
    payload: type[P]
    handler: Callable[[Work, P], Result | Refusal]

    def read(self, value: Any) -> P:
        """Return the typed payload.

        Raises:
            InvalidParams: `detail` names the field.
        """
        try:
            return msgspec.convert(value, self.payload, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidParams(f"{self.name}: {error!s:.400}") from None  # it quotes what was sent


def operation(name: str) -> Callable[[Callable[[Work, P], Result | Refusal]], Operation[P]]:
    """Make an operation of a handler; its payload's type is the annotation of the second parameter.

    The type is a msgspec Struct (`forbid_unknown_fields=True` closes it), a dataclass or a TypedDict.

    Raises:
        ConfigurationError: the name is not dotted lower case, or the handler is not annotated.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"operation {name!r}: a name is dotted lower case, such as invoice.add")

    def make(handler: Callable[[Work, P], Result | Refusal]) -> Operation[P]:
        hints = [hint for key, hint in get_type_hints(handler).items() if key != "return"]
        if len(hints) != 2:
            raise ConfigurationError(f"operation {name}: its handler takes an annotated Work and payload")
        return Operation(name, hints[1], handler)

    return make


class Registry:
    """The operations of one ledger: tenure's own, those of entry points, and those given.

    Raises:
        ConfigurationError: a name is taken, or an entry point is not an operation.
    """

    def __init__(self, builtin: Iterable[Operation[Any]], extra: Iterable[Operation[Any]] = ()) -> None:
        self._known: dict[str, Operation[Any]] = {}
        for known in (*builtin, *_installed(), *extra):
            if self._known.setdefault(known.name, known) is not known:
                raise ConfigurationError(f"operation {known.name}: the name is taken")

    def __iter__(self) -> Iterator[Operation[Any]]:
        return iter(self._known.values())

    def get(self, name: object) -> Operation[Any]:
        """Return the operation of that name.

        Raises:
            InvalidParams: there is none.
        """
        found = self._known.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidParams(f"operation: {shown(name)} is not known")
        return found


def _installed() -> Iterator[Operation[Any]]:
    for point in entry_points(group=ENTRY_POINTS):
        found = point.load()
        if not isinstance(found, Operation):
            raise ConfigurationError(f"entry point {point.name}: {point.value} is not an @operation")
        yield found
