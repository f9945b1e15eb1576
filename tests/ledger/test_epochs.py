"""Epochs: each start of an owner fences everything before it, and what it finds is settled once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from tenure.ledger import Ledger, Limits, Status, reads, secret_digest
from tenure.ledger.errors import (
    ConfigurationError,
    OwnerSuperseded,
    PermissionDenied,
    RuntimeDraining,
    StaleEpoch,
    StaleGeneration,
)
from tenure.ledger.schema import epochs, runtime_epoch, sessions, worker_executions
from tests.ledger.kit import ELSEWHERE, Worker, dump, row, rows

pytestmark = pytest.mark.usefixtures("lawful")

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
HISTORY = {"status_at", "status_reason", "status_by"}  # how it came there, not where it stands


def status(ledger: Ledger, worker: Worker) -> str:
    return str(row(ledger, worker_executions, execution_id=worker.execution_id).status)


def restart(ledger: Ledger) -> int:
    """Begin a new epoch and recover, as an owner does when it starts."""
    epoch = ledger.begin_epoch("the next owner")
    ledger.recover(epoch)
    return epoch


def test_epochs_count_from_one_and_keep_their_owner(ledger, clock):
    assert row(ledger, runtime_epoch).epoch == 0
    for number in (1, 2, 3):
        clock.advance(minutes=1)
        assert ledger.begin_epoch(f"owner {number}") == number
        kept = row(ledger, epochs, epoch=number)
        assert (kept.owner, kept.began_at, kept.recovered_at, kept.released_at) == (
            f"owner {number}",
            clock.now,
            None,
            None,
        )
        current = row(ledger, runtime_epoch)
        assert (current.epoch, current.began_at) == (number, clock.now)


def test_owners_that_start_at_once_get_different_epochs(ledger):
    with ThreadPoolExecutor(8) as pool:
        begun = list(pool.map(lambda number: ledger.begin_epoch(f"owner {number}"), range(8)))
    assert sorted(begun) == list(range(1, 9))
    assert row(ledger, runtime_epoch).epoch == 8


def test_an_owner_that_left_in_good_order_is_told_from_one_that_did_not(ledger):
    first = ledger.begin_epoch("first")
    assert not ledger.predecessor_crashed(first)
    second = ledger.begin_epoch("second")
    assert ledger.predecessor_crashed(second)
    ledger.release(second)
    third = ledger.begin_epoch("third")
    assert not ledger.predecessor_crashed(third)
    fourth = ledger.begin_epoch("fourth")
    assert ledger.predecessor_crashed(fourth)


def test_an_older_owner_can_do_nothing(ledger, epoch, worker, subtests):
    child = worker.reserve()
    ledger.begin_epoch("the second owner")
    before = dump(ledger)
    actions = {
        "apply": lambda: ledger.apply(epoch, worker.request("transcript.append", HELLO)),
        "a replay": lambda: ledger.apply(
            epoch, worker.request("child.reserve", {"secret_digest": secret_digest(child.secret)}, sequence=1)
        ),
        "apply with care": lambda: ledger.apply(epoch, worker.request("transcript.append", HELLO), careful=True),
        "register": lambda: ledger.register(epoch, Worker(ledger, epoch).registration),
        "register again": lambda: ledger.register(epoch, worker.registration),
        "adopt": lambda: ledger.adopt(epoch, worker.address, worker.proof),
        "attach": lambda: replace(child).attach(ELSEWHERE),
        "recover": lambda: ledger.recover(epoch),
        "release": lambda: ledger.release(epoch),
        "look back": lambda: ledger.predecessor_crashed(epoch),
    }
    for name, action in actions.items():
        with subtests.test(name), pytest.raises(OwnerSuperseded) as superseded:
            action()
        assert isinstance(superseded.value, StaleEpoch)
        assert superseded.value.data == {"presented": 1, "epoch": 2}
    assert dump(ledger) == before


def test_an_owner_of_the_future_can_do_nothing(ledger, epoch, worker):
    with pytest.raises(OwnerSuperseded):
        ledger.apply(epoch + 1, worker.request("transcript.append", HELLO, epoch=epoch + 1))


def test_after_a_restart_roots_are_unknown_and_children_have_ended(ledger, epoch, clock):
    ledger.limits = Limits(3, 2)
    registered, running = (Worker(ledger, epoch).register() for _ in range(2))
    running.say("hello")
    child = running.reserve()
    grandchild = child.reserve()
    clock.advance(minutes=1)
    now = restart(ledger)
    for root in (registered, running):
        x = row(ledger, worker_executions, execution_id=root.execution_id)
        assert (x.status, x.status_reason, x.status_by, x.epoch) == (
            "unknown",
            "owner_restarted",
            "recovery of epoch 2",
            epoch,
        )
        assert (x.outcome, x.ended_at) == (None, None)
        assert row(ledger, sessions, session_id=root.session_id).ended_at is None
    for below in (child, grandchild):
        x = row(ledger, worker_executions, execution_id=below.execution_id)
        s = row(ledger, sessions, session_id=below.session_id)
        assert (x.status, x.status_reason, x.outcome, x.ended_at) == (
            "terminal",
            "owner_restarted",
            "interrupted",
            clock.now,
        )
        assert (s.end_reason, s.ended_at) == ("agent_close", clock.now)
    assert row(ledger, epochs, epoch=now).recovered_at == clock.now


@pytest.mark.parametrize("recovered", [False, True])
def test_late_writes_change_nothing(ledger, epoch, worker, subtests, recovered):
    worker.say("hello")
    child = worker.reserve()
    now = ledger.begin_epoch("the second owner")
    if recovered:
        ledger.recover(now)
    before = dump(ledger)
    for who, late in (("root", worker), ("child", child)):
        for presented, detail in ((epoch, "epoch_mismatch"), (now, "not_adopted")):
            for careful in (False, True):
                with subtests.test(who, detail=detail, careful=careful):
                    request = late.request("transcript.append", HELLO, epoch=presented)
                    with pytest.raises(StaleEpoch) as stale:
                        ledger.apply(now, request, careful=careful)
                    assert (stale.value.detail, stale.value.data) == (detail, {"epoch": now})
                    assert stale.value.action == "adopt"
    assert dump(ledger) == before


@pytest.mark.parametrize("recovered", [False, True])
def test_a_child_is_never_adopted_nor_attached_after_a_restart(ledger, epoch, worker, recovered):
    child, fresh = worker.reserve(), worker.reserve()
    child.say("hello")
    now = ledger.begin_epoch("the second owner")
    if recovered:
        ledger.recover(now)
    before = dump(ledger)
    for orphan in (child, fresh):
        orphan.epoch = now
        with pytest.raises(StaleGeneration) as refused:
            ledger.adopt(now, orphan.address, orphan.proof)
        assert refused.value.detail == "child_not_adoptable"
        with pytest.raises(StaleEpoch, check=lambda error: error.detail == "not_adopted"):
            replace(orphan).attach(ELSEWHERE)
    assert dump(ledger) == before


def test_a_root_adopts_with_its_own_secret_and_goes_on(ledger, epoch, worker):
    worker.say("hello")
    now = restart(ledger)
    before = dump(ledger)
    impostors = {
        "another secret": replace(worker, epoch=now, secret="the secret of somebody else"),
        "another process": replace(worker, epoch=now, identity=ELSEWHERE),
        "another principal": replace(worker, epoch=now, principal="others"),
        "another profile": replace(worker, epoch=now, profile="others"),
    }
    for impostor in impostors.values():
        with pytest.raises(PermissionDenied, check=lambda error: error.detail == "claim_mismatch"):
            ledger.adopt(now, impostor.address, impostor.proof)
    assert dump(ledger) == before
    hold = worker.adopt(now)
    assert (hold.status, hold.epoch, hold.generation, hold.last_sequence) == (Status.RUNNING, now, 1, 1)
    assert worker.say("going on").result == {"positions": [2]}
    first = worker.send(worker.request("transcript.append", HELLO, sequence=1))
    assert (first.replayed, first.result) == (True, {"positions": [1]})
    again = dump(ledger)
    assert worker.adopt(now) == replace(hold, last_sequence=2)
    assert dump(ledger) == again


def test_an_epoch_must_be_adopted_even_if_nobody_recovered(ledger, epoch, worker):
    now = ledger.begin_epoch("the second owner")
    with pytest.raises(StaleEpoch, check=lambda error: error.detail == "epoch_mismatch"):
        ledger.adopt(now, worker.address, worker.proof)
    assert worker.adopt(now).status is Status.RUNNING
    assert worker.say("hello").sequence == 1
    assert ledger.recover(now).empty


def standing(ledger: Ledger, people: dict[str, Worker]) -> dict[str, Any]:
    """Return every row about these people with their roles for their ids, without times and history."""
    roles = {worker.execution_id: name for name, worker in people.items()}
    roles |= {worker.session_id: f"session of {name}" for name, worker in people.items()}
    found: dict[str, Any] = {}
    with ledger.read() as connection:
        for table in (worker_executions, sessions):
            for mapping in connection.execute(table.select()).mappings():
                told = {
                    name: ("a time" if isinstance(value, datetime) else roles.get(value, value))
                    for name, value in mapping.items()
                    if name not in HISTORY | {"claim_digest", "model_config"}
                }
                if next(iter(mapping.values())) in roles:
                    found[told[table.primary_key.columns.keys()[0]]] = told
    return found


def test_recover_then_adopt_and_adopt_then_recover_end_alike(ledger, epoch):
    def family() -> dict[str, Worker]:
        root = Worker(ledger, epoch).register()
        root.say("hello")
        return {"root": root, "child": root.reserve(), "second child": root.reserve()}

    recovered_first, adopted_first = family(), family()
    now = ledger.begin_epoch("the second owner")
    adopted_first["root"].adopt(now)
    report = ledger.recover(now)
    recovered_first["root"].adopt(now)
    assert report.unknown == [recovered_first["root"].execution_id]
    assert len(report.retired) == 4
    assert len(standing(ledger, adopted_first)) == 6
    assert standing(ledger, recovered_first) == standing(ledger, adopted_first)
    for people in (recovered_first, adopted_first):
        assert people["root"].say("going on").refused is None
        assert people["root"].reserve().say("a new child").sequence == 1


def test_a_child_of_the_new_epoch_survives_its_recovery(ledger, epoch, worker):
    """An owner recovers before it consumes; should it not, what the new epoch has made is not taken for old."""
    old = worker.reserve()
    now = ledger.begin_epoch("the second owner")
    worker.adopt(now)
    new = worker.reserve()
    assert ledger.recover(now).retired == [old.execution_id]
    assert new.say("hello").sequence == 1


def test_recovery_twice_is_recovery_once(ledger, epoch, worker, clock):
    worker.reserve()
    now = ledger.begin_epoch("the second owner")
    report = ledger.recover(now)
    assert not report.empty
    before = dump(ledger)
    clock.advance(minutes=1)
    assert ledger.recover(now).empty
    after = dump(ledger)
    assert len(after.pop("recovery_passes")) == len(before.pop("recovery_passes")) + 1
    assert after == before


def test_an_unknown_root_stays_so_through_further_restarts(ledger, epoch, worker):
    worker.say("hello")
    for _ in range(3):
        now = restart(ledger)
    assert status(ledger, worker) == "unknown"
    with ledger.read() as connection:
        assert len(reads.history(connection, worker.execution_id)) == 3  # registered, running, unknown
    worker.adopt(now)
    assert worker.say("after all that").sequence == 2


def test_a_drain_lasts_through_restarts_until_it_is_lifted(ledger, epoch, worker, clock):
    ledger.drain("an upgrade")
    since = clock.now
    clock.advance(minutes=1)
    now = restart(ledger)
    worker.adopt(now)
    with pytest.raises(RuntimeDraining) as draining:
        ledger.register(now, Worker(ledger, now).registration)
    assert (draining.value.detail, draining.value.action) == ("an upgrade", "later")
    assert ledger.register(now, worker.registration).execution_id == worker.execution_id
    assert worker.apply("child.reserve", {"secret_digest": secret_digest("x" * 16)}).refused == "runtime_draining"
    kept = row(ledger, runtime_epoch)
    assert (kept.drain_reason, kept.drain_since) == ("an upgrade", since)
    ledger.drain(None)
    assert row(ledger, runtime_epoch).drain_since is None
    Worker(ledger, now).register()
    assert len(rows(ledger, worker_executions)) == 2


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_a_drain_needs_a_reason(ledger, reason):
    with pytest.raises(ConfigurationError):
        ledger.drain(reason)
    assert row(ledger, runtime_epoch).drain_reason is None
