"""The owner's desk: what control messages ask for, answered one by one.

A message has been read and its signature verified; what its body says is believed only as far as it is proved.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..ledger import Address, Identity, Kind, Registration, hosts, reads, submissions
from ..ledger.canonical import parse
from ..ledger.errors import AdmissionConflict, InvalidParams, PermissionDenied
from ..ledger.executions import Hold, check_address, check_identity
from ..ledger.states import Status
from ..ledger.submissions import Submission
from ..ledger.transaction import Execution
from .keys import Capability, Principal
from .liveness import Life, admit, check
from .wire import Control, ControlMessage, ControlProof

if TYPE_CHECKING:
    from .owner import Owner

MAX_PAGE = 1000  # receipts in one answer


class Desk:
    """Answers control messages for one owner."""

    def __init__(self, owner: Owner, owner_pid: int) -> None:
        self._owner, self._owner_pid = owner, owner_pid

    def answer(self, message: ControlMessage, principal: Principal) -> dict[str, Any]:
        """Do what a control message asks for and return the answer.

        Raises:
            TenureError: what is answered instead.
        """
        body = parse(message.body, name="body")
        duty = {
            Control.REGISTER: self._register,
            Control.ADOPT: self._adopt,
            Control.ATTACH: self._attach,
            Control.INSPECT: self._inspect,
            Control.HOLD: self._hold,
            Control.HISTORY: self._history,
            Control.SUBMIT: self._submit,
            Control.LOOKUP: self._lookup,
            Control.PROBE: self._probe,
        }[message.control]
        try:
            return duty(body, principal)
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
        hold = self._owner.ledger.register(self._owner.epoch, request)
        self._owner.watch([identity])
        return hold_to_json(hold)

    def _adopt(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.ADOPT)
        address, proof = _address(body), _proof(body, Control.ADOPT)
        hold = self._owner.ledger.adopt(self._owner.epoch, address, proof)
        with self._owner.ledger.read() as connection:
            self._owner.watch([reads.execution(connection, hold.execution_id).identity])
        return hold_to_json(hold)

    def _attach(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.ATTACH)
        identity = self._checked_process(body)
        digest = _opened_secret(body, principal)
        hold = self._owner.ledger.attach(self._owner.epoch, _address(body), secret_digest=digest, identity=identity)
        self._owner.watch([identity])
        return hold_to_json(hold)

    def _inspect(self, body: dict[str, Any], _principal: Principal) -> dict[str, Any]:
        """Tell a holder how its execution and its children stand; it takes no sequence and no lock."""
        address, proof = _address(body), _proof(body, Control.INSPECT)
        with self._owner.ledger.read() as connection:
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
        admission = admit(identity, self._owner.here, owner_pid=self._owner_pid)
        if not admission.admitted:
            raise PermissionDenied(f"process_{admission.reason}")
        return identity

    def _hold(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        """Register, or take over what a process held that is gone."""
        try:
            held = self._register(body | {"source": "workflow"}, principal)
        except AdmissionConflict as error:
            if error.detail != "execution_exists":
                raise
        else:
            # The same process, held to be gone, may go on where nobody else has: it has only stood still.
            if held["status"] != Status.UNKNOWN:
                return held
        identity = self._checked_process(body)
        address = check_address(Address(self._owner.epoch, body["execution"], body["session"], 1))
        hold = self._owner.ledger.take_over(
            self._owner.epoch,
            address,
            secret_digest=_opened_secret(body, principal),
            identity=identity,
            gone=self._gone(address.execution_id),
        )
        self._owner.watch([identity])
        return hold_to_json(hold)

    def _gone(self, execution_id: str) -> Identity | None:
        """Return the process that holds an execution, if it is proven dead."""
        with self._owner.ledger.read() as connection:
            identity = reads.execution(connection, execution_id).identity
        return identity if check(identity, self._owner.here).life is Life.DEAD else None

    def _history(self, body: dict[str, Any], _principal: Principal) -> dict[str, Any]:
        """Tell a holder what its execution did so far."""
        after, limit = body["after"], body["limit"]
        if type(after) is not int or type(limit) is not int or not (after >= 0 and 0 < limit <= MAX_PAGE):
            raise InvalidParams(f"body: after from 0 and limit from 1 to {MAX_PAGE} are allowed")
        with self._owner.ledger.read() as connection:
            execution = reads.execution(connection, _address(body).execution_id)
            if not _proof(body, Control.HISTORY).matches(execution.claim_digest):
                raise PermissionDenied("claim_mismatch")
            past = reads.receipts(connection, execution.execution_id, after=after, limit=limit)
        return {"receipts": [asdict(receipt) for receipt in past]}

    def _submit(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        principal.require(Capability.SUBMIT)
        request = Submission(
            request_id=body["request"],
            workflow=body["workflow"],
            arguments=_text(body, "arguments"),
            queue=_text(body, "queue"),
            profile=body["profile"],
            principal=principal.name,
            max_attempts=body["attempts"],
        )
        standing = self._owner.ledger.submit(self._owner.epoch, request)
        self._owner.send_due()
        return asdict(standing)

    def _lookup(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        with self._owner.ledger.read() as connection:
            return asdict(submissions.standing(connection, _text(body, "request"), principal.name))

    def _probe(self, body: dict[str, Any], principal: Principal) -> dict[str, Any]:
        """Take in what a host's probe has seen; tell it which processes to watch."""
        principal.require(Capability.PROBE)
        host, boot, seconds = _text(body, "host"), _text(body, "boot"), float(body["seconds"])
        if not (0 < seconds <= 3600 and 0 < len(host) <= 128 and len(boot) <= 128):
            raise InvalidParams("body: host and boot of at most 128 characters, and up to 3600 seconds, are allowed")
        hosts.renew(self._owner.ledger.store, host, boot, seconds=seconds)
        for lost in body["lost"]:
            identity = check_identity(Identity(**lost["identity"]))
            if identity.host != host:
                raise PermissionDenied("other_host")
            self._owner.bury(identity, _text(lost, "evidence"))
        with self._owner.ledger.read() as connection:
            held = {death.identity for death in reads.held_on(connection, host)}
        return {"watch": [asdict(identity) for identity in held]}


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
