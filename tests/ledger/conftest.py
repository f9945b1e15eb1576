"""A ledger on each database, with a clock to set and its first epoch begun."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import delete, insert, text

from tenure.ledger import Ledger
from tenure.ledger.laws import LAWS
from tenure.ledger.schema import metadata, runtime_epoch
from tenure.ledger.store import Store
from tests.isolation import PostgresRun
from tests.ledger.kit import SettableClock, Worker
from tests.services import POSTGRES


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture(scope="session")
def _shared_postgres(_postgres: PostgresRun) -> Iterator[str]:
    """One database for the run: to make one takes longer than most of these tests."""
    with _postgres.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def emptied_url(request: pytest.FixtureRequest) -> str:
    """A migrated ledger with nothing in it."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    if POSTGRES.missing:
        return str(request.getfixturevalue("postgres_url"))  # which skips or fails, and counts that
    url = str(request.getfixturevalue("_shared_postgres"))
    empty(url)
    return url


def empty(url: str) -> None:
    """Make a ledger as it was migrated, whatever a test has left in it or keeps open."""
    store = Store(url)
    with store.write() as connection:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        connection.execute(text(f"{others} AND pid <> pg_backend_pid()"))
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
        connection.execute(insert(runtime_epoch).values(id=1, epoch=0))
    store.close()


@pytest.fixture
def ledger(emptied_url: str, clock: SettableClock) -> Iterator[Ledger]:
    """An open ledger; what the test leaves in it must be lawful."""
    with Ledger.open(emptied_url, clock=clock) as opened:
        yield opened
        with opened.read() as connection:
            assert [violation for law in LAWS for violation in law(connection)] == []


@pytest.fixture
def epoch(ledger: Ledger) -> int:
    return ledger.begin_epoch("the first owner")


@pytest.fixture
def worker(ledger: Ledger, epoch: int) -> Worker:
    """A registered root."""
    return Worker(ledger, epoch).register()
