"""PostgreSQL: not there, going away in the middle, a standby, a driver that will not send."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec
import psycopg
import pytest
from sqlalchemy import literal, select, text

from tenure.ledger import Ledger, Work, operation
from tenure.ledger.errors import Unavailable
from tenure.ledger.migrate import upgrade
from tenure.ledger.schema import messages
from tests.ledger.kit import Worker, dump, rows
from tests.services import libpq_url


@pytest.fixture
def worker(postgres_url: str) -> Iterator[Worker]:
    with Ledger.open(postgres_url, operations=[gives_way, too_many]) as ledger:
        yield Worker(ledger, ledger.begin_epoch("owner")).register()


class Nothing(msgspec.Struct):
    """A payload that has no fields."""


times: list[int] = []


@operation("test.gives_way")
def gives_way(work: Work, payload: Nothing) -> dict[str, object]:
    """Lose the connection in the middle of the first transaction."""
    work.session.model = "half-written"
    work.insert(
        messages,
        session_id=work.session.session_id,
        position=99,
        execution_id=work.execution.execution_id,
        sequence=work.sequence,
        role="user",
        body="{}",
        created_at=work.now,
    )
    work.execute(select(1))
    times.append(1)
    if len(times) == 1:
        work.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    return {"times": len(times)}


@operation("test.too_many")
def too_many(work: Work, payload: Nothing) -> dict[str, object]:
    """Ask with more parameters than the protocol can carry."""
    return {"found": len(work.execute(select(messages.c.role).where(literal(1).in_(range(70_000)))).all())}


def test_a_port_where_nobody_listens():
    for attempt in (Ledger.open, upgrade):
        with pytest.raises(Unavailable) as told:
            attempt("postgresql://u:hunter2@127.0.0.1:1/d")
        assert told.value.detail.startswith("PostgreSQL: ")
        assert "hunter2" not in told.value.detail


def test_a_database_that_does_not_exist(postgres_url):
    with pytest.raises(Unavailable, check=lambda error: "does not exist" in error.detail):
        Ledger.open(urlsplit(postgres_url)._replace(path="/no_such_database_of_tenure").geturl())


def test_a_connection_that_ends_in_mid_transaction(worker):
    times.clear()
    before = dump(worker.ledger)
    with pytest.raises(Unavailable, check=lambda error: "57P01" in error.detail):
        worker.apply("test.gives_way")
    assert dump(worker.ledger) == before
    receipt = worker.apply("test.gives_way")
    assert (receipt.sequence, receipt.result, receipt.replayed) == (1, {"times": 2}, False)
    assert worker.send(worker.request("test.gives_way", sequence=1)).replayed
    assert len(rows(worker.ledger, messages)) == 1
    with worker.ledger.store.write() as connection:  # no append tells of it
        connection.execute(messages.delete())


def test_a_connection_that_ended_between_two_transactions_is_not_noticed(worker):
    worker.say("before")
    with psycopg.connect(libpq_url(worker.ledger.store.url.render_as_string(hide_password=False))) as other:
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        other.execute(f"{others} AND pid <> pg_backend_pid()")  # type: ignore[arg-type]
    assert worker.say("after").sequence == 2


def test_a_server_that_takes_no_writes_is_unavailable(worker):
    """A standby: it may be the primary in a minute."""
    before = dump(worker.ledger)
    with worker.ledger.store.write() as connection:
        connection.execute(text("SELECT set_config('default_transaction_read_only', 'on', false)"))
    with pytest.raises(Unavailable, check=lambda error: "25006" in error.detail):
        worker.say("hello")
    worker.ledger.store.close()  # the setting was that connection's
    assert dump(worker.ledger) == before
    assert worker.say("hello").sequence == 1


def test_a_statement_that_the_driver_will_not_send_is_the_handlers_failure(worker):
    receipt = worker.apply("test.too_many")
    assert receipt.result == {"refused": "operation_failed", "error": "OperationalError"}
    assert worker.say("the next sequence").sequence == 2


def test_a_lock_that_is_not_given_is_unavailable(worker):
    with psycopg.connect(libpq_url(worker.ledger.store.url.render_as_string(hide_password=False))) as other:
        other.execute("SELECT * FROM runtime_epoch FOR UPDATE")
        with worker.ledger.store.engine.connect() as connection:
            assert connection.execute(text("SHOW lock_timeout")).scalar_one() == "20s"
            connection.execute(text("SELECT set_config('lock_timeout', '50ms', false)"))
            connection.commit()
        with pytest.raises(Unavailable, check=lambda error: "55P03" in error.detail):
            worker.say("hello")
    worker.ledger.store.close()
    assert worker.say("hello").sequence == 1


def test_what_the_database_says_hides_what_was_sent(worker):
    end = text("SELECT pg_terminate_backend(pg_backend_pid()), :secret").bindparams(secret="hunter2")
    with pytest.raises(Unavailable) as told, worker.ledger.store.write() as connection:
        connection.execute(end)
    assert "hunter2" not in f"{told.value.detail}{told.value.__cause__}"
