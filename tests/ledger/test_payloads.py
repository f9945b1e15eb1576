"""Malformed requests: each is refused with the field's name, and nothing is written or lost."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from tenure.ledger import Identity
from tenure.ledger.canonical import MAX_BYTES, MAX_DEPTH, canonical, parse
from tenure.ledger.errors import InvalidParams
from tests.ledger.kit import Worker, dump

DIGEST = "0123456789abcdef" * 4
MIB = 2**20


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | message]}


def used(**fields: Any) -> dict[str, Any]:
    return {"model": "m"} | fields


def step(result: Any) -> dict[str, Any]:
    return {"name": "n", "input_digest": DIGEST, "result": result}


MALFORMED: dict[str, tuple[Any, Any, str]] = {  # what is wrong: operation, payload, a part of the detail
    "an unknown operation": ("transcript.delete", {}, "operation: 'transcript.delete' is not known"),
    "an operation that is no text": (7, {}, "operation: 7"),
    "an operation beyond printing": (10**5000, {}, "operation: an integer beyond 64 bits"),
    "an operation that has no hash": ([], {}, "operation: []"),
    "a payload that is a list": ("execution.finish", [], "payload: list given"),
    "a payload that is nothing": ("execution.finish", None, "payload: NoneType given"),
    "a payload that is text": ("execution.finish", "{}", "payload: str given"),
    "a payload of another mapping type": ("execution.finish", OrderedDict(), "payload: OrderedDict given"),
    # closed structures
    "an extra field": ("execution.finish", {"outcom": "failed"}, "unknown field `outcom`"),
    "an extra field of a message": ("transcript.append", said(extra=1), "unknown field `extra` - at `$.messages[0]`"),
    "a missing field": ("session.end", {}, "missing required field `end_reason`"),
    "a missing field of a message": ("transcript.append", {"messages": [{}]}, "field `role` - at `$.messages[0]`"),
    "the secret itself": ("child.reserve", {"secret_digest": DIGEST, "secret": "s" * 16}, "unknown field `secret`"),
    # types
    "a number for text": ("session.end", {"end_reason": 1}, "$.end_reason"),
    "nothing for text": ("session.end", {"end_reason": None}, "$.end_reason"),
    "a list for an object": ("session.create", {"source": "s", "model_config": []}, "$.model_config"),
    "an object for a list": ("transcript.append", {"messages": {}}, "$.messages"),
    "a number for content": ("transcript.append", said(content=1), "$.messages[0].content"),
    "a number for a tool call's id": ("transcript.append", said(tool_call_id=1), "$.messages[0].tool_call_id"),
    "text for metadata": ("transcript.append", said(metadata="m"), "$.messages[0].metadata"),
    "an unknown role": ("transcript.append", said(role="root"), "$.messages[0].role"),
    "an unknown outcome": ("execution.finish", {"outcome": "fine"}, "$.outcome"),
    "a bool for an int": ("usage.record", used(input_tokens=True), "$.input_tokens"),
    "a bool for a float": ("usage.record", used(cost=True), "$.cost"),
    "a float for an int": ("usage.record", used(output_tokens=1.0), "$.output_tokens"),
    "text for an int": ("usage.record", used(output_tokens="1"), "$.output_tokens"),
    # bounds
    "no messages": ("transcript.append", {"messages": []}, "$.messages"),
    "1001 messages": ("transcript.append", {"messages": [{"role": "user"}] * 1001}, "$.messages"),
    "a negative counter": ("usage.record", used(cache_read_tokens=-1), "$.cache_read_tokens"),
    "a counter above 2**53": ("usage.record", used(cache_write_tokens=2**53 + 1), "$.cache_write_tokens"),
    "a negative cost": ("usage.record", used(cost=-0.01), "$.cost"),
    "a cost above a million": ("usage.record", used(cost=1e6 + 1), "$.cost"),
    "an empty reason": ("session.end", {"end_reason": ""}, "$.end_reason"),
    "a long reason": ("session.end", {"end_reason": "x" * 257}, "$.end_reason"),
    "an empty source": ("session.create", {"source": ""}, "$.source"),
    "a long source": ("session.create", {"source": "x" * 65}, "$.source"),
    "a long model": ("usage.record", {"model": "x" * 257}, "$.model"),
    "a short digest": ("child.reserve", {"secret_digest": DIGEST[1:]}, "$.secret_digest"),
    "a digest in capitals": ("child.reserve", {"secret_digest": DIGEST.upper()}, "$.secret_digest"),
    "a line feed after a digest": ("child.reserve", {"secret_digest": DIGEST + "\n"}, "$.secret_digest"),
    "a line feed after a step's": ("step.record", step(1) | {"input_digest": DIGEST + "\n"}, "$.input_digest"),
    "more than 4 MiB": ("step.record", step("x" * 4 * MIB), "payload: "),
    "more than 4 MiB encoded": ("step.record", step("\u20ac" * (4 * MIB // 3)), "payload: "),
    "more than 4 MiB escaped": ("step.record", step("\n" * 2 * MIB), "payload: "),
    "101 levels": ("step.record", step(nested(MAX_DEPTH + 1)), "nested more than 100 levels"),
    "a thousand levels": ("step.record", step(nested(900)), "nested more than 100 levels"),
    # what JSON cannot carry
    "NaN": ("step.record", step({"a": [float("nan")]}), "payload.result.a[0]: nan"),
    "Infinity": ("step.record", step(float("inf")), "payload.result: inf"),
    "-Infinity": ("usage.record", used(cost=float("-inf")), "payload.cost: -inf"),
    "NUL": ("transcript.append", said(content="a\0b"), "payload.messages[0].content: text holds a NUL"),
    "NUL in a key": ("step.record", step({"a\0": 1}), "payload.result key: text holds a NUL"),
    "a lone surrogate": ("transcript.append", said(content="\ud800"), "content: text holds a lone surrogate"),
    "half a pair": ("transcript.append", said(name="\udc00\ud800"), "name: text holds a lone surrogate"),
    "a lone surrogate in a key": ("step.record", step({"\udfff": 1}), "key: text holds a lone surrogate"),
    "an integer for a key": ("step.record", step({1: 1}), "payload.result: key 1 is int"),
    "nothing for a key": ("step.record", step({None: 1}), "payload.result: key None is NoneType"),
    "a bool for a key": ("step.record", step({"a": [{True: 1}]}), "payload.result.a[0]: key True is bool"),
    "a key beyond printing": ("step.record", step({10**5000: 1}), "key an integer beyond 64 bits is int"),
    "a payload's own key": ("execution.finish", {1: 2}, "payload: key 1"),
    "an integer beyond 64 bits": ("step.record", step(2**63), "payload.result: integer beyond 64 bits"),
    "one below 64 bits": ("step.record", step([-(2**63) - 1]), "payload.result[0]: integer beyond 64 bits"),
    "a tuple": ("step.record", step((1, 2)), "payload.result: tuple"),
    "a tuple of messages": ("transcript.append", {"messages": ({"role": "user"},)}, "payload.messages: tuple"),
    "bytes": ("step.record", step(b"x"), "payload.result: bytes"),
    "a Decimal": ("usage.record", used(cost=Decimal("0.1")), "payload.cost: Decimal"),
    "a set": ("step.record", step({1}), "payload.result: set"),
    "an enum's integer": ("usage.record", used(input_tokens=Number.ONE), "payload.input_tokens: Number"),
    "a subclass of text": ("session.end", {"end_reason": Text("x")}, "payload.end_reason: Text"),
}


def test_a_malformed_payload_is_refused_by_name_and_nothing_is_written_or_lost(ledger, worker, subtests):
    worker.say("hello")
    before = dump(ledger)
    for what, (operation, payload, told) in MALFORMED.items():
        with subtests.test(what):
            request = replace(worker.request("execution.finish"), operation=operation, payload=payload)
            with pytest.raises(InvalidParams) as refused:
                worker.send(request)
            assert told in refused.value.detail
            assert len(refused.value.detail) < 500
    assert dump(ledger) == before
    assert worker.say("still here").sequence == 2


def test_a_refusal_quotes_little_of_what_was_sent(worker):
    for payload in ({"k" * MIB: 1}, {"outcome": "v" * MIB}, {"result": {"k" * MIB: {"k" * MIB: float("nan")}}}):
        with pytest.raises(InvalidParams) as refused:
            worker.send(worker.request("execution.finish", payload))
        assert len(refused.value.detail) < 500


WELL_FORMED: dict[str, tuple[str, Any]] = {
    "a thousand messages": ("transcript.append", {"messages": [{"role": "tool"}] * 1000}),
    "exactly 4 MiB": ("step.record", step("x" * (MAX_BYTES - len(canonical(step("")))))),
    "100 levels": ("step.record", step(nested(MAX_DEPTH))),
    "64 bits": ("step.record", step([2**63 - 1, -(2**63)])),
    "the largest counter": ("usage.record", used(input_tokens=2**53)),
    "a whole cost": ("usage.record", used(cost=1)),
    "text beyond the basic plane": ("transcript.append", said(content="\U0001f600 \u20ac \u0001 \u2028 \ufffe")),
    "keys that look like types": ("step.record", step({"__type__": "datetime", "": {"": None}})),
    "an unusual float": ("step.record", step([1e-320, -0.0, 1.7976931348623157e308, 0.1 + 0.2])),
}


def test_the_bounds_themselves_are_allowed(worker, subtests):
    for what, (operation, payload) in WELL_FORMED.items():
        with subtests.test(what):
            receipt = worker.apply(operation, payload)
            assert receipt.refused is None
            assert worker.send(worker.request(operation, payload, sequence=receipt.sequence)).replayed


def test_an_address_that_is_none_is_refused_by_name(ledger, epoch, worker, subtests):
    before = dump(ledger)
    wrong: list[tuple[str, Any]] = [
        *(("epoch", value) for value in (True, -1, "1", None, 1.0, 2**63, 10**5000)),
        *(("generation", value) for value in (True, 0, "1", None, 1.0, 2**63)),
        *((name, value) for name in ("execution_id", "session_id") for value in IDS),
    ]
    for name, value in wrong:
        with subtests.test(f"{name} {type(value).__name__}"):
            request = worker.request("execution.finish", **{name: value})
            for send in (
                lambda request=request: worker.send(request),
                lambda request=request: ledger.adopt(epoch, request.address, worker.proof),
                lambda request=request: ledger.attach(
                    epoch, request.address, secret_digest=DIGEST, identity=worker.identity
                ),
            ):
                with pytest.raises(InvalidParams) as refused:
                    send()
                assert refused.value.detail.startswith(f"{name}: ")
    assert dump(ledger) == before


IDS: list[Any] = ["", "a" * 129, "a b", "a\n", "a/b", "\u00e9", "a\0", "\ud800", None, 1, b"x", ["x"], "'; --"]


def test_a_registration_that_is_none_is_refused_by_name(ledger, epoch, subtests):
    before = dump(ledger)
    wrong: list[tuple[str, Any]] = [
        *((name, value) for name in ("execution_id", "session_id", "profile", "principal", "source") for value in IDS),
        *(("principal", value) for value in ("p" * 65,)),
        *(("source", value) for value in ("s" * 65,)),
        *(("kind", value) for value in ("child", "robot", None, 1, [], {})),
        *(("secret_digest", value) for value in (DIGEST[1:], DIGEST.upper(), DIGEST + "\n", None, b"0" * 64, 1)),
    ]
    for name, value in wrong:
        with subtests.test(f"{name} {value!r:.20}"):
            request = replace(Worker(ledger, epoch).registration, **{name: value})
            with pytest.raises(InvalidParams) as refused:
                ledger.register(epoch, request)
            assert name in refused.value.detail.partition(":")[0]
    assert dump(ledger) == before


def test_an_identity_that_is_none_is_refused_by_name(ledger, epoch, subtests):
    child = Worker(ledger, epoch).register().reserve()
    before = dump(ledger)
    good = Identity("h", "", 1, "ticks:1", "u")
    texts: list[Any] = ["x" * 129, "a\0", "a\n", "\ud800", None, 1, b"x"]
    wrong: list[tuple[str, Any]] = [
        *((name, value) for name in ("host", "boot", "birth", "user") for value in texts),
        *(("pid", value) for value in (True, 0, -1, 2**31, "1", 1.0, None)),
    ]
    for name, value in wrong:
        with subtests.test(f"{name} {value!r:.20}"):
            identity = replace(good, **{name: value})
            for send in (
                lambda identity=identity: ledger.register(
                    epoch, replace(Worker(ledger, epoch).registration, identity=identity)
                ),
                lambda identity=identity: replace(child).attach(identity),
            ):
                with pytest.raises(InvalidParams) as refused:
                    send()
                assert refused.value.detail.startswith(f"identity.{name}: ")
    assert dump(ledger) == before


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a":Infinity}', "[-Infinity]", "1" * 5000, "[" * 100_000])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(InvalidParams, check=lambda error: error.detail.startswith("receipt: ")):
        parse(text, name="receipt")


def test_equal_values_have_equal_text():
    assert canonical({"b": [1, None, True], "a": {"d": "\u20ac", "c": 1.5}}) == (
        '{"a":{"c":1.5,"d":"\u20ac"},"b":[1,null,true]}'
    )
    assert canonical({"a": 1}) != canonical({"a": 1.0}) != canonical({"a": True})
