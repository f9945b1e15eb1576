"""Executions as their holders see them: register, adopt, attach, discard, and the history of each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tenure.ledger import Claim, Death, Hold, Kind, Ledger, Limits, Status, claim_digest, reads, secret_digest
from tenure.ledger.errors import (
    AdmissionConflict,
    InvalidParams,
    NotFound,
    PermissionDenied,
    RuntimeDraining,
    StaleEpoch,
    StaleGeneration,
    TenureError,
)
from tenure.ledger.schema import execution_transitions, sessions, worker_executions
from tenure.ledger.states import TRANSITIONS
from tests.ledger.kit import ELSEWHERE, HERE, Worker, dump, row, rows

pytestmark = pytest.mark.usefixtures("lawful")

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def execution(ledger: Ledger, worker: Worker) -> Any:
    return row(ledger, worker_executions, execution_id=worker.execution_id)


def lose(worker: Worker) -> None:
    """Have the worker's process proven dead."""
    worker.ledger.recover(worker.epoch, deaths=[Death(worker.execution_id, worker.identity, "no_such_process")])


def detail(expected: str) -> Any:
    return lambda error: error.detail == expected


# --- register -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.COMPUTE, Kind.CRON, Kind.KANBAN])
def test_a_registration_makes_the_session_and_holds_it(ledger, epoch, kind):
    worker = Worker(ledger, epoch, kind=kind, source="telegram", profile="p", principal="q")
    hold = ledger.register(epoch, worker.registration)
    with ledger.read() as connection:
        assert hold == Hold.of(reads.execution(connection, worker.execution_id))
    assert (hold.kind, hold.status, hold.epoch, hold.generation, hold.last_sequence) == (
        kind,
        Status.REGISTERED,
        epoch,
        1,
        0,
    )
    x = execution(ledger, worker)
    assert (x.depth, x.parent_execution_id, x.reserved_sequence, x.profile, x.principal) == (0, None, None, "p", "q")
    assert (x.host, x.boot, x.pid, x.birth, x.username) == ("host-a", "boot-1", 4242, "ticks:1000", "worker")
    assert (x.claim_digest, x.created_at, x.status_by) == (worker.claim, ledger.clock(), "q")
    s = row(ledger, sessions, session_id=worker.session_id)
    assert (s.source, s.profile, s.parent_session_id, s.generation, s.revision) == ("telegram", "p", None, 1, 0)


def test_the_same_registration_again_gets_the_same_answer(ledger, epoch, worker):
    before = dump(ledger)
    hold = ledger.register(epoch, worker.registration)
    assert ledger.register(epoch, worker.registration) == hold
    assert dump(ledger) == before
    worker.say("hello")
    assert ledger.register(epoch, worker.registration) == replace(hold, status=Status.RUNNING, last_sequence=1)
    worker.finish()
    assert ledger.register(epoch, worker.registration).status is Status.TERMINAL


def test_a_registration_that_is_repeated_after_a_restart_says_that_it_must_adopt(ledger, epoch, worker):
    now = ledger.begin_epoch("the second owner")
    ledger.recover(now)
    hold = ledger.register(now, worker.registration)
    assert (hold.status, hold.epoch) == (Status.UNKNOWN, epoch)


def test_another_claim_on_the_same_execution_conflicts(ledger, epoch, worker, subtests):
    child = worker.reserve()
    before = dump(ledger)
    others = {
        "session": replace(worker, session_id="another-session"),
        "kind": replace(worker, kind=Kind.CRON),
        "secret": replace(worker, secret="the secret of somebody else"),
        "process": replace(worker, identity=replace(HERE, pid=4243)),
        "birth": replace(worker, identity=replace(HERE, birth="ticks:1001")),
        "boot": replace(worker, identity=replace(HERE, boot="boot-2")),
        "user": replace(worker, identity=replace(HERE, user="root")),
        "profile": replace(worker, profile="another"),
        "principal": replace(worker, principal="another"),
        "a child's id": replace(child, kind=Kind.COMPUTE),
    }
    for what, other in others.items():
        with subtests.test(what), pytest.raises(AdmissionConflict, check=detail("execution_exists")):
            ledger.register(epoch, other.registration)
    assert dump(ledger) == before


@pytest.mark.parametrize("state", ["registered", "running", "unknown"])
def test_a_session_is_held_until_its_holder_has_ended(ledger, epoch, worker, state):
    if state == "running":
        worker.say("hello")
    if state == "unknown":
        lose(worker)
    before = dump(ledger)
    with pytest.raises(AdmissionConflict, check=detail("session_held")) as held:
        Worker(ledger, epoch, session_id=worker.session_id).register()
    assert held.value.data == {"status": state, "kind": "compute"}
    assert dump(ledger) == before


def test_a_childs_session_is_held_and_then_ended(ledger, epoch, worker):
    child = worker.reserve()
    with pytest.raises(AdmissionConflict, check=detail("session_held")):
        Worker(ledger, epoch, session_id=child.session_id).register()
    child.finish()
    with pytest.raises(StaleGeneration, check=detail("session_ended")):
        Worker(ledger, epoch, session_id=child.session_id).register()


def test_the_next_holder_of_a_session_has_the_next_generation(ledger, epoch, worker):
    worker.say("from the first")
    worker.finish()
    second = Worker(ledger, epoch, session_id=worker.session_id).register()
    assert second.generation == 2
    assert second.say("from the second").result == {"positions": [2]}
    assert row(ledger, sessions, session_id=worker.session_id).generation == 2
    before = dump(ledger)
    for generation in (1, 2):
        with pytest.raises(StaleGeneration, check=detail("generation_mismatch")):
            worker.send(worker.request("transcript.append", HELLO, sequence=1, generation=generation))
    assert dump(ledger) == before
    second.finish()
    assert Worker(ledger, epoch, session_id=worker.session_id).register().generation == 3


def test_sessions_that_cannot_be_taken(ledger, epoch, worker):
    other = Worker(ledger, epoch).register()
    worker.apply("session.end", {"end_reason": "done"})
    worker.finish()
    other.finish()
    before = dump(ledger)
    with pytest.raises(StaleGeneration, check=detail("session_ended")):
        Worker(ledger, epoch, session_id=worker.session_id).register()
    with pytest.raises(PermissionDenied, check=detail("other_profile")):
        Worker(ledger, epoch, session_id=other.session_id, profile="another").register()
    ledger.drain("an upgrade")
    with pytest.raises(RuntimeDraining, check=detail("an upgrade")):
        Worker(ledger, epoch).register()
    ledger.drain(None)
    assert dump(ledger) == before


def test_of_many_that_want_a_session_one_gets_it(ledger, epoch):
    contenders = [Worker(ledger, epoch, session_id="wanted") for _ in range(8)]

    def register(worker: Worker) -> bool:
        try:
            worker.register()
        except AdmissionConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(register, contenders)) == 1
    assert len(rows(ledger, worker_executions)) == 1


# --- adopt ----------------------------------------------------------------------------------------


def test_a_registered_execution_runs_once_it_has_adopted(ledger, epoch, worker):
    assert worker.adopt(epoch).status is Status.RUNNING
    before = dump(ledger)
    assert worker.adopt(epoch).status is Status.RUNNING
    assert dump(ledger) == before


def test_what_was_taken_for_dead_and_lives_adopts_again(ledger, epoch, worker):
    worker.say("hello")
    lose(worker)
    with pytest.raises(StaleGeneration, check=detail("execution_unknown")):
        worker.say("it lives")
    worker.adopt(epoch)
    assert worker.say("it lives").sequence == 2


def test_a_finished_root_adopts_to_read_its_receipts(ledger, epoch, worker):
    worker.say("hello")
    ended = worker.finish({"outcome": "completed", "result": 7})
    now = ledger.begin_epoch("the second owner")
    with pytest.raises(StaleEpoch, check=detail("not_adopted")):
        ledger.apply(now, worker.request("execution.finish", {}, sequence=2, epoch=now))
    hold = worker.adopt(now)
    assert (hold.status, hold.epoch, hold.last_sequence) == (Status.TERMINAL, now, 2)
    payload = {"outcome": "completed", "result": 7}
    assert worker.send(worker.request("execution.finish", payload, sequence=2)) == replace(ended, replayed=True)
    before = dump(ledger)
    with pytest.raises(StaleGeneration, check=detail("execution_terminal")):
        worker.say("one more")
    assert dump(ledger) == before


def test_what_cannot_be_adopted(ledger, epoch, worker, subtests):
    other = Worker(ledger, epoch).register()
    before = dump(ledger)
    cases: dict[str, tuple[Any, type[TenureError], str]] = {
        "nobody": (replace(worker, execution_id="nobody"), NotFound, "execution"),
        "another's session": (replace(worker, session_id=other.session_id), PermissionDenied, "other_session"),
        "another generation": (replace(worker, generation=2), StaleGeneration, "generation_mismatch"),
        "another epoch": (replace(worker, epoch=epoch + 1), StaleEpoch, "epoch_mismatch"),
    }
    for what, (impostor, error, told) in cases.items():
        with subtests.test(what), pytest.raises(error, check=detail(told)):
            ledger.adopt(epoch, impostor.address, worker.proof)
    with pytest.raises(PermissionDenied, check=detail("claim_mismatch")):
        ledger.adopt(epoch, worker.address, other.proof)
    assert dump(ledger) == before


def test_a_holder_whose_session_was_taken_on_does_not_adopt(ledger, epoch, worker):
    worker.finish()
    Worker(ledger, epoch, session_id=worker.session_id).register()
    with pytest.raises(StaleGeneration, check=detail("generation_mismatch")):
        worker.adopt(epoch)


# --- attach ---------------------------------------------------------------------------------------


def test_a_child_attaches_its_own_process_once(ledger, worker, clock):
    child = worker.reserve()
    reserved = replace(child)
    clock.advance(seconds=5)
    hold = child.attach(ELSEWHERE)
    x = execution(ledger, child)
    assert (x.host, x.boot, x.pid, x.birth, x.attached_at) == ("host-b", "boot-9", 77, "ticks:5", clock.now)
    assert x.claim_digest == child.claim != reserved.claim
    assert (hold.status, hold.last_sequence) == (Status.RUNNING, 0)
    before = dump(ledger)
    with pytest.raises(PermissionDenied, check=detail("claim_mismatch")):  # the parent's process has let go
        reserved.say("as the parent's process")
    assert child.attach(ELSEWHERE) == hold
    with pytest.raises(PermissionDenied, check=detail("attached_elsewhere")):
        replace(child).attach(replace(ELSEWHERE, pid=78))
    assert dump(ledger) == before
    assert child.say("from elsewhere").sequence == 1
    assert child.attach(ELSEWHERE).last_sequence == 1
    child.finish()
    assert child.attach(ELSEWHERE).status is Status.TERMINAL


def test_a_child_may_attach_its_parents_process(ledger, worker):
    child = worker.reserve()
    child.attach(HERE)
    with pytest.raises(PermissionDenied, check=detail("attached_elsewhere")):
        replace(child).attach(ELSEWHERE)
    assert child.say("hello").sequence == 1


def test_what_cannot_be_attached(ledger, epoch, worker, subtests):
    used, ended, fresh = worker.reserve(), worker.reserve(), worker.reserve()
    used.say("by the parent's process")
    ended.finish()
    refused = {"last_sequence": 1}
    before = dump(ledger)
    cases: dict[str, tuple[Worker, type[TenureError], str]] = {
        "wrong secret": (replace(fresh, secret="the secret of somebody else"), PermissionDenied, "claim_mismatch"),
        "a sibling's secret": (replace(fresh, secret=used.secret), PermissionDenied, "claim_mismatch"),
        "the parent's secret": (replace(fresh, secret=worker.secret), PermissionDenied, "claim_mismatch"),
        "the parent's session": (replace(fresh, session_id=worker.session_id), PermissionDenied, "other_session"),
        "nobody": (replace(fresh, execution_id="nobody"), NotFound, "execution"),
        "after a receipt": (used, StaleGeneration, "execution_running"),
        "after the end": (ended, StaleGeneration, "execution_terminal"),
        "a root": (worker, PermissionDenied, "not_a_child"),
        "another generation": (replace(fresh, generation=2), StaleGeneration, "generation_mismatch"),
    }
    for what, (child, error, told) in cases.items():
        with subtests.test(what):
            with pytest.raises(error, check=detail(told)) as caught:
                replace(child).attach(ELSEWHERE)
            if child in (used, ended):
                assert caught.value.data == refused
    with pytest.raises(InvalidParams, check=lambda error: error.detail.startswith("secret_digest")):
        ledger.attach(epoch, fresh.address, secret_digest=fresh.secret, identity=ELSEWHERE)
    assert dump(ledger) == before
    fresh.attach(ELSEWHERE)


def test_an_attached_childs_parent_still_ends_it(ledger, worker):
    child = worker.reserve()
    child.attach(ELSEWHERE)
    child.say("hello")
    worker.finish()
    with pytest.raises(StaleGeneration, check=lambda error: error.data == {"reason": "parent_finished"}):
        child.say("too late")


# --- discard --------------------------------------------------------------------------------------


def test_only_what_is_unknown_is_discarded(ledger, epoch, worker, clock):
    before = dump(ledger)
    with pytest.raises(AdmissionConflict, check=detail("execution_registered")):
        ledger.discard(worker.execution_id, by="operator")
    worker.adopt(epoch)
    with pytest.raises(AdmissionConflict, check=detail("execution_running")):
        ledger.discard(worker.execution_id, by="operator")
    with pytest.raises(NotFound):
        ledger.discard("nobody", by="operator")
    with pytest.raises(InvalidParams):
        ledger.discard("nobody\0", by="operator")
    lose(worker)
    clock.advance(minutes=1)
    hold = ledger.discard(worker.execution_id, by="operator", reason="gone for good")
    assert hold.status is Status.TERMINAL
    x = execution(ledger, worker)
    assert (x.outcome, x.status_reason, x.status_by, x.ended_at) == (
        "interrupted",
        "gone for good",
        "operator",
        clock.now,
    )
    assert row(ledger, sessions, session_id=worker.session_id).ended_at is None
    ended = dump(ledger)
    assert ledger.discard(worker.execution_id, by="another operator") == hold
    assert dump(ledger) == ended != before
    assert Worker(ledger, epoch, session_id=worker.session_id).register().generation == 2


def test_a_discard_ends_children_that_live_elsewhere(ledger, worker):
    child = worker.reserve()
    child.attach(ELSEWHERE)
    lose(worker)
    assert child.say("it still lives").sequence == 1
    ledger.discard(worker.execution_id, by="operator")
    assert execution(ledger, child).status_reason == "parent_finished"
    assert row(ledger, sessions, session_id=child.session_id).end_reason == "agent_close"


def test_a_child_cannot_be_discarded_from_under_its_parent(ledger, worker):
    child = worker.reserve()
    with pytest.raises(AdmissionConflict, check=detail("execution_running")):
        ledger.discard(child.execution_id, by="operator")


# --- history --------------------------------------------------------------------------------------


def test_history_tells_each_change_when_why_and_by_whom(ledger, epoch, clock):
    ledger.limits = Limits(3, 2)
    worker = Worker(ledger, epoch).register()
    at = [clock.now]
    for step in (
        lambda: worker.say("hello"),
        lambda: lose(worker),
        lambda: worker.adopt(epoch),
        lambda: ledger.recover(ledger.begin_epoch("the second owner")),
        lambda: worker.adopt(epoch + 1),
        worker.finish,
    ):
        clock.advance(minutes=1)
        at.append(clock.now)
        step()
    with ledger.read() as connection:
        history = reads.history(connection, worker.execution_id)
    me = worker.execution_id
    assert [(move.before, move.after, move.reason, move.by, move.epoch) for move in history] == [
        (None, "registered", "registered", "agents", 1),
        ("registered", "running", "first_receipt", me, 1),
        ("running", "unknown", "process_dead", "no_such_process", 1),
        ("unknown", "running", "adopted", me, 1),
        ("running", "unknown", "owner_restarted", "recovery of epoch 2", 2),
        ("unknown", "running", "adopted", me, 2),
        ("running", "terminal", "finished", me, 2),
    ]
    assert [move.at for move in history] == at
    x = execution(ledger, worker)
    assert (x.status_at, x.status_reason, x.status_by) == (history[-1].at, history[-1].reason, history[-1].by)


def test_each_history_is_a_chain_of_allowed_moves(ledger, epoch):
    """Every way of changing a status that there is, then each line of the history against the table."""
    ledger.limits = Limits(5, 2)
    finishes_at_once, by_receipt, by_adopting, lost_registered, waits, discards, expires, parent = (
        Worker(ledger, epoch).register() for _ in range(8)
    )
    finishes_at_once.finish()
    by_receipt.say("hello")
    by_adopting.adopt(epoch)
    for worker in (lost_registered, by_receipt, discards):
        lose(worker)
    by_receipt.adopt(epoch)
    ledger.discard(discards.execution_id, by="operator")
    child, dead, finished = (parent.reserve() for _ in range(3))
    child.reserve()
    finished.finish()
    lose(dead)
    now = ledger.begin_epoch("the second owner")
    ledger.recover(now)
    waits.adopt(now)
    orphan = parent
    orphan.adopt(now)
    orphan.reserve()
    orphan.finish()
    ledger.clock.advance(days=1)  # type: ignore[attr-defined]
    ledger.recover(now, unknown_grace=timedelta(hours=1))
    assert execution(ledger, expires).status_reason == "grace_expired"
    seen = set()
    for found in rows(ledger, worker_executions):
        status = None
        for move in rows(ledger, execution_transitions, execution_id=found.execution_id):
            assert move.from_status == status
            status = move.to_status
            seen.add((move.from_status, move.to_status))
        assert status == found.status
    assert seen == TRANSITIONS


def test_a_claim_binds_each_of_its_facts():
    facts: dict[str, Any] = {
        "profile": "p",
        "session_id": "s",
        "execution_id": "x",
        "generation": 1,
        "identity": HERE,
        "secret_digest": secret_digest("a secret of sixteen"),
        "principal": "q",
    }
    others = [
        *({name: "other"} for name in ("profile", "session_id", "execution_id", "secret_digest", "principal")),
        {"generation": 2},
        {"profile": "ps", "session_id": ""},
        *({"identity": replace(HERE, **{name: "other"})} for name in ("host", "birth")),
        {"identity": replace(HERE, pid=1)},
    ]
    digests = {claim_digest(**facts)} | {claim_digest(**(facts | other)) for other in others}
    assert len(digests) == len(others) + 1
    assert claim_digest(**facts) not in repr(Claim(claim_digest(**facts)))
    assert secret_digest("a secret of sixteen") not in digests
