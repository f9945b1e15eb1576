"""SQLite: durable, patient, and clear about files that cannot be a ledger."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tenure.ledger import Ledger
from tenure.ledger.errors import ConfigurationError, SchemaMismatch, TenureError, Unavailable
from tenure.ledger.migrate import upgrade
from tenure.ledger.store import Store
from tests.ledger.kit import Worker, dump

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[Path]:
    """Give out a folder, and run as a user whom permissions bind: root may do anything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "ledger").mkdir()
        if os.geteuid() != 0:
            yield folder / "ledger"
            return
        os.chown(folder / "ledger", NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield folder / "ledger"
        finally:
            os.seteuid(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with unprivileged() as found:
        yield found
        found.chmod(0o755)


def test_each_connection_is_durable_and_patient(sqlite_url):
    expected = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 20000}
    store = Store(sqlite_url)
    with store.write() as writing, store.read() as reading:
        assert writing.connection.dbapi_connection is not reading.connection.dbapi_connection
        for connection in (writing, reading):
            for pragma, value in expected.items():
                assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value, pragma
    store.close()


def test_a_write_locks_the_file_before_its_first_statement_and_a_read_does_not(sqlite_url):
    store = Store(sqlite_url)
    with closing(sqlite3.connect(str(store.url.database), timeout=0, isolation_level=None)) as other:
        with store.read() as connection:
            connection.exec_driver_sql("SELECT * FROM epochs").all()
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        with store.write(), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    store.close()


def test_a_file_that_stays_locked_is_unavailable(sqlite_url, monkeypatch):
    monkeypatch.setattr("tenure.ledger.store.PATIENCE_SECONDS", 0.05)
    store = Store(sqlite_url)
    with closing(sqlite3.connect(str(store.url.database), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable) as told, store.write():
            pass
    assert told.value.detail == "SQLite: database is locked (SQLITE_BUSY)"
    store.close()


def fails(path: Path, error: type[TenureError], *told: str) -> None:
    """Opening and upgrading must each fail with this one error."""
    for attempt in (Ledger.open, upgrade):
        with pytest.raises(TenureError) as caught:
            attempt(f"sqlite:///{path}")
        assert type(caught.value) is error
        for part in told:
            assert part in caught.value.detail


def test_a_folder_as_file(tmp_path):
    fails(tmp_path, ConfigurationError, str(tmp_path), "is not a file")


def test_a_missing_folder(tmp_path):
    fails(tmp_path / "missing" / "ledger.sqlite3", ConfigurationError, "missing", "does not exist")
    assert not (tmp_path / "missing").exists()


def test_a_file_for_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file" / "ledger.sqlite3", ConfigurationError, "file")


@pytest.mark.parametrize("content", [b"this is no database, however long it goes on" * 100, b"SQLite format 3\0" * 64])
def test_a_file_that_is_no_database(tmp_path, content):
    path = tmp_path / "ledger.sqlite3"
    path.write_bytes(content)
    fails(path, Unavailable, "SQLite: ")
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written(folder):
    folder.chmod(0o555)
    fails(folder / "ledger.sqlite3", Unavailable, "unable to open database file", "SQLITE_CANTOPEN")


def test_a_folder_that_cannot_be_read(folder):
    (folder / "inner").mkdir()
    folder.chmod(0o000)
    for path in (folder / "inner" / "ledger.sqlite3", folder / "ledger.sqlite3"):
        for attempt in (Ledger.open, upgrade):
            with pytest.raises(TenureError) as caught:
                attempt(f"sqlite:///{path}")
            assert type(caught.value) in (ConfigurationError, Unavailable)


def test_a_file_that_cannot_be_written(folder):
    path = folder / "ledger.sqlite3"
    path.touch()
    path.chmod(0o444)
    fails(path, Unavailable, "readonly database", "SQLITE_READONLY")


def test_a_ledger_that_cannot_be_written_any_more(folder):
    path = folder / "ledger.sqlite3"
    upgrade(f"sqlite:///{path}")
    with Ledger.open(f"sqlite:///{path}") as ledger:
        worker = Worker(ledger, ledger.begin_epoch("owner")).register()
        before = dump(ledger)
    path.chmod(0o444)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        worker.ledger = ledger
        with pytest.raises(Unavailable, check=lambda error: "SQLITE_READONLY" in error.detail):
            worker.say("hello")
    path.chmod(0o644)
    with Ledger.open(f"sqlite:///{path}") as ledger:
        assert dump(ledger) == before


def test_a_full_disk_is_unavailable_and_nothing_is_written(sqlite_url):
    with Ledger.open(sqlite_url) as ledger:
        worker = Worker(ledger, ledger.begin_epoch("owner")).register()
        before = dump(ledger)
        with ledger.store.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(Unavailable, check=lambda error: "SQLITE_FULL" in error.detail):
            worker.say("x" * 100_000)
        assert dump(ledger) == before
        with ledger.store.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        assert worker.say("x" * 100_000).sequence == 1


def test_a_new_file_says_that_it_is_empty(tmp_path):
    with pytest.raises(SchemaMismatch, check=lambda error: "tenure db upgrade" in error.detail):
        Ledger.open(f"sqlite:///{tmp_path / 'new.sqlite3'}")
