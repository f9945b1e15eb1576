"""The desk's answers about workflows: HOLD, HISTORY, SUBMIT, LOOKUP and PROBE. Each goes there and back as JSON."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tenure.ledger import Ledger, Status, hosts, reads, secret_digest
from tenure.tasks.client import hold_from_json
from tenure.tasks.desk import MAX_PAGE
from tenure.tasks.keys import Principal
from tenure.tasks.liveness import identity_of
from tenure.tasks.orders import Order
from tenure.tasks.wire import Answer, Control
from tests.ledger.kit import dump
from tests.tasks.kit import ALICE, BOB, ELSEWHERE, HERE, Desk, Holder, open_ledger, registration, said, say

CAROL = Principal.of("carol", b"c" * 32)


@pytest.fixture
def ledger(emptied_url: str) -> Iterator[Ledger]:
    with open_ledger(emptied_url) as opened:
        yield opened


@pytest.fixture
def sent() -> list[Order]:
    return []


@pytest.fixture
def desk(ledger: Ledger, sent: list[Order]) -> Desk:
    made = Desk(ledger)
    made.owner.keyring._principals["carol"] = CAROL
    made.owner.send = lambda orders: sent.extend(orders) or []
    return made


def reason(answer: Answer) -> tuple[str, str]:
    """Return why it was refused."""
    assert answer.error is not None, answer
    return answer.error["reason"], answer.error["detail"]


def request(**changes: Any) -> dict[str, Any]:
    body = {
        "request": "r1",
        "workflow": "shop.check",
        "arguments": '{"args":[17],"kwargs":{}}',
        "queue": "",
        "profile": "default",
        "attempts": 3,
    }
    return body | changes


def hold_body(holder: Holder | None = None, *, identity: Any = HERE, **changes: Any) -> dict[str, Any]:
    """Return the body by which a worker takes hold of an execution, its own or one that another had."""
    body = registration(identity=identity) | {"epoch": 1}
    del body["source"]
    if holder is not None:
        hold = holder.hold
        body |= {"execution": hold.execution_id, "session": hold.session_id, "secret": secret_digest(holder.secret)}
    return body | changes


@pytest.fixture
def elsewhere(desk: Desk) -> Holder:
    """An execution that a process of another host holds."""
    return replace(desk.register(identity=ELSEWHERE), identity=ELSEWHERE)


# HOLD.


def test_the_first_to_take_hold_registers(desk, ledger):
    watched: list[Any] = []
    desk.owner.watch = watched.extend
    body = hold_body()
    answer = desk.control(Control.HOLD, body)
    hold = hold_from_json(answer.value)
    assert (hold.execution_id, hold.status, hold.generation) == (body["execution"], Status.REGISTERED, 1)
    assert watched == [HERE]
    assert desk.control(Control.HOLD, body).value == answer.value
    with ledger.read() as connection:
        assert reads.session(connection, hold.session_id).source == "workflow"


def test_what_a_living_process_holds_is_refused(desk, elsewhere, ledger):
    before = dump(ledger)
    assert reason(desk.control(Control.HOLD, hold_body(elsewhere))) == ("admission_conflict", "held")
    assert dump(ledger) == before


def test_what_was_found_gone_is_taken_over(desk, elsewhere, ledger):
    desk.run(elsewhere.message(("transcript.append", say("one"))))
    desk.owner.bury(ELSEWHERE, "stopped")
    watched: list[Any] = []
    desk.owner.watch = watched.extend
    hold = hold_from_json(desk.control(Control.HOLD, hold_body(elsewhere)).value)
    assert (hold.generation, hold.status, hold.last_sequence) == (2, Status.RUNNING, 1)
    assert watched == [HERE]
    second = Holder(hold, elsewhere.secret)
    (late,) = desk.run(elsewhere.message(("transcript.append", say("a byte")), first=2))
    assert late.error["reason"] == "stale_generation"
    (told,) = desk.run(second.message(("transcript.append", say("two")), first=2))
    assert told.error is None
    assert said(ledger, hold.session_id) == ["one", "two"]


def test_the_owner_proves_for_itself_that_a_process_of_its_host_is_gone(desk, spawn):
    sleeper = spawn("sleep", "300")
    identity = identity_of(sleeper.pid)
    holder = replace(desk.register(identity=identity), identity=identity)
    assert reason(desk.control(Control.HOLD, hold_body(holder))) == ("admission_conflict", "held")
    sleeper.signal(signal.SIGKILL)
    sleeper.wait(within=10)
    assert hold_from_json(desk.control(Control.HOLD, hold_body(holder)).value).generation == 2


def test_what_has_ended_is_answered_as_it_is(desk, elsewhere):
    desk.run(elsewhere.message(("execution.finish", {})))
    assert hold_from_json(desk.control(Control.HOLD, hold_body(elsewhere)).value).status is Status.TERMINAL


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"secret": secret_digest("some other secret")}, ("permission_denied", "claim_mismatch")),
        ({"session": "another"}, ("permission_denied", "other_session")),
        ({"kind": "child"}, ("invalid_params", "kind")),
        ({"identity": replace(HERE, birth="ticks:1")}, ("permission_denied", "process_other_birth")),
        ({"profile": 5}, ("invalid_params", "profile")),
    ],
    ids=lambda v: f"{v!r:.24}",
)
def test_who_may_not_take_hold_is_refused_and_changes_nothing(desk, elsewhere, ledger, change, expected):
    desk.owner.bury(ELSEWHERE, "no_such_process")
    before = dump(ledger)
    told = reason(desk.control(Control.HOLD, hold_body(elsewhere, **change)))
    assert told[0] == expected[0]
    assert told[1].startswith(expected[1])
    assert dump(ledger) == before


def test_another_principal_cannot_take_over(desk, elsewhere):
    desk.owner.bury(ELSEWHERE, "no_such_process")
    theirs = secret_digest(CAROL.derive(elsewhere.hold.execution_id))
    answer = desk.control(Control.HOLD, hold_body(elsewhere, secret=theirs), principal=CAROL)
    assert reason(answer) == ("permission_denied", "claim_mismatch")
    answer = desk.control(Control.HOLD, hold_body(elsewhere), principal=BOB)
    assert reason(answer) == ("permission_denied", "capability_register")


def test_a_session_that_somebody_else_holds_is_no_takeover(desk, elsewhere):
    body = hold_body(session=elsewhere.hold.session_id)
    assert reason(desk.control(Control.HOLD, body)) == ("admission_conflict", "session_held")


def test_during_a_drain_a_new_hold_is_refused_and_a_takeover_is_not(desk, elsewhere, ledger):
    desk.owner.bury(ELSEWHERE, "no_such_process")
    ledger.drain("an upgrade")
    assert reason(desk.control(Control.HOLD, hold_body())) == ("runtime_draining", "an upgrade")
    assert hold_from_json(desk.control(Control.HOLD, hold_body(elsewhere)).value).generation == 2


# HISTORY.


def history(desk: Desk, holder: Holder, *, after: Any = 0, limit: Any = 100, **changes: Any) -> Answer:
    body = holder.proved(Control.HISTORY) | {"after": after, "limit": limit} | changes
    return desk.control(Control.HISTORY, body)


def test_a_holder_is_told_what_its_execution_did(desk):
    holder = desk.register()
    step = {"name": "fetch", "input_digest": "0" * 64, "result": {"value": [1]}}
    desk.run(
        holder.message(("transcript.append", say("a")), ("step.record", step), ("session.end", {"end_reason": "e"}))
    )
    told = history(desk, holder).value["receipts"]
    assert [(one["sequence"], one["operation"]) for one in told] == [
        (1, "transcript.append"),
        (2, "step.record"),
        (3, "session.end"),
    ]
    assert told[0]["result"] == {"positions": [1]}
    assert told[0]["step"] is None
    assert told[1]["step"] == step | {"sequence": 2}
    assert len(told[0]["digest"]) == 64
    page = history(desk, holder, after=1, limit=1).value["receipts"]
    assert page == told[1:2]
    assert history(desk, holder, after=3).value["receipts"] == []


@pytest.mark.parametrize(
    "page", [{"after": -1}, {"limit": 0}, {"limit": MAX_PAGE + 1}, {"after": "0"}, {"limit": True}]
)
def test_a_page_out_of_range_is_refused(desk, page):
    assert reason(history(desk, desk.register(), **page))[0] == "invalid_params"


def test_the_history_is_its_holders(desk):
    holder, other = desk.register(), desk.register()
    for change in ({"proof": "0" * 64}, {"proof": other.proved(Control.HISTORY)["proof"]}):
        assert reason(history(desk, holder, **change)) == ("permission_denied", "claim_mismatch")
    body = holder.proved(Control.INSPECT) | {"after": 0, "limit": 1}  # made for another purpose
    assert reason(desk.control(Control.HISTORY, body)) == ("permission_denied", "claim_mismatch")
    assert reason(history(desk, holder, execution="nobody"))[0] == "not_found"


# SUBMIT and LOOKUP.


def test_a_submission_is_kept_and_sent_once(desk, sent):
    first = desk.control(Control.SUBMIT, request(queue="slow"))
    again = desk.control(Control.SUBMIT, request(queue="slow"))
    assert first.value == again.value
    assert (first.value["status"], first.value["reason"]) == (None, "submitted")
    (order,) = sent
    assert (order.request, order.workflow, order.queue, order.epoch) == ("r1", "shop.check", "slow", desk.owner.epoch)
    assert (order.execution, order.session) == (first.value["execution_id"], first.value["session_id"])
    assert Order.from_json(order.to_json()) == order
    assert order.parent == ""


def test_a_submission_is_looked_up_by_who_made_it(desk):
    kept = desk.control(Control.SUBMIT, request()).value
    assert desk.control(Control.LOOKUP, {"request": "r1"}).value == kept
    assert reason(desk.control(Control.LOOKUP, {"request": "r1"}, principal=CAROL)) == ("not_found", "request")
    assert reason(desk.control(Control.LOOKUP, {"request": "r2"})) == ("not_found", "request")


def test_a_lookup_tells_the_result(desk, sent):
    desk.control(Control.SUBMIT, request())
    (order,) = sent
    secret = ALICE.derive(order.key)
    body = hold_body(execution=order.execution, session=order.session, secret=secret_digest(secret))
    holder = Holder(hold_from_json(desk.control(Control.HOLD, body).value), secret)
    desk.run(holder.message(("execution.finish", {"outcome": "failed", "result": {"error": "e"}})))
    told = desk.control(Control.LOOKUP, {"request": "r1"}).value
    assert (told["status"], told["outcome"], told["result"]) == ("terminal", "failed", {"error": "e"})


def test_a_request_reused_and_one_of_another_principal_are_refused(desk, sent, ledger):
    desk.control(Control.SUBMIT, request())
    before = dump(ledger)
    answer = desk.control(Control.SUBMIT, request(arguments='{"args":[],"kwargs":{}}'))
    assert reason(answer) == ("admission_conflict", "request_reused")
    assert reason(desk.control(Control.SUBMIT, request(), principal=CAROL)) == ("permission_denied", "other_principal")
    answer = desk.control(Control.SUBMIT, request(request="r2"), principal=BOB)
    assert reason(answer) == ("permission_denied", "capability_submit")
    assert dump(ledger) == before
    assert len(sent) == 1


@pytest.mark.parametrize(
    "change",
    [{"request": 5}, {"workflow": "a b"}, {"arguments": 5}, {"arguments": "{"}, {"attempts": 0}, {"queue": None}],
    ids=str,
)
def test_a_malformed_submission_is_refused(desk, sent, change):
    assert reason(desk.control(Control.SUBMIT, request(**change)))[0] == "invalid_params"
    assert sent == []


def test_what_the_broker_does_not_take_goes_with_the_next_pass(desk, sent):
    takes = desk.owner.send
    desk.owner.send = lambda orders: [order.request for order in orders]
    assert desk.control(Control.SUBMIT, request()).error is None
    desk.owner.send = takes
    desk.owner.recover(unknown_grace=None)
    assert [order.request for order in sent] == ["r1"]


def test_a_reserved_child_with_work_is_sent_with_its_parent(desk, sent):
    holder = desk.register()
    work = {"workflow": "shop.page", "arguments": "{}", "key": "k:1.0", "label": "1.0"}
    secret = secret_digest(ALICE.derive("k:1.0"))
    (told,) = desk.run(holder.message(("child.reserve", {"secret_digest": secret, "work": work})))
    (order,) = sent
    assert (order.execution, order.parent) == (told.value["execution_id"], holder.hold.execution_id)
    assert told.value["label"] == "1.0"


# PROBE.


def probe(desk: Desk, *, lost: Any = (), principal: Principal = ALICE, **changes: Any) -> Answer:
    body = {"host": ELSEWHERE.host, "boot": ELSEWHERE.boot, "seconds": 30.0, "lost": list(lost)} | changes
    return desk.control(Control.PROBE, body, principal=principal)


def loss(identity: Any, evidence: Any = "no_such_process") -> dict[str, Any]:
    return {"identity": asdict(identity), "evidence": evidence}


def test_a_probe_renews_its_hosts_lease_and_is_told_whom_to_watch(desk, elsewhere, ledger):
    desk.register()  # of this host
    assert probe(desk).value == {"watch": [asdict(ELSEWHERE)]}
    with ledger.read() as connection:
        (host,) = hosts.known(connection)
    assert (host.host, host.boot) == (ELSEWHERE.host, ELSEWHERE.boot)
    assert -31 < host.silent < 0


@pytest.mark.parametrize("evidence", ["no_such_process", "stopped"])
def test_what_a_probe_has_lost_is_settled(desk, elsewhere, ledger, evidence):
    assert probe(desk, lost=[loss(ELSEWHERE, evidence)]).value == {"watch": []}
    with ledger.read() as connection:
        stands = reads.execution(connection, elsewhere.hold.execution_id)
    reasons = {"no_such_process": "process_dead", "stopped": "process_stopped"}
    assert (stands.status, stands.status_reason, stands.status_by) == (Status.UNKNOWN, reasons[evidence], evidence)


def test_a_probe_tells_nothing_of_another_host(desk, elsewhere, ledger):
    before = [table for name, table in dump(ledger).items() if name != "hosts"]
    assert reason(probe(desk, host="strange", lost=[loss(ELSEWHERE)])) == ("permission_denied", "other_host")
    assert [table for name, table in dump(ledger).items() if name != "hosts"] == before


def test_a_process_that_nobody_held_by_is_lost_without_a_trace(desk, elsewhere):
    assert probe(desk, lost=[loss(replace(ELSEWHERE, pid=8))]).value == {"watch": [asdict(ELSEWHERE)]}


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0},
        {"seconds": 3601},
        {"seconds": "nan"},
        {"seconds": None},
        {"host": ""},
        {"host": "x" * 129},
        {"boot": 5},
        {"lost": [{}]},
        {"lost": [loss(replace(ELSEWHERE, pid=0))]},
        {"lost": [loss(ELSEWHERE, 5)]},
    ],
    ids=lambda v: f"{v!r:.40}",
)
def test_a_malformed_probe_is_refused_and_settles_nothing(desk, elsewhere, ledger, change):
    assert reason(probe(desk, **change))[0] == "invalid_params"
    with ledger.read() as connection:
        assert reads.execution(connection, elsewhere.hold.execution_id).status is Status.REGISTERED


def test_a_principal_without_the_capability_may_not_probe(desk):
    assert reason(probe(desk, principal=BOB)) == ("permission_denied", "capability_probe")
