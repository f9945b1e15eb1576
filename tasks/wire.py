"""Messages between workers and owners, as plain JSON values, signed.

kombu's JSON rewrites values that look typed, so whatever a user can put anything into travels as one opaque
string of canonical JSON, and the proof covers exactly that string. Nothing here carries a secret.

    control   register, adopt, attach, inspect and others: signed with the principal's key
    apply     a run of consecutive operations of one execution: proved with its claim, signed with the principal's key
    reply     answers to either, in bulk: signed with the principal's key

The claim's proof decides what may be written. The signature decides what is answered: an answer can end a
sender's stream, so nobody else may bring an owner to give one in reply to something that the sender never sent.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

import msgspec

from ..ledger.canonical import MAX_BYTES, canonical, parse, shown
from ..ledger.errors import InvalidParams, PermissionDenied
from .keys import Principal, keyed_digest, same

VERSION = 1
MAX_RUN_BYTES = MAX_BYTES + 64 * 1024  # one operation of the greatest size, or many small ones
REPLY_QUEUE = re.compile(r"tenure\.reply\.[0-9a-f]{32}")


class Control(StrEnum):
    """What a control message asks for."""

    REGISTER = "register"
    ADOPT = "adopt"
    ATTACH = "attach"
    INSPECT = "inspect"
    HOLD = "hold"
    HISTORY = "history"
    SUBMIT = "submit"
    LOOKUP = "lookup"
    PROBE = "probe"


class _Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    version: int
    principal: str
    proof: str
    reply_to: str


class ControlMessage(_Message, frozen=True):
    """One control request. `body` is canonical JSON, `request` names it in the reply."""

    control: Control
    request: str
    body: str


class ApplyMessage(_Message, frozen=True):
    """A run of consecutive operations: `run` is canonical JSON, a list of `[name, payload]`.

    `request` comes back with every answer, so that the sender can tell an answer about operations that it has
    renumbered since.
    """

    signature: str
    request: str
    epoch: int
    execution: str
    session: str
    generation: int
    first: int
    run: str


class ReplyMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Answers in bulk: `answers` is JSON text, a list of `Answer`."""

    version: int
    epoch: int
    principal: str
    answers: str
    proof: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one operation (`execution` and `sequence` name it) or one control message (`request`).

    `value` is a receipt's result, or what a control message returned; `error` is `errors.to_wire`'s form.
    """

    value: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    execution: str = ""
    sequence: int = 0
    request: str = ""


def control(
    kind: Control, body: dict[str, Any], *, principal: Principal, request: str, reply_to: str
) -> dict[str, Any]:
    """Return a signed control message."""
    text = canonical(body, name="body")
    proof = principal.sign(_control_text(kind, principal.name, request, reply_to, text))
    message = ControlMessage(VERSION, principal.name, proof, reply_to, kind, request, text)
    return msgspec.structs.asdict(message) | {"control": kind.value}


def apply(
    *,
    epoch: int,
    execution: str,
    session: str,
    generation: int,
    first: int,
    operations: list[tuple[str, str]],
    claim: str,
    principal: Principal,
    request: str,
    reply_to: str,
) -> dict[str, Any]:
    """Return a proved and signed run; each operation is a name and its payload's canonical JSON text."""
    run = "[" + ",".join(f'["{name}",{payload}]' for name, payload in operations) + "]"
    fences = (epoch, execution, session, generation)
    bare = ApplyMessage(VERSION, principal.name, "", reply_to, "", request, *fences, first, run)
    text = apply_text(bare)
    proof = keyed_digest(claim.encode(), text)
    return msgspec.structs.asdict(bare) | {"proof": proof, "signature": principal.sign(_signed_text(text, proof))}


def reply(epoch: int, answers: list[Answer], *, principal: Principal) -> dict[str, Any]:
    """Return signed answers."""
    # Not canonical: a result that is nested as deep as is allowed stands deeper here. ASCII carries any text.
    text = json.dumps([asdict(answer) for answer in answers], allow_nan=False, separators=(",", ":"))
    proof = principal.sign(_reply_text(epoch, principal.name, text))
    return msgspec.structs.asdict(ReplyMessage(VERSION, epoch, principal.name, text, proof))


def read_control(value: object) -> ControlMessage:
    """Read a control message; its signature is still to be verified.

    Raises:
        InvalidParams: it is not of the form above.
    """
    message = _read(value, ControlMessage)
    _check_request(message, "body", message.body)
    return message


def read_apply(value: object) -> ApplyMessage:
    """Read a run; its signature and its proof are still to be verified.

    Raises:
        InvalidParams: it is not of the form above.
    """
    message = _read(value, ApplyMessage)
    _check_request(message, "run", message.run)
    return message


def read_reply(value: object, principal: Principal) -> tuple[int, list[Answer]]:
    """Return the epoch and the answers of a reply that is authentic.

    Raises:
        InvalidParams: it is not of the form above.
        PermissionDenied: it is not signed by an owner that has this principal's key.
    """
    message = _read(value, ReplyMessage)
    if message.principal != principal.name:
        raise PermissionDenied("other_principal")
    principal.verify(_reply_text(message.epoch, message.principal, message.answers), message.proof)
    return message.epoch, [Answer(**answer) for answer in parse(message.answers, name="answers")]


def read_run(message: ApplyMessage) -> list[tuple[str, Any]]:
    """Return the operations of a run.

    Raises:
        InvalidParams: it is not a list of names and payloads.
    """
    run = parse(message.run, name="run")
    if not isinstance(run, list) or not run:
        raise InvalidParams("run: a list of operations is allowed")
    for entry in run:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise InvalidParams("run: an operation is [name, payload]")
    return [(name, payload) for name, payload in run]


def verify_control(message: ControlMessage, principal: Principal) -> None:
    """Check a control message's signature.

    Raises:
        PermissionDenied: it is not this principal's.
    """
    text = _control_text(message.control, message.principal, message.request, message.reply_to, message.body)
    principal.verify(text, message.proof)


def verify_run(message: ApplyMessage, principal: Principal) -> None:
    """Check a run's signature.

    Raises:
        PermissionDenied: it is not this principal's.
    """
    principal.verify(_signed_text(apply_text(message), message.proof), message.signature)


@dataclass(frozen=True, slots=True)
class RunProof:
    """A run's HMAC as proof of the claim it is keyed by."""

    text: str
    proof: str

    @classmethod
    def of(cls, message: ApplyMessage) -> Self:
        """Take it from a message."""
        return cls(apply_text(message), message.proof)

    def matches(self, claim: str) -> bool:
        """Compute it anew with the stored claim."""
        return same(keyed_digest(claim.encode(), self.text), self.proof)


def claim_proof(claim: str, purpose: Control, execution: str, epoch: int) -> str:
    """Return the proof of a claim that a control message carries in its body."""
    return keyed_digest(claim.encode(), f"tenure.{purpose}\0{execution}\0{epoch}")


@dataclass(frozen=True, slots=True)
class ControlProof:
    """A control message's proof of a claim."""

    purpose: Control
    execution: str
    epoch: int
    proof: str

    def matches(self, claim: str) -> bool:
        """Compute it anew with the stored claim."""
        return same(claim_proof(claim, self.purpose, self.execution, self.epoch), self.proof)


def apply_text(message: ApplyMessage) -> str:
    """Return what a run's proof covers: every field but the proof and the signature."""
    head = (message.version, message.principal, message.reply_to, message.request, message.epoch)
    rest = (message.execution, message.session, message.generation, message.first)
    return "\0".join(["tenure.apply", *map(str, head + rest), message.run])


def _signed_text(text: str, proof: str) -> str:
    return f"tenure.run\0{proof}\0{text}"


def _control_text(kind: Control, principal: str, request: str, reply_to: str, body: str) -> str:
    return "\0".join(["tenure.control", str(VERSION), kind, principal, request, reply_to, body])


def _reply_text(epoch: int, principal: str, answers: str) -> str:
    return "\0".join(["tenure.reply", str(VERSION), str(epoch), principal, answers])


M = TypeVar("M", ControlMessage, ApplyMessage, ReplyMessage)
_QUOTING = ("Object contains unknown field", "Invalid enum value")  # what msgspec then says holds text of the message


def _read(value: object, kind: type[M]) -> M:
    try:
        message = msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        told = str(error)
        raise InvalidParams(f"message: {next((q for q in _QUOTING if told.startswith(q)), told)}") from None
    if message.version != VERSION:
        raise InvalidParams(f"version: {shown(message.version)} given, {VERSION} is allowed")
    for name in kind.__struct_fields__:
        _check_text(name, getattr(message, name))
    return message


def _check_request(message: _Message, name: str, text: str) -> None:
    if not REPLY_QUEUE.fullmatch(message.reply_to):
        raise InvalidParams("reply_to: not a reply queue's name")
    if len(text) > MAX_RUN_BYTES:
        raise InvalidParams(f"{name}: {len(text)} characters, at most {MAX_RUN_BYTES} are allowed")


def _check_text(name: str, value: object) -> None:
    """Refuse what digests cannot cover: NUL parts their fields, a lone surrogate has no UTF-8 form."""
    if isinstance(value, str) and ("\0" in value or not _encodable(value)):
        raise InvalidParams(f"{name}: text holds a NUL character or a lone surrogate")


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
