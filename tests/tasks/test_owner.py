"""The owner's duties, one message at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from random import Random
from typing import Any

import msgspec
import pytest

from tenure.ledger import Ledger, Limits, Work, operation, secret_digest
from tenure.ledger.errors import OwnerSuperseded, from_wire
from tenure.ledger.schema import operation_attempts, worker_executions, worker_receipts
from tenure.tasks import desk as desk_module
from tenure.tasks import transports, wire
from tenure.tasks.client import hold_from_json
from tenure.tasks.keys import Capability
from tenure.tasks.liveness import Admission, Life
from tenure.tasks.owner import CAREFUL_SECONDS
from tenure.tasks.wire import Control
from tests.ledger.kit import Failing, dump, row, rows
from tests.tasks.kit import (
    ALICE,
    BOB,
    ELSEWHERE,
    HERE,
    REPLY_TO,
    Desk,
    Holder,
    SettableMonotonic,
    open_ledger,
    registration,
    said,
    say,
    through_kombu,
)

APPEND = "transcript.append"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A payload without fields."""


@operation("test.die")
def die(work: Work, payload: Nothing) -> dict[str, Any]:
    """End the process, as far as a test can: nothing catches this on its way out of the owner."""
    raise KeyboardInterrupt


@pytest.fixture
def ledger(sqlite_url: str) -> Iterator[Ledger]:
    with open_ledger(sqlite_url, limits=Limits(2, 1), operations=[die]) as opened:
        yield opened


@pytest.fixture
def desk(ledger: Ledger) -> Desk:
    return Desk(ledger)


@pytest.fixture
def holder(desk: Desk) -> Holder:
    return desk.register()


def told(answers: Any) -> list[str]:
    """Return what each answer says, shortly."""
    return ["ok" if a.error is None else f"{a.error['reason']}: {a.error['detail']}" for a in answers]


# Register.


def test_a_registration_is_answered_with_its_hold(desk):
    body = registration()
    answer = desk.control(Control.REGISTER, body, request="r7")
    assert answer.value is not None
    hold = hold_from_json(answer.value)
    assert (hold.execution_id, hold.session_id, hold.epoch) == (body["execution"], body["session"], desk.owner.epoch)
    assert (hold.generation, hold.last_sequence, answer.request) == (1, 0, "r7")
    stored = row(desk.ledger, worker_executions)
    assert (stored.principal, stored.host, stored.pid) == ("alice", HERE.host, HERE.pid)


def test_a_registration_sent_again_gets_the_same_answer_and_changes_nothing(desk):
    body = registration()
    first = desk.control(Control.REGISTER, body)
    before = dump(desk.ledger)
    assert desk.control(Control.REGISTER, body) == first
    assert dump(desk.ledger) == before


def test_the_same_registration_with_another_secret_is_another(desk):
    body = registration()
    desk.control(Control.REGISTER, body)
    assert told([desk.control(Control.REGISTER, body | {"secret": secret_digest("another one")})]) == [
        "admission_conflict: execution_exists"
    ]


def test_a_session_has_one_holder(desk, holder):
    answer = desk.control(Control.REGISTER, registration(session=holder.hold.session_id))
    assert told([answer]) == ["admission_conflict: session_held"]


@pytest.mark.parametrize("reason", ["no_such_process", "other_birth", "zombie", "other_boot", "other_user", "is_owner"])
@pytest.mark.parametrize("kind", [Control.REGISTER, Control.ATTACH])
def test_a_process_that_is_not_what_it_says_is_refused_with_the_reason(desk, holder, monkeypatch, kind, reason):
    monkeypatch.setattr(desk_module, "admit", lambda *_, **__: Admission(False, Life.DEAD, reason))
    body = registration() if kind is Control.REGISTER else holder.attachment(HERE)
    before = dump(desk.ledger)
    assert told([desk.control(kind, body)]) == [f"permission_denied: process_{reason}"]
    assert dump(desk.ledger) == before


def test_a_process_of_which_nothing_can_be_told_is_admitted(desk):
    assert desk.control(Control.REGISTER, registration(identity=ELSEWHERE)).error is None


def test_what_is_asked_about_is_the_senders_process_and_this_owners(ledger, monkeypatch):
    asked = []

    def admit(identity, here, *, owner_pid):
        asked.append((identity, here, owner_pid))
        return Admission(True, Life.ALIVE, "alive")

    monkeypatch.setattr(desk_module, "admit", admit)
    Desk(ledger, owner_pid=4711).register(identity=ELSEWHERE)
    assert asked == [(ELSEWHERE, HERE, 4711)]


def test_a_process_of_this_host_that_is_gone_is_refused(desk, spawn):
    process = spawn("true")
    process.wait(within=10)
    gone = replace(HERE, pid=process.pid, birth="ticks:1")
    assert told([desk.control(Control.REGISTER, registration(identity=gone))]) == [
        "permission_denied: process_no_such_process"
    ]


def test_a_worker_in_the_owners_own_process_is_refused_unless_the_two_are_one_program(ledger):
    desk = Desk(ledger, owner_pid=HERE.pid)
    assert told([desk.control(Control.REGISTER, registration())]) == ["permission_denied: process_is_owner"]
    assert told([Desk(ledger, owner_pid=0).control(Control.REGISTER, registration())]) == ["ok"]


# Capabilities.


@pytest.mark.parametrize(
    ("kind", "capability"),
    [(Control.REGISTER, "register"), (Control.ADOPT, "adopt"), (Control.ATTACH, "attach")],
)
def test_a_principal_without_the_capability_is_refused(desk, holder, kind, capability):
    allowed = replace(BOB, capabilities=frozenset(set(Capability) - {Capability(capability)}))
    desk.owner.keyring._principals["bob"] = allowed
    body = {
        Control.REGISTER: registration(),
        Control.ADOPT: holder.proved(Control.ADOPT),
        Control.ATTACH: holder.attachment(HERE),
    }[kind]
    before = dump(desk.ledger)
    assert told([desk.control(kind, body, principal=allowed)]) == [f"permission_denied: capability_{capability}"]
    assert dump(desk.ledger) == before
    desk.owner.keyring._principals["bob"] = BOB


def test_a_principal_may_do_what_it_may(desk, holder):
    assert told([desk.control(Control.ADOPT, holder.proved(Control.ADOPT), principal=BOB)]) == ["ok"]


# Malformed requests that are properly signed.


WRONG = [
    ("identity", None),
    ("identity", "x"),
    ("identity", {}),
    ("identity", asdict(HERE) | {"more": 1}),
    ("identity", asdict(HERE) | {"pid": "1"}),
    ("identity", asdict(HERE) | {"pid": 2**40}),
    ("identity", asdict(HERE) | {"birth": 7}),
    ("identity", asdict(HERE) | {"birth": None}),
    ("identity", asdict(HERE) | {"host": ["x"]}),
    ("identity", asdict(HERE) | {"\ud800": ""}),
    ("execution", 7),
    ("execution", None),
    ("execution", ["x"]),
    ("execution", "with spaces"),
    ("execution", "\ud800"),
    ("session", 7),
    ("session", {}),
    ("kind", "child"),
    ("kind", ["compute"]),
    ("kind", "\ud800"),
    ("profile", None),
    ("source", 7),
    ("secret", 7),
    ("secret", None),
    ("secret", {"a": 1}),
    ("epoch", "1"),
    ("epoch", None),
    ("epoch", True),
    ("epoch", [1]),
    ("generation", 1.0),
    ("generation", 2**70),
    ("generation", {}),
    ("proof", 7),
    ("proof", None),
    ("proof", "\ud800"),
    ("proof", "é"),
]


def signed(kind: Control, body: str) -> Any:
    """Return a control message with any text as its body, properly signed."""
    message = wire.control(kind, {}, principal=ALICE, request="asked", reply_to=REPLY_TO)
    proof = ALICE.sign(wire._control_text(kind, "alice", "asked", REPLY_TO, body))
    return message | {"body": body, "proof": proof}


def bodies(desk: Desk, holder: Holder) -> dict[Control, dict[str, Any]]:
    """Return a good body for each request, with the secret sealed."""
    joining, attachment = registration(), holder.attachment(HERE)
    for body in (joining, attachment):
        body["secret"] = ALICE.seal(body["secret"], context=body["execution"])
    return {
        Control.REGISTER: joining,
        Control.ATTACH: attachment,
        Control.ADOPT: holder.proved(Control.ADOPT),
        Control.INSPECT: holder.proved(Control.INSPECT),
    }


def test_a_malformed_request_is_answered_and_changes_nothing(desk, holder, subtests):
    for kind, good in bodies(desk, holder).items():
        changes = [(name, good | {name: value}) for name, value in WRONG if name in good]
        changes += [(f"no {name}", {k: v for k, v in good.items() if k != name}) for name in good]
        for name, body in changes:
            with subtests.test(f"{kind}: {name} {body.get(name)!r}"):
                before = dump(desk.ledger)
                reply = desk.owner.control(through_kombu(signed(kind, json.dumps(body))))
                assert reply is not None
                (answer,) = wire.read_reply(reply.message, ALICE)[1]
                assert answer.error is not None
                assert answer.error["reason"] in {"invalid_params", "permission_denied", "not_found"}
                assert dump(desk.ledger) == before


@pytest.mark.parametrize("body", ["", "{", "[]", "7", "null", '"x"', "[" * 5000, '{"epoch":NaN}'])
@pytest.mark.parametrize("kind", list(Control))
def test_a_body_that_is_no_object_is_answered(desk, kind, body):
    reply = desk.owner.control(signed(kind, body))
    assert reply is not None
    (answer,) = wire.read_reply(reply.message, ALICE)[1]
    assert answer.error is not None
    assert answer.error["reason"] == "invalid_params"


def test_a_body_says_what_is_wrong_and_not_what_it_holds(desk):
    reply = desk.owner.control(signed(Control.REGISTER, '{"identity": {}, "secret": "x"}'))
    (answer,) = wire.read_reply(reply.message, ALICE)[1]
    assert answer.error["detail"].startswith("body: TypeError: ")


# Runs.


def test_a_run_is_applied_in_order_and_each_answer_carries_its_tag(desk, holder):
    answers = desk.run(holder.message((APPEND, say("a")), (APPEND, say("b", "c")), request="r9"))
    assert [(a.execution, a.sequence, a.request) for a in answers] == [
        (holder.hold.execution_id, 1, "r9"),
        (holder.hold.execution_id, 2, "r9"),
    ]
    assert [a.value for a in answers] == [{"positions": [1]}, {"positions": [2, 3]}]


def test_a_run_stops_at_the_first_error_and_tells_what_came_before(desk, holder):
    answers = desk.run(holder.message((APPEND, say("a")), (APPEND, {"messages": []}), (APPEND, say("c"))))
    assert [told([a])[0].partition(":")[0] for a in answers] == ["ok", "invalid_params"]
    assert [(a.sequence, a.request) for a in answers] == [(1, "tag"), (2, "tag")]
    assert said(desk.ledger, holder.hold.session_id) == ["a"]


def test_a_refusal_does_not_stop_a_run(desk, holder):
    answers = desk.run(
        holder.message(("session.end", {"end_reason": "done"}), (APPEND, say("late")), ("execution.finish", {}))
    )
    assert [a.value.get("refused", "ok") for a in answers] == ["ok", "session_ended", "ok"]


def test_an_unknown_operation_is_refused_by_its_name(desk, holder):
    (answer,) = desk.run(holder.message(("no.such", {})))
    assert told([answer]) == ["invalid_params: operation: 'no.such' is not known"]


def test_runs_cut_repeated_overlapping_in_any_order_give_each_operation_once(desk, holder):
    random = Random(7)
    operations = [(APPEND, say(f"m{number}")) for number in range(1, 13)]
    for _ in range(40):
        first = random.randint(1, 12)
        length = random.randint(1, 13 - first)
        desk.run(holder.message(*operations[first - 1 : first - 1 + length], first=first))
    answers = desk.run(holder.message(*operations))
    assert [a.value for a in answers] == [{"positions": [n]} for n in range(1, 13)]
    assert said(desk.ledger, holder.hold.session_id) == [f"m{number}" for number in range(1, 13)]
    assert len(rows(desk.ledger, worker_receipts)) == 12


def test_a_run_ahead_of_its_time_tells_where_to_send_from(desk, holder):
    (answer,) = desk.run(holder.message((APPEND, say("c")), (APPEND, say("d")), first=3))
    assert answer.error == {"reason": "sequence_gap", "detail": "missing", "data": {"expected": 1}}
    assert answer.sequence == 3


@pytest.mark.parametrize("first", [0, -1, 2**63])
def test_a_first_sequence_that_is_none_is_refused(desk, holder, first):
    (answer,) = desk.run(holder.message((APPEND, say("a")), first=first))
    assert told([answer])[0].startswith("invalid_params: sequence: ")


def test_a_run_with_another_claim_is_answered_and_not_applied(desk, holder):
    other = replace(holder, secret="not the secret of anybody")
    assert told(desk.run(other.message((APPEND, say("a"))))) == ["permission_denied: claim_mismatch"]
    assert told(desk.run(holder.message((APPEND, say("a")), session_id="another"))) == [
        "permission_denied: other_session"
    ]
    assert told(desk.run(holder.message((APPEND, say("a")), execution_id="nobody"))) == ["not_found: execution"]
    assert said(desk.ledger, holder.hold.session_id) == []


def test_what_the_database_cannot_serve_now_is_answered_as_such(desk, holder):
    with Failing(desk.ledger, "commit"):
        (answer,) = desk.run(holder.message((APPEND, say("a"))))
    assert answer.error is not None
    assert (answer.error["reason"], from_wire(answer.error).action) == ("unavailable", "later")
    assert told(desk.run(holder.message((APPEND, say("a"))))) == ["ok"]


def test_a_refusal_for_good_is_not_told_while_the_database_cannot_say_who_is_the_owner(desk, holder):
    with Failing(desk.ledger, "commit"):
        (answer,) = desk.run(holder.message(("no.such", {})))
    assert answer.error is not None
    assert answer.error["reason"] == "unavailable"


def test_a_handler_that_fails_is_a_refusal_and_the_next_one_proceeds(sqlite_url):
    @operation("test.fail")
    def fail(work: Work, payload: Nothing) -> dict[str, Any]:
        raise SystemExit("the owner must not leave")

    with open_ledger(sqlite_url, operations=[fail]) as ledger:
        desk = Desk(ledger)
        holder = desk.register()
        first, second = desk.run(holder.message(("test.fail", {}), (APPEND, say("after"))))
        assert first.value == {"refused": "operation_failed", "error": "SystemExit"}
        assert second.value == {"positions": [1]}


# Reservations.


@pytest.fixture
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have payloads travel as they are."""
    monkeypatch.setattr(transports, "_travelling", lambda item, *_: (item.operation, item.payload))


def test_a_reservation_sealed_for_another_execution_is_refused(desk, holder, as_given):
    reserve = ("child.reserve", {"sealed": ALICE.seal(secret_digest("a child's secret"), context="another")})
    assert told(desk.run(holder.message(reserve))) == ["permission_denied: bad_seal"]


def test_a_reservation_sealed_by_another_principal_is_refused(desk, holder, as_given):
    reserve = ("child.reserve", {"sealed": BOB.seal(secret_digest("a child's"), context=holder.hold.execution_id)})
    assert told(desk.run(holder.message(reserve))) == ["permission_denied: bad_seal"]


@pytest.mark.parametrize("sealed", ["", "nonsense", "\ud7ff", 7, None, ["x"]])
def test_a_reservation_that_is_not_sealed_properly_is_refused(desk, holder, as_given, sealed):
    (answer,) = desk.run(holder.message(("child.reserve", {"sealed": sealed})))
    assert answer.error is not None
    assert answer.error["reason"] in {"permission_denied", "invalid_params"}
    assert len(rows(desk.ledger, worker_executions)) == 1


def test_a_reservation_sent_again_with_a_new_seal_is_the_same(desk, holder):
    reserve = ("child.reserve", {"secret_digest": secret_digest("the secret of a child")})
    first, second = holder.message(reserve), holder.message(reserve)
    assert first["run"] != second["run"]
    assert desk.run(first)[0].value == desk.run(second)[0].value
    assert len(rows(desk.ledger, worker_executions)) == 2


# Inspect.


def test_a_holder_is_told_how_it_stands_and_who_else_is_not(desk, holder):
    desk.run(holder.message(("child.reserve", {"secret_digest": secret_digest("the secret of a child")})))
    answer = desk.control(Control.INSPECT, holder.proved(Control.INSPECT))
    assert answer.value is not None
    (child,) = answer.value["children"]
    assert (answer.value["last_sequence"], child["status"], child["reason"]) == (1, "running", "reserved")
    assert (child["sequence"], child["outcome"], child["result"]) == (1, None, None)
    for wrong in (
        holder.proved(Control.ADOPT),
        replace(holder, secret="not the secret of anybody").proved(Control.INSPECT),
        holder.proved(Control.INSPECT) | {"epoch": 99},
    ):
        assert told([desk.control(Control.INSPECT, wrong)]) == ["permission_denied: claim_mismatch"]
    assert told([desk.control(Control.INSPECT, holder.proved(Control.INSPECT) | {"execution": "x"})]) == [
        "not_found: execution"
    ]


def test_inspecting_changes_nothing(desk, holder):
    before = dump(desk.ledger)
    desk.control(Control.INSPECT, holder.proved(Control.INSPECT))
    assert dump(desk.ledger) == before


# A newer owner.


def test_a_superseded_owner_answers_nothing_and_changes_nothing(desk, holder):
    newer = Desk(desk.ledger)
    before = dump(desk.ledger)
    with pytest.raises(OwnerSuperseded):
        desk.owner.apply(holder.message((APPEND, say("a"))))
    with pytest.raises(OwnerSuperseded):
        desk.owner.apply(holder.message((APPEND, say("a")), epoch=newer.owner.epoch))
    for wrong in (("no.such", {}), (APPEND, {"messages": []})):
        with pytest.raises(OwnerSuperseded):  # it may not know what its successor does
            desk.owner.apply(holder.message(wrong, epoch=newer.owner.epoch))
    for kind, body in bodies(desk, holder).items():
        for text in (json.dumps(body), "{}"):
            if kind is not Control.INSPECT or text == "{}":
                with pytest.raises(OwnerSuperseded):
                    desk.owner.control(signed(kind, text))
    with pytest.raises(OwnerSuperseded):
        desk.owner.recover(unknown_grace=None)
    assert dump(desk.ledger) == before


def test_a_worker_of_an_older_epoch_is_told_the_new_one_and_goes_on_after_adopting(desk, holder):
    desk.run(holder.message((APPEND, say("a"))))
    newer = Desk(desk.ledger)
    (answer,) = newer.run(holder.message((APPEND, say("b")), first=2))
    assert answer.error is not None
    assert (answer.error["reason"], answer.error["data"]) == ("stale_epoch", {"epoch": newer.owner.epoch})
    assert newer.adopt(holder).error is None
    assert told(newer.run(holder.message((APPEND, say("b")), first=2))) == ["ok"]
    assert said(desk.ledger, holder.hold.session_id) == ["a", "b"]


def test_adopting_needs_the_proof_for_that_epoch(desk, holder):
    newer = Desk(desk.ledger)
    body = holder.proved(Control.ADOPT)
    for wrong in (
        body | {"epoch": newer.owner.epoch},  # the proof is of the older one
        holder.proved(Control.INSPECT, epoch=newer.owner.epoch),
    ):
        assert told([newer.control(Control.ADOPT, wrong)]) == ["permission_denied: claim_mismatch"]


# After a crash.


def test_an_owner_is_careful_for_a_while_after_a_crash_and_not_after_a_release(ledger):
    clock = SettableMonotonic()
    first = Desk(ledger, monotonic=clock)
    assert not first.owner.careful  # nobody was before it
    after_crash = Desk(ledger, monotonic=clock)
    assert after_crash.owner.careful
    clock.advance(CAREFUL_SECONDS)
    assert not after_crash.owner.careful
    ledger.release(after_crash.owner.epoch)
    assert not Desk(ledger, monotonic=clock).owner.careful


def test_a_careful_owner_forgets_its_count_when_all_goes_well(ledger):
    Desk(ledger)
    desk = Desk(ledger)
    holder = desk.register()
    assert told(desk.run(holder.message((APPEND, say("a"))))) == ["ok"]
    assert rows(ledger, operation_attempts) == []


def test_an_operation_that_kills_its_owner_is_poisoned_and_the_next_one_proceeds(ledger):
    desk = Desk(ledger)
    holder = desk.register()

    def message() -> Any:
        return holder.message((APPEND, say("before")), ("test.die", {}), (APPEND, say("after")))

    with pytest.raises(KeyboardInterrupt):
        desk.owner.apply(message())  # the first owner has no reason to count
    for deaths in range(1, 6):
        desk = Desk(ledger)
        assert desk.adopt(holder).error is None
        with pytest.raises(KeyboardInterrupt):
            desk.owner.apply(message())
        assert [found.attempts for found in rows(ledger, operation_attempts)] == [deaths]
    desk = Desk(ledger)
    desk.adopt(holder)
    answers = desk.run(message())
    assert [a.value for a in answers] == [
        {"positions": [1]},
        {"refused": "poisoned", "attempts": 5},
        {"positions": [2]},
    ]
    assert rows(ledger, operation_attempts) == []
    assert said(ledger, holder.hold.session_id) == ["before", "after"]


def test_a_poisoned_operation_stays_so(ledger):
    desk = Desk(ledger)
    holder = desk.register()
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt):
            desk.owner.apply(holder.message(("test.die", {})))
        desk = Desk(ledger)
        desk.adopt(holder)
    poisoned = desk.run(holder.message(("test.die", {})))
    desk.ledger.release(desk.owner.epoch)
    desk = Desk(ledger)
    desk.adopt(holder)
    assert not desk.owner.careful
    assert [a.value for a in desk.run(holder.message(("test.die", {})))] == [a.value for a in poisoned]


# Recovery.


def test_recovery_loses_executions_of_processes_that_are_gone(desk, spawn, monkeypatch):
    monkeypatch.setattr(desk_module, "admit", lambda *_, **__: Admission(True, Life.ALIVE, "alive"))
    process = spawn("true")
    process.wait(within=10)
    gone = desk.register(identity=replace(HERE, pid=process.pid, birth="ticks:1"))
    alive, far = desk.register(), desk.register(identity=ELSEWHERE)
    report = desk.owner.recover(unknown_grace=None)
    assert report["unknown"] == [gone.hold.execution_id]
    stands = {x.execution_id: (x.status, x.status_by) for x in rows(desk.ledger, worker_executions)}
    assert stands[gone.hold.execution_id] == ("unknown", "no_such_process")
    assert {stands[x.hold.execution_id][0] for x in (alive, far)} == {"registered"}
    assert desk.owner.recover(unknown_grace=None)["unknown"] == []
