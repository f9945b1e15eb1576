"""The ledger: one database, opened and fenced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update
from sqlalchemy.exc import DBAPIError

from . import engine, epochs, executions, recovery, schema, submissions, takeover
from .claims import Identity, Proof
from .clock import Clock, utc_now
from .engine import HandlerFault, Receipt, Request
from .errors import ConfigurationError, TenureError, Unavailable
from .executions import Address, Hold, Registration
from .limits import Limits
from .migrate import require_head
from .operations import BUILTIN, Operation, Registry
from .recovery import Death, Report
from .states import Reason
from .store import Store
from .submissions import Due, Standing, Submission
from .transaction import Transaction


class Ledger:
    """The durable truth about executions, and the only way to change it.

    Methods that take `epoch` are for the owner that began it and raise `OwnerSuperseded` once a newer epoch has
    begun. Any method may raise `Unavailable`: nothing was written then, or, if it was the commit that failed,
    sending the same again answers from the receipt.
    """

    def __init__(self, store: Store, registry: Registry, *, limits: Limits, clock: Clock) -> None:
        self.store, self.registry, self.limits, self.clock = store, registry, limits, clock

    @classmethod
    def open(
        cls,
        url: str,
        *,
        limits: Limits | None = None,
        operations: Iterable[Operation[Any]] = (),
        clock: Clock = utc_now,
    ) -> Self:
        """Open the ledger at `sqlite:///FILE` or `postgresql://...`.

        Raises:
            ConfigurationError: the URL or an operation is not usable.
            SchemaMismatch: the ledger has to be upgraded first (`tenure db upgrade`), or is newer than this version.
            Unavailable: the database does not answer.
        """
        registry = Registry(BUILTIN, operations)
        store = Store(url)
        try:
            require_head(store)
        except BaseException:
            store.close()
            raise
        return cls(store, registry, limits=limits or Limits(), clock=clock)

    def close(self) -> None:
        """Give every connection back."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @contextmanager
    def transaction(self, epoch: int | None = None) -> Iterator[Transaction]:
        """Run one fenced writing transaction, of the owner of `epoch` or, without one, of an operator."""
        with self.store.write() as connection:
            tx = Transaction(connection, now=self.clock(), limits=self.limits)
            if epoch is not None:
                tx.require(epoch)
            yield tx
            tx.flush()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Run one reading transaction, for the functions of `tenure.ledger.reads` and `tenure.ledger.laws`."""
        with self.store.read() as connection:
            yield connection

    def begin_epoch(self, owner: str) -> int:
        """Begin the next epoch; every earlier owner is fenced when this returns."""
        with self.transaction() as tx:
            return epochs.begin(tx, owner=owner)

    def release(self, epoch: int) -> None:
        """Record that the owner of `epoch` leaves in good order."""
        with self.transaction(epoch) as tx:
            epochs.release(tx)

    def predecessor_crashed(self, epoch: int) -> bool:
        """Return whether the owner before this one ended without `release`."""
        with self.transaction(epoch) as tx:
            return epochs.predecessor_crashed(tx)

    def recover(
        self,
        epoch: int,
        *,
        deaths: Sequence[Death] = (),
        unknown_grace: timedelta | None = None,
        retention: timedelta | None = None,
    ) -> Report:
        """Settle what earlier epochs and dead processes left behind; see `tenure.ledger.recovery`."""
        with self.transaction(epoch) as tx:
            return recovery.recover(tx, deaths=deaths, unknown_grace=unknown_grace, retention=retention)

    def register(self, epoch: int, request: Registration) -> Hold:
        """Admit a root execution. The same registration again gets the same answer."""
        executions.check_registration(request)
        with self.transaction(epoch) as tx:
            return executions.register(tx, request)

    def adopt(self, epoch: int, address: Address, proof: Proof) -> Hold:
        """Attach a live root to the current epoch."""
        executions.check_address(address)
        with self.transaction(epoch) as tx:
            return executions.adopt(tx, address, proof)

    def attach(self, epoch: int, address: Address, *, secret_digest: str, identity: Identity) -> Hold:
        """Put a reserved child into the hands of its own process."""
        executions.check_address(address)
        with self.transaction(epoch) as tx:
            return executions.attach(tx, address, secret_digest, identity)

    def take_over(
        self, epoch: int, address: Address, *, secret_digest: str, identity: Identity, gone: Identity | None
    ) -> Hold:
        """Continue a root execution in another process; see `tenure.ledger.takeover`."""
        with self.transaction(epoch) as tx:
            return takeover.take_over(tx, address, secret_digest=secret_digest, identity=identity, gone=gone)

    def submit(self, epoch: int, request: Submission) -> Standing:
        """Keep a workflow that was asked for; see `tenure.ledger.submissions`."""
        submissions.check(request)
        with self.transaction(epoch) as tx:
            return submissions.submit(tx, request)

    def take_due(self, epoch: int) -> list[Due]:
        """Return the workflows that are to be sent to the work queue now, and note that they are."""
        with self.transaction(epoch) as tx:
            return submissions.take_due(tx)

    def not_sent(self, epoch: int, request_ids: list[str]) -> None:
        """Note that the broker did not take these."""
        with self.transaction(epoch) as tx:
            submissions.not_sent(tx, request_ids)

    def apply(self, epoch: int, request: Request, *, careful: bool = False) -> Receipt:
        """Apply one operation, once; a replay is answered from its receipt.

        What a handler raises is stored as a refusal `operation_failed`. With `careful`, the attempt is
        recorded first, and an operation that has killed its process five times is refused as `poisoned`
        instead of run.

        Raises:
            InvalidParams, StaleEpoch, NotFound, PermissionDenied, StaleGeneration, AdmissionConflict,
                SequenceGap: nothing was consumed.
        """
        checked = engine.read(request, self.registry)
        if not careful:
            return self._run(epoch, checked)
        if self._count_attempt(epoch, checked) > engine.POISON_ATTEMPTS:
            verdict = {"refused": "poisoned", "attempts": engine.POISON_ATTEMPTS}
            return self._settle(epoch, checked, verdict, careful=True)
        try:
            return self._run(epoch, checked, careful=True)
        except Unavailable:
            with suppress(TenureError):  # the first error is the one to tell
                self._uncount_attempt(epoch, checked)
            raise

    def _run(self, epoch: int, checked: engine.Checked, *, careful: bool = False) -> Receipt:
        """Run the operation, or store that it failed."""
        try:
            return self._settle(epoch, checked, careful=careful)
        except HandlerFault as fault:
            cause: BaseException = fault.cause
        except DBAPIError as error:  # a deferred constraint of an application's table speaks at the commit
            cause = error
        verdict = {"refused": "operation_failed", "error": type(cause).__name__}
        return self._settle(epoch, checked, verdict, careful=careful)

    def _settle(
        self, epoch: int, checked: engine.Checked, verdict: dict[str, Any] | None = None, *, careful: bool
    ) -> Receipt:
        with self.transaction(epoch) as tx:
            receipt = engine.apply(tx, checked, verdict=verdict)
            if careful:
                tx.execute(delete(schema.operation_attempts).where(_attempts_of(checked)))
            return receipt

    def _count_attempt(self, epoch: int, checked: engine.Checked) -> int:
        """Record one more attempt of an operation that is about to run; returns how many that makes."""
        a, mine = schema.operation_attempts, _attempts_of(checked)
        with self.transaction(epoch) as tx:
            if isinstance(engine.admit(tx, checked), Receipt):
                return 0
            if tx.execute(update(a).where(mine).values(attempts=a.c.attempts + 1)).rowcount == 0:
                row = {"execution_id": checked.address.execution_id, "sequence": checked.sequence}
                tx.execute(insert(a).values(row | {"attempts": 1}))
            return int(tx.execute(select(a.c.attempts).where(mine)).scalar_one())

    def _uncount_attempt(self, epoch: int, checked: engine.Checked) -> None:
        """Take an attempt back that its process has survived."""
        a = schema.operation_attempts
        with self.transaction(epoch) as tx:
            tx.execute(update(a).where(_attempts_of(checked)).values(attempts=a.c.attempts - 1))

    def discard(self, execution_id: str, *, by: str, reason: str = Reason.DISCARDED) -> Hold:
        """End an `unknown` execution for good, as an operator."""
        with self.transaction() as tx:
            return executions.discard(tx, execution_id, reason=reason, by=by)

    def drain(self, reason: str | None) -> None:
        """Refuse registers and reservations from now on; None takes them again."""
        if reason is not None and not reason.strip():
            raise ConfigurationError("drain: a reason is needed")
        with self.transaction() as tx:
            epochs.drain(tx, reason)


def _attempts_of(checked: engine.Checked) -> ColumnElement[bool]:
    a = schema.operation_attempts
    return (a.c.execution_id == checked.address.execution_id) & (a.c.sequence == checked.sequence)
