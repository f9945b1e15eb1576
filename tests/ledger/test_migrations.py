"""The migrations make the tables that the code declares, once, on both databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, Connection, Table, func, inspect, select, text

from tenure.ledger import Ledger, migrate
from tenure.ledger.errors import SchemaMismatch
from tenure.ledger.migrate import head, require_head, revision, upgrade
from tenure.ledger.schema import metadata, runtime_epoch
from tenure.ledger.store import Store
from tests.ledger.kit import Worker, dump
from tests.services import wait_until


@pytest.fixture(params=["sqlite", "postgresql"])
def nothing_url(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """A database without a table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'nothing.sqlite3'}"
    url = str(request.getfixturevalue("postgres_url"))
    clear(url)
    return url


def clear(url: str) -> None:
    """Take every table away."""
    store = Store(url)
    with store.write() as connection:
        if store.dialect == "postgresql":
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        else:
            for name in inspect(connection).get_table_names():
                connection.exec_driver_sql(f'DROP TABLE "{name}"')
    store.close()


@pytest.fixture
def store(nothing_url: str) -> Iterator[Store]:
    found = Store(nothing_url)
    yield found
    found.close()


def shape(connection: Connection) -> dict[str, Any]:
    """Return all that the database tells about each of the tables."""
    inspector = inspect(connection)
    told: dict[str, Any] = {}
    for table in metadata.tables:
        indexes = sorted(inspector.get_indexes(table), key=lambda index: str(index["name"]))
        told[table] = {
            "columns": [
                (c["name"], str(c["type"]), c["nullable"], c["default"], c.get("autoincrement"))
                for c in inspector.get_columns(table)
            ],
            "checks": sorted((str(c["name"]), c["sqltext"]) for c in inspector.get_check_constraints(table)),
            "indexes": [
                (
                    i["name"],
                    i["column_names"],
                    i["unique"],
                    {k: str(v) for k, v in i.get("dialect_options", {}).items()},
                )
                for i in indexes
            ],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(inspector.get_foreign_keys(table), key=str),
            "options": inspector.get_table_options(table),
        }
    return told


def declared_checks(table: Table) -> set[str]:
    return {str(c.name) for c in table.constraints if isinstance(c, CheckConstraint)}


def test_the_migrations_make_what_the_code_declares(nothing_url, store):
    assert upgrade(nothing_url) == head()
    with store.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        migrated = shape(connection)
        names = set(inspect(connection).get_table_names())
        assert connection.execute(select(runtime_epoch.c.id, runtime_epoch.c.epoch)).all() == [(1, 0)]
    assert names == set(metadata.tables) | {"alembic_version"}
    for table in metadata.sorted_tables:
        assert {name for name, _ in migrated[table.name]["checks"]} == declared_checks(table)
    clear(nothing_url)
    with store.write() as connection:
        metadata.create_all(connection)
        declared = shape(connection)
    for table in metadata.tables:
        assert migrated[table] == declared[table]


def test_a_comparison_that_sees_a_difference(nothing_url, store):
    """The tool of the test above: a changed table is noticed."""
    upgrade(nothing_url)
    with store.write() as connection:
        before = shape(connection)
        connection.exec_driver_sql("DROP INDEX uq_worker_executions_live_session")
        assert shape(connection) != before
        context = MigrationContext.configure(connection)
        assert len(compare_metadata(context, metadata)) == 1


def test_without_rowid_is_kept_where_it_is_declared(sqlite_url):
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        made = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    for name, table in metadata.tables.items():
        declared = table.dialect_options["sqlite"]["with_rowid"] is False
        assert ("WITHOUT ROWID" in made[name]) == declared, name


def test_a_ledger_that_is_empty_says_so(nothing_url, store):
    assert revision(store) is None
    refused(nothing_url, f"the ledger is empty, this version needs {head()}: run `tenure db upgrade`")
    with store.read() as connection:
        assert inspect(connection).get_table_names() == []


def test_a_ledger_that_is_behind_says_so(emptied_url, monkeypatch):
    at = head()
    monkeypatch.setattr(migrate, "head", lambda: "9999")
    refused(emptied_url, f"the ledger is at {at}, this version needs 9999: run `tenure db upgrade`")


def test_a_ledger_that_is_ahead_says_so(nothing_url, store):
    upgrade(nothing_url)
    with store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    told = "the ledger is at 9999, which is newer than this version of tenure; upgrade tenure"
    refused(nothing_url, told)
    with pytest.raises(SchemaMismatch, check=lambda error: error.detail == told):
        upgrade(nothing_url)
    assert revision(store) == "9999"


def refused(url: str, detail: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        Ledger.open(url)
    assert caught.value.detail == detail


def test_an_upgrade_of_what_is_up_to_date_changes_nothing(emptied_url):
    with Ledger.open(emptied_url) as ledger:
        Worker(ledger, ledger.begin_epoch("owner")).register().say("hello")
        before = dump(ledger)
        assert upgrade(emptied_url) == upgrade(emptied_url) == head()
        assert dump(ledger) == before


def test_upgrades_at_once_all_end_at_the_head(nothing_url, store):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(upgrade, [nothing_url] * 4)) == [head()] * 4
    require_head(store)
    with store.read() as connection:
        assert len(connection.execute(select(runtime_epoch)).all()) == 1


def test_upgrades_of_different_ledgers_at_once(tmp_path):
    urls = [f"sqlite:///{tmp_path / f'{number}.sqlite3'}" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(upgrade, urls)) == [head()] * 4
    for url in urls:
        Ledger.open(url).close()


def test_tables_of_somebody_else_are_left_alone(nothing_url, store):
    with store.write() as connection:
        connection.execute(text("CREATE TABLE sessions (id INTEGER)"))
    with pytest.raises(SchemaMismatch, check=lambda error: "sessions" in error.detail):
        upgrade(nothing_url)
    with store.read() as connection:
        assert inspect(connection).get_table_names() == ["sessions"]
    assert revision(store) is None


def test_an_upgrade_waits_for_that_of_another_process(postgres_url):
    clear(postgres_url)
    store = Store(postgres_url)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def waits() -> bool:
        with store.read() as connection:
            return bool(connection.execute(text(waiting)).scalar_one())

    with ThreadPoolExecutor(1) as pool:
        with store.write() as other:
            other.execute(select(func.pg_advisory_xact_lock(migrate._ADVISORY_LOCK)))
            running = pool.submit(upgrade, postgres_url)
            wait_until(waits, within=15, what="an upgrade that waits")
            assert not running.done()
        assert running.result(15) == head()
    store.close()
