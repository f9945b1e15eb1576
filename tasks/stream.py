"""One execution's operations on their way from its outbox to their receipts.

A state machine without threads and without a clock of its own: `poll` says what to send now, `receive` takes an
answer in. It believes nothing but receipts, so whatever is lost, in either direction, is sent again.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from uuid import uuid4

from ..ledger.claims import Identity, claim_digest
from ..ledger.engine import Receipt
from ..ledger.errors import (
    Action,
    AdmissionConflict,
    InvalidParams,
    OutboxCorrupt,
    SequenceGap,
    StaleEpoch,
    TenureError,
    Unavailable,
    from_wire,
)
from ..ledger.executions import Hold
from .outbox import Entry, Outbox
from .wire import Answer

logger = logging.getLogger(__name__)

MAX_PAUSE_SECONDS = 30.0
RUN_LENGTH = 64  # operations in one message
RUN_BYTES = 256 * 1024  # a run is cut here; one greater operation travels alone


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """What proves a hold: facts that the ledger has too, and a digest that only the holder has."""

    profile: str
    principal: str
    identity: Identity
    secret_digest: str

    def claim(self, hold: Hold) -> str:
        """Return the claim on an execution at its generation."""
        return claim_digest(
            profile=self.profile,
            session_id=hold.session_id,
            execution_id=hold.execution_id,
            generation=hold.generation,
            identity=self.identity,
            secret_digest=self.secret_digest,
            principal=self.principal,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """Operations to send, under the fences that hold now."""

    hold: Hold
    claim: str
    request: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True, repr=False)
class Adoption:
    """An adoption to ask for, under the epoch that the last answer named."""

    hold: Hold
    claim: str
    epoch: int
    request: str


class Stream:
    """The sender's view of one execution. Callers hold the sender's lock."""

    def __init__(self, outbox: Outbox, hold: Hold, credential: Credential, *, resend_seconds: float) -> None:
        self.outbox, self.hold, self.credential = outbox, hold, credential
        self.claim = credential.claim(hold)
        self.broken: TenureError | None = None
        # What an earlier process had journalled here is waited for like one's own.
        self.promises: dict[int, Future[Receipt]] = {entry.sequence: Future() for entry in outbox.pending()}
        self._resend_seconds = self._pause = resend_seconds
        self._due = 0.0  # when to send next; 0 is at once
        self._in_flight = 0  # operations sent and not answered
        self._adopting: int | None = None  # the epoch to adopt under
        self.request = uuid4().hex

    def append(self, operation: str, payload: str) -> Future[Receipt]:
        """Journal an operation; when this returns it is durable here. The future becomes its receipt.

        Raises:
            TenureError: why this execution can write no more.
            OutboxFull, Unavailable: nothing was journalled.
        """
        if self.broken:
            raise self.broken
        entry = self.outbox.append(operation, payload)
        promise = self.promises[entry.sequence] = Future[Receipt]()
        return promise

    @property
    def idle(self) -> bool:
        """Whether everything that was journalled has its receipt."""
        return self._adopting is None and not self.outbox.pending(limit=1)

    def due(self) -> float | None:
        """Return when to poll next, on the clock of `poll`; None when there is nothing to send."""
        try:
            return None if self.broken or self.idle else self._due
        except TenureError:  # of the outbox; `poll` sees to it
            return self._due

    def poll(self, now: float) -> Run | Adoption | None:
        """Return what to send now. It counts as sent: without an answer it comes again after a pause."""
        if self.broken or now < self._due:
            return None
        try:
            return None if self.idle else self._next(now)
        except Unavailable as error:
            logger.warning("%s: its outbox cannot be read now: %s", self.hold.execution_id, error.explain())
            self._pause_from(now)
        except TenureError as error:
            self._break(error)
        return None

    def _next(self, now: float) -> Run | Adoption:
        if self._adopting is not None:
            self._pause_from(now)
            return Adoption(self.hold, self.claim, self._adopting, self.request)
        entries = _cut(self.outbox.pending(limit=RUN_LENGTH))
        self._pause_from(now)
        self._in_flight = len(entries)
        return Run(self.hold, self.claim, self.request, entries)

    def _pause_from(self, now: float) -> None:
        self._due = now + self._pause
        self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)

    def receive(self, answer: Answer) -> None:
        """Take one answer in. Those to an earlier numbering, or already taken in, mean nothing."""
        if answer.request != self.request or self.broken:
            return
        try:
            self._take_in(answer)
        except Unavailable as error:
            # The disk did not take it, so it is not taken in at all; it comes again when the operation is sent again.
            logger.warning("%s: an answer was left aside: %s", self.hold.execution_id, error.explain())
        except OutboxCorrupt as error:
            self._break(error)

    def _take_in(self, answer: Answer) -> None:
        if answer.error is not None:
            self._fail(answer.sequence, from_wire(answer.error))
        elif answer.sequence:
            self._settle(answer)
        elif answer.value is not None:
            self._adopted(answer.value["epoch"])

    def _settle(self, answer: Answer) -> None:
        entry = self._pending(answer.sequence)
        if entry is None:
            return
        self.outbox.settle(answer.sequence)
        self._in_flight = max(0, self._in_flight - 1)
        if self._in_flight == 0:
            self._send_again()
        receipt = Receipt(answer.execution, answer.sequence, entry.operation, answer.value or {})
        self._keep(answer.sequence, receipt)

    def _pending(self, sequence: int) -> Entry | None:
        found = self.outbox.pending(start=sequence, limit=1)
        return found[0] if found and found[0].sequence == sequence else None

    def _adopted(self, epoch: int) -> None:
        if epoch != self._adopting:
            return
        logger.info("%s: adopted under epoch %d", self.hold.execution_id, epoch)
        self.hold = replace(self.hold, epoch=epoch)
        self._adopting = None
        self._send_again()

    def _fail(self, sequence: int, error: TenureError) -> None:
        match error.action:
            case Action.LATER:
                logger.info("%s: %s; sending again", self.hold.execution_id, error.explain())
            case Action.ADOPT if isinstance(error, StaleEpoch):
                self._adopting = error.data.get("epoch", self.hold.epoch)
                self._send_again()
            case Action.RESEND if isinstance(error, SequenceGap):
                self._go_back(error)
            case _:
                self._refused(sequence, error)

    def _go_back(self, error: SequenceGap) -> None:
        """Send from the first operation without a receipt; what the ledger has already it answers again."""
        head = self.outbox.pending(limit=1)
        if head and error.data.get("expected", 0) < head[0].sequence:
            # The ledger lacks what it had acknowledged: it was put back to an earlier state.
            self._break(SequenceGap("ledger_behind", error.data))
        else:
            self._send_again()

    def _refused(self, sequence: int, error: TenureError) -> None:
        """Give up one operation, or the stream where no operation of it can ever be taken."""
        if sequence and not self._pending(sequence):
            return
        match error:
            case InvalidParams() if sequence:
                moved = self.outbox.reject(sequence, error.reason, error.detail)
                promise = self.promises.pop(sequence, None)
                for old, new in moved:
                    if old in self.promises:
                        self.promises[new] = self.promises.pop(old)
                self.request = uuid4().hex  # answers about the old numbers are void
            case AdmissionConflict() if sequence:
                self.outbox.drop(sequence, error.reason, error.detail)
                promise = self.promises.pop(sequence, None)
            case _:
                self._break(error)
                return
        logger.error("%s:%d: given up: %s", self.hold.execution_id, sequence, error.explain())
        if promise:
            promise.set_exception(error)
        self._send_again()

    def _break(self, error: TenureError) -> None:
        logger.error("%s: no more can be written: %s", self.hold.execution_id, error.explain())
        self.broken = error
        promises, self.promises = self.promises, {}
        for promise in promises.values():
            promise.set_exception(error)

    def _keep(self, sequence: int, receipt: Receipt) -> None:
        if promise := self.promises.pop(sequence, None):
            promise.set_result(receipt)

    def _send_again(self) -> None:
        self._in_flight = 0
        self._pause = self._resend_seconds
        self._due = 0.0


def _cut(entries: list[Entry]) -> list[Entry]:
    """Return the first of them that go together: consecutive, and not too much for one message."""
    size = 0
    for index, entry in enumerate(entries):
        size += len(entry.payload)
        if index and (size > RUN_BYTES or entry.sequence != entries[index - 1].sequence + 1):
            return entries[:index]
    return entries
