"""The owner's duties, one call each, without a queue: read a message, apply it, return the reply.

Nothing a message holds may kill the owner or stop the next message. What cannot be understood or proved is
refused; what the database cannot serve now is answered `unavailable`, and the worker sends it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ..ledger import Address, Identity, Kind, Ledger, Registration, Request, reads
from ..ledger.canonical import parse
from ..ledger.errors import (
    Action,
    InvalidParams,
    OwnerSuperseded,
    PermissionDenied,
    TenureError,
    Unavailable,
    to_wire,
)
from ..ledger.executions import Hold, check_address, check_identity
from ..ledger.transaction import Execution
from . import wire
from .keys import Capability, Keyring, Principal
from .liveness import admit
from .recovery import deaths_on_this_host
from .wire import Answer, ApplyMessage, Control, ControlMessage, ControlProof

logger = logging.getLogger(__name__)

CAREFUL_SECONDS = 120.0  # after a crash, for how long attempts are counted before they are made


@dataclass(frozen=True, slots=True)
class Reply:
    """What to send back, and where."""

    reply_to: str
    message: dict[str, Any]


class Owner:
    """One epoch's owner: the only one whose writes the ledger takes."""

    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        here: Identity,
        epoch: int,
        *,
        owner_pid: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.keyring, self.here, self.epoch = ledger, keyring, here, epoch
        # A worker in the owner's own process is refused, unless the two are one program (`owner_pid` 0).
        self._owner_pid = here.pid if owner_pid is None else owner_pid
        self._monotonic = monotonic
        # A worker that knows nothing of the crash sends again what caused it, so this owner counts first.
        crashed = ledger.predecessor_crashed(epoch)
        self._careful_until = monotonic() + CAREFUL_SECONDS if crashed else float("-inf")

    @property
    def careful(self) -> bool:
        """Whether attempts are counted before they are made."""
        return self._monotonic() < self._careful_until

    def apply(self, value: object) -> Reply | None:
        """Apply a run of operations, one after the other, up to the first that is not answered by a receipt.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
        """
        try:
            message = wire.read_apply(value)
            principal = self.keyring.get(message.principal)
            wire.verify_run(message, principal)
        except TenureError as error:
            _refuse(value, error)
            return None
        answers = self._run(message, principal)
        return Reply(message.reply_to, wire.reply(self.epoch, answers, principal=principal))

    def _run(self, message: ApplyMessage, principal: Principal) -> list[Answer]:
        answers: list[Answer] = []
        address = Address(message.epoch, message.execution, message.session, message.generation)
        proof = wire.RunProof.of(message)
        sequence = message.first
        try:
            for name, payload in wire.read_run(message):
                opened = _unsealed(name, payload, principal, message.execution)
                request = Request(address, sequence, name, opened, proof)
                receipt = self.ledger.apply(self.epoch, request, careful=self.careful)
                answers.append(Answer(receipt.result, None, message.execution, sequence, message.request))
                sequence += 1
        except OwnerSuperseded:
            raise
        except TenureError as error:
            logger.info("%s:%d: %s", message.execution, sequence, error.explain())
            answers.append(Answer(None, self._told(error), message.execution, sequence, message.request))
        return answers

    def control(self, value: object) -> Reply | None:
        """Answer a control message.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
        """
        try:
            message = wire.read_control(value)
            principal = self.keyring.get(message.principal)
            wire.verify_control(message, principal)
        except TenureError as error:
            _refuse(value, error)
            return None
        try:
            answer = Answer(self._control(message, principal), request=message.request)
        except OwnerSuperseded:
            raise
        except TenureError as error:
            logger.info("%s: %s", message.control, error.explain())
            answer = Answer(None, self._told(error), request=message.request)
        return Reply(message.reply_to, wire.reply(self.epoch, [answer], principal=principal))

    def _told(self, error: TenureError) -> dict[str, Any]:
        """Return an error as it is answered. One that has its reader give up is for the current owner to tell.

        Raises:
            OwnerSuperseded: this is not it.
        """
        try:
            if error.action is Action.NEVER:
                with self.ledger.transaction(self.epoch):
                    pass
        except Unavailable as now:
            return to_wire(now)
        return to_wire(error)

    def _control(self, message: ControlMessage, principal: Principal) -> dict[str, Any]:
        body = parse(message.body, name="body")
        try:
            match message.control:
                case Control.REGISTER:
                    return self._register(body, principal)
                case Control.ADOPT:
                    return self._adopt(body, principal)
                case Control.ATTACH:
                    return self._attach(body, principal)
                case Control.INSPECT:
                    return self._inspect(body)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidParams(f"body: {type(error).__name__}: {error}") from error

    def _register(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.REGISTER)
        identity = self._checked_process(body)
        request = Registration(
            execution_id=body["execution"],
            session_id=body["session"],
            kind=Kind(body["kind"]),
            profile=body["profile"],
            principal=principal.name,
            identity=identity,
            secret_digest=_opened_secret(body, principal),
            source=body["source"],
        )
        return hold_to_json(self.ledger.register(self.epoch, request))

    def _adopt(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.ADOPT)
        address, proof = _address(body), _proof(body, Control.ADOPT)
        return hold_to_json(self.ledger.adopt(self.epoch, address, proof))

    def _attach(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.ATTACH)
        identity = self._checked_process(body)
        digest = _opened_secret(body, principal)
        hold = self.ledger.attach(self.epoch, _address(body), secret_digest=digest, identity=identity)
        return hold_to_json(hold)

    def _inspect(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tell a holder how its execution and its children stand; it takes no sequence and no lock."""
        address, proof = _address(body), _proof(body, Control.INSPECT)
        with self.ledger.read() as connection:
            execution = reads.execution(connection, address.execution_id)
            if not proof.matches(execution.claim_digest):
                raise PermissionDenied("claim_mismatch")
            children = reads.children(connection, address.execution_id)
        told = [_child_to_json(child) for child in children]
        return hold_to_json(Hold.of(execution)) | {"children": told}

    def _checked_process(self, body: dict[str, Any]) -> Identity:
        """Return the sender's identity; refuse a process of this host that is provably not what it says.

        Raises:
            InvalidParams: it cannot be an identity.
            PermissionDenied: the process is dead, another one, another user's, or this owner.
        """
        identity = check_identity(Identity(**body["identity"]))
        admission = admit(identity, self.here, owner_pid=self._owner_pid)
        if not admission.admitted:
            raise PermissionDenied(f"process_{admission.reason}")
        return identity

    def recover(self, *, unknown_grace: timedelta | None) -> dict[str, Any]:
        """Run one recovery pass; returns the report.

        Raises:
            OwnerSuperseded: a newer epoch has begun; this process must leave.
            Unavailable: the database cannot serve this now.
        """
        deaths = deaths_on_this_host(self.ledger, self.here)
        return self.ledger.recover(self.epoch, deaths=deaths, unknown_grace=unknown_grace).as_json()


def hold_to_json(hold: Hold) -> dict[str, Any]:
    """Return a hold as a JSON object; `hold_from_json` is its inverse."""
    return asdict(hold) | {"kind": hold.kind.value, "status": hold.status.value}


def _child_to_json(child: Execution) -> dict[str, Any]:
    return hold_to_json(Hold.of(child)) | {
        "outcome": None if child.outcome is None else child.outcome.value,
        "reason": child.status_reason,
        "sequence": child.reserved_sequence,
        "result": None if child.result is None else parse(child.result, name="result"),
    }


def _address(body: dict[str, Any]) -> Address:
    return check_address(Address(body["epoch"], body["execution"], body["session"], body["generation"]))


def _proof(body: dict[str, Any], purpose: Control) -> ControlProof:
    return ControlProof(purpose, body["execution"], body["epoch"], _text(body, "proof"))


def _opened_secret(body: dict[str, Any], principal: Principal) -> str:
    return principal.unseal(_text(body, "secret"), context=_text(body, "execution"))


def _text(body: dict[str, Any], name: str) -> str:
    value = body[name]
    if not isinstance(value, str):
        raise InvalidParams(f"body.{name}: text is allowed")
    return value


def _unsealed(name: str, payload: Any, principal: Principal, execution: str) -> Any:
    """Open the secret's digest of a reservation, which travels sealed."""
    if name != "child.reserve" or not isinstance(payload, dict) or "sealed" not in payload:
        return payload
    token = payload["sealed"]
    if not isinstance(token, str):
        raise InvalidParams("child.reserve: sealed is text")
    rest = {key: value for key, value in payload.items() if key != "sealed"}
    return rest | {"secret_digest": principal.unseal(token, context=execution)}


def _refuse(value: object, error: TenureError) -> None:
    """Refuse what is not ours, or not provably from whom it says: once in the log, sizes only."""
    texts = [item for item in value.values() if isinstance(item, str)] if isinstance(value, dict) else []
    logger.warning("refused a message with %d characters of text: %s", sum(map(len, texts)), error.explain())
