"""Children: minted for their parent, capped, each with its own session only, ended with their parent."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tenure.ledger import Ledger, Limits, Receipt, secret_digest
from tenure.ledger import children as children_module
from tenure.ledger.children import MARKER
from tenure.ledger.errors import (
    AdmissionConflict,
    ConfigurationError,
    PermissionDenied,
    SequenceGap,
    StaleGeneration,
    TenureError,
)
from tenure.ledger.schema import execution_transitions, sessions, worker_executions
from tenure.ledger.transaction import Transaction
from tests.ledger.kit import ELSEWHERE, HERE, Worker, dump, row, rows

pytestmark = pytest.mark.usefixtures("lawful")


class TakenBack(Exception):
    """Ends a transaction that is not to be kept."""


HELLO = {"messages": [{"role": "user", "content": "hello"}]}
RESERVE = {"secret_digest": secret_digest("the secret of a child")}


def reserve(worker: Worker) -> Receipt:
    """Send a reservation that may be refused."""
    return worker.apply("child.reserve", RESERVE)


def marker(ledger: Ledger, session_id: str) -> Any:
    return json.loads(row(ledger, sessions, session_id=session_id).model_config)


def execution(ledger: Ledger, worker: Worker) -> Any:
    return row(ledger, worker_executions, execution_id=worker.execution_id)


def session(ledger: Ledger, worker: Worker) -> Any:
    return row(ledger, sessions, session_id=worker.session_id)


def without(before: dict[str, Any], after: dict[str, Any], *tables: str) -> bool:
    """Return whether nothing else has changed."""
    return all(before[name] == after[name] for name in before if name not in tables)


def test_a_child_is_minted_with_its_origin_and_runs(ledger, epoch):
    parent = Worker(ledger, epoch, profile="tenant-7", principal="fleet").register()
    parent.say("hello")
    receipt = reserve(parent)
    child = parent.child(receipt, "the secret of a child")
    x, s = execution(ledger, child), session(ledger, child)
    assert (x.kind, x.status, x.depth, x.last_sequence, x.epoch) == ("child", "running", 1, 0, epoch)
    assert (x.parent_execution_id, x.reserved_sequence) == (parent.execution_id, 2)
    assert (x.profile, x.principal, x.host, x.pid) == ("tenant-7", "fleet", HERE.host, HERE.pid)
    assert (x.attached_at, x.outcome, x.ended_at, x.result) == (None, None, None, None)
    assert (s.source, s.parent_session_id, s.profile) == ("subagent", parent.session_id, "tenant-7")
    assert (s.generation, s.revision, s.message_count, s.ended_at) == (1, 0, 0, None)
    assert s.model_config == f'{{"_delegate_from":"{parent.session_id}"}}'
    (made,) = rows(ledger, execution_transitions, execution_id=child.execution_id)
    assert (made.from_status, made.to_status, made.reason, made.by) == (
        None,
        "running",
        "reserved",
        parent.execution_id,
    )
    assert receipt.result == {
        "execution_id": child.execution_id,
        "session_id": child.session_id,
        "generation": 1,
        "depth": 1,
    }


def test_a_child_has_its_own_stream_and_its_own_session(ledger, worker):
    child = worker.reserve()
    assert child.say("from the child").sequence == 1
    assert worker.say("from the parent").sequence == 2
    assert session(ledger, child).message_count == session(ledger, worker).message_count == 1
    before = dump(ledger)
    for other in ({"session_id": worker.session_id}, {"session_id": "nobody"}):
        with pytest.raises(PermissionDenied, check=lambda error: error.detail == "other_session"):
            child.send(child.request("transcript.append", HELLO, **other))
    with pytest.raises(PermissionDenied, check=lambda error: error.detail == "claim_mismatch"):
        worker.send(replace(worker.request("transcript.append", HELLO), proof=child.proof))
    with pytest.raises(PermissionDenied, check=lambda error: error.detail == "claim_mismatch"):
        child.send(replace(child.request("transcript.append", HELLO), proof=worker.proof))
    assert dump(ledger) == before
    assert child.say("its sequence is still free").sequence == 2


def test_the_marker_stays_whatever_a_child_says(ledger, worker, subtests):
    tries: list[Any] = [
        {"max_iterations": 7},
        {"max_iterations": 7, MARKER: "somebody else"},
        {"max_iterations": 7, MARKER: None},
        {"max_iterations": 7, MARKER: {}},
    ]
    for config in tries:
        with subtests.test(repr(config)):
            child = worker.reserve()
            child.apply("session.create", {"source": "not a subagent", "model": "m", "model_config": config})
            assert marker(ledger, child.session_id) == {"max_iterations": 7, MARKER: worker.session_id}
            kept = session(ledger, child)
            assert (kept.source, kept.model, kept.revision) == ("subagent", "m", 1)
            child.finish()


@pytest.mark.parametrize("config", [None, {}])
def test_the_marker_stays_when_nothing_is_said(ledger, worker, config):
    child = worker.reserve()
    child.apply("session.create", {"source": "s", "model_config": {"temperature": 0.5}})
    child.apply("session.create", {"source": "s", "model_config": config})
    assert marker(ledger, child.session_id) == {"temperature": 0.5, MARKER: worker.session_id}


def test_a_refused_child_is_data_and_leaves_nothing_but_its_receipt(ledger, epoch, subtests):
    ledger.limits = Limits(2, 1)
    parent = Worker(ledger, epoch).register()
    child = parent.reserve()
    parent.reserve()
    deep = {"refused": "delegation_depth_exceeded", "max_spawn_depth": 1, "depth": 1}
    full = {"refused": "delegation_capacity", "max_concurrent_children": 2, "live_children": 2}
    draining = {"refused": "runtime_draining", "detail": "an upgrade"}
    cases = [("depth", child, None, deep), ("capacity", parent, None, full)]
    cases += [("drain before depth", child, "an upgrade", draining)]
    cases += [("drain before capacity", parent, "an upgrade", draining)]
    for what, worker, drain, expected in cases:
        with subtests.test(what):
            ledger.drain(drain)
            before = dump(ledger)
            receipt = reserve(worker)
            assert (receipt.result, receipt.refused) == (expected, expected["refused"])
            assert without(before, after := dump(ledger), "worker_receipts", "worker_executions")
            assert len(after["worker_receipts"]) == len(before["worker_receipts"]) + 1
            assert len(after["worker_executions"]) == len(before["worker_executions"])
            ledger.drain(None)
            again = worker.send(worker.request("child.reserve", RESERVE, sequence=receipt.sequence))
            assert again == replace(receipt, replayed=True)
            assert worker.say("the next sequence").sequence == receipt.sequence + 1


def test_depth_is_told_before_capacity(ledger, epoch):
    ledger.limits = Limits(1, 2)
    parent = Worker(ledger, epoch).register()
    child = parent.reserve()
    grandchild = child.reserve()
    assert reserve(grandchild).result == {
        "refused": "delegation_depth_exceeded",
        "max_spawn_depth": 2,
        "depth": 2,
    }
    ledger.limits = Limits(0, 0)
    assert reserve(parent).refused == "delegation_depth_exceeded"


def test_a_drain_lets_everything_but_children_go_on(ledger, worker):
    child = worker.reserve()
    ledger.drain("an upgrade")
    assert child.say("hello").refused is None
    assert child.finish().refused is None
    assert worker.finish().refused is None


@pytest.mark.parametrize("limits", [Limits(0, 1), Limits(3, 0), Limits(0, 0)])
def test_zero_means_none(ledger, worker, limits):
    ledger.limits = limits
    refusals = {reserve(worker).refused for _ in range(3)}
    assert refusals == {"delegation_capacity" if limits.max_spawn_depth else "delegation_depth_exceeded"}
    assert len(rows(ledger, worker_executions)) == 1


@pytest.mark.parametrize("value", [True, False, -1, 1.5, 1.0, "3", None, 1001, float("nan"), []])
@pytest.mark.parametrize("name", ["max_concurrent_children", "max_spawn_depth"])
def test_limits_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigurationError, check=lambda error: error.detail.startswith(f"{name}: ")):
        Limits(**{name: value})


def test_the_bounds_of_the_limits():
    assert (Limits(), Limits(1000, 16), Limits(0, 0)) == (Limits(3, 1), Limits(1000, 16), Limits(0, 0))
    with pytest.raises(ConfigurationError, check=lambda error: "0 to 16" in error.detail):
        Limits(3, 17)
    with pytest.raises(ConfigurationError, check=lambda error: "an integer beyond 64 bits" in error.detail):
        Limits(10**5000)


def test_a_reservation_sent_twice_is_one_child(ledger, worker):
    receipt = reserve(worker)
    before = dump(ledger)
    for _ in range(3):
        again = worker.send(worker.request("child.reserve", RESERVE, sequence=1))
        assert again == replace(receipt, replayed=True)
    with pytest.raises(AdmissionConflict):
        worker.send(worker.request("child.reserve", {"secret_digest": secret_digest("another one")}, sequence=1))
    assert dump(ledger) == before


def test_finishing_a_child_frees_one_slot_and_its_replay_frees_none(ledger, epoch):
    ledger.limits = Limits(2, 1)
    parent = Worker(ledger, epoch).register()
    first, second = parent.reserve(), parent.reserve()
    assert reserve(parent).refused == "delegation_capacity"
    finish = first.request("execution.finish", {})
    assert not first.send(finish).replayed
    assert first.send(finish).replayed
    third = parent.reserve()
    assert reserve(parent).result["live_children"] == 2
    assert first.send(finish).replayed
    assert reserve(parent).refused == "delegation_capacity"
    second.finish()
    third.finish()
    parent.reserve()
    parent.reserve()
    assert reserve(parent).refused == "delegation_capacity"


def test_a_childs_finish_ends_its_session_and_keeps_its_outcome(ledger, worker):
    child = worker.reserve()
    child.say("hello")
    receipt = child.finish({"outcome": "failed", "result": {"error": "no luck"}})
    assert receipt.result == {"outcome": "failed", "retired": []}
    x, s = execution(ledger, child), session(ledger, child)
    assert (x.status, x.outcome, json.loads(x.result)) == ("terminal", "failed", {"error": "no luck"})
    assert (x.status_reason, x.status_by, x.ended_at) == ("finished", child.execution_id, ledger.clock())
    assert (s.end_reason, s.ended_at, s.revision) == ("agent_close", ledger.clock(), 2)
    assert session(ledger, worker).ended_at is None
    with pytest.raises(StaleGeneration, check=lambda error: error.detail == "execution_terminal"):
        child.say("too late")


def test_a_session_that_a_child_has_ended_itself_keeps_its_reason(ledger, epoch, clock):
    ledger.limits = Limits(3, 2)
    parent = Worker(ledger, epoch).register()
    by_finish, by_parent = parent.reserve(), parent.reserve()
    ended = clock.now
    for child in (by_finish, by_parent):
        child.apply("session.end", {"end_reason": "its own reason"})
    clock.advance(minutes=1)
    by_finish.finish()
    parent.finish()
    for child in (by_finish, by_parent):
        kept = session(ledger, child)
        assert (kept.end_reason, kept.ended_at, kept.revision) == ("its own reason", ended, 1)
        assert execution(ledger, child).status == "terminal"


def family(ledger: Ledger, epoch: int) -> dict[str, Worker]:
    """Return a root with two children and three grandchildren, one child and one grandchild finished."""
    ledger.limits = Limits(3, 2)
    root = Worker(ledger, epoch, session_id="root").register()
    a, b = root.reserve(), root.reserve()
    found = {"root": root, "a": a, "b": b, "aa": a.reserve(), "ab": a.reserve(), "ba": b.reserve()}
    found["aa"].finish({"outcome": "completed", "result": 1})
    return found


def test_a_parents_finish_ends_every_descendant_and_their_sessions_only(ledger, epoch, clock):
    people = family(ledger, epoch)
    # Ids that begin like those that end: another root's session, and one that is held.
    alike = Worker(ledger, epoch, session_id=people["a"].session_id + "-and-more").register()
    other = Worker(ledger, epoch).register()
    nephew = other.reserve()
    clock.advance(minutes=1)
    receipt = people["root"].finish()
    live = [people[name].execution_id for name in ("a", "b", "ab", "ba")]
    assert receipt.result == {"outcome": "completed", "retired": sorted(live)}
    for name in ("a", "b", "ab", "ba"):
        x, s = execution(ledger, people[name]), session(ledger, people[name])
        assert (x.status, x.outcome, x.result, x.ended_at) == ("terminal", "interrupted", None, clock.now)
        assert (x.status_reason, x.status_by) == ("parent_finished", people["root"].execution_id)
        assert (s.end_reason, s.ended_at, s.revision) == ("agent_close", clock.now, {"a": 3, "b": 2}.get(name, 1))
        last = rows(ledger, execution_transitions, execution_id=people[name].execution_id)[-1]
        assert (last.from_status, last.to_status, last.reason) == ("running", "terminal", "parent_finished")
        with pytest.raises(StaleGeneration, check=lambda error: error.data == {"reason": "parent_finished"}):
            people[name].say("too late")
    finished = execution(ledger, people["aa"])
    assert (finished.outcome, finished.status_reason, finished.result) == ("completed", "finished", "1")
    for untouched in (people["root"], alike, other, nephew):
        assert session(ledger, untouched).ended_at is None
    for living in (alike, other, nephew):
        assert living.say("still here").refused is None


def test_a_childs_finish_ends_its_own_children_only(ledger, epoch):
    people = family(ledger, epoch)
    assert people["a"].finish().result["retired"] == [people["ab"].execution_id]
    for living in ("root", "b", "ba"):
        assert people[living].say("still here").refused is None


def test_grandchildren_count_for_their_own_parent(ledger, epoch):
    people = family(ledger, epoch)
    assert [execution(ledger, people[name]).depth for name in ("root", "a", "aa")] == [0, 1, 2]
    assert reserve(people["ab"]).result == {"refused": "delegation_depth_exceeded", "max_spawn_depth": 2, "depth": 2}
    people["root"].reserve()
    assert reserve(people["root"]).result["live_children"] == 3
    people["a"].reserve()
    people["a"].reserve()
    assert reserve(people["a"]).result["live_children"] == 3
    assert marker(ledger, people["ab"].session_id) == {MARKER: people["a"].session_id}


def test_more_descendants_than_a_statement_may_name(ledger, epoch, monkeypatch):
    monkeypatch.setattr(children_module, "IDS_PER_STATEMENT", 2)
    people = family(ledger, epoch)
    assert len(people["root"].finish().result["retired"]) == 4
    assert {x.status for x in rows(ledger, worker_executions)} == {"terminal"}


def test_an_end_sees_what_the_same_transaction_has_changed(ledger, epoch):
    """A child that was read, or minted, in the transaction that ends it is written once, as ended."""
    people = family(ledger, epoch)

    def look(tx: Transaction) -> None:
        child = tx.execution(people["b"].execution_id)
        tx.session(people["b"].session_id).model = "a model"
        minted = children_module.mint(tx, child, 99, RESERVE["secret_digest"], tx.limits)
        ended = children_module.retire_descendants(tx, [people["root"].execution_id], reason="r", by="b")
        assert minted.execution_id in ended
        tx.flush()
        for execution_id in (child.execution_id, minted.execution_id):
            assert tx.execution(execution_id).status == "terminal"
            assert tx.session(tx.execution(execution_id).session_id).end_reason == "agent_close"
        assert tx.session(people["b"].session_id).model == "a model"
        raise TakenBack  # no receipt names that child

    with pytest.raises(TakenBack), ledger.transaction(epoch) as tx:
        look(tx)


def test_no_secret_is_stored(ledger, worker):
    child = worker.reserve("the secret nobody may read")
    child.attach(ELSEWHERE)
    child.finish()
    stored = repr(dump(ledger))
    for secret in (worker.secret, child.secret):
        assert secret not in stored
        assert secret_digest(secret) not in stored


def test_fifty_reservations_at_once_never_exceed_the_cap(ledger, worker):
    cap = 10
    ledger.limits = Limits(cap, 1)
    started = threading.Barrier(50)

    def one(number: int) -> Receipt:
        payload = {"secret_digest": secret_digest(f"the secret of child {number}")}
        started.wait()
        sequence = 1
        while True:  # ends: each round somebody takes a sequence, and there are fifty of them
            try:
                return worker.send(worker.request("child.reserve", payload, sequence=sequence))
            except AdmissionConflict:
                sequence += 1
            except SequenceGap as gap:
                sequence = gap.data["expected"]

    with ThreadPoolExecutor(50) as pool:
        receipts = list(pool.map(one, range(50)))
    assert sorted(receipt.sequence for receipt in receipts) == list(range(1, 51))
    granted = [receipt for receipt in receipts if not receipt.refused]
    assert len({receipt.result["execution_id"] for receipt in granted}) == cap
    assert [receipt.sequence for receipt in sorted(granted, key=lambda r: r.sequence)] == list(range(1, cap + 1))
    assert len(rows(ledger, worker_executions, kind="child", status="running")) == cap


def test_a_childs_claim_is_not_a_claim_on_anything_else(ledger, worker):
    one, two = worker.reserve("the same secret for both"), worker.reserve("the same secret for both")
    with pytest.raises(TenureError, check=lambda error: error.detail == "claim_mismatch"):
        two.send(replace(two.request("transcript.append", HELLO), proof=one.proof))
