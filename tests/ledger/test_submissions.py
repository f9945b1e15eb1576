"""Submissions: kept once, sent when due, given up after so many attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tenure.ledger import Death, Limits, secret_digest, submissions
from tenure.ledger.errors import AdmissionConflict, InvalidParams, NotFound, PermissionDenied, RuntimeDraining
from tenure.ledger.executions import Address
from tenure.ledger.schema import submissions as table
from tenure.ledger.submissions import MAX_PATIENCE, PATIENCE, Submission
from tests.ledger.kit import ELSEWHERE, HERE, Worker, row, rows

REQUEST = Submission("r1", "shop.check", '{"args":[17],"kwargs":{}}', "", "p1", "agents", 3)

pytestmark = pytest.mark.usefixtures("lawful")


def standing(ledger: Any, request_id: str = "r1", principal: str = "agents") -> Any:
    with ledger.read() as connection:
        return submissions.standing(connection, request_id, principal)


def requests(due: list[Any]) -> list[str]:
    return [one.request_id for one in due]


def begin(ledger: Any, epoch: int, due: Any, *, identity: Any = HERE) -> Worker:
    """Begin what was sent, as its worker does."""
    worker = Worker(ledger, epoch, due.execution_id, due.session_id, f"the secret of {due.key}", identity, due.profile)
    return worker.register()


def lose(ledger: Any, epoch: int, worker: Worker) -> None:
    ledger.recover(epoch, deaths=[Death(worker.execution_id, worker.identity, "no_such_process")])


def test_a_request_is_kept_once_and_the_same_one_is_answered_with_how_it_stands(ledger, epoch):
    first = ledger.submit(epoch, REQUEST)
    assert (first.status, first.reason) == (None, "submitted")
    assert first.session_id == f"{first.execution_id}.session"
    assert ledger.submit(epoch, replace(REQUEST, queue="other", max_attempts=9)) == first == standing(ledger)
    (due,) = ledger.take_due(epoch)
    worker = begin(ledger, epoch, due)
    worker.finish({"result": {"found": 1}})
    again = ledger.submit(epoch, REQUEST)
    assert (again.status, again.outcome, again.result) == ("terminal", "completed", {"found": 1})
    assert len(rows(ledger, table)) == 1
    assert ledger.take_due(epoch) == []


@pytest.mark.parametrize("change", [{"workflow": "shop.other"}, {"arguments": '{"args":[18],"kwargs":{}}'}])
def test_a_request_reused_with_something_else_is_refused(ledger, epoch, change):
    ledger.submit(epoch, REQUEST)
    with pytest.raises(AdmissionConflict) as refused:
        ledger.submit(epoch, replace(REQUEST, **change))
    assert (refused.value.detail, refused.value.data) == ("request_reused", {"workflow": "shop.check"})
    assert row(ledger, table).arguments == REQUEST.arguments


def test_a_request_is_its_principals(ledger, epoch):
    ledger.submit(epoch, REQUEST)
    with pytest.raises(PermissionDenied) as refused:
        ledger.submit(epoch, replace(REQUEST, principal="strangers"))
    assert refused.value.detail == "other_principal"
    with pytest.raises(NotFound):
        standing(ledger, principal="strangers")
    with pytest.raises(NotFound):
        standing(ledger, "r2")


MALFORMED: list[dict[str, Any]] = [
    {"request_id": "a b"},
    {"workflow": ""},
    {"profile": "ä"},
    {"principal": "x" * 129},
    {"queue": "a b"},
    {"arguments": "{"},
    {"arguments": '{"a": 1}'},
    {"max_attempts": 0},
    {"max_attempts": 1001},
    {"max_attempts": True},
]


@pytest.mark.parametrize("change", MALFORMED, ids=str)
def test_a_malformed_request_is_refused_by_its_field(ledger, epoch, change):
    with pytest.raises(InvalidParams) as refused:
        ledger.submit(epoch, replace(REQUEST, **change))
    assert next(iter(change)) in refused.value.detail
    assert rows(ledger, table) == []


def test_during_a_drain_a_new_request_is_refused_and_a_known_one_is_answered(ledger, epoch):
    first = ledger.submit(epoch, REQUEST)
    ledger.drain("an upgrade")
    assert ledger.submit(epoch, REQUEST) == first
    with pytest.raises(RuntimeDraining) as refused:
        ledger.submit(epoch, replace(REQUEST, request_id="r2"))
    assert refused.value.detail == "an upgrade"


# What is due.


def test_what_is_due_says_all_that_a_worker_needs(ledger, epoch):
    kept = ledger.submit(epoch, replace(REQUEST, queue="slow"))
    (due,) = ledger.take_due(epoch)
    assert (due.request_id, due.workflow, due.arguments) == ("r1", "shop.check", REQUEST.arguments)
    assert (due.queue, due.profile, due.parent_execution_id) == ("slow", "p1", None)
    assert (due.execution_id, due.session_id, due.key) == (kept.execution_id, kept.session_id, kept.execution_id)


def test_what_nobody_begins_is_due_again_after_a_patience_that_doubles_to_a_bound(ledger, epoch, clock):
    ledger.submit(epoch, REQUEST)
    patience, sent = PATIENCE, 0
    for _ in range(10):
        assert requests(ledger.take_due(epoch)) == ["r1"]
        sent += 1
        clock.advance(seconds=patience.total_seconds() - 1)
        assert ledger.take_due(epoch) == []
        clock.advance(seconds=1)
        patience = min(patience * 2, MAX_PATIENCE)
    assert patience == MAX_PATIENCE
    assert row(ledger, table).sent_count == sent


def test_what_the_broker_did_not_take_is_due_at_once(ledger, epoch):
    for number in (1, 2):
        ledger.submit(epoch, replace(REQUEST, request_id=f"r{number}"))
    ledger.take_due(epoch)
    ledger.not_sent(epoch, ["r2"])
    assert requests(ledger.take_due(epoch)) == ["r2"]


def test_what_a_living_process_holds_is_not_due(ledger, epoch, clock):
    ledger.submit(epoch, REQUEST)
    begin(ledger, epoch, ledger.take_due(epoch)[0])
    clock.advance(days=1)
    assert ledger.take_due(epoch) == []


def test_what_waits_does_not_hide_what_came_later(ledger, epoch, monkeypatch):
    """As when no worker takes from the queue of the older ones."""
    monkeypatch.setattr(submissions, "BATCH", 2)
    for number in range(3):
        ledger.submit(epoch, replace(REQUEST, request_id=f"old{number}", queue="nobody"))
    assert len(ledger.take_due(epoch) + ledger.take_due(epoch)) == 3
    ledger.submit(epoch, replace(REQUEST, request_id="new"))
    assert requests(ledger.take_due(epoch)) == ["new"]


def test_a_process_that_is_gone_makes_it_due_at_once_and_then_with_patience(ledger, epoch, clock):
    ledger.submit(epoch, REQUEST)
    worker = begin(ledger, epoch, ledger.take_due(epoch)[0])
    lose(ledger, epoch, worker)
    assert requests(ledger.take_due(epoch)) == ["r1"]
    assert ledger.take_due(epoch) == []
    clock.advance(seconds=2 * PATIENCE.total_seconds())
    assert requests(ledger.take_due(epoch)) == ["r1"]


def test_what_only_lost_its_owner_is_not_due(ledger, epoch, clock):
    ledger.submit(epoch, REQUEST)
    begin(ledger, epoch, ledger.take_due(epoch)[0])
    second = ledger.begin_epoch("the second owner")
    ledger.recover(second)
    clock.advance(days=1)
    assert ledger.take_due(second) == []


def test_after_so_many_attempts_it_is_given_up_with_that_reason(ledger, epoch):
    ledger.submit(epoch, replace(REQUEST, max_attempts=2))
    worker = begin(ledger, epoch, ledger.take_due(epoch)[0])
    lose(ledger, epoch, worker)
    assert requests(ledger.take_due(epoch)) == ["r1"]
    address = Address(epoch, worker.execution_id, worker.session_id, 1)
    digest = secret_digest(worker.secret)
    ledger.take_over(epoch, address, secret_digest=digest, identity=ELSEWHERE, gone=None)
    worker.identity = ELSEWHERE
    lose(ledger, epoch, worker)
    assert ledger.take_due(epoch) == []
    given_up = standing(ledger)
    assert (given_up.status, given_up.outcome, given_up.reason) == ("terminal", "interrupted", "attempts_exhausted")
    assert ledger.take_due(epoch) == []
    assert row(ledger, table).closed_at is not None


def test_one_that_is_given_up_does_not_keep_the_others(ledger, epoch):
    for name, attempts in (("r1", 1), ("r2", 3)):
        ledger.submit(epoch, replace(REQUEST, request_id=name, max_attempts=attempts))
    workers = [begin(ledger, epoch, due) for due in ledger.take_due(epoch)]
    for worker in workers:
        lose(ledger, epoch, worker)
    assert requests(ledger.take_due(epoch)) == ["r2"]


def test_what_has_ended_is_closed(ledger, epoch, clock):
    ledger.submit(epoch, REQUEST)
    begin(ledger, epoch, ledger.take_due(epoch)[0]).finish()
    assert row(ledger, table).closed_at is None
    clock.advance(seconds=5)
    ledger.take_due(epoch)
    assert row(ledger, table).closed_at == clock.now


# Children with work.


@pytest.fixture
def parent(ledger, epoch) -> Worker:
    return Worker(ledger, epoch).register()


def reserve(parent: Worker, label: str = "1.0", **work: Any) -> Any:
    facts = {"workflow": "shop.page", "arguments": '{"args":[],"kwargs":{}}', "key": f"k:{label}", "label": label}
    return parent.apply("child.reserve", {"secret_digest": secret_digest(f"secret {label}"), "work": facts | work})


def attach(parent: Worker, receipt: Any, label: str = "1.0") -> Worker:
    child = parent.child(receipt, f"secret {label}")
    child.attach(ELSEWHERE)
    return child


def test_a_child_with_work_is_due_until_a_process_attaches(ledger, epoch, parent, clock):
    receipt = reserve(parent, queue="slow")
    (due,) = ledger.take_due(epoch)
    assert (due.parent_execution_id, due.queue, due.key) == (parent.execution_id, "slow", "k:1.0")
    assert due.execution_id == receipt.result["execution_id"]
    clock.advance(seconds=PATIENCE.total_seconds())
    assert len(ledger.take_due(epoch)) == 1
    attach(parent, receipt)
    clock.advance(days=1)
    assert ledger.take_due(epoch) == []


def test_a_child_without_work_is_never_due(ledger, epoch, parent):
    parent.reserve()
    assert ledger.take_due(epoch) == []


def test_a_childs_end_is_no_reason_to_send_it_again(ledger, epoch, parent):
    receipt = reserve(parent)
    ledger.take_due(epoch)
    lose(ledger, epoch, attach(parent, receipt))
    assert ledger.take_due(epoch) == []


def test_a_child_that_was_retired_before_it_was_sent_is_not_due(ledger, epoch, parent):
    reserve(parent)
    parent.finish()
    assert ledger.take_due(epoch) == []


def test_a_child_goes_on_being_due_while_its_parents_process_is_gone(ledger, epoch, parent):
    reserve(parent)
    lose(ledger, epoch, parent)
    assert len(ledger.take_due(epoch)) == 1


def test_during_a_drain_and_over_the_cap_a_child_with_work_leaves_no_row(ledger, epoch, parent):
    ledger.drain("an upgrade")
    receipt = reserve(parent)
    assert receipt.result == {"refused": "runtime_draining", "detail": "an upgrade", "label": "1.0"}
    ledger.drain(None)
    ledger.limits = Limits(0, 1)
    assert reserve(parent, "1.1").refused == "delegation_capacity"
    assert rows(ledger, table) == []
