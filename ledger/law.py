"""What a law is: ways of breaking it, each a statement that selects the rows that do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, Table

from .limits import Limits

ROWS = 1000  # fetched together, where a row is small
WIDE_ROWS = 16  # fetched together, where each may hold megabytes

Rows = Select[*tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Violation:
    """A row that breaks a law; `key` is its primary key, `detail` holds nothing of a session's content."""

    law: str
    table: str
    key: dict[str, Any]  # JSON
    detail: str


@dataclass(frozen=True, slots=True)
class Case:
    """One way of breaking a law.

    `rows` selects the primary key of `table`, beside it the facts that tell what is wrong. Where SQL cannot judge,
    `broken` does, also from columns whose names begin with an underscore, which are told to nobody.
    """

    table: Table
    what: str
    rows: Rows
    broken: Callable[[RowMapping], bool] | None = None
    at_once: int = ROWS  # rows fetched together

    def found(self, connection: Connection, law: str) -> Iterator[Violation]:
        """Yield the rows that break the law as the database finds them."""
        with connection.execute(self.rows.execution_options(yield_per=self.at_once)) as result:
            for row in result.mappings():
                if self.broken is None or self.broken(row):
                    yield self._violation(law, row)

    def _violation(self, law: str, row: RowMapping) -> Violation:
        key = {name: _json(row[name]) for name in self.table.primary_key.columns.keys()}  # noqa: SIM118 (iterating gives columns)
        facts = [f"{name} {row[name]}" for name in row if name not in key and not name.startswith("_")]
        return Violation(law, self.table.name, key, f"{self.what} ({', '.join(facts)})" if facts else self.what)


def _json(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int)) else str(value)


@dataclass(frozen=True, slots=True)
class Law:
    """An invariant. Calling it yields every row that breaks it; what depends on limits is left out without them."""

    name: str
    text: str
    cases: Callable[[Connection, Limits | None], Iterable[Case]]

    def __call__(self, connection: Connection, limits: Limits | None = None) -> Iterator[Violation]:
        """Yield the violations as they are found, in any order."""
        for case in self.cases(connection, limits):
            yield from case.found(connection, self.name)


def law(cases: Callable[[], Iterable[Case]]) -> Law:
    """Make a law of a function that yields the ways of breaking it; its docstring is the law's text."""
    return Law(cases.__name__, cases.__doc__ or "", lambda _connection, _limits: cases())


def law_of_limits(cases: Callable[[Limits | None], Iterable[Case]]) -> Law:
    """Make a law that depends on the limits."""
    return Law(cases.__name__, cases.__doc__ or "", lambda _connection, limits: cases(limits))
