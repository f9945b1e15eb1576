"""The two ways to an owner. Kombu's in-memory transport stands for a broker: what is sent can be looked at."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import amqp
import pytest
from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from tenure.config import Settings
from tenure.ledger import Hold, Kind, Ledger, Status, secret_digest
from tenure.ledger.canonical import parse
from tenure.ledger.errors import OwnerSuperseded, Unavailable
from tenure.ledger.schema import epochs, worker_executions
from tenure.tasks import replies, transports, wire
from tenure.tasks.application import APPLY, CONTROL, make_app
from tenure.tasks.client import hold_from_json
from tenure.tasks.keys import Principal
from tenure.tasks.owner import Reply
from tenure.tasks.replies import Listener, publish
from tenure.tasks.stream import Run
from tenure.tasks.transports import BrokerTransport, DirectTransport, control_message
from tenure.tasks.wire import Answer, Control
from tests.ledger.kit import row
from tests.tasks.kit import ALICE, HERE, REPLY_TO, Holder, entry, names_of, open_ledger, registration, said, say

SOON = 10.0
SECRET = "the secret of a child"
HOLD = Hold("x1", "s1", Kind.COMPUTE, Status.REGISTERED, epoch=5, generation=1, last_sequence=0)
HOLDER = Holder(HOLD, SECRET)


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    with open_ledger(sqlite_url) as opened:
        yield opened


def held(answers: list[Answer]) -> Holder:
    (answer,) = answers
    assert answer.value is not None, answer
    return Holder(hold_from_json(answer.value), SECRET, principal=Principal.of("local", b""))


def run_of(holder: Holder, *operations: tuple[str, Any], first: int = 1, request: str = "tag") -> Run:
    entries = [entry(number, *operation) for number, operation in enumerate(operations, first)]
    return Run(holder.hold, holder.credential.claim(holder.hold), request, entries)


# Making messages.


def test_a_secrets_digest_in_a_request_travels_sealed_for_that_execution():
    body = {"execution": "x1", "secret": secret_digest(SECRET), "session": "s1"}
    message = control_message(Control.REGISTER, body, "asked", principal=ALICE, reply_to=REPLY_TO)
    sent = parse(message["body"])
    assert ALICE.unseal(sent.pop("secret"), context="x1") == secret_digest(SECRET)
    assert sent == {"execution": "x1", "session": "s1"}
    assert body["secret"] == secret_digest(SECRET)  # the caller's is as it was


def test_a_request_without_a_secret_travels_as_it_is():
    message = control_message(Control.ADOPT, {"execution": "x1"}, "asked", principal=ALICE, reply_to=REPLY_TO)
    assert parse(message["body"]) == {"execution": "x1"}


# Straight into a ledger.


def test_a_direct_owner_begins_an_epoch_and_recovers(ledger):
    first = DirectTransport(ledger, HERE)
    root = held(first.control(Control.REGISTER, registration(secret=SECRET), "r"))
    second = DirectTransport(ledger, HERE)
    assert (first.owner.epoch, second.owner.epoch) == (1, 2)
    assert row(ledger, worker_executions).status == "unknown"
    assert root.hold.epoch == 1
    assert row(ledger, epochs, epoch=2).recovered_at is not None
    assert row(ledger, epochs, epoch=2).owner == f"direct:{HERE.pid}"


def test_a_direct_owner_answers_at_once(ledger):
    transport = DirectTransport(ledger, HERE)
    holder = held(transport.control(Control.REGISTER, registration(secret=SECRET), "r"))
    operations = [("transcript.append", say("a")), ("child.reserve", {"secret_digest": secret_digest(SECRET)})]
    first, second = transport.run(run_of(holder, *operations))
    assert (first.value, first.request, second.error) == ({"positions": [1]}, "tag", None)
    assert said(ledger, holder.hold.session_id) == ["a"]


def test_a_direct_owner_that_leaves_in_good_order_is_no_crash(ledger):
    transport = DirectTransport(ledger, HERE)
    transport.close()
    assert row(ledger, epochs).released_at is not None
    assert not DirectTransport(ledger, HERE).owner.careful
    assert DirectTransport(ledger, HERE).owner.careful  # that one did not


def test_a_direct_owner_that_was_replaced_says_so_and_leaves_quietly(ledger):
    transport = DirectTransport(ledger, HERE)
    holder = held(transport.control(Control.REGISTER, registration(secret=SECRET), "r"))
    newer = DirectTransport(ledger, HERE)
    with pytest.raises(OwnerSuperseded):
        transport.run(run_of(holder, ("transcript.append", say("a"))))
    transport.close()
    assert row(ledger, epochs, epoch=newer.owner.epoch).released_at is None


# Through a broker.


@pytest.fixture
def app(tmp_path, unique_name) -> Iterator[Celery]:
    environ = {"TENURE_BROKER_URL": "redis://nobody.invalid", "TENURE_STATE_DIR": str(tmp_path)}
    made = make_app(Settings.from_environ(environ | {"TENURE_OWNER_QUEUE": unique_name}))
    made.conf.update(broker_url="memory://", broker_transport_options={"polling_interval": 0.01})
    yield made
    made.close()


@pytest.fixture
def arrived() -> Queue[list[Answer]]:
    return Queue()


@pytest.fixture
def transport(app: Celery, unique_name: str, arrived: Queue[list[Answer]], monkeypatch) -> Iterator[BrokerTransport]:
    monkeypatch.setattr(replies, "_POLL_SECONDS", 0.05)
    made = BrokerTransport(app, ALICE, unique_name, arrived.put)
    yield made
    made.close()


def taken(app: Celery, queue: str) -> Any:
    """Take the next message from a queue."""
    with app.connection_for_read() as connection:
        message = app.amqp.queues[queue].bind(connection.default_channel).get(no_ack=True, accept=["json"])
        assert message is not None
        return message


def test_a_run_is_published_for_the_owner_under_a_readable_name_and_shows_its_size_only(app, transport, unique_name):
    operations = [("transcript.append", say("what nobody may read")), ("session.end", {"end_reason": "done"})]
    run = run_of(HOLDER, *operations, first=7)
    assert transport.run(run) == []
    message = taken(app, unique_name)
    ((sent,), kwargs, _embed) = message.decode()
    assert kwargs == {}
    assert names_of(sent) == ["transcript.append", "session.end"]
    wire.verify_run(wire.read_apply(sent), ALICE)
    assert wire.RunProof.of(wire.read_apply(sent)).matches(run.claim)
    headers = message.headers
    assert headers["task"] == APPLY
    assert headers["id"].startswith("x1:7-8@5:")
    assert headers["argsrepr"] == f"<{len(sent['run'])} characters>"
    assert headers["kwargsrepr"] == "{}"
    assert headers["ignore_result"]
    assert "what nobody may read" not in json.dumps([headers, message.properties])


def test_a_request_is_published_for_the_owner_and_shows_its_size_only(app, transport, unique_name):
    body = registration(secret=SECRET)
    assert transport.control(Control.REGISTER, body, "asked") == []
    message = taken(app, unique_name)
    ((sent,), _kwargs, _embed) = message.decode()
    wire.verify_control(wire.read_control(sent), ALICE)
    assert message.headers["task"] == CONTROL
    assert message.headers["id"].startswith(f"register:{body['execution']}:")
    assert message.headers["argsrepr"] == f"<{len(sent['body'])} characters>"


def test_every_send_has_a_name_of_its_own(app, transport, unique_name):
    run = run_of(HOLDER, ("transcript.append", say("a")))
    for _ in range(3):
        transport.run(run)
        transport.control(Control.ADOPT, {"execution": "x1"}, "asked")
    names = {taken(app, unique_name).headers["id"] for _ in range(6)}
    assert len(names) == 6


def test_a_broker_that_does_not_take_it_is_unavailable(app, transport, monkeypatch):
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(app, "send_task", refuse)
    for send in (
        lambda: transport.run(run_of(HOLDER, ("transcript.append", say("a")))),
        lambda: transport.control(Control.ADOPT, {"execution": "x1"}, "asked"),
    ):
        with pytest.raises(Unavailable) as told:
            send()
        assert "connection refused" in told.value.detail


def test_nothing_is_sent_before_answers_can_be_heard(app, transport, unique_name, monkeypatch):
    monkeypatch.setattr(transports, "_READY_SECONDS", 0.01)
    transport.close()
    assert not transport._listener.listening.is_set()
    with pytest.raises(Unavailable):
        transport.run(run_of(HOLDER, ("transcript.append", say("a"))))
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[unique_name].bind(connection.default_channel)
        queue.declare()
        assert queue.get(no_ack=True) is None


def reply_to(transport: BrokerTransport, *answers: Answer, principal: Principal = ALICE) -> Reply:
    return Reply(transport._reply_to, wire.reply(5, list(answers), principal=principal))


def test_a_reply_comes_back(app, transport, arrived):
    answers = [Answer({"positions": [1]}, None, "x1", 1, "tag"), Answer({"epoch": 5}, request="asked")]
    assert transport._listener.listening.wait(SOON)
    publish(app, reply_to(transport, *answers))
    assert arrived.get(timeout=SOON) == answers


class Intruder:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_replies_that_are_not_ours_are_left_aside_and_the_next_one_is_heard(app, transport, arrived, caplog, tmp_path):
    assert transport._listener.listening.wait(SOON)
    answer = Answer({"positions": [1]}, None, "x1", 1, "tag")
    good = reply_to(transport, answer)
    others = [
        {},
        {"answers": "x"},
        good.message | {"answers": "[]"},
        good.message | {"version": 2},
        good.message | {"proof": "\ud800"},
        good.message | {"answers": "\ud800"},
        good.message | {"epoch": "5"},
        {"answer": {"__type__": "uuid", "__value__": "none"}},  # kombu itself cannot read this one
        reply_to(transport, answer, principal=Principal.of("alice", b"another's key")).message,
    ]
    for other in others:
        publish(app, Reply(good.reply_to, other))
    pickled = {"content_type": "application/x-python-serialize", "content_encoding": "binary"}
    with app.connection_for_write() as connection:
        producer = Producer(connection.default_channel)
        for body, options in (
            ("text", {"serializer": "json"}),
            ("not JSON", {"content_type": "application/json", "content_encoding": "utf-8"}),
            (pickle.dumps(Intruder(tmp_path / "made")), pickled),
        ):
            producer.publish(body, routing_key=good.reply_to, exchange="", **options)
    publish(app, good)
    assert arrived.get(timeout=SOON) == [answer]
    with pytest.raises(Empty):
        arrived.get_nowait()
    assert caplog.text.count("left aside") == len(others) + 3
    assert not (tmp_path / "made").exists()


def test_a_listener_that_is_stopped_ends(app, transport):
    assert transport._listener.listening.wait(SOON)
    transport.close()
    assert not transport._listener._thread.is_alive()


def test_a_listener_hears_again_after_the_broker_was_away(app, unique_name, monkeypatch, arrived):
    monkeypatch.setattr(replies, "_POLL_SECONDS", 0.05)
    refused = []
    listen = Listener._listen

    def refuse_once(self: Listener, connection: Any) -> None:
        if not refused:
            refused.append(connection)
            raise amqp.RecoverableConnectionError("the broker is away")
        listen(self, connection)

    monkeypatch.setattr(Listener, "_listen", refuse_once)
    listener = Listener(app.connection_for_read, f"tenure.reply.{unique_name}", arrived.put)
    assert listener.listening.wait(SOON)
    assert len(refused) == 1
    publish(app, Reply(f"tenure.reply.{unique_name}", {"a": 1}))
    assert arrived.get(timeout=SOON) == {"a": 1}
    listener.stop()


@pytest.mark.parametrize("lost", [amqp.RecoverableConnectionError, amqp.AccessRefused, OperationalError])
def test_a_reply_that_the_broker_does_not_take_is_told_and_left_to_the_worker(app, monkeypatch, caplog, lost):
    """A transport raises errors of its own when a connection is lost that was there."""

    def lose(*_args: Any, **_kwargs: Any) -> None:
        raise lost("by peer")

    monkeypatch.setattr(Producer, "publish", lose)
    publish(app, Reply(REPLY_TO, {"a": 1}))
    assert "by peer" in caplog.text
    assert "its worker will ask again" in caplog.text


@pytest.mark.parametrize("refusal", [amqp.AccessRefused, amqp.RecoverableConnectionError, amqp.ChannelError, OSError])
def test_a_broker_that_refuses_is_as_good_as_away(refusal):
    assert issubclass(refusal, replies._faults(Connection("amqp://nobody.invalid")))


def test_the_queue_of_replies_is_the_transports_own(app, transport, arrived, unique_name):
    assert wire.REPLY_QUEUE.fullmatch(transport._reply_to)
    other = BrokerTransport(app, ALICE, unique_name, arrived.put)
    assert other._reply_to != transport._reply_to
    transport.run(run_of(HOLDER, ("transcript.append", say("a"))))
    assert taken(app, unique_name).decode()[0][0]["reply_to"] == transport._reply_to
    other.close()
