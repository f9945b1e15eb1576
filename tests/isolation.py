"""A database, a Redis number, a virtual host of a test's own on the servers that run."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import filelock
import psutil
import psycopg
import pytest
import redis
from psycopg import sql

from tenure.config import mask_url
from tests.services import CONNECT_SECONDS, RABBITMQ, libpq_url, redis_client


class PostgresRun:
    """The databases of one run: a template that is migrated once, and copies of it.

    An advisory lock, held as long as the run lives, tells them from what a killed run has left behind;
    the next run drops that.
    """

    _LOCKS = 0x7E4E  # our class of advisory locks

    def __init__(self, url: str, migrate: Callable[[str], object]) -> None:
        self._url = url
        self._run = secrets.randbelow(2**31)
        self._serial = 0
        self._guard = psycopg.connect(libpq_url(url), autocommit=True, connect_timeout=CONNECT_SECONDS)
        self._guard.execute("SELECT pg_advisory_lock(%s, %s)", (self._LOCKS, self._run))
        # Locks are kept per database: runs that guard theirs elsewhere must not look abandoned to us.
        row = self._guard.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        assert row is not None
        self._prefix = f"tenure_test_{row[0]}_"
        self._drop_abandoned()
        self._template = self._name("template")
        self._create(self._template)
        migrate(self.url_of(self._template))

    def url_of(self, name: str) -> str:
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    @contextmanager
    def database(self) -> Iterator[str]:
        """Give out the URL of a fresh, migrated database; drop it afterwards, whoever is connected."""
        self._serial += 1
        name = self._name(str(self._serial))
        self._create(name, self._template)
        try:
            yield self.url_of(name)
        finally:
            self._drop(name)

    def close(self) -> None:
        self._drop(self._template)
        self._guard.close()

    def _name(self, part: str) -> str:
        return f"{self._prefix}{self._run}_{part}"

    def _create(self, name: str, template: str = "template0") -> None:
        statement = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
        self._guard.execute(statement.format(sql.Identifier(name), sql.Identifier(template)))

    def _drop(self, name: str) -> None:
        self._guard.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _drop_abandoned(self) -> None:
        names = self._guard.execute(
            "SELECT datname FROM pg_database WHERE starts_with(datname, %s)", (self._prefix,)
        ).fetchall()
        for (name,) in names:
            run = int(name.removeprefix(self._prefix).partition("_")[0])
            if run != self._run and self._try_lock(run):
                self._drop(name)
                self._guard.execute("SELECT pg_advisory_unlock(%s, %s)", (self._LOCKS, run))

    def _try_lock(self, run: int) -> bool:
        row = self._guard.execute("SELECT pg_try_advisory_lock(%s, %s)", (self._LOCKS, run)).fetchone()
        return bool(row and row[0])


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a database with what its log still holds."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


_MARKS = "tenure-tests"  # hash in the database of the URL: numbers whose content is ours to flush


@contextmanager
def redis_database(url: str) -> Iterator[str]:
    """Give out a database number that no other process of this machine uses; flush it before and after.

    A number that holds something which no test has put there is passed over.
    """
    with closing(redis_client(url)) as home, ExitStack() as stack:
        own = next((own for number in range(1, 16) if (own := _claim(stack, home, url, number))), None)
        if own is None:
            pytest.fail(f"no free database among 1..15 of {mask_url(url)}: all are locked or hold data of others")
        client = stack.enter_context(closing(redis_client(own)))
        client.flushdb()
        try:
            yield own
        finally:
            client.flushdb()
            home.hdel(_MARKS, own)


def _claim(stack: ExitStack, home: redis.Redis, url: str, number: int) -> str | None:
    parts = urlsplit(url)
    own = parts._replace(path=f"/{number}").geturl()
    if own == url:
        return None
    place = Path(tempfile.gettempdir()) / f"tenure-tests-redis-{parts.hostname}-{parts.port}-{number}.lock"
    lock = filelock.FileLock(place, blocking=False)
    try:
        lock.acquire()
    except (filelock.Timeout, PermissionError):  # in use, or another user's
        return None
    with closing(redis_client(own)) as client:
        if client.dbsize() and not home.hexists(_MARKS, own):
            lock.release()
            return None
    stack.callback(lock.release)
    home.hset(_MARKS, own, 1)
    return own


@contextmanager
def rabbitmq_vhost(url: str) -> Iterator[str]:
    """Give out a virtual host of the test's own where `rabbitmqctl` may make one, else the URL as it is."""
    name = f"tenure-test-{os.getpid()}-{secrets.token_hex(4)}"
    own = urlsplit(url)._replace(path=f"/{name}").geturl()
    if not _rabbitmqctl("add_vhost", name):
        yield url
        return
    try:
        user = urlsplit(url).username or "guest"
        granted = _rabbitmqctl("set_permissions", "-p", name, user, ".*", ".*", ".*")
        # rabbitmqctl speaks to this machine's server, which need not be the one of the URL.
        yield own if granted and _reachable(own) else url
    finally:
        _rabbitmqctl("delete_vhost", name)


def delete_abandoned_vhosts() -> None:
    """Delete the virtual hosts of runs that were killed."""
    for name in _rabbitmqctl("list_vhosts").split():
        if name.startswith("tenure-test-") and not psutil.pid_exists(int(name.split("-")[2])):
            _rabbitmqctl("delete_vhost", name)


def _reachable(url: str) -> bool:
    try:
        return bool(RABBITMQ.probe(url))
    except RABBITMQ.faults:
        return False


def _rabbitmqctl(command: str, *args: str) -> str:
    """Run a command; return its output, or "ok" where it says nothing, or "" where it cannot be run."""
    program = shutil.which("rabbitmqctl")
    if program is None:
        return ""
    done = subprocess.run([program, "-q", "-t", "20", command, *args], capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout or "ok"
