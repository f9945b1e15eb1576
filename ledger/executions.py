"""Executions as their holders see them: register, adopt, attach; and discard, for an operator."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from . import schema
from .canonical import shown
from .children import claim_of, new_session, retire_descendants
from .claims import Identity, Proof
from .errors import (
    AdmissionConflict,
    InvalidParams,
    NotFound,
    PermissionDenied,
    RuntimeDraining,
    StaleEpoch,
    StaleGeneration,
)
from .states import Kind, Outcome, Reason, Status
from .transaction import Execution, Session, Transaction

_ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Address:
    """What every request of a worker names: which execution, on which session, at which fences."""

    epoch: int
    execution_id: str
    session_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker that wants to hold a session. The same registration may be sent again."""

    execution_id: str
    session_id: str
    kind: Kind
    profile: str
    principal: str
    identity: Identity
    secret_digest: str
    source: str = "worker"


@dataclass(frozen=True, slots=True)
class Hold:
    """How an execution stands: what its holder needs to go on."""

    execution_id: str
    session_id: str
    kind: Kind
    status: Status
    epoch: int
    generation: int
    last_sequence: int

    @classmethod
    def of(cls, execution: Execution) -> Hold:
        """Tell how this execution stands."""
        return cls(
            execution.execution_id,
            execution.session_id,
            execution.kind,
            execution.status,
            execution.epoch,
            execution.generation,
            execution.last_sequence,
        )


def check_id(name: str, value: object) -> str:
    """Return the value if it can be an id.

    Raises:
        InvalidParams: it is not 1 to 128 characters of letters, digits and `_.:@-`.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InvalidParams(f"{name}: 1 to 128 letters, digits and _.:@- are allowed")
    return value


def check_whole(name: str, value: object, *, least: int) -> None:
    """Check that the value is a whole number that every database can hold.

    Raises:
        InvalidParams: it is not, or less than `least`.
    """
    if type(value) is not int or not least <= value < 2**63:
        raise InvalidParams(f"{name}: {shown(value)} given, a whole number from {least} is allowed")


def check_address(address: Address) -> Address:
    """Return the address if it is well formed.

    Raises:
        InvalidParams: `detail` names the field.
    """
    check_whole("epoch", address.epoch, least=0)
    check_whole("generation", address.generation, least=1)
    check_id("execution_id", address.execution_id)
    check_id("session_id", address.session_id)
    return address


def check_registration(request: Registration) -> Registration:
    """Return the request if it is well formed.

    Raises:
        InvalidParams: `detail` names the field.
    """
    for name in ("execution_id", "session_id", "profile", "principal", "source"):
        check_id(name, getattr(request, name))
    check_identity(request.identity)
    if len(request.source) > 64 or len(request.principal) > 64:
        raise InvalidParams("source, principal: at most 64 characters are allowed")
    if request.kind not in [kind for kind in Kind if kind is not Kind.CHILD]:
        raise InvalidParams(f"kind: {shown(request.kind)} given; compute, cron or kanban is allowed")
    check_secret_digest(request.secret_digest)
    return request


def check_identity(identity: Identity) -> Identity:
    """Return the identity if it can be stored.

    Raises:
        InvalidParams: `detail` names the field.
    """
    for name in ("host", "boot", "birth", "user"):
        value = getattr(identity, name)
        if not isinstance(value, str) or len(value) > 128 or not value.isprintable():
            raise InvalidParams(f"identity.{name}: at most 128 printable characters are allowed")
    if type(identity.pid) is not int or not 0 < identity.pid < 2**31:
        raise InvalidParams("identity.pid: a process id is a positive whole number")
    return identity


def check_secret_digest(value: object) -> None:
    """Refuse what is not the digest of a secret.

    Raises:
        InvalidParams: it is not 64 hexadecimal digits.
    """
    if not isinstance(value, str) or not _HEX64.fullmatch(value):
        raise InvalidParams("secret_digest: 64 hexadecimal digits are allowed")


def register(tx: Transaction, request: Registration) -> Hold:
    """Admit a root execution that holds its session from now on.

    Raises:
        AdmissionConflict: the id is taken (`execution_exists`), or the session is held (`session_held`).
        PermissionDenied: the session belongs to another profile.
        StaleGeneration: the session has ended.
        RuntimeDraining: an operator drains the runtime.
    """
    if known := tx.execution(request.execution_id):
        return _registered_before(known, request)
    if tx.drain_reason is not None:
        raise RuntimeDraining(tx.drain_reason)
    session = _take_session(tx, request)
    execution = Execution(
        execution_id=request.execution_id,
        session_id=request.session_id,
        kind=request.kind,
        status=Status.REGISTERED,
        parent_execution_id=None,
        reserved_sequence=None,
        depth=0,
        max_concurrent_children=None,
        max_spawn_depth=None,
        profile=request.profile,
        principal=request.principal,
        epoch=tx.epoch,
        generation=session.generation,
        last_sequence=0,
        claim_digest="",
        host=request.identity.host,
        boot=request.identity.boot,
        pid=request.identity.pid,
        birth=request.identity.birth,
        username=request.identity.user,
        outcome=None,
        result=None,
        status_at=tx.now,
        status_reason=Reason.REGISTERED,
        status_by=request.principal,
        created_at=tx.now,
        attached_at=None,
        ended_at=None,
    )
    execution.claim_digest = claim_of(execution, request.secret_digest)
    tx.add(execution)
    tx.record_move(execution.execution_id, None, Status.REGISTERED, reason=Reason.REGISTERED, by=request.principal)
    return Hold.of(execution)


def _registered_before(known: Execution, request: Registration) -> Hold:
    same = (
        known.session_id == request.session_id
        and known.kind == request.kind
        and known.profile == request.profile
        and known.principal == request.principal
        and hmac.compare_digest(known.claim_digest, claim_of(known, request.secret_digest))
        and known.identity == request.identity
    )
    if not same:
        raise AdmissionConflict("execution_exists")
    return Hold.of(known)


def _take_session(tx: Transaction, request: Registration) -> Session:
    session = tx.session(request.session_id)
    if session is None:
        session = new_session(tx, session_id=request.session_id, source=request.source, profile=request.profile)
        tx.add(session)
        return session
    if session.profile != request.profile:
        raise PermissionDenied("other_profile")
    if session.ended_at is not None:
        raise StaleGeneration("session_ended")
    x = schema.worker_executions
    held = tx.execute(x.select().where(x.c.session_id == session.session_id, x.c.status != Status.TERMINAL)).first()
    if held is not None:
        raise AdmissionConflict("session_held", {"status": held.status, "kind": held.kind})
    session.generation += 1
    return session


def authenticate(tx: Transaction, address: Address, proof: Proof) -> Execution:
    """Return the execution that the sender has proved to hold.

    Raises:
        StaleEpoch: the epoch is not the current one; `data["epoch"]` is.
        NotFound, PermissionDenied, StaleGeneration: as the names say.
    """
    if address.epoch != tx.epoch:
        raise StaleEpoch("epoch_mismatch", {"epoch": tx.epoch})
    execution = tx.execution(address.execution_id)
    if execution is None:
        raise NotFound("execution")
    if execution.session_id != address.session_id:
        raise PermissionDenied("other_session")
    session = tx.session(execution.session_id)
    assert session is not None  # a foreign key says so
    if not address.generation == execution.generation == session.generation:
        raise StaleGeneration("generation_mismatch", {"generation": session.generation})
    if not proof.matches(execution.claim_digest):
        raise PermissionDenied("claim_mismatch")
    return execution


def adopt(tx: Transaction, address: Address, proof: Proof) -> Hold:
    """Attach a live root to the current epoch.

    A root that has ended is answered too, as `terminal`: its receipts can be read by replay, nothing can be added.

    Raises:
        StaleGeneration: it is a child (`child_not_adoptable`): its parent delegates anew.
        StaleEpoch, NotFound, PermissionDenied: as in `authenticate`.
    """
    execution = authenticate(tx, address, proof)
    if execution.kind is Kind.CHILD:
        raise StaleGeneration("child_not_adoptable", {"status": execution.status.value})
    execution.epoch = tx.epoch
    if execution.status in {Status.REGISTERED, Status.UNKNOWN}:
        tx.move(execution, Status.RUNNING, reason=Reason.ADOPTED, by=execution.execution_id)
    return Hold.of(execution)


def attach(tx: Transaction, address: Address, secret_digest: str, identity: Identity) -> Hold:
    """Put a reserved child into the hands of its own process, which may be anywhere on the fleet.

    Raises:
        PermissionDenied: wrong secret, or another process has attached before (`claim_mismatch`).
        StaleGeneration: the child has ended, or has receipts of its parent's process.
        StaleEpoch: it was reserved under an older epoch, whose children end.
        NotFound: as in `authenticate`.
    """
    check_identity(identity)
    check_secret_digest(secret_digest)
    execution = authenticate(tx, address, _Secret(tx, address, secret_digest))
    if execution.kind is not Kind.CHILD:
        raise PermissionDenied("not_a_child")
    if execution.epoch != tx.epoch:
        raise StaleEpoch("not_adopted", {"epoch": tx.epoch})
    if execution.attached_at is not None and execution.identity == identity:
        return Hold.of(execution)
    if execution.attached_at is not None:
        raise PermissionDenied("attached_elsewhere")
    if execution.status is not Status.RUNNING or execution.last_sequence:
        raise StaleGeneration(f"execution_{execution.status}", {"last_sequence": execution.last_sequence})
    execution.host, execution.boot = identity.host, identity.boot
    execution.pid, execution.birth, execution.username = identity.pid, identity.birth, identity.user
    execution.claim_digest = claim_of(execution, secret_digest)
    execution.attached_at = tx.now
    return Hold.of(execution)


class _Secret:
    """A secret as proof: it makes the claim anew from the facts that the ledger has."""

    def __init__(self, tx: Transaction, address: Address, secret_digest: str) -> None:
        self.tx, self.address, self.secret_digest = tx, address, secret_digest

    def matches(self, claim: str) -> bool:
        execution = self.tx.execution(self.address.execution_id)
        assert execution is not None  # the caller has found it
        return hmac.compare_digest(claim, claim_of(execution, self.secret_digest))


def end(tx: Transaction, execution: Execution, *, outcome: Outcome, reason: str, by: str) -> list[str]:
    """Make an execution terminal and retire its descendants; returns their ids."""
    tx.move(execution, Status.TERMINAL, reason=reason, by=by)
    execution.outcome = outcome
    execution.ended_at = tx.now
    return retire_descendants(tx, [execution.execution_id], reason=Reason.PARENT_FINISHED, by=by)


def discard(tx: Transaction, execution_id: str, *, reason: str, by: str) -> Hold:
    """End an execution that is `unknown` and that nobody will adopt. Ended ones are answered as they are.

    Raises:
        InvalidParams: it cannot be an id.
        NotFound: no such execution.
        AdmissionConflict: it is live: drain or let it finish.
    """
    execution = tx.execution(check_id("execution_id", execution_id))
    if execution is None:
        raise NotFound("execution")
    if execution.status.writable:
        raise AdmissionConflict(f"execution_{execution.status}")
    if execution.status is Status.UNKNOWN:
        end(tx, execution, outcome=Outcome.INTERRUPTED, reason=reason, by=by)
    return Hold.of(execution)
