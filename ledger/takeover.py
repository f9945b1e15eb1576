"""Takeover: another process continues an execution whose process is gone.

Same secret, next generation. The first process, should it only have been paused, is fenced by the generation:
whatever it still sends is stale.
"""

from __future__ import annotations

import hmac

from .children import claim_of
from .claims import Identity
from .errors import AdmissionConflict, NotFound, PermissionDenied, StaleGeneration
from .executions import Address, Hold, check_identity, check_secret_digest
from .states import Kind, Reason, Status
from .transaction import Execution, Transaction

GONE = frozenset({Reason.PROCESS_DEAD, Reason.PROCESS_STOPPED})


def take_over(
    tx: Transaction, address: Address, *, secret_digest: str, identity: Identity, gone: Identity | None
) -> Hold:
    """Continue a root execution in another process.

    `gone` is the process that the owner has proved to be gone, where it has; that recovery has found so before
    counts as well. An execution that has ended is answered as it is.

    Raises:
        NotFound: no such execution.
        PermissionDenied: another session, or not its secret.
        AdmissionConflict: its process is not proven gone (`held`).
        StaleGeneration: it is a child: its parent delegates anew.
    """
    check_identity(identity)
    check_secret_digest(secret_digest)
    execution = _held(tx, address, secret_digest)
    if execution.status is Status.TERMINAL or execution.identity == identity:
        return _again(tx, execution)
    if execution.status is not Status.UNKNOWN and execution.identity == gone:
        tx.move(execution, Status.UNKNOWN, reason=Reason.PROCESS_DEAD, by=f"takeover by {identity.host}:{identity.pid}")
    lost = execution.status is Status.UNKNOWN and (execution.status_reason in GONE or execution.identity == gone)
    if not lost:
        raise AdmissionConflict("held", {"status": execution.status.value})
    session = tx.session(execution.session_id)
    assert session is not None  # a foreign key says so
    session.generation += 1
    execution.generation = session.generation
    execution.host, execution.boot = identity.host, identity.boot
    execution.pid, execution.birth, execution.username = identity.pid, identity.birth, identity.user
    execution.claim_digest = claim_of(execution, secret_digest)
    execution.epoch = tx.epoch
    tx.move(execution, Status.RUNNING, reason=Reason.TAKEN_OVER, by=f"{identity.host}:{identity.pid}")
    return Hold.of(execution)


def _held(tx: Transaction, address: Address, secret_digest: str) -> Execution:
    execution = tx.execution(address.execution_id)
    if execution is None:
        raise NotFound("execution")
    if execution.session_id != address.session_id:
        raise PermissionDenied("other_session")
    if not hmac.compare_digest(execution.claim_digest, claim_of(execution, secret_digest)):
        raise PermissionDenied("claim_mismatch")
    if execution.kind is Kind.CHILD:
        raise StaleGeneration("child_not_adoptable", {"status": execution.status.value})
    return execution


def _again(tx: Transaction, execution: Execution) -> Hold:
    """Answer the process that holds it already, or that asks for what has ended."""
    execution.epoch = tx.epoch
    if execution.status is Status.UNKNOWN:
        tx.move(execution, Status.RUNNING, reason=Reason.ADOPTED, by=execution.execution_id)
    return Hold.of(execution)
