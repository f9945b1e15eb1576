"""The tests' own tools: a helper that hides a failure hides every failure."""

from __future__ import annotations

import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text

from tests import isolation, services
from tests.isolation import PostgresRun, copy_sqlite, redis_database
from tests.processes import Spawner
from tests.services import Needs, Service, libpq_url, must_be_there, wait_until

ROOT = Path(__file__).parent.parent
NOWHERE = Service(
    "Nowhere",
    "TENURE_TEST_NOWHERE",
    "redis://:hunter2@127.0.0.1:1/0",
    services.REDIS.probe,
    (OSError, redis.RedisError),
)


def test_waiting_returns_the_value_and_fails_with_what_it_waited_for():
    seen = iter([0, "", None, "there"])
    assert wait_until(lambda: next(seen), within=5, what="a value") == "there"
    with pytest.raises(AssertionError, match=r"not within 0\.02 s: the moon \(last seen: 0\)"):
        wait_until(lambda: 0, within=0.02, what="the moon")


@pytest.mark.parametrize(
    ("environ", "answer"),
    [
        ({}, False),
        ({"CI": ""}, False),
        ({"CI": "false"}, False),
        ({"CI": "true"}, True),
        ({"CI": "1"}, True),
        ({"CI": "true", "TENURE_TEST_ALLOW_SKIP": "1"}, False),
        ({"CI": "true", "TENURE_TEST_ALLOW_SKIP": "0"}, True),
    ],
)
def test_a_missing_service_is_a_failure_on_ci_only(environ, answer):
    assert must_be_there(environ) is answer


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_service_is_named_without_its_password(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("TENURE_TEST_ALLOW_SKIP", raising=False)
    monkeypatch.setattr(services, "SERVICES", (NOWHERE,))
    needs = Needs()
    with pytest.raises(outcome, match=r"Nowhere not found at redis://:\*\*\*@127\.0\.0\.1:1/0: ") as caught:
        needs.require(NOWHERE)
    assert "hunter2" not in str(caught.value)
    assert f"Nowhere NOT FOUND (1 tests {'failed' if ci else 'skipped'})" in needs.summary()


def test_each_test_has_a_ledger_of_its_own(ledger_url, request):
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE mine (id integer)"))
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar() == 1
    engine.dispose()


@pytest.mark.parametrize("again", [1, 2])
def test_a_ledger_is_not_that_of_the_test_before(ledger_url, again):
    test_each_test_has_a_ledger_of_its_own(ledger_url, None)


def _databases(url: str) -> set[str]:
    with psycopg.connect(libpq_url(url)) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}


def test_databases_of_a_run_that_was_killed_are_dropped_and_those_of_a_live_one_kept(postgres_url):
    url = services.POSTGRES.url
    live, dead = PostgresRun(url, lambda _: None), PostgresRun(url, lambda _: None)
    dead._guard.close()
    next_run = PostgresRun(url, lambda _: None)
    try:
        assert dead._template not in _databases(url)
        assert live._template in _databases(url)
        with psycopg.connect(libpq_url(postgres_url)) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        live.close()
        next_run.close()
    assert not {live._template, next_run._template} & _databases(url)


def test_a_database_is_dropped_although_someone_is_connected(postgres_url):
    run = PostgresRun(services.POSTGRES.url, lambda _: None)
    with run.database() as url:
        connection = psycopg.connect(libpq_url(url))
    assert urlsplit(url).path[1:] not in _databases(services.POSTGRES.url)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
    run.close()


def test_two_users_of_redis_get_two_numbers_and_leave_nothing(redis_url):
    with redis_database(services.REDIS.url) as other:
        assert other != redis_url
        with closing(services.redis_client(other)) as client:
            client.set("left", "behind")
    with closing(services.redis_client(other)) as client:
        assert client.dbsize() == 0


def test_a_redis_number_with_data_of_others_is_passed_over(redis_url):
    with redis_database(services.REDIS.url) as free:
        pass
    with closing(services.redis_client(free)) as client:
        client.set("precious", "1")
        try:
            with redis_database(services.REDIS.url) as other:
                assert other != free
            assert client.get("precious") == b"1"
        finally:
            client.delete("precious")


def test_what_a_killed_run_left_in_redis_is_flushed(redis_url):
    with redis_database(services.REDIS.url) as free:
        pass
    home = services.redis_client(services.REDIS.url)
    with closing(home), closing(services.redis_client(free)) as client:
        client.set("left", "behind")
        home.hset(isolation._MARKS, free, 1)
        with redis_database(services.REDIS.url) as again:
            assert again == free
            assert client.dbsize() == 0


def test_rabbitmq_is_reachable_where_the_fixture_says(rabbitmq_url):
    assert services.RABBITMQ.probe(rabbitmq_url)


def test_a_sqlite_copy_holds_what_is_still_in_the_log(tmp_path):
    source = sqlite3.connect(tmp_path / "source", isolation_level=None)
    with closing(source):
        source.execute("PRAGMA journal_mode = WAL")
        source.execute("CREATE TABLE t (x)")
        source.execute("INSERT INTO t VALUES (7)")
        copy_sqlite(tmp_path / "source", tmp_path / "target")
    with closing(sqlite3.connect(tmp_path / "target")) as target:
        assert target.execute("SELECT x FROM t").fetchall() == [(7,)]


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
theirs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", ours.pid, theirs.pid, "end", flush=True)
time.sleep(600)
"""


def test_a_stubborn_process_and_all_it_started_are_ended(tmp_path):
    spawner = Spawner(tmp_path)
    process = spawner(sys.executable, "-c", STUBBORN)
    pids = [int(word) for word in process.says(" end", within=20).split()[1:3]]
    assert all(psutil.pid_exists(pid) for pid in (*pids, process.pid))
    process.end(patience=0.2)
    assert process.wait(within=1) == -signal.SIGKILL
    for pid in pids:
        wait_until(lambda pid=pid: not _runs(pid), within=5, what=f"{pid} is gone")


def test_a_child_in_the_group_is_ended_after_its_parent_was_killed(tmp_path):
    spawner = Spawner(tmp_path)
    process = spawner(sys.executable, "-c", STUBBORN.replace(", start_new_session=True", ""))
    pids = [int(word) for word in process.says(" end", within=20).split()[1:3]]
    process.signal(signal.SIGKILL)
    assert process.wait(within=5) == -signal.SIGKILL
    assert all(_runs(pid) for pid in pids)
    spawner.end()
    for pid in pids:
        wait_until(lambda pid=pid: not _runs(pid), within=5, what=f"{pid} is gone")


def test_a_stopped_process_is_ended_by_term(spawn):
    process = spawn(sys.executable, "-c", "import time; print('up'); time.sleep(600)")
    process.says("up", within=20)
    process.signal(signal.SIGSTOP)
    process.end()
    assert process.wait(within=1) == -signal.SIGTERM


def test_waiting_for_words_of_a_process_that_ended_does_not_last(spawn):
    process = spawn(sys.executable, "-c", "print('oh'); raise SystemExit(3)")
    with pytest.raises(AssertionError, match="ended with 3 before it said 'ready'"):
        process.says("ready", within=60)
    assert spawn.reports()[0][1] == "oh\n"


def test_a_process_gets_the_environment_of_the_test_and_no_settings_of_the_user(spawn, tmp_path, monkeypatch):
    monkeypatch.setenv("GIVEN", "here")
    code = "import os; print({k: os.environ.get(k) for k in ('TENURE_STATE_DIR', 'GIVEN', 'HOST', 'HOME')}, 'end')"
    output = spawn(sys.executable, "-c", code, env={"HOME": None, "HOST": "x"}).says("end", within=20)
    assert repr(str(tmp_path / "state")) in output
    assert "'GIVEN': 'here'" in output
    assert "'HOST': 'x'" in output
    assert "'HOME': None" in output


SUITE = """
import os, sys, pytest
from tests import isolation, services

def test_started_before_the_broker_is_ended_before_it(spawn, redis_url, request):
    process = spawn(sys.executable, "-c", "import time; print('words of a process'); time.sleep(600)")
    process.says("words", within=20)
    client = services.redis_client(redis_url)

    def at_teardown():
        client.close()
        assert not process.running
    request.addfinalizer(at_teardown)
    assert "TENURE_LEASE_SECONDS" not in os.environ
    assert False, "so that its output is shown"

def test_needs(postgres_url):
    pass
"""


@pytest.mark.parametrize("ci", ["", "true"])
def test_what_the_fixtures_report(spawn, tmp_path, ci, redis_url):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_suite.py").write_text(SUITE)
    run = spawn(
        *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", tmp_path, "-rs"),
        tmp_path / "suite",
        cwd=ROOT,
        env={
            "CI": ci,
            "TENURE_TEST_ALLOW_SKIP": None,
            "TENURE_TEST_POSTGRES": "postgresql://a:hunter2@127.0.0.1:1/x",
            "TENURE_LEASE_SECONDS": "a setting of whoever runs the tests",
        },
    )
    code, output = run.wait(within=60), run.output
    assert code == 1, output
    assert "so that its output is shown" in output
    assert "words of a process" in output.partition("output of")[2]
    assert "PostgreSQL not found at postgresql://a:***@127.0.0.1:1/x: " in output
    assert "hunter2" not in output
    assert f"services: PostgreSQL NOT FOUND (1 tests {'failed' if ci else 'skipped'}), Redis " in output
    assert "RabbitMQ not asked for" in output
    assert ("1 failed, 1 error" if ci else "1 failed, 1 skipped") in output


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
