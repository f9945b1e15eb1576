"""What keeps an owner from starting is said in one line."""

from __future__ import annotations

import json
import signal
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from tenure.ledger.errors import OwnerSuperseded
from tenure.tasks.ownership import EX_CONFIG, EX_SUPERSEDED, OwnershipStep, Tenancy
from tests.processes import Spawned
from tests.services import POSTGRES, libpq_url
from tests.tasks.live import START_SECONDS, Fleet


def refused(process: Spawned, *expected: str) -> int:
    """Wait until it has ended; it has said why in one line that holds what is expected, and nothing else of note."""
    code = process.wait(within=START_SECONDS)
    lines = [line for line in process.output.splitlines() if "tenure: " in line]
    assert len(lines) == 1, process.output
    assert all(text in lines[0] for text in expected), lines[0]
    assert "Traceback" not in process.output
    assert " ready." not in process.output
    return code


@pytest.fixture
def fleet(spawn, tmp_path, sqlite_url, redis_url):
    return Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)


def test_a_worker_that_could_apply_two_operations_at_once_is_no_owner(fleet):
    parallel = fleet.worker("-c", "2", "-l", "CRITICAL")
    mixed = fleet.worker("-Q", "owner,work")
    of_all = fleet.celery("worker")  # without -Q a worker consumes every queue there is
    assert refused(parallel, "concurrency 2 on 'owner'", "-c 1") == EX_CONFIG
    assert refused(mixed, "'owner' alone", "not work too") == EX_CONFIG
    assert refused(of_all, "'owner' alone", "not work too") == EX_CONFIG
    assert fleet.epoch == 0


def test_a_worker_of_the_work_queue_is_no_owner_and_has_the_pool_it_asks_for(fleet):
    worker = fleet.worker("-Q", "work", "-P", "prefork", "-c", "2")
    worker.says(" ready.", within=START_SECONDS)
    assert "concurrency: 2 (prefork)" in worker.output
    assert fleet.epoch == 0
    worker.signal(signal.SIGTERM)
    assert worker.wait(within=15) == 0
    assert "Traceback" not in worker.output


def test_a_ledger_that_is_empty_or_of_another_version_is_named_with_what_to_do(fleet, tmp_path):
    empty = fleet.worker(env={"TENURE_LEDGER_URL": f"sqlite:///{tmp_path}/empty.sqlite3"})
    engine = create_engine(fleet.settings.ledger_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'another'")
    engine.dispose()
    newer = fleet.worker()
    assert refused(empty, "the ledger is empty", "tenure db upgrade") == EX_CONFIG
    assert refused(newer, "the ledger is at another", "upgrade tenure") == EX_CONFIG


def test_a_key_file_that_is_missing_open_to_others_or_broken_is_named(fleet, tmp_path):
    missing = fleet.worker(env={"TENURE_KEYS": f"{tmp_path}/none.json"})
    others = tmp_path / "others.json"
    others.write_text(fleet.settings.keys.read_text())
    others.chmod(0o644)
    broken = tmp_path / "broken.json"
    broken.touch(mode=0o600)
    broken.write_text(json.dumps({"principals": {"a": {"key": "c2hvcnQ=", "capabilities": []}}}))
    readable, short = (fleet.worker(env={"TENURE_KEYS": str(path)}) for path in (others, broken))
    assert refused(missing, "none.json", "`tenure keys` makes one") == EX_CONFIG
    assert refused(readable, "others.json", "chmod 600") == EX_CONFIG
    assert refused(short, "broken.json", "at least 32") == EX_CONFIG
    assert fleet.epoch == 0


def test_settings_that_are_wrong_are_told_all_at_once(fleet):
    wrong = {"TENURE_LEASE_SECONDS": "0", "TENURE_MAX_SPAWN_DEPTH": "-1", "TENURE_OWNER_QEUE": "x"}
    settings = [fleet.worker(env=wrong), fleet.celery("beat", env=wrong)]
    nowhere = fleet.worker(env={"TENURE_BROKER_URL": "", "TENURE_LEDGER_URL": "mysql://u:hunter2@h/d"})
    embedded = {name: value for name, value in fleet.env.items() if name != "TENURE_BROKER_URL"}
    fleet.env = embedded
    alone = fleet.worker()
    for process in settings:
        expected = ("TENURE_LEASE_SECONDS", "TENURE_MAX_SPAWN_DEPTH", "did you mean TENURE_OWNER_QUEUE?")
        assert refused(process, *expected) != 0
    assert refused(nowhere, "TENURE_BROKER_URL", "TENURE_LEDGER_URL", "mysql://u:***@h/d") != 0
    assert "hunter2" not in nowhere.output
    assert refused(alone, "no embedded broker runs", "tenure up") != 0


def test_a_database_that_is_away_is_waited_for(spawn, tmp_path, postgres_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url)
    name = sql.Identifier(urlsplit(postgres_url).path[1:])
    with psycopg.connect(libpq_url(POSTGRES.url), autocommit=True) as server:
        server.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        owner = fleet.worker()
        owner.says("standing by: unavailable: PostgreSQL", within=START_SECONDS)
        server.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        owner.says(" ready.", within=START_SECONDS)
    assert "Traceback" not in owner.output
    assert "concurrency: 1 (thread)" in owner.output  # without a word about its pool
    assert fleet.epoch == 1


class LeftError(Exception):
    pass


def test_an_owner_that_is_superseded_while_it_starts_leaves(monkeypatch, caplog):
    def leave(code: int) -> None:
        raise LeftError(code)

    def superseded() -> None:
        raise OwnerSuperseded("owner_superseded", {"presented": 1, "epoch": 2})

    monkeypatch.setattr("os._exit", leave)
    step = object.__new__(OwnershipStep)
    step.tenancy = object.__new__(Tenancy)
    with pytest.raises(LeftError, match=str(EX_SUPERSEDED)):
        step._stand_by(superseded)
    assert "leaving: stale_epoch: owner_superseded" in caplog.text
