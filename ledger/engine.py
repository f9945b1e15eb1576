"""The receipt engine: one operation of one execution, applied once.

The order of the checks is the contract: shape, epoch, execution, generation, claim, adoption, receipt, status,
sequence; only then the handler. `read` does the first, outside any transaction; `apply` the others.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import DBAPIError

from . import schema
from .canonical import canonical, digest, parse
from .claims import Proof
from .errors import AdmissionConflict, InvalidParams, SequenceGap, StaleEpoch, StaleGeneration
from .executions import Address, authenticate, check_address, check_whole
from .operations import Operation, Refusal, Registry, Result, Work
from .states import Reason, Status
from .store import unavailable
from .transaction import Execution, Transaction

POISON_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One operation as a worker sends it."""

    address: Address
    sequence: int
    operation: str
    payload: dict[str, Any]
    proof: Proof


@dataclass(frozen=True, slots=True)
class Checked:
    """A request whose shape is right."""

    address: Address
    sequence: int
    operation: Operation[Any]
    payload: Any
    digest: str
    proof: Proof


@dataclass(frozen=True, slots=True)
class Receipt:
    """The stored answer to one operation."""

    execution_id: str
    sequence: int
    operation: str
    result: Result
    replayed: bool = False

    @property
    def refused(self) -> str | None:
        """Why the operation was refused, or None."""
        reason = self.result.get("refused")
        return reason if isinstance(reason, str) else None


class HandlerFault(Exception):
    """A handler raised something of its own."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause
        super().__init__(type(cause).__name__)


def read(request: Request, registry: Registry) -> Checked:
    """Check a request's shape.

    Raises:
        InvalidParams: `detail` names the field.
    """
    check_whole("sequence", request.sequence, least=1)
    address = check_address(request.address)
    operation = registry.get(request.operation)
    if type(request.payload) is not dict:
        raise InvalidParams(f"payload: {type(request.payload).__name__} given, an object is allowed")
    text = canonical(request.payload)
    payload = operation.read(request.payload)
    return Checked(address, request.sequence, operation, payload, digest(operation.name, text), request.proof)


def admit(tx: Transaction, request: Checked) -> Execution | Receipt:
    """Return the execution whose next operation this is, or the receipt that answers it already.

    Raises:
        StaleEpoch, NotFound, PermissionDenied, StaleGeneration, AdmissionConflict, SequenceGap: nothing is
            consumed; each in the order above.
    """
    execution = authenticate(tx, request.address, request.proof)
    if execution.epoch != tx.epoch:
        raise StaleEpoch("not_adopted", {"epoch": tx.epoch})
    if stored := tx.receipt(execution.execution_id, request.sequence):
        if stored.digest != request.digest:
            raise AdmissionConflict("other_payload", {"operation": stored.operation})
        result = parse(stored.result, name="receipt")
        return Receipt(execution.execution_id, request.sequence, stored.operation, result, replayed=True)
    if not execution.status.writable:
        raise StaleGeneration(f"execution_{execution.status}", {"reason": execution.status_reason})
    if request.sequence != execution.last_sequence + 1:
        raise SequenceGap("missing", {"expected": execution.last_sequence + 1})
    return execution


def apply(tx: Transaction, request: Checked, *, verdict: Result | None = None) -> Receipt:
    """Apply one operation in the transaction, or answer it from its receipt.

    `verdict` is stored instead of running the handler: what became of an operation that cannot be run.

    Raises:
        StaleEpoch, NotFound, PermissionDenied, StaleGeneration, AdmissionConflict, SequenceGap: as in `admit`.
        HandlerFault: the handler raised; the transaction must not commit.
    """
    execution = admit(tx, request)
    if isinstance(execution, Receipt):
        return execution
    session = tx.session(execution.session_id)
    assert session is not None  # a foreign key says so
    work = Work(tx, execution, session, request.sequence)
    result = verdict if verdict is not None else _run(request, work)
    text = _result_text(result)
    execution.last_sequence = request.sequence
    if execution.status is Status.REGISTERED:
        tx.move(execution, Status.RUNNING, reason=Reason.FIRST_RECEIPT, by=execution.execution_id)
    if work.changed:
        session.revision += 1
    tx.insert(
        schema.worker_receipts,
        execution_id=execution.execution_id,
        sequence=request.sequence,
        operation=request.operation.name,
        digest=request.digest,
        result=text,
        epoch=tx.epoch,
        generation=execution.generation,
        created_at=tx.now,
    )
    return Receipt(execution.execution_id, request.sequence, request.operation.name, result)


def _result_text(result: Result) -> str:
    if type(result) is not dict:
        raise HandlerFault(TypeError(f"{type(result).__name__} returned, an object is allowed"))
    try:
        return canonical(result, name="result")
    except InvalidParams as error:
        raise HandlerFault(error) from error


def _run(request: Checked, work: Work) -> Result:
    """Run the handler. What it raises becomes a fault; what the database raises stays what it is."""
    try:
        result = request.operation.handler(work, request.payload)
        work.tx.flush()
    except DBAPIError as error:
        if unavailable(error):
            raise
        raise HandlerFault(error) from error
    except KeyboardInterrupt as error:
        # In the main thread this is a person at the terminal; elsewhere only a handler can have raised it.
        if threading.current_thread() is threading.main_thread():
            raise
        raise HandlerFault(error) from error
    except BaseException as error:
        # An end of the process that a handler asks for is its fault too: the owner answers, and goes on.
        raise HandlerFault(error) from error
    return result.result() if isinstance(result, Refusal) else result
