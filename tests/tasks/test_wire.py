"""Messages: what arrives is what was sent, and what is not provably so is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from kombu.utils import json as kombu_json

from tenure.ledger import secret_digest
from tenure.ledger.canonical import MAX_BYTES, canonical, parse
from tenure.ledger.errors import InvalidParams, PermissionDenied, SequenceGap, from_wire, to_wire
from tenure.ledger.schema import messages, steps, worker_executions
from tenure.tasks import wire
from tenure.tasks.keys import Principal
from tenure.tasks.wire import Answer, Control, RunProof
from tests.ledger.kit import dump, row
from tests.tasks.kit import ALICE, BOB, ELSEWHERE, REPLY_TO, Desk, Holder, open_ledger, say, through_kombu

CLAIM = "c" * 64
IMPOSTOR = Principal.of("alice", b"another key that has 32 bytes ..")


@pytest.fixture
def ledger(sqlite_url):
    with open_ledger(sqlite_url) as opened:
        yield opened


@pytest.fixture
def desk(ledger):
    return Desk(ledger)


@pytest.fixture
def holder(desk):
    return desk.register()


def control(**body: Any) -> dict[str, Any]:
    return wire.control(Control.REGISTER, body, principal=ALICE, request="asked", reply_to=REPLY_TO)


def run(*operations: tuple[str, str], principal: Principal = ALICE, claim: str = CLAIM) -> dict[str, Any]:
    return wire.apply(
        epoch=3,
        execution="x1",
        session="s1",
        generation=2,
        first=7,
        operations=list(operations or [("transcript.append", "{}")]),
        claim=claim,
        principal=principal,
        request="tag",
        reply_to=REPLY_TO,
    )


ANSWERS = [Answer({"positions": [1]}, None, "x1", 1, "tag"), Answer(None, {"reason": "not_found"}, request="asked")]


def reply() -> dict[str, Any]:
    return wire.reply(3, ANSWERS, principal=ALICE)


def test_a_control_message_arrives_as_it_was_sent():
    message = wire.read_control(through_kombu(control(secret="é\u2028", nested=[{"1": None}])))
    wire.verify_control(message, ALICE)
    assert (message.control, message.request, message.reply_to) == (Control.REGISTER, "asked", REPLY_TO)
    assert parse(message.body) == {"secret": "é\u2028", "nested": [{"1": None}]}


def test_a_run_arrives_as_it_was_sent():
    sent = run(("transcript.append", canonical(say("é"))), ("session.end", '{"end_reason":"done"}'))
    message = wire.read_apply(through_kombu(sent))
    wire.verify_run(message, ALICE)
    assert RunProof.of(message).matches(CLAIM)
    assert not RunProof.of(message).matches("d" * 64)
    assert wire.read_run(message) == [("transcript.append", say("é")), ("session.end", {"end_reason": "done"})]
    fences = (message.epoch, message.execution, message.session, message.generation, message.first)
    assert fences == (3, "x1", "s1", 2, 7)


def test_a_reply_arrives_as_it_was_sent():
    assert wire.read_reply(through_kombu(reply()), ALICE) == (3, ANSWERS)


OTHER_VALUES = {
    "version": 2,
    "principal": "bob",
    "proof": "0" * 64,
    "signature": "0" * 64,
    "reply_to": f"tenure.reply.{'1' * 32}",
    "request": "another",
    "control": "adopt",
    "body": '{"other":1}',
    "epoch": 4,
    "execution": "x2",
    "session": "s2",
    "generation": 3,
    "first": 8,
    "run": '[["transcript.append",{"messages":[]}]]',
    "answers": "[]",
}


def accept_control(value: object) -> None:
    message = wire.read_control(value)
    wire.verify_control(message, {"alice": ALICE, "bob": BOB}[message.principal])


def accept_run(value: object) -> None:
    message = wire.read_apply(value)
    wire.verify_run(message, {"alice": ALICE, "bob": BOB}[message.principal])


def accept_reply(value: object) -> None:
    wire.read_reply(value, ALICE)


CHANGED = [
    *((accept_control, control, name) for name in control()),
    *((accept_run, run, name) for name in run()),
    *((accept_reply, reply, name) for name in reply()),
]


@pytest.mark.parametrize(
    ("accept", "make", "name"), CHANGED, ids=[f"{make.__name__}-{name}" for _, make, name in CHANGED]
)
def test_every_changed_field_is_noticed(accept, make, name):
    message = make()
    accept(message)
    assert message[name] != OTHER_VALUES[name]
    with pytest.raises((PermissionDenied, InvalidParams)):
        accept(message | {name: OTHER_VALUES[name]})


@pytest.mark.parametrize("name", sorted(set(run()) - {"proof", "signature", "version"}))
def test_every_changed_field_breaks_the_proof_of_the_claim(name):
    message = wire.read_apply(run())
    changed = wire.read_apply(run() | {name: OTHER_VALUES[name]})
    assert RunProof.of(message).matches(CLAIM)
    assert not RunProof.of(changed).matches(CLAIM)


def test_a_message_of_one_form_is_none_of_another():
    """A signature is of a message of its own form: whoever sees one cannot use it for another."""
    with pytest.raises(InvalidParams):
        wire.read_apply(control())
    with pytest.raises(InvalidParams):
        wire.read_control(run())
    body = canonical({"a": 1})
    spliced = control() | {"body": body, "proof": ALICE.sign(body)}
    with pytest.raises(PermissionDenied):
        accept_control(spliced)


def test_fields_cannot_trade_places():
    """What one field lacks at its end the next cannot have at its beginning."""
    message = run()
    for left, right, changes in (
        ("execution", "session", {"execution": "x", "session": "1s1"}),
        ("execution", "session", {"execution": "x1\0s1", "session": ""}),
    ):
        assert left in message
        assert right in message
        with pytest.raises((PermissionDenied, InvalidParams)):
            accept_run(message | changes)


REWRITTEN = {
    "typed like a time": {"__type__": "datetime", "__value__": "2026-01-01T00:00:00"},
    "typed like an id": {"__type__": "uuid", "__value__": "not an id at all"},
    "typed like a number": {"__type__": "decimal", "__value__": "1.0"},
    "typed like bytes": {"__type__": "base64", "__value__": "AAAA"},
    "typed as it likes": {"__type__": "x", "__value__": [{"__type__": "date", "__value__": "x"}]},
    "keys like numbers": {"1": {"2": 3}, "01": 0, "-1": 1, "1.0": 2, "true": 3, "null": 4},
    "nested lists": [[], [[1, [2, [3]]]], [{"a": [[]]}]],
    "numbers": [0, -1, 2**63 - 1, -(2**63), 0.1, 1e300, 5e-324, 1.0, -0.0],
    "text": "\u2028\u0001\\\"'</é\U0001f600\ufeff",
    "little": [None, True, False, "", {}, []],
}


@pytest.mark.parametrize("value", REWRITTEN.values(), ids=REWRITTEN)
def test_what_a_user_says_is_stored_exactly(desk, holder, value):
    message = {"role": "user", "content": "x", "metadata": {"value": value}}
    step = {"name": "step", "input_digest": "0" * 64, "result": value}
    answers = desk.run(holder.message(("transcript.append", {"messages": [message]}), ("step.record", step)))
    assert [answer.error for answer in answers] == [None, None]
    assert row(desk.ledger, messages).body == canonical(message)
    assert row(desk.ledger, steps).result == canonical(value)


def test_kombu_does_rewrite_what_is_not_one_string():
    """Why the above is tested: as plain JSON it would arrive as something else, or not at all."""
    value = REWRITTEN["typed like a time"]
    assert kombu_json.loads(kombu_json.dumps({"value": value})) != {"value": value}


def test_a_result_nested_as_deep_as_is_allowed_comes_back():
    """An answer adds levels of its own, which must not make it one that cannot be sent."""
    deep: Any = 0
    for _ in range(99):
        deep = [deep]
    canonical({"result": deep})
    sent = [Answer({"children": [{"result": deep}]}, request="asked")]
    assert wire.read_reply(through_kombu(wire.reply(1, sent, principal=ALICE)), ALICE)[1] == sent


def test_an_error_that_quotes_anything_comes_back():
    sent = [Answer(None, to_wire(InvalidParams("field '\ud800\0': unknown")), request="asked")]
    assert wire.read_reply(through_kombu(wire.reply(1, sent, principal=ALICE)), ALICE)[1] == sent


def test_errors_come_back_as_what_they_were():
    for error in (SequenceGap("missing", {"expected": 3}), InvalidParams("x"), PermissionDenied("claim_mismatch")):
        sent = [Answer(None, to_wire(error), request="asked")]
        _epoch, (answer,) = wire.read_reply(through_kombu(wire.reply(1, sent, principal=ALICE)), ALICE)
        assert answer.error is not None
        back = from_wire(answer.error)
        assert (type(back), back.detail, back.data) == (type(error), error.detail, error.data)


def test_a_reply_is_believed_from_an_owner_that_has_our_key():
    with pytest.raises(PermissionDenied):
        wire.read_reply(wire.reply(3, ANSWERS, principal=IMPOSTOR), ALICE)
    with pytest.raises(PermissionDenied) as refused:
        wire.read_reply(wire.reply(3, ANSWERS, principal=BOB), ALICE)
    assert refused.value.detail == "other_principal"


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


SECRET_TEXT = "what nobody may read"
HUGE = json.dumps([SECRET_TEXT + "x" * wire.MAX_RUN_BYTES])


def malformed(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return messages that are none; `text` is the field that a user can put anything into."""
    said: dict[str, Any] = {
        "nothing": None,
        "a number": 7,
        "text": SECRET_TEXT,
        "a list": [message],
        "another object": {"task": SECRET_TEXT},
        "an empty object": {},
        "an extra field": message | {SECRET_TEXT: SECRET_TEXT},
        "huge": message | {text: HUGE},
        "another version": message | {"version": 2},
        "a version that is text": message | {"version": "1"},
        "a version that is true": message | {"version": True},
        "an unknown principal": message | {"principal": SECRET_TEXT},
        "no signature of its principal": message | {"principal": "bob"},
        "a number as text": message | {text: 7},
        "a lone surrogate": message | {text: "\ud800"},
        "a lone surrogate as a tag": message | {"request": "\ud800"},
        "a lone surrogate as proof": message | {"proof": "\ud800"},
        "a NUL": message | {"request": "a\0b"},
    }
    said |= {f"no {name}": without(message, name) for name in message}
    for name in ("", "celery", "owner", REPLY_TO + "0", REPLY_TO + "\n", REPLY_TO.upper(), "tenure.reply." + "g" * 32):
        said[f"reply to {name!r}"] = message | {"reply_to": name}
    return said


MALFORMED = [
    *(("control", name, value) for name, value in malformed(control(secret=SECRET_TEXT), "body").items()),
    *(("apply", name, value) for name, value in malformed(run(), "run").items()),
    ("control", "an unknown request", control() | {"control": SECRET_TEXT}),
    ("apply", "an epoch that is text", run() | {"epoch": "3"}),
    ("apply", "an epoch that is a fraction", run() | {"epoch": 3.0}),
    ("apply", "a signature that is not text", run() | {"signature": None}),
    ("apply", "a lone surrogate as signature", run() | {"signature": "\udfff"}),
    ("apply", "another's key", run(principal=IMPOSTOR)),
]


def test_what_is_no_message_is_refused_once_and_never_shown(desk, holder, caplog, subtests):
    for duty, name, value in MALFORMED:
        with subtests.test(f"{duty}: {name}"):
            caplog.clear()
            before = dump(desk.ledger)
            assert getattr(desk.owner, duty)(value) is None
            (record,) = caplog.records
            assert record.levelname == "WARNING"
            assert "refused a message with" in record.getMessage()
            assert len(record.getMessage()) < 300
            assert "\n" not in record.getMessage()
            assert SECRET_TEXT not in caplog.text
            assert dump(desk.ledger) == before
    # The owner goes on with the next message.
    (answer,) = desk.run(holder.message(("transcript.append", say("hello"))))
    assert answer.value == {"positions": [1]}


def signed_body(body: str) -> dict[str, Any]:
    proof = ALICE.sign(wire._control_text(Control.REGISTER, "alice", "asked", REPLY_TO, body))
    return control() | {"body": body, "proof": proof}


def control_to(reply_to: str, request: str = "asked") -> dict[str, Any]:
    return wire.control(Control.REGISTER, {}, principal=ALICE, request=request, reply_to=reply_to)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        *((control_to(REPLY_TO + end), "reply_to: not a reply queue's name") for end in ("0", "\n", ".owner")),
        (control_to("owner"), "reply_to: not a reply queue's name"),
        (control_to(REPLY_TO, "a\0b"), "request: text holds a NUL character"),
        (signed_body(HUGE), f"body: {len(HUGE)} characters, at most {wire.MAX_RUN_BYTES} are allowed"),
    ],
    ids=range(6),
)
def test_what_is_no_message_is_refused_whoever_has_signed_it(desk, caplog, message, told):
    assert desk.owner.control(message) is None
    assert told in caplog.text


def test_a_run_of_the_greatest_operation_is_no_more_than_is_taken(desk, holder):
    """What a worker may journal, an owner must be able to read."""
    empty = len(canonical({"name": "n", "input_digest": "0" * 64, "result": ""}))
    greatest = {"name": "n", "input_digest": "0" * 64, "result": "x" * (MAX_BYTES - empty)}
    assert len(canonical(greatest)) == MAX_BYTES
    (answer,) = desk.run(holder.message(("step.record", greatest)))
    assert answer.value == {"recorded": True}


def test_the_log_of_a_refusal_tells_its_size(desk, caplog):
    desk.owner.apply(run() | {"run": "x" * 1234, "signature": "", "proof": ""})
    size = 1234 + len("alice" + REPLY_TO + "tag" + "x1" + "s1")
    assert f"with {size} characters of text" in caplog.text


def test_a_run_that_is_no_list_of_operations_is_answered(desk, holder, subtests):
    wrong = ["{}", "[]", "7", '["transcript.append"]', "[[]]", '[["session.end"]]', "[[7,{}]]", '[["a",{},1]]', "[", ""]
    for text in (*wrong, "[NaN]", "[" * 5000, "[" + "9" * 5000 + "]"):
        with subtests.test(text[:20]):
            message = wire.apply(
                epoch=holder.hold.epoch,
                execution=holder.hold.execution_id,
                session=holder.hold.session_id,
                generation=1,
                first=1,
                operations=[],
                claim=holder.credential.claim(holder.hold),
                principal=ALICE,
                request="tag",
                reply_to=REPLY_TO,
            )
            bare = replace_run(message, text, holder)
            (answer,) = desk.run(bare)
            assert answer.error is not None
            assert (answer.error["reason"], answer.sequence, answer.request) == ("invalid_params", 1, "tag")


def replace_run(message: dict[str, Any], text: str, holder: Holder) -> dict[str, Any]:
    """Return the message with another run, proved and signed as if its holder had sent that."""
    changed = wire.read_apply(message | {"run": text})
    covered = wire.apply_text(changed)
    proof = wire.keyed_digest(holder.credential.claim(holder.hold).encode(), covered)
    return message | {"run": text, "proof": proof, "signature": ALICE.sign(wire._signed_text(covered, proof))}


def test_nobody_else_can_have_an_owner_tell_a_sender_that_it_has_no_claim(desk, holder, caplog):
    """Who sees a run on its way, tag and all, and can send to the owner, cannot end the sender's stream by it."""
    seen = holder.message(("transcript.append", say("hello")))
    for changed in (
        seen | {"proof": "0" * 64},
        seen | {"session": "another"},
        seen | {"generation": 9},
        seen | {"execution": "nobody"},
        seen | {"run": "[]"},
    ):
        assert desk.owner.apply(through_kombu(changed)) is None
    assert caplog.text.count("bad_signature") == 5


def test_no_secret_and_no_claim_is_in_any_message(desk):
    """A whole conversation: register, write, reserve, attach, adopt, inspect, refusals, finish."""
    parent = desk.register()
    secret = "the secret of the child"
    reserve = {"secret_digest": secret_digest(secret)}
    answers = desk.run(parent.message(("transcript.append", say("hello")), ("child.reserve", reserve)))
    minted = answers[1].value
    assert minted is not None
    child = Holder(replace(parent.hold, **{k: minted[k] for k in ("execution_id", "session_id", "generation")}), secret)
    claims = {parent.credential.claim(parent.hold), child.credential.claim(child.hold)}
    assert desk.control(Control.ATTACH, child.attachment(ELSEWHERE)).value
    child.identity = ELSEWHERE
    claims.add(child.credential.claim(child.hold))
    assert desk.run(child.message(("transcript.append", say("I am the child"))))[0].value
    assert desk.control(Control.INSPECT, parent.proved(Control.INSPECT)).value
    second = Desk(desk.ledger)
    assert desk.run is not second.run
    (stale,) = second.run(parent.message(("transcript.append", say("more")), first=3))
    assert stale.error is not None
    assert second.adopt(parent).value
    assert second.run(parent.message(("execution.finish", {}), first=3))[0].value
    claims.add(row(desk.ledger, worker_executions, execution_id=parent.hold.execution_id).claim_digest)
    letters = json.dumps(desk.letters + second.letters)
    hidden = claims | {parent.secret, secret, secret_digest(parent.secret), secret_digest(secret)}
    assert len(hidden) == 7
    assert [text for text in hidden if text in letters] == []
    assert letters.count("sealed") == 1  # that the reservation was among them
    assert letters.count("I am the child") == 1


def test_the_child_that_a_reservation_mints_is_held_by_the_sealed_secret(desk, holder):
    secret = "the secret of the child"
    message = holder.message(("child.reserve", {"secret_digest": secret_digest(secret)}))
    (name, payload), *_ = wire.read_run(wire.read_apply(message))
    assert (name, list(payload)) == ("child.reserve", ["sealed"])
    (answer,) = desk.run(message)
    assert answer.value is not None
    minted = {key: answer.value[key] for key in ("execution_id", "session_id", "generation")}
    child = Holder(replace(holder.hold, **minted), secret)
    assert desk.run(child.message(("transcript.append", say("held"))))[0].value == {"positions": [1]}
