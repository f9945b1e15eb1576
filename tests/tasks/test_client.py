"""A process' client: what it opens, what it refuses, what it lets go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.config import Settings
from tenure.ledger import Hold, Kind, Ledger, Status, Work, operation, secret_digest
from tenure.ledger.errors import ConfigurationError, InvalidParams, OutboxFull, PermissionDenied
from tenure.ledger.schema import epochs, worker_executions
from tenure.tasks import keys, transports
from tenure.tasks.client import Client, hold_from_json
from tenure.tasks.desk import hold_to_json
from tenure.tasks.stream import Credential
from tenure.tasks.wire import Control, claim_proof
from tests.ledger.kit import row, rows
from tests.services import wait_until
from tests.tasks.kit import HERE, open_ledger, registration, said, say, through_kombu

HOLD = Hold("x1", "s1", Kind.COMPUTE, Status.REGISTERED, epoch=5, generation=1, last_sequence=0)


@operation("invoice.add")
def add_invoice(work: Work, payload: dict[str, int]) -> dict[str, Any]:
    return {}


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    with open_ledger(sqlite_url, operations=[add_invoice]) as opened:
        yield opened


@pytest.fixture
def client(ledger: Ledger, tmp_path: Path) -> Iterator[Client]:
    with Client.direct(ledger, tmp_path) as made:
        yield made


def credential(client: Client, secret: str = "a secret of x1, long enough") -> Credential:
    return Credential("default", client.principal.name, client.identity, secret_digest(secret))


# Payloads are judged before they are journalled.


@pytest.mark.parametrize(
    ("name", "payload", "told"),
    [
        ("no.such", {}, "operation: 'no.such' is not known"),
        ("transcript.append", {"messages": []}, "$.messages"),
        ("transcript.append", {"messages": [{"role": "robot"}]}, "$.messages[0].role"),
        ("transcript.append", say("a") | {"more": 1}, "more"),
        ("transcript.append", say("a\0b"), "payload.messages[0].content"),
        ("transcript.append", say("\ud800"), "payload.messages[0].content"),
        ("usage.record", {"model": "m", "cost": float("nan")}, "payload.cost"),
        ("usage.record", {"model": "m", "input_tokens": -1}, "$.input_tokens"),
        ("step.record", {"name": "n", "input_digest": "0" * 64, "result": {1: 2}}, "payload.result"),
        ("step.record", {"name": "n", "input_digest": "0" * 64, "result": (1, 2)}, "payload.result"),
        ("step.record", {"name": "n", "input_digest": "0" * 64, "result": "x" * 2**22}, "payload: "),
        ("step.record", {"name": "n", "input_digest": "no", "result": 1}, "$.input_digest"),
        ("child.reserve", {"secret": "x" * 20}, "secret"),
        ("session.end", [], "session.end: "),
    ],
)
def test_what_no_owner_would_take_is_refused_by_its_field(client, name, payload, told):
    with pytest.raises(InvalidParams) as refused:
        client.encode(name, payload)
    assert told in refused.value.detail


def test_what_is_taken_is_one_text_for_equal_payloads(client):
    one = {"role": "user", "content": "é", "metadata": {"b": 1, "a": [1.0, None]}}
    other = dict(reversed(one.items()))
    assert client.encode("transcript.append", {"messages": [one]}) == client.encode(
        "transcript.append", {"messages": [other]}
    )


def test_an_applications_operation_is_known_where_it_is_installed(client):
    assert client.encode("invoice.add", {"total": 7}) == '{"total":7}'
    with pytest.raises(InvalidParams):
        client.encode("invoice.add", {"total": "seven"})


# Straight into a ledger.


def test_a_direct_client_is_an_owner_of_its_own(client, ledger):
    assert client.identity == HERE
    assert row(ledger, epochs).recovered_at is not None
    hold = hold_from_json(client.ask(Control.REGISTER, registration(), within=5))
    assert (hold.epoch, hold.status) == (1, Status.REGISTERED)
    assert row(ledger, worker_executions).principal == client.principal.name


def test_a_direct_client_that_is_closed_leaves_in_good_order_once(ledger, tmp_path):
    client = Client.direct(ledger, tmp_path)
    client.close()
    client.close()
    assert row(ledger, epochs).released_at is not None


def test_a_client_whose_owner_was_replaced_closes_quietly(ledger, tmp_path):
    with Client.direct(ledger, tmp_path), Client.direct(ledger, tmp_path):
        pass
    assert [found.released_at is not None for found in rows(ledger, epochs)] == [False, True]


def test_a_hold_comes_back_from_json_as_it_was():
    for hold in (HOLD, replace(HOLD, kind=Kind.CHILD, status=Status.TERMINAL, last_sequence=2**40)):
        back = hold_from_json(through_kombu(hold_to_json(hold)))
        assert back == hold
        assert (type(back.kind), type(back.status)) == (Kind, Status)


def test_what_proves_a_hold_is_of_that_execution_epoch_and_purpose(client):
    body = client.prove(Control.INSPECT, HOLD, "claim")
    assert body.pop("proof") == claim_proof("claim", Control.INSPECT, "x1", 5)
    assert body == {"epoch": 5, "execution": "x1", "session": "s1", "generation": 1}
    proofs = {
        claim_proof(claim, purpose, execution, epoch)
        for claim in ("claim", "other")
        for purpose in (Control.INSPECT, Control.ADOPT)
        for execution in ("x1", "x2")
        for epoch in (5, 6)
    }
    assert len(proofs) == 16


# Outboxes.


def test_a_stream_is_carried_from_its_outbox(client, ledger):
    body = registration(secret="a secret of x1, long enough")
    hold = hold_from_json(client.ask(Control.REGISTER, body, within=5))
    stream = client.open_stream(hold, credential(client))
    promise = client.sender.append(stream, "transcript.append", client.encode("transcript.append", say("a")))
    assert client.sender.wait(promise, 5).result == {"positions": [1]}
    assert said(ledger, hold.session_id) == ["a"]
    stream.outbox.close()


def test_an_outbox_of_another_secret_or_scope_is_refused(client):
    client.open_stream(HOLD, credential(client)).outbox.close()
    for hold, own in (
        (HOLD, credential(client, "another secret, long enough")),
        (replace(HOLD, session_id="s2"), credential(client)),
        (HOLD, replace(credential(client), profile="other")),
    ):
        with pytest.raises(PermissionDenied) as refused:
            client.open_stream(hold, own)
        assert "x1" in refused.value.detail
    client.open_stream(HOLD, credential(client)).outbox.close()


def test_an_outbox_takes_no_more_than_its_cap(ledger, tmp_path):
    client = Client(state_dir=tmp_path, identity=HERE, outbox_bytes=1000)
    client._use(transports.DirectTransport(ledger, HERE), threaded=False)
    stream = client.open_stream(HOLD, credential(client))
    with pytest.raises(OutboxFull):
        client.sender.append(stream, "op", '"' + "x" * 2000 + '"')
    stream.outbox.close()
    client.close()


# Through a broker that is away.


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    keys.create(tmp_path / "keys.json", "default")
    return {
        "TENURE_STATE_DIR": str(tmp_path),
        "TENURE_BROKER_URL": "redis://127.0.0.1:1",
        "TENURE_RESEND_SECONDS": "0.05",
        "TENURE_OUTBOX_BYTES": "65536",
    }


@pytest.fixture
def away(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(transports, "_READY_SECONDS", 0.05)
    monkeypatch.setattr("kombu.utils.functional.sleep", lambda _seconds: None)  # between two attempts to connect
    with Client.connect(Settings.from_environ(environ)) as made:
        yield made


def test_a_client_connects_with_the_key_of_its_principal(away, tmp_path):
    assert away.principal == keys.Keyring.load(tmp_path / "keys.json").get("default")
    assert away.sender.resend_seconds == 0.05
    stream = away.open_stream(HOLD, credential(away))
    with pytest.raises(OutboxFull):
        away.sender.append(stream, "op", '"' + "x" * 65536 + '"')
    away.sender.remove(stream)
    stream.outbox.close()


def test_a_client_that_is_closed_leaves_no_thread(environ, away):
    thread, listener = away.sender._thread, away._transport._listener._thread
    assert thread.is_alive()
    away.close()
    assert not thread.is_alive()
    assert not listener.is_alive()


def test_while_the_broker_is_away_a_question_is_given_up_in_time(away):
    with pytest.raises(TimeoutError):
        away.ask(Control.REGISTER, registration(), within=0.2)


def test_a_question_that_cannot_be_sent_is_answered_at_once_and_harms_nobody(away, caplog):
    caplog.set_level("INFO")
    with pytest.raises(InvalidParams) as refused:
        away.ask(Control.REGISTER, registration(session="a\0b"), within=30)
    assert "session" in refused.value.detail
    stream = away.open_stream(HOLD, credential(away))
    caplog.clear()
    promise = away.sender.append(stream, "session.end", '{"end_reason":"done"}')
    wait_until(lambda: "not sent, will be again" in caplog.text, within=10, what="the sender still tries")
    assert not promise.done()
    away.sender.remove(stream)
    stream.outbox.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"TENURE_PRINCIPAL": "nobody"}, "no principal 'nobody'"),
        ({"TENURE_KEYS": "/nonexistent/keys.json"}, "/nonexistent/keys.json"),
        ({"TENURE_BROKER_URL": None}, "no broker"),
    ],
)
def test_a_client_that_cannot_connect_says_what_is_missing(environ, change, told):
    merged = {name: value for name, value in (environ | change).items() if value is not None}
    with pytest.raises(ConfigurationError) as refused:
        Client.connect(Settings.from_environ(merged))
    assert told in refused.value.detail
