"""Transactions on both databases: whole, patient with a busy database, and clear about one that is not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import DatabaseError, IntegrityError

from tenure.ledger.errors import ConfigurationError, Unavailable
from tenure.ledger.schema import epochs, owner_lease, runtime_epoch
from tenure.ledger.store import Store, database_seconds, parse_url
from tests.ledger.kit import SettableClock
from tests.processes import Spawner

NOW = SettableClock()()


@contextmanager
def opened(url: str) -> Iterator[Store]:
    store = Store(url)
    try:
        yield store
    finally:
        store.close()


def begun(number: int) -> dict[str, object]:
    return {"epoch": number, "began_at": NOW, "owner": "somebody"}


def begin_and_fail(connection: Connection, number: int) -> None:
    """Release a savepoint, then fail."""
    with connection.begin_nested():
        connection.execute(insert(epochs).values(begun(number)))
    raise ZeroDivisionError


def numbers(store: Store) -> list[int]:
    with store.read() as connection:
        return list(connection.execute(select(epochs.c.epoch).order_by(epochs.c.epoch)).scalars())


def test_a_write_commits_at_its_end_or_not_at_all(emptied_url):
    with opened(emptied_url) as store:
        with store.write() as connection:
            connection.execute(insert(epochs).values(begun(1)))
        with pytest.raises(ZeroDivisionError), store.write() as connection:
            begin_and_fail(connection, 2)
        with pytest.raises(IntegrityError), store.write() as connection:
            connection.execute(insert(epochs), [begun(3), begun(1)])
        assert numbers(store) == [1]


def test_a_savepoint_that_is_released_goes_with_its_transaction(emptied_url):
    with opened(emptied_url) as store:
        with pytest.raises(ZeroDivisionError), store.write() as connection:
            begin_and_fail(connection, 1)
        assert numbers(store) == []
        with store.write() as connection:
            connection.execute(insert(epochs).values(begun(1)))
            with pytest.raises(IntegrityError), connection.begin_nested():
                connection.execute(insert(epochs), [begun(2), begun(1)])
            connection.execute(insert(epochs).values(begun(3)))
        assert numbers(store) == [1, 3]


def test_a_read_is_one_moment(emptied_url):
    with opened(emptied_url) as store, store.read() as reading:
        assert reading.execute(select(epochs.c.epoch)).all() == []
        with store.write() as writing:
            writing.execute(insert(epochs).values(begun(1)))
        assert reading.execute(select(epochs.c.epoch)).all() == []


def test_four_processes_lose_no_update(emptied_url, spawn: Spawner, pytestconfig):
    command = (sys.executable, "-m", "tests.ledger.increment", emptied_url, "40")
    processes = [spawn(*command, cwd=pytestconfig.rootpath) for _ in range(4)]
    for process in processes:
        assert process.wait(within=60) == 0, process.output
        assert process.output == ""
    with opened(emptied_url) as store, store.read() as connection:
        assert connection.execute(select(runtime_epoch.c.epoch)).scalar_one() == 160


def test_times_are_utc_whatever_they_were_given_in(emptied_url):
    from datetime import datetime, timedelta, timezone

    east = NOW.astimezone(timezone(timedelta(hours=9)))
    with opened(emptied_url) as store:
        with store.write() as connection:
            connection.execute(insert(epochs).values(begun(1) | {"began_at": east}))
        with store.read() as connection:
            (kept,) = connection.execute(select(epochs.c.began_at)).one()
        assert (kept, kept.utcoffset()) == (NOW, timedelta(0))
        with pytest.raises(Exception, match="a time without a zone"), store.write() as connection:
            connection.execute(insert(epochs).values(begun(2) | {"began_at": datetime(2030, 1, 1)}))  # noqa: DTZ001


def test_the_databases_clock_counts_seconds_since_1970(emptied_url):
    import time

    with opened(emptied_url) as store, store.read() as connection:
        told = database_seconds(connection)
        assert abs(told - time.time()) < 60
        assert database_seconds(connection) >= told


def test_a_pool_that_is_used_up_is_unavailable(emptied_url):
    with opened(emptied_url) as store:
        pool = store.engine.pool
        pool._timeout = 0.05  # type: ignore[attr-defined]
        held = [store.engine.connect() for _ in range(pool.size() + pool._max_overflow)]  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, check=lambda error: "pool" in error.detail), store.read():
            pass
        for connection in held:
            connection.close()
        assert numbers(store) == []


def test_a_wrong_statement_is_told_as_what_it_is(emptied_url):
    with opened(emptied_url) as store, pytest.raises(DatabaseError), store.read() as connection:
        connection.execute(text("SELECT nothing FROM nowhere"))


def test_a_write_outside_the_tables_rules_is_refused_by_the_database(emptied_url):
    with opened(emptied_url) as store:
        for statement in (
            insert(runtime_epoch).values(id=2, epoch=0),
            update(runtime_epoch).values(epoch=-1),
            insert(owner_lease).values(name="a"),
        ):
            with pytest.raises(IntegrityError), store.write() as connection:
                connection.execute(statement)


@pytest.mark.parametrize(
    "url",
    ["", "ledger.sqlite3", "sqlite://", "sqlite:///", "sqlite:///:memory:", "mysql://u:hunter2@h/d", "oracle://x"],
)
def test_other_urls_are_refused_without_their_password(url):
    with pytest.raises(ConfigurationError) as refused:
        parse_url(url)
    assert "hunter2" not in refused.value.detail
    assert "sqlite:///FILE or postgresql://..." in refused.value.detail


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:///a.db", "sqlite"),
        ("sqlite+pysqlite:////a.db", "sqlite"),
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://h/d", "postgresql+psycopg"),
    ],
)
def test_a_url_gets_the_driver_that_tenure_uses(url, driver):
    assert parse_url(url).drivername == driver
