"""What is lost on the way is sent again: messages, answers, connections, the broker with all it held."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from tenure.ledger import Outcome
from tenure.tasks.broker import EmbeddedBroker
from tenure.workflows import Client, Execution
from tests.services import redis_client, wait_until
from tests.tasks.live import PREFIX, Fleet, kill, message, numbered, says, submit

AT_ONCE = 1.0  # seconds in which a call returns that waits for no broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "state") as broker:
        yield broker


@pytest.fixture
def embedded(spawn, tmp_path, sqlite_url, broker):
    return Fleet(spawn, tmp_path, ledger=sqlite_url, broker=None)


def test_a_message_that_a_frozen_consumer_took_to_its_grave_is_sent_again(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url, resend_seconds=4)
    owner = fleet.owner()
    with fleet.run() as run, closing(redis_client(redis_url)) as redis:
        sent = 0

        def taken() -> bool:
            """Publish to a frozen owner; whether Redis gave it the message, which it does while it waits for one."""
            nonlocal sent
            fleet.freeze(owner)
            run.client.sender._fault = points.append
            points.clear()
            submit(run, [f"message {sent}"])
            sent += 1
            wait_until(lambda: "after_send" in points, within=5, what="the message is published")
            if not fleet.waiting():
                return True
            owner.signal(signal.SIGCONT)
            run.flush()
            return False

        points: list[str] = []
        wait_until(taken, within=30, what="a frozen owner is given a message")
        kill(owner)
        assert not fleet.waiting()
        assert not redis.exists(PREFIX + "unacked")  # Redis knows no more of it
        fleet.owner()
        run.flush()
        run.finish()
    assert fleet.transcript() == numbered(sent)
    fleet.assert_lawful()


def test_the_loss_of_all_that_the_broker_held_delays_and_loses_nothing(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    owner = fleet.owner()
    with fleet.run() as run, closing(redis_client(redis_url)) as redis:
        says(run, "first")
        fleet.freeze(owner)
        receipts = submit(run, numbered(80))
        wait_until(lambda: fleet.waiting() >= 2, within=20, what="operations wait in the queue")
        redis.flushdb()
        owner.signal(signal.SIGCONT)
        for receipt in receipts:
            receipt.result(30)
        says(run, "last")
        run.finish()
    assert fleet.transcript() == ["first", *numbered(80), "last"]
    fleet.assert_lawful()


LOSES_ACKNOWLEDGEMENTS = """
import kombu.transport.redis, redis
real, left = kombu.transport.redis.QoS._remove_from_indices, [3]
def remove(self, *args, **kwargs):
    if left[0]:
        left[0] -= 1
        raise redis.TimeoutError("the broker does not answer")
    return real(self, *args, **kwargs)
kombu.transport.redis.QoS._remove_from_indices = remove
"""


def test_an_owner_that_could_not_acknowledge_goes_on(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    fleet.module("loses_acknowledgements", LOSES_ACKNOWLEDGEMENTS)
    owner = fleet.owner()
    with fleet.run(within=10) as run:
        says(run, *numbered(5))
        run.finish()
    assert owner.output.count("Couldn't ack") == 3
    assert fleet.transcript() == numbered(5)


def test_an_answer_that_was_lost_is_given_again_from_the_receipt(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    owner = fleet.owner()
    with fleet.run() as run:
        dropped = drop_answers(run.client, 3)
        assert run.append([message("hello")]) == [1]
        assert len(dropped) == 3
        lost = drop_answers(run.client, 2)
        child = run.reserve_child()
        assert isinstance(child, Execution)
        assert len(lost) == 2
        (told,) = run.children()
        assert told.execution_id == child.execution_id
        child.close()
        assert run.finish(outcome=Outcome.COMPLETED) == []
    assert owner.output.count(":1-1@1:") >= 2 * 4  # received and succeeded, four times
    assert fleet.transcript() == ["hello"]
    assert fleet.value("SELECT count(*) FROM worker_executions") == 2
    fleet.assert_lawful()


def drop_answers(client: Client, count: int) -> list[object]:
    """Lose the next replies on their way into this process; returns what was lost."""
    transport = client._transport
    deliver, dropped = transport._deliver, []

    def lose(answers: list[object]) -> None:
        if len(dropped) < count:
            dropped.append(answers)
        else:
            deliver(answers)

    transport._deliver = lose
    return dropped


def assert_not_yet(run: Execution, content: str) -> None:
    """Append while the broker is away: at once, and journalled for as long as it takes."""
    began = time.monotonic()
    (receipt,) = submit(run, [content])
    assert time.monotonic() - began < AT_ONCE
    run.within = 0.5
    with pytest.raises(TimeoutError, match="keeps it journalled"):
        run.flush()
    run.within = 30.0
    assert not receipt.done()
    assert content in run._stream.outbox.pending()[-1].payload


def test_a_broker_that_was_killed_and_started_again_is_found_again(embedded, broker):
    embedded.owner()
    with embedded.run() as run:
        says(run, "before")
        kill_server(broker)
        for content in ("away", "still away"):
            assert_not_yet(run, content)
        broker.start()
        run.flush()
        says(run, "after")
        run.finish()
    assert embedded.transcript() == ["before", "away", "still away", "after"]
    embedded.assert_lawful()


def kill_server(broker: EmbeddedBroker) -> None:
    broker._process.kill()
    wait_until(lambda: not broker.running, within=5, what="the broker's server is gone")


def test_a_broker_that_takes_connections_and_does_not_answer_holds_up_nobody(embedded, broker):
    embedded.owner()
    with embedded.run() as run:
        says(run, "before")
        broker._process.send_signal(signal.SIGSTOP)
        assert_not_yet(run, "frozen")
        broker._process.send_signal(signal.SIGCONT)
        run.flush()
        run.finish()
    assert embedded.transcript() == ["before", "frozen"]


def test_a_caller_of_a_broker_that_never_answers_is_told_in_time(spawn, tmp_path, sqlite_url):
    with socket.create_server(("127.0.0.1", 0), backlog=50) as hole:
        url = f"redis://127.0.0.1:{hole.getsockname()[1]}/0"
        fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=url)
        with fleet.client() as client:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                Execution.start(client, "s", within=0.5)
            told = time.monotonic()
        closed = time.monotonic()
    assert told - began < 0.5 + AT_ONCE
    assert closed - told < 15  # two threads have five seconds each to end


def test_an_operation_gets_through_after_a_storm_of_cut_connections(embedded, broker):
    embedded.owner()
    with embedded.run() as run, closing(broker._started().address.client()) as server:
        says(run, "before")
        for _ in range(10):
            server.client_kill_filter(_type="normal")
            wait_until(lambda: others(server), within=10, what="somebody has connected again")
        began = time.monotonic()
        says(run, "after")
        assert time.monotonic() - began < 15
        run.finish()
    assert embedded.transcript() == ["before", "after"]


def others(server: redis.Redis) -> int:
    return len(server.client_list(_type="normal")) - 1
