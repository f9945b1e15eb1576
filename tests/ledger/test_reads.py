"""Reading the ledger: what each function returns, in which order, and what it says of what is not there."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.ledger import Death, Kind, Ledger, Limits, Status, reads
from tenure.ledger.errors import InvalidParams, NotFound
from tests.ledger.kit import ELSEWHERE, HERE, Worker, dump

DIGEST = "0123456789abcdef" * 4


def reading(ledger: Ledger, function: Any, *args: Any, **kwargs: Any) -> Any:
    with ledger.read() as connection:
        found = function(connection, *args, **kwargs)
        return found if not hasattr(found, "__next__") else list(found)


def test_the_runtime_as_a_whole(ledger, clock):
    fresh = reading(ledger, reads.runtime)
    assert (fresh.epoch, fresh.began_at, fresh.drain_reason, fresh.drain_since, fresh.live) == (0, None, None, None, 0)
    epoch = ledger.begin_epoch("owner")
    one, two = (Worker(ledger, epoch).register() for _ in range(2))
    one.reserve()
    two.finish()
    clock.advance(minutes=1)
    ledger.drain("an upgrade")
    told = reading(ledger, reads.runtime)
    assert (told.epoch, told.drain_reason, told.drain_since, told.live) == (1, "an upgrade", clock.now, 2)
    assert told.began_at is not None
    assert told.began_at < clock.now


def test_a_session_and_an_execution(ledger, worker):
    worker.say("hello", "again")
    session = reading(ledger, reads.session, worker.session_id)
    assert (session.session_id, session.source, session.message_count, session.revision) == (
        worker.session_id,
        "worker",
        2,
        1,
    )
    execution = reading(ledger, reads.execution, worker.execution_id)
    assert (execution.kind, execution.status, execution.outcome) == (Kind.COMPUTE, Status.RUNNING, None)
    assert (execution.last_sequence, execution.identity) == (1, HERE)


def test_what_is_not_there(ledger, worker):
    for function in (reads.session, reads.execution, reads.transcript):
        with pytest.raises(NotFound):
            reading(ledger, function, "nobody")
        for name in ("a\0b", "\ud800", "", "x" * 129, None, 7):
            with pytest.raises(InvalidParams):
                reading(ledger, function, name)
    for function in (reads.children, reads.steps, reads.history):
        assert reading(ledger, function, "nobody") == []
    assert reading(ledger, reads.held_on, "no such host") == []


def test_executions_oldest_first_and_children_after_their_parents(ledger, epoch, clock):
    ledger.limits = Limits(3, 2)
    old = Worker(ledger, epoch).register()
    clock.advance(minutes=1)
    parent = Worker(ledger, epoch).register()
    children = [parent.reserve(), parent.reserve()]
    grandchild = children[0].reserve()
    clock.advance(minutes=1)
    late = old.reserve()
    children[1].finish()
    everybody = [old, parent, *children, grandchild, late]
    ids = [worker.execution_id for worker in everybody]
    assert [x.execution_id for x in reading(ledger, reads.executions)] == ids
    live = [x.execution_id for x in reading(ledger, reads.executions, live_only=True)]
    assert live == [execution_id for execution_id in ids if execution_id != children[1].execution_id]


def test_children_in_the_order_of_their_reservation_ended_ones_too(ledger, worker):
    children = [worker.reserve() for _ in range(3)]
    worker.say("between")
    children[1].finish({"outcome": "failed", "result": {"why": "so"}})
    children.append(worker.reserve())
    found = reading(ledger, reads.children, worker.execution_id)
    assert [x.execution_id for x in found] == [child.execution_id for child in children]
    assert [x.reserved_sequence for x in found] == [1, 2, 3, 5]
    assert [x.status for x in found] == ["running", "terminal", "running", "running"]
    assert (found[1].outcome, found[1].result) == ("failed", '{"why":"so"}')


def test_a_transcript_in_order_across_its_holders(ledger, epoch, worker):
    worker.say(*map(str, range(12)))
    worker.finish()
    second = Worker(ledger, epoch, session_id=worker.session_id).register()
    second.say("12", "13")
    messages = reading(ledger, reads.transcript, worker.session_id)
    assert [message["content"] for message in messages] == [str(number) for number in range(14)]
    assert reading(ledger, reads.transcript, Worker(ledger, epoch).register().session_id) == []


def test_steps_in_order_with_their_results(ledger, worker):
    results: list[Any] = [{"a": [1, None]}, None, "text", 0.5]
    for number, result in enumerate(results):
        worker.apply("step.record", {"name": f"step {number}", "input_digest": DIGEST, "result": result})
    found = reading(ledger, reads.steps, worker.execution_id)
    assert [(step.sequence, step.name, step.result) for step in found] == [
        (number + 1, f"step {number}", result) for number, result in enumerate(results)
    ]
    assert {step.input_digest for step in found} == {DIGEST}


def test_history_with_its_states(ledger, epoch, worker):
    ledger.recover(epoch, deaths=[Death(worker.execution_id, HERE, "no_such_process")])
    first, second = reading(ledger, reads.history, worker.execution_id)
    assert (first.before, first.after) == (None, Status.REGISTERED)
    assert (second.before, second.after, second.reason) == (Status.REGISTERED, Status.UNKNOWN, "process_dead")
    assert isinstance(second.before, Status)
    assert {first.execution_id, second.execution_id} == {worker.execution_id}


def test_who_holds_something_on_a_host(ledger, epoch):
    registered, running, unknown, ended = (Worker(ledger, epoch).register() for _ in range(4))
    child = running.reserve()
    Worker(ledger, epoch, identity=ELSEWHERE).register()
    ended.finish()
    ledger.recover(epoch, deaths=[Death(unknown.execution_id, HERE, "no_such_process")])
    found = reading(ledger, reads.held_on, HERE.host)
    assert {death.execution_id for death in found} == {x.execution_id for x in (registered, running, child)}
    assert {(death.identity, death.evidence) for death in found} == {(HERE, "")}


def test_reading_changes_nothing(ledger, worker):
    worker.say("hello")
    before = dump(ledger)
    reading(ledger, reads.runtime)
    reading(ledger, reads.session, worker.session_id)
    reading(ledger, reads.executions)
    reading(ledger, reads.transcript, worker.session_id)
    reading(ledger, reads.history, worker.execution_id)
    assert dump(ledger) == before
