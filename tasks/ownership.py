"""Ownership: take the lease, begin the epoch, recover, and only then consume.

A bootstep of the worker that consumes the owner queue. While it stands by it consumes nothing and still obeys
SIGTERM. It never takes ownership twice: once the lease or the epoch is lost the process leaves, and its
supervisor starts a new one, which is a new epoch.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from celery import Celery, bootsteps, signals
from celery.concurrency import get_implementation
from celery.utils.text import str_to_list
from celery.worker import state
from kombu.exceptions import OperationalError

from ..config import Settings
from ..ledger import Identity, Ledger, Limits, ownership, reads
from ..ledger.errors import OwnerSuperseded, TenureError, Unavailable
from .application import CANARY
from .intake import Intake
from .keys import Keyring
from .liveness import Life, check, own_identity
from .orders import Order
from .owner import Owner
from .watch import Watcher

logger = logging.getLogger(__name__)

T = TypeVar("T")

EX_SUPERSEDED = 70  # this owner has been replaced; start a new one
EX_CONFIG = 78
CANARY_SECONDS = 30.0
CANARIES_UNHEARD = 3
_STANDBY_SECONDS = 0.2


@dataclass
class Tenancy:
    """What this process has of ownership: nothing until it owns, then its ledger, epoch and owner."""

    settings: Settings
    holder: str = field(default_factory=lambda: uuid4().hex)
    last_consumed: float = field(default_factory=time.monotonic)
    send: Callable[[list[Order]], list[str]] = lambda orders: [order.request for order in orders]
    _owner: Owner | None = None
    _watcher: Watcher | None = None

    @property
    def owner(self) -> Owner:
        """The owner of this process.

        Raises:
            RuntimeError: this worker does not consume the owner queue, yet got an owner's message.
        """
        if self._owner is None:
            raise RuntimeError("this process is not the owner")
        return self._owner

    @property
    def owns(self) -> bool:
        """Whether this process has become the owner."""
        return self._owner is not None

    def consumed(self) -> None:
        """Note that a message has arrived."""
        self.last_consumed = time.monotonic()

    def leave(self, why: str) -> NoReturn:
        """Leave the process at once: it is not the owner any more, nothing it does can count."""
        logger.critical("leaving: %s", why)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(EX_SUPERSEDED)

    def open(self) -> tuple[Ledger, Identity]:
        """Open what an owner needs.

        Raises:
            ConfigurationError, SchemaMismatch, Unavailable: one clear line of what is missing.
        """
        limits = Limits(self.settings.max_concurrent_children, self.settings.max_spawn_depth)
        return Ledger.open(self.settings.ledger_url, limits=limits), own_identity(self.settings.host_id)

    def try_to_own(self, ledger: Ledger, here: Identity, keyring: Keyring) -> Owner | None:
        """Take the lease if it is free, begin an epoch and recover; None while another holds it.

        Raises:
            Unavailable: the database cannot serve this now.
        """
        if not _take(ledger, self, here):
            return None
        epoch = ledger.begin_epoch(f"{socket.gethostname()}:{here.pid}:{self.holder[:8]}")
        self._owner = owner = Owner(ledger, keyring, here, epoch)
        owner.send = self.send
        report = owner.recover(unknown_grace=timedelta(seconds=self.settings.unknown_grace_seconds))
        logger.info(
            "owner of epoch %d; recovered: %d unknown, %d retired, %d discarded",
            epoch,
            len(report["unknown"]),
            len(report["retired"]),
            len(report["discarded"]),
        )
        self._watch(owner)
        return owner

    def _watch(self, owner: Owner) -> None:
        """Watch the processes of this host from now on."""
        self._watcher = Watcher(owner.here, lease_seconds=self.settings.lease_seconds, told=self._lost)
        owner.watch = self._watcher.watch
        with owner.ledger.read() as connection:
            owner.watch([death.identity for death in reads.held_on(connection, owner.here.host)])

    def _lost(self, identity: Identity, evidence: str) -> None:
        try:
            self.owner.bury(identity, evidence)
        except OwnerSuperseded as error:
            self.leave(error.explain())
        except Unavailable as error:  # the next recovery finds it too
            logger.warning("not settled yet: %s", error.explain())

    def renew(self) -> None:
        """Keep the lease and see that the epoch is still ours; leave the process if either is lost.

        Raises:
            Unavailable: the database cannot serve this now.
        """
        owner = self.owner
        if not _take(owner.ledger, self, owner.here):
            self.leave("another owner holds the lease")
        with owner.ledger.read() as connection:
            current = reads.runtime(connection).epoch
        if current != owner.epoch:
            self.leave(f"epoch {owner.epoch} has ended, {current} is current")
        owner.bury_silent_hosts(lease_seconds=self.settings.lease_seconds)

    def release(self) -> None:
        """Leave in good order: the next owner need not wait for the lease to run out."""
        if self._owner is None:
            return
        owner, self._owner = self._owner, None
        if self._watcher is not None:
            self._watcher.stop()
        try:
            owner.ledger.release(owner.epoch)
            ownership.give_up(owner.ledger.store, self.settings.owner_queue, self.holder)
        except TenureError as error:  # the lease will run out by itself
            logger.warning("not released: %s", error.explain())
        owner.ledger.close()


def _take(ledger: Ledger, tenancy: Tenancy, here: Identity) -> bool:
    """Take or renew the lease; one whose holder is proven dead need not run out first."""
    name, seconds = tenancy.settings.owner_queue, tenancy.settings.lease_seconds
    other = ownership.take(ledger.store, name, tenancy.holder, here, seconds=seconds)
    if other is None:
        return True
    if check(other.identity, here).life is not Life.DEAD:
        return False
    gone = other.holder
    return ownership.take(ledger.store, name, tenancy.holder, here, seconds=seconds, instead_of=gone) is None


class OwnershipStep(bootsteps.StartStopStep):
    """Holds a worker of the owner queue back until it owns."""

    requires = ("celery.worker.components:Pool",)
    tenancy: Tenancy  # set by `gate`

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self.stopping = threading.Event()
        self.threads: list[threading.Thread] = []

    def include_if(self, worker: Any) -> bool:
        """Take part only where the owner queue is consumed."""
        queue = self.tenancy.settings.owner_queue
        return queue in worker.app.amqp.queues.consume_from

    def create(self, worker: Any) -> None:
        """Refuse a worker that could apply two operations at once; have the other take its messages in our way."""
        queues = list(worker.app.amqp.queues.consume_from)
        if problem := unfit(queues, worker.concurrency, worker.pool_cls.__module__, self.tenancy.settings.owner_queue):
            _refuse_to_start(problem)
        worker.consumer_cls = Intake

    def start(self, worker: Any) -> None:
        """Stand by until the lease is free, then own."""
        try:
            keyring = Keyring.load(self.tenancy.settings.keys)
            ledger, here = self._stand_by(self.tenancy.open)
        except TenureError as error:
            _refuse_to_start(error.explain())
        self._stand_by(lambda: self.tenancy.try_to_own(ledger, here, keyring))
        signals.worker_shutdown.connect(self._released, sender=worker, weak=False)
        self._spawn(self._renew, "tenure-lease")
        self._spawn(lambda: self._listen_for_itself(worker.app), "tenure-canary")

    def _stand_by(self, attempt: Callable[[], T | None]) -> T:
        told = ""
        while True:
            state.maybe_shutdown()
            try:
                if found := attempt():
                    return found
                now = "standing by: another owner is at work"
            except OwnerSuperseded as error:  # it was held up between its epoch's begin and its recovery
                self.tenancy.leave(error.explain())
            except Unavailable as error:
                now = f"standing by: {error.explain()}"
            if now != told:
                logger.info("%s", now)
                told = now
            self.stopping.wait(_STANDBY_SECONDS)

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _renew(self) -> None:
        while not self.stopping.wait(self.tenancy.settings.lease_seconds / 3):
            try:
                self.tenancy.renew()
            except Unavailable as error:
                logger.warning("lease not renewed: %s", error.explain())

    def _listen_for_itself(self, app: Celery) -> None:
        """Notice when this owner is connected and yet consumes nothing."""
        unheard = 0
        sent = time.monotonic()
        while not self.stopping.wait(CANARY_SECONDS):
            unheard = 0 if self.tenancy.last_consumed > sent else unheard
            if unheard >= CANARIES_UNHEARD:
                self.tenancy.leave(f"{unheard} canaries were sent and none was consumed")
            sent = time.monotonic()
            unheard += _send_canary(app)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 (the base's signature)
        """Stop the threads; the release comes when the pool has finished."""
        self.stopping.set()

    def terminate(self, parent: Any) -> None:
        """Stop the threads."""
        self.stop(parent)

    def _released(self, **_kwargs: Any) -> None:
        for thread in self.threads:
            thread.join(timeout=5)
        self.tenancy.release()


def _send_canary(app: Celery) -> bool:
    """Send one; a broker that is away is no sign of a deaf owner."""
    try:
        app.send_task(CANARY, ignore_result=True, retry=False)
    except OperationalError:
        return False
    return True


def unfit(queues: list[str], concurrency: int, pool: str, owner_queue: str) -> str | None:
    """Return why a worker may not be an owner, or None."""
    if len(queues) != 1:
        others = ", ".join(sorted(set(queues) - {owner_queue}))
        return f"an owner consumes {owner_queue!r} alone, not {others} too; start another worker for those"
    if concurrency != 1:
        return f"concurrency {concurrency} on {owner_queue!r}: an owner applies one operation at a time, use -c 1"
    if pool not in {"celery.concurrency.thread", "celery.concurrency.solo"}:
        return f"pool {pool.rpartition('.')[2]} on {owner_queue!r}: an owner runs in its own process, use -P threads"
    return None


def _refuse_to_start(problem: str) -> NoReturn:
    # Not to standard error, which Celery has turned into warnings by now: some log levels and log files miss those.
    logger.critical("tenure: %s", problem)
    raise SystemExit(EX_CONFIG)


def gate(app: Celery, tenancy: Tenancy) -> None:
    """Hold back this application's worker of the owner queue until it owns.

    Such a worker gets its pool and concurrency here: Celery's own defaults, prefork and one process for each core, are
    for the work queue.
    """
    queue = tenancy.settings.owner_queue

    def one_at_a_time(instance: Any, conf: Any, options: dict[str, Any], **_kwargs: Any) -> None:
        if (
            instance.app is app
            and options.get("concurrency") is None
            and queue in str_to_list(options.get("queues") or "")
        ):
            conf.worker_concurrency = 1

    def in_this_process(sender: Any, **_kwargs: Any) -> None:
        consumed = sender.app is app and queue in app.amqp.queues.consume_from
        if consumed:
            conf = sender.app.conf
            conf.worker_disable_prefetch = False  # the next operation may wait here: nobody else would apply it
            if sender.pool_cls is get_implementation("prefork"):
                sender.pool_cls = get_implementation("threads")

    signals.celeryd_init.connect(one_at_a_time, weak=False)
    signals.worker_init.connect(in_this_process, weak=False)
    app.steps["worker"].add(type("Ownership", (OwnershipStep,), {"tenancy": tenancy}))
