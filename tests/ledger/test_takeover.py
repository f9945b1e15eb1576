"""Takeover: only of what is proven gone, with the same secret, at the next generation; and the first is fenced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tenure.ledger import Death, Hold, Status, reads, secret_digest
from tenure.ledger.errors import (
    AdmissionConflict,
    InvalidParams,
    NotFound,
    PermissionDenied,
    StaleGeneration,
    TenureError,
)
from tests.ledger.kit import ELSEWHERE, HERE, Worker, dump

pytestmark = pytest.mark.usefixtures("lawful")


def take(worker: Worker, *, identity: Any = ELSEWHERE, gone: Any = None, secret: str = "", **address: Any) -> Hold:
    return worker.ledger.take_over(
        worker.epoch,
        replace(worker.address, **address),
        secret_digest=secret_digest(secret or worker.secret),
        identity=identity,
        gone=gone,
    )


def lose(worker: Worker, evidence: str = "no_such_process") -> None:
    worker.ledger.recover(worker.epoch, deaths=[Death(worker.execution_id, worker.identity, evidence)])


def successor(worker: Worker, hold: Hold) -> Worker:
    return replace(worker, identity=ELSEWHERE, generation=hold.generation)


def history(worker: Worker) -> list[tuple[str, str]]:
    with worker.ledger.read() as connection:
        return [(move.after.value, move.reason) for move in reads.history(connection, worker.execution_id)]


@pytest.mark.parametrize("evidence", ["no_such_process", "stopped"])
def test_what_recovery_found_gone_is_continued_at_the_next_generation(worker, evidence):
    worker.say("one")
    lose(worker, evidence)
    hold = take(worker)
    assert (hold.generation, hold.status, hold.last_sequence) == (2, Status.RUNNING, 1)
    second = successor(worker, hold)
    second.say("two")
    with worker.ledger.read() as connection:
        assert reads.execution(connection, worker.execution_id).identity == ELSEWHERE
        assert reads.session(connection, worker.session_id).generation == 2
    reason = "process_stopped" if evidence == "stopped" else "process_dead"
    assert history(worker)[-2:] == [("unknown", reason), ("running", "taken_over")]


def test_what_the_owner_has_proved_gone_just_now_is_continued_too(worker):
    hold = take(worker, gone=worker.identity)
    assert hold.generation == 2
    assert history(worker) == [("registered", "registered"), ("unknown", "process_dead"), ("running", "taken_over")]


def test_the_first_process_cannot_write_a_byte_any_more(worker):
    worker.say("one")
    lose(worker, "stopped")
    second = successor(worker, take(worker))
    second.say("two")
    before = dump(worker.ledger)
    attempts = [
        lambda: worker.say("a byte"),
        lambda: worker.send(worker.request("transcript.append", {"messages": []}, sequence=9)),
        lambda: worker.adopt(worker.epoch),
        lambda: worker.send(worker.request("usage.record", {"model": "m"}, sequence=3, generation=2)),
        worker.reserve,
        worker.finish,
    ]
    for attempt in attempts:
        with pytest.raises((StaleGeneration, PermissionDenied, InvalidParams)):
            attempt()
    assert dump(worker.ledger) == before
    second.say("three")


def test_it_may_be_taken_over_time_and_again(worker):
    for generation in range(2, 6):
        lose(worker)
        identity = replace(ELSEWHERE, pid=100 + generation)
        assert take(worker, identity=identity).generation == generation
        worker.identity, worker.generation = identity, generation
        worker.say(str(generation))


@pytest.mark.parametrize("said", [False, True], ids=["registered", "running"])
def test_what_a_process_holds_that_is_not_proven_gone_is_left_to_it(worker, said):
    if said:
        worker.say("one")
    before = dump(worker.ledger)
    for gone in (None, ELSEWHERE, replace(HERE, birth="ticks:1")):
        with pytest.raises(AdmissionConflict) as held:
            take(worker, gone=gone)
        assert (held.value.detail, held.value.data) == ("held", {"status": "running" if said else "registered"})
    assert dump(worker.ledger) == before


def test_what_only_lost_its_owner_is_left_to_its_process_unless_that_is_gone_too(worker):
    worker.epoch = worker.ledger.begin_epoch("the second owner")
    worker.ledger.recover(worker.epoch)
    with pytest.raises(AdmissionConflict):
        take(worker)
    hold = take(worker, gone=worker.identity)
    assert (hold.generation, hold.epoch) == (2, worker.epoch)


def test_the_process_that_holds_it_is_answered_as_it_stands(worker):
    worker.say("one")
    assert take(worker, identity=HERE).generation == 1
    worker.epoch = worker.ledger.begin_epoch("the second owner")
    worker.ledger.recover(worker.epoch)
    hold = take(worker, identity=HERE)
    assert (hold.generation, hold.status, hold.epoch) == (1, Status.RUNNING, worker.epoch)
    worker.say("two")
    assert history(worker)[-1] == ("running", "adopted")


def test_one_that_was_only_stopped_and_asks_first_goes_on_itself(worker):
    lose(worker, "stopped")
    assert take(worker, identity=HERE).generation == 1
    worker.say("one")
    with pytest.raises(AdmissionConflict):
        take(worker)


def test_what_has_ended_is_answered_and_stays_so(worker):
    worker.finish()
    hold = take(worker)
    assert (hold.status, hold.generation) == (Status.TERMINAL, 1)
    with pytest.raises(StaleGeneration):
        worker.say("late")


REFUSED: list[tuple[dict[str, Any], type[TenureError], str]] = [
    ({"execution_id": "nobody"}, NotFound, "execution"),
    ({"session_id": "another"}, PermissionDenied, "other_session"),
    ({"secret": "some other secret"}, PermissionDenied, "claim_mismatch"),
    ({"identity": replace(ELSEWHERE, pid=0)}, InvalidParams, "identity.pid: a process id is a positive whole number"),
]


@pytest.mark.parametrize(("change", "error", "detail"), REFUSED, ids=lambda v: f"{v!r:.24}")
def test_who_cannot_prove_it_gets_nothing(worker, change, error, detail):
    lose(worker)
    before = dump(worker.ledger)
    with pytest.raises(error) as refused:
        take(worker, **change)
    assert refused.value.detail == detail
    assert dump(worker.ledger) == before


def test_a_child_is_not_taken_over_its_parent_delegates_anew(worker):
    child = worker.reserve()
    child.attach(ELSEWHERE)
    with pytest.raises(StaleGeneration) as refused:
        take(child, identity=HERE, gone=ELSEWHERE)
    assert refused.value.detail == "child_not_adoptable"


def test_a_takeover_under_an_older_epoch_is_refused(worker):
    lose(worker)
    worker.ledger.begin_epoch("the second owner")
    before = dump(worker.ledger)
    with pytest.raises(TenureError) as refused:
        take(worker)
    assert refused.value.detail == "owner_superseded"
    assert dump(worker.ledger) == before


def test_its_children_live_on_through_a_takeover(worker):
    child = worker.reserve()
    child.attach(replace(ELSEWHERE, pid=5))
    lose(worker)
    second = successor(worker, take(worker))
    child.say("still here")
    assert second.finish().result["retired"] == [child.execution_id]
