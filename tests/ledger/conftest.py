"""A ledger on each database, with a clock to set and its first epoch begun."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tenure.ledger import Ledger
from tenure.ledger.laws import LAWS
from tenure.ledger.schema import metadata
from tests.isolation import PostgresRun
from tests.ledger.kit import SettableClock, Worker
from tests.services import POSTGRES, libpq_url

_OTHERS = "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
_EMPTY = "; ".join(
    [
        f"SELECT pg_terminate_backend(pid) FROM {_OTHERS}",
        *(f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)),
        "INSERT INTO runtime_epoch (id, epoch) VALUES (1, 0)",
    ]
)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture(scope="session")
def _shared_postgres(_postgres: PostgresRun) -> Iterator[tuple[str, psycopg.Connection]]:
    """One database for the run and a connection to it: to make a database takes longer than most of these tests."""
    with _postgres.database() as url, psycopg.connect(libpq_url(url), autocommit=True) as connection:
        yield url, connection


@pytest.fixture(params=["sqlite", "postgresql"])
def emptied_url(request: pytest.FixtureRequest) -> str:
    """A migrated ledger with nothing in it, whatever the test before has left in it or keeps open."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    if POSTGRES.missing:
        return str(request.getfixturevalue("postgres_url"))  # which skips or fails, and counts that
    url, connection = request.getfixturevalue("_shared_postgres")
    connection.execute(_EMPTY)
    return str(url)


@pytest.fixture
def ledger(emptied_url: str, clock: SettableClock) -> Iterator[Ledger]:
    with Ledger.open(emptied_url, clock=clock) as opened:
        yield opened


@pytest.fixture
def lawful(ledger: Ledger) -> Iterator[None]:
    """What the test leaves in the ledger must be lawful; asked on one database, as it takes longer than most tests."""
    yield
    if ledger.store.dialect == "sqlite":
        with ledger.read() as connection:
            assert [violation for law in LAWS for violation in law(connection)] == []


@pytest.fixture
def epoch(ledger: Ledger) -> int:
    return ledger.begin_epoch("the first owner")


@pytest.fixture
def worker(ledger: Ledger, epoch: int) -> Worker:
    """A registered root."""
    return Worker(ledger, epoch).register()
