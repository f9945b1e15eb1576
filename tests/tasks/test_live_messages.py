"""Whatever arrives on the owner queue, the owner goes on; what it refuses or answers is no crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Producer

from tenure.ledger import Refusal
from tenure.ledger.canonical import canonical
from tenure.ledger.errors import InvalidParams, Refused
from tenure.tasks import wire
from tenure.tasks.application import APPLY, CANARY, CONTROL, RECOVER, make_app
from tenure.tasks.keys import Keyring
from tenure.tasks.outbox import Entry
from tenure.tasks.replies import ABANDONED_SECONDS
from tenure.tasks.stream import Run
from tenure.tasks.wire import Answer, Control
from tenure.workflows import Client, Execution
from tests.services import redis_client, wait_until
from tests.tasks.live import PREFIX, Fleet, message, says

NOBODY = f"tenure.reply.{'0' * 32}"  # the reply queue of nobody


@pytest.fixture
def fleet(spawn, tmp_path, sqlite_url, redis_url):
    return Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)


@pytest.fixture
def app(fleet: Fleet) -> Celery:
    return make_app(fleet.settings)


def ours(fleet: Fleet, run: Execution) -> list[tuple[str, list[object]]]:
    """Messages to our own tasks that no owner may act on."""
    hold, principal = run._stream.hold, Keyring.load(fleet.settings.keys).get("default")
    apply = wire.apply(
        epoch=hold.epoch,
        execution=hold.execution_id,
        session=hold.session_id,
        generation=hold.generation,
        first=run._stream.outbox.next_sequence,
        operations=[("transcript.append", canonical({"messages": [message("forged")]}))],
        claim=run._stream.claim,
        principal=principal,
        request="r",
        reply_to=NOBODY,
    )
    control = wire.control(Control.REGISTER, {"execution": "x"}, principal=principal, request="r", reply_to=NOBODY)
    found: list[tuple[str, list[object]]] = [(APPLY, []), (CONTROL, []), (APPLY, [control]), (CONTROL, [apply])]
    for task, good, text in ((APPLY, apply, "run"), (CONTROL, control, "body")):
        wrong = [
            *({"version": 2}, {"version": "1"}, {"request": None}, {"more": 1}, {"proof": "0" * 64}),
            *({"reply_to": "celery"}, {"principal": "nobody"}, {"principal": ""}),
            *({text: good[text] + " "}, {text: "["}, {text: "x" * (5 * 2**20)}, {text: {}}),
        ]
        found += [(task, [good | change]) for change in wrong]
        found += [(task, [body]) for body in (None, 0, "text", [], {}, {**good, "proof": good["proof"].upper()})]
        found += [(task, [{name: value for name, value in good.items() if name != left}]) for left in good]
    return found


def test_messages_that_are_not_provably_ours_are_refused_and_change_nothing(fleet, app):
    owner = fleet.owner()
    with fleet.run() as run:
        says(run, "before")
        before = fleet.snapshot()
        sent = ours(fleet, run)
        for task, args in sent:
            app.send_task(task, args=args, queue="owner", ignore_result=True)
        app.send_task(APPLY, kwargs={"value": {}, "_task": 1}, queue="owner", ignore_result=True)
        app.send_task(CANARY, args=[{"any": "thing"}, 2], kwargs={"x": 1}, queue="owner", ignore_result=True)
        wait_until(lambda: "Task tenure.canary" in owner.output, within=20, what="the owner has read them all")
        assert owner.output.count("refused a message ") == len(sent) + 1
        assert "Traceback" not in owner.output
        assert "forged" not in owner.output
        assert fleet.snapshot() == before
        says(run, "after")
        run.finish()
    assert fleet.transcript() == ["before", "after"]
    fleet.assert_lawful()


def test_messages_of_others_are_thrown_away_and_the_owner_serves_on(fleet, app):
    owner = fleet.owner()
    with fleet.run() as run, app.connection_for_write() as connection:
        producer = Producer(connection, routing_key="owner")
        said = []
        for number, send in enumerate(alien(app, producer)):
            send()
            says(run, f"after {number}")
            said.append(f"after {number}")
        run.finish()
    assert fleet.transcript() == said
    assert owner.running
    fleet.assert_lawful()


def alien(app: Celery, producer: Producer) -> list[Callable[[], Any]]:
    typed = {"__type__": "uuid", "__value__": "x"}  # kombu tries to make a UUID of it
    return [
        lambda: app.send_task("nobody.knows", args=[1], queue="owner"),
        lambda: app.send_task(APPLY, args=[typed], queue="owner"),
        lambda: app.send_task(APPLY, kwargs={"self": 1}, queue="owner"),
        lambda: app.send_task(RECOVER, args=[typed], kwargs={"x": typed}, queue="owner"),
        lambda: producer.publish("no json at all", content_type="application/json", content_encoding="utf-8"),
        lambda: producer.publish({"hello": "world"}, serializer="json"),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY, "id": "x"}),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY}),
        lambda: producer.publish("x", serializer="json", headers={"task": 5, "id": 7}),
        lambda: producer.publish("x", serializer="json", headers={"task": {}, "id": "x"}),
        lambda: producer.publish(5, serializer="json", headers={"task": APPLY, "id": "x"}),
        lambda: producer.publish([5], serializer="json", headers={"task": APPLY, "id": "x"}),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY, "id": [], "expires": 5}),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY, "id": {}, "retries": "x"}),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY, "id": "x", "eta": "never"}),
        lambda: producer.publish([[], {}, {}], serializer="json", headers={"task": APPLY, "id": "x", "timelimit": 1}),
        lambda: producer.publish({"a": 1}, serializer="pickle"),
        lambda: producer.publish(b"\xff\x00", content_type="application/x-unknown", content_encoding="binary"),
    ]


class Wire:
    """Sends runs of a test's own making and hears what the owner answers."""

    def __init__(self, client: Client) -> None:
        self._transport = client._transport
        self._deliver, self._answers = self._transport._deliver, {}
        self._transport._deliver = self._hear

    def _hear(self, answers: list[Answer]) -> None:
        self._answers |= {answer.request: answer for answer in answers}
        self._deliver(answers)

    def ask(self, run: Execution, sequence: int, content: str = "x", *, claim: str = "", **fences: Any) -> str:
        """Send one append and return what it is answered: the reason and the detail, or the receipt's result."""
        request = uuid4().hex
        hold = replace(run._stream.hold, **fences)
        entry = Entry(sequence, "transcript.append", canonical({"messages": [message(content)]}))
        self._transport.run(Run(hold, claim or run._stream.claim, request, [entry]))
        answer = wait_until(lambda: self._answers.get(request), within=20, what="an answer")
        return f"{answer.error['reason']} {answer.error['detail']}" if answer.error else json.dumps(answer.value)


def test_refusals_and_errors_of_a_conversation_are_answers_and_no_crashes(fleet):
    owner = fleet.owner()
    with fleet.run() as run:
        wire = Wire(run.client)
        says(run, "first")
        assert wire.ask(run, 1, "first") == '{"positions": [1]}'
        assert wire.ask(run, 1, "another") == "admission_conflict other_payload"
        assert wire.ask(run, 7) == "sequence_gap missing"
        assert wire.ask(run, 2, epoch=0).startswith("stale_epoch ")
        assert wire.ask(run, 2, generation=9).startswith("stale_generation ")
        assert wire.ask(run, 2, session_id="other").startswith("permission_denied ")
        assert wire.ask(run, 2, claim="0" * 64).startswith("permission_denied ")
        assert wire.ask(run, 2, execution_id="other").startswith("not_found ")
        with pytest.raises(InvalidParams):
            run.append([{"role": "nobody", "content": "x"}])
        children = [run.reserve_child() for _ in range(4)]
        refusal = children.pop()
        assert refusal == Refusal("delegation_capacity", {"max_concurrent_children": 3, "live_children": 3})
        for child in children:
            child.close()
        assert run.end_session("done")
        assert not run.end_session("again")
        with pytest.raises(Refused):
            says(run, "too late")
        run.finish()
        assert wire.ask(run, 1, "first") == '{"positions": [1]}'
        assert wire.ask(run, run._stream.outbox.next_sequence).startswith("stale_generation ")
    assert "Traceback" not in owner.output
    assert "ERROR" not in owner.output
    assert fleet.transcript() == ["first"]
    fleet.assert_lawful()


def test_an_answer_that_nobody_reads_is_gone_some_time_later(fleet, app, redis_url):
    fleet.owner()
    principal = Keyring.load(fleet.settings.keys).get("default")
    body = {"epoch": 1, "execution": "x", "session": "s", "generation": 1, "proof": "p"}
    asked = wire.control(Control.INSPECT, body, principal=principal, request="r", reply_to=NOBODY)
    app.send_task(CONTROL, args=[asked], queue="owner", ignore_result=True)
    with closing(redis_client(redis_url)) as redis:
        left = wait_until(lambda: redis.pttl(PREFIX + NOBODY) != -2, within=20, what="an answer")
        assert left
        wait_until(lambda: 0 < redis.pttl(PREFIX + NOBODY) <= ABANDONED_SECONDS * 1000, within=5, what="it expires")
