"""Work gets through, on every broker and both databases, by real owners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import amqp
import pytest

from tenure.ledger import Outcome, Refusal, Status
from tenure.tasks.broker import EmbeddedBroker
from tests.tasks.live import Fleet, message, numbered, submit


def work(fleet: Fleet) -> None:
    """Do what a worker does: register, write, delegate, look, finish."""
    with fleet.run("root") as run:
        assert run.append([message("first"), message("second")]) == [1, 2]
        receipts = submit(run, numbered(200))
        child = run.reserve_child()
        assert not isinstance(child, Refusal)
        assert child.append([message("of a child")]) == [1]
        child.finish(outcome=Outcome.FAILED, result={"why": "told"})
        child.close()
        assert [receipt.result(30).result for receipt in receipts] == [{"positions": [3 + n]} for n in range(200)]
        (told,) = run.children()
        assert (told.status, told.outcome, told.result) == (Status.TERMINAL, Outcome.FAILED, {"why": "told"})
        left = run.reserve_child()
        assert not isinstance(left, Refusal)
        assert left.append([message("of another")]) == [1]
        assert run.finish(result="done") == [left.execution_id]
        left.close()
    assert fleet.transcript("root") == ["first", "second", *numbered(200)]
    assert fleet.transcript(child.session_id) == ["of a child"]
    fleet.assert_lawful()
    assert not list((fleet.state_dir / "outbox").glob(f"{run.execution_id}*"))  # nothing is kept that nobody needs


@pytest.mark.parametrize("database", ["sqlite_url", "postgres_url"])
def test_work_gets_through_redis(request, spawn, tmp_path, redis_url, database):
    fleet = Fleet(spawn, tmp_path, ledger=request.getfixturevalue(database), broker=redis_url)
    fleet.owner()
    work(fleet)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "state") as broker:
        yield broker


def test_work_gets_through_the_embedded_broker(spawn, tmp_path, sqlite_url, embedded):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=None)
    fleet.owner()
    work(fleet)


def test_work_gets_through_rabbitmq_whose_owner_queue_has_one_active_consumer(
    spawn, tmp_path, postgres_url, rabbitmq_url, unique_name
):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=rabbitmq_url, owner_queue=unique_name)
    fleet.owner()
    work(fleet)
    # The server compares a second declaration with the queue and names what is missing from it.
    arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True}
    for name in arguments:
        others = {key: value for key, value in arguments.items() if key != name}
        with pytest.raises(amqp.PreconditionFailed, match=f"inequivalent arg '{name}'"):
            declare(rabbitmq_url, unique_name, others)
    declare(rabbitmq_url, unique_name, arguments)


def declare(url: str, queue: str, arguments: dict[str, object]) -> None:
    parts = urlsplit(url)
    connection = amqp.Connection(
        f"{parts.hostname}:{parts.port or 5672}",
        userid=parts.username or "guest",
        password=parts.password or "guest",
        virtual_host=parts.path[1:] or "/",
    )
    with closing(connection):
        connection.connect()
        connection.channel().queue_declare(queue, durable=True, auto_delete=False, arguments=arguments)
