"""What the ledger's tests work with: a clock to set, a worker, and the whole of a ledger as a value."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Self

import psycopg
from sqlalchemy import Table, event, select
from sqlalchemy.exc import OperationalError

from tenure.ledger import (
    Address,
    Claim,
    Hold,
    Identity,
    Kind,
    Ledger,
    Proof,
    Receipt,
    Registration,
    Request,
    claim_digest,
    secret_digest,
)
from tenure.ledger.schema import metadata

HERE = Identity(host="host-a", boot="boot-1", pid=4242, birth="ticks:1000", user="worker")
ELSEWHERE = Identity(host="host-b", boot="boot-9", pid=77, birth="ticks:5", user="worker")

_names = count(1)


class SettableClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **parts: float) -> None:
        self.now += timedelta(**parts)


@dataclass
class Worker:
    """The holder of one execution: knows its secret, counts its own operations."""

    ledger: Ledger
    epoch: int
    execution_id: str = field(default_factory=lambda: f"x{next(_names)}")
    session_id: str = ""
    secret: str = ""
    identity: Identity = HERE
    profile: str = "default"
    principal: str = "agents"
    kind: Kind = Kind.COMPUTE
    source: str = "worker"
    generation: int = 1
    sequence: int = 0  # of the last operation that has a receipt

    def __post_init__(self) -> None:
        self.session_id = self.session_id or f"session-of-{self.execution_id}"
        self.secret = self.secret or f"the secret of {self.execution_id}"

    @property
    def registration(self) -> Registration:
        return Registration(
            execution_id=self.execution_id,
            session_id=self.session_id,
            kind=self.kind,
            profile=self.profile,
            principal=self.principal,
            identity=self.identity,
            secret_digest=secret_digest(self.secret),
            source=self.source,
        )

    @property
    def address(self) -> Address:
        return Address(self.epoch, self.execution_id, self.session_id, self.generation)

    @property
    def claim(self) -> str:
        return claim_digest(
            profile=self.profile,
            session_id=self.session_id,
            execution_id=self.execution_id,
            generation=self.generation,
            identity=self.identity,
            secret_digest=secret_digest(self.secret),
            principal=self.principal,
        )

    @property
    def proof(self) -> Proof:
        return Claim(self.claim)

    def register(self) -> Worker:
        self.generation = self.ledger.register(self.epoch, self.registration).generation
        return self

    def request(self, operation: str, payload: Any = None, *, sequence: Any = None, **address: Any) -> Request:
        """Make the next request, or the one with that sequence; `address` replaces fields of it."""
        number = self.sequence + 1 if sequence is None else sequence
        return Request(
            replace(self.address, **address), number, operation, {} if payload is None else payload, self.proof
        )

    def send(self, request: Request, *, careful: bool = False) -> Receipt:
        """Send a request as the owner of its worker's epoch."""
        return self.ledger.apply(self.epoch, request, careful=careful)

    def apply(self, operation: str, payload: Any = None, *, careful: bool = False) -> Receipt:
        """Send the next operation and count it."""
        receipt = self.send(self.request(operation, payload), careful=careful)
        self.sequence = receipt.sequence
        return receipt

    def say(self, *texts: str) -> Receipt:
        return self.apply("transcript.append", {"messages": [{"role": "user", "content": text} for text in texts]})

    def reserve(self, secret: str = "") -> Worker:
        """Reserve a child and return it; it must not be refused."""
        secret = secret or f"a child's secret {next(_names)}"
        return self.child(self.apply("child.reserve", {"secret_digest": secret_digest(secret)}), secret)

    def child(self, receipt: Receipt, secret: str) -> Worker:
        """Return the child that a reservation has minted."""
        assert receipt.refused is None, receipt
        minted = receipt.result
        return replace(
            self,
            execution_id=minted["execution_id"],
            session_id=minted["session_id"],
            generation=minted["generation"],
            secret=secret,
            kind=Kind.CHILD,
            sequence=0,
        )

    def adopt(self, epoch: int) -> Hold:
        """Go on under another epoch."""
        self.epoch = epoch
        return self.ledger.adopt(epoch, self.address, self.proof)

    def attach(self, identity: Identity) -> Hold:
        """Take a reserved child into another process."""
        hold = self.ledger.attach(self.epoch, self.address, secret_digest=secret_digest(self.secret), identity=identity)
        self.identity = identity
        return hold

    def finish(self, payload: Any = None) -> Receipt:
        return self.apply("execution.finish", payload)


Dump = dict[str, list[tuple[Any, ...]]]


def dump(ledger: Ledger, *more: Table) -> Dump:
    """Return every row of every table, as the driver gives them: nothing need be compiled."""
    with ledger.read() as connection:
        return {
            table.name: sorted(map(tuple, connection.exec_driver_sql(f"SELECT * FROM {table.name}")), key=repr)
            for table in (*metadata.sorted_tables, *more)
        }


def rows(ledger: Ledger, table: Table, **where: Any) -> list[Any]:
    """Return the rows of a table that have these values, in the order of its primary key."""
    statement = select(table).order_by(*table.primary_key.columns)
    for name, value in where.items():
        statement = statement.where(table.c[name] == value)
    with ledger.read() as connection:
        return list(connection.execute(statement))


def row(ledger: Ledger, table: Table, **where: Any) -> Any:
    """Return the one row of a table that has these values."""
    (found,) = rows(ledger, table, **where)
    return found


def database_fault(ledger: Ledger) -> OperationalError:
    """Return what SQLAlchemy raises when the database itself gives way."""
    cause: Exception
    if ledger.store.dialect == "sqlite":
        cause = sqlite3.OperationalError("disk I/O error")
        cause.sqlite_errorcode, cause.sqlite_errorname = sqlite3.SQLITE_IOERR, "SQLITE_IOERR"  # type: ignore[attr-defined]
    else:
        cause = psycopg.OperationalError("the connection is lost")
    return OperationalError("", None, cause, connection_invalidated=True)


class Failing:
    """Makes the n-th occurrence of an engine's event in a block fail, before the database sees it.

    A `before_cursor_execute` is a statement, SQLite's BEGIN among them; a `commit` is the end of a transaction.
    """

    def __init__(self, ledger: Ledger, name: str, *, number: int = 1) -> None:
        self.ledger, self.name, self.left, self.failed = ledger, name, number, False

    def _before(self, *_what: object) -> None:
        self.left -= 1
        if self.left == 0:
            self.failed = True
            raise database_fault(self.ledger)

    def __enter__(self) -> Self:
        event.listen(self.ledger.store.engine, self.name, self._before)
        return self

    def __exit__(self, *_exc: object) -> None:
        event.remove(self.ledger.store.engine, self.name, self._before)
