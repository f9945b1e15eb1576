"""Fixtures for every test: a ledger on either database, a broker of the test's own, processes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.isolation import PostgresRun, copy_sqlite, delete_abandoned_vhosts, rabbitmq_vhost, redis_database
from tests.processes import Spawner
from tests.services import POSTGRES, RABBITMQ, REDIS, Needs

_NEEDS = pytest.StashKey[Needs]()
_SPAWNER = pytest.StashKey[Spawner]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_NEEDS] = Needs()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(config.stash[_NEEDS].summary())


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the settings of whoever runs the tests out of them, and the tests out of that state folder."""
    for name in [name for name in os.environ if name.startswith("TENURE_") and not name.startswith("TENURE_TEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TENURE_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def _migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tenure.ledger.migrate import upgrade

    path = tmp_path_factory.mktemp("migrated") / "ledger.sqlite3"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(_migrated_sqlite: Path, tmp_path: Path) -> str:
    """A fresh, migrated ledger in a file."""
    path = tmp_path / "ledger.sqlite3"
    copy_sqlite(_migrated_sqlite, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def _postgres() -> Iterator[PostgresRun]:
    from tenure.ledger.migrate import upgrade

    run = PostgresRun(POSTGRES.url, upgrade)
    yield run
    run.close()


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[str]:
    """A fresh, migrated ledger on PostgreSQL."""
    pytestconfig.stash[_NEEDS].require(POSTGRES)  # for each test, so that each is counted
    run: PostgresRun = request.getfixturevalue("_postgres")
    with run.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated ledger; the test runs once for each database."""
    return str(request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]))


@pytest.fixture
def redis_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """An empty database of the running Redis that no other run uses."""
    with redis_database(pytestconfig.stash[_NEEDS].require(REDIS)) as url:
        yield url


@pytest.fixture(scope="session")
def _rabbitmq() -> str:
    delete_abandoned_vhosts()
    return RABBITMQ.url


@pytest.fixture
def rabbitmq_url(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[str]:
    """The running RabbitMQ: a virtual host of the test's own, or a shared one; name queues by `unique_name`."""
    pytestconfig.stash[_NEEDS].require(RABBITMQ)
    with rabbitmq_vhost(request.getfixturevalue("_rabbitmq")) as url:
        yield url


@pytest.fixture
def unique_name() -> str:
    """A name that nothing else has, for a queue or a key."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def spawn(request: pytest.FixtureRequest, tmp_path: Path) -> Spawner:
    """Starts processes that end with the test, before any other fixture is torn down."""
    folder = tmp_path / "processes"
    folder.mkdir()
    spawner = Spawner(folder)
    request.node.stash[_SPAWNER] = spawner
    return spawner


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    try:
        if _SPAWNER in item.stash:
            item.stash[_SPAWNER].end()
    finally:
        yield  # the fixtures are torn down in any case


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _SPAWNER in item.stash:
        report.sections.extend(item.stash[_SPAWNER].reports())
    return report
