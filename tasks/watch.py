"""Noticing, as it happens, that a process of this host has ended or has been stopped.

On Linux the kernel says so through a file descriptor for each process; elsewhere the process table is read a few
times a second. A process that has only been stopped is not dead. Once it has stood still for a whole lease it is
reported as `stopped`, and its executions may go on elsewhere, fenced from it.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

from ..ledger import Identity
from ..ledger.recovery import STOPPED
from .liveness import Life, check

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # how often the process table is read


class Watcher:
    """Watches processes of this host, each until it is lost; `told` is called with the identity and the evidence."""

    def __init__(self, here: Identity, *, lease_seconds: float, told: Callable[[Identity, str], None]) -> None:
        self._here, self._lease_seconds, self._told = here, lease_seconds, told
        self._lock = threading.Lock()
        self._watched: dict[Identity, int | None] = {}  # with the descriptor that tells of its end
        self._still_since: dict[Identity, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)  # a full pipe wakes as well
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tenure-watch", daemon=True)
        self._thread.start()

    def watch(self, identities: Iterable[Identity]) -> None:
        """Watch these too; one of another host, or watched already, is left alone."""
        with self._lock:
            if self._stopping:
                return
            for identity in identities:
                if identity.host == self._here.host and identity not in self._watched:
                    self._watched[identity] = self._descriptor(identity)
            self._wake()

    def forget_others(self, identities: Iterable[Identity]) -> None:
        """Stop watching what is not among these."""
        with self._lock:
            for identity in set(self._watched) - set(identities):
                self._drop(identity)

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._wake()
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def _descriptor(self, identity: Identity) -> int | None:
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            descriptor = os.pidfd_open(identity.pid)
        except OSError:  # gone, or not ours to watch: the process table will say which
            return None
        self._selector.register(descriptor, selectors.EVENT_READ, identity)
        return descriptor

    def _drop(self, identity: Identity) -> None:
        descriptor = self._watched.pop(identity)
        self._still_since.pop(identity, None)
        if descriptor is not None:
            self._close(descriptor)

    def _run(self) -> None:
        looked = 0.0
        while not self._stopping:
            ready = self._selector.select(LOOK_SECONDS)
            if any(key.fd == self._wake_read for key, _ in ready):
                os.read(self._wake_read, 4096)
            ended = [key.data for key, _ in ready if isinstance(key.data, Identity)]
            self._heard(ended)
            now = time.monotonic()
            if ended or now - looked >= LOOK_SECONDS:
                looked = now
                self._look(now)
        with self._lock:
            for identity in list(self._watched):
                self._drop(identity)

    def _heard(self, ended: list[Identity]) -> None:
        """A descriptor tells once; should the process table not agree yet, it is asked again like any other's."""
        with self._lock:
            for identity in ended:
                descriptor = self._watched.get(identity)
                if descriptor is not None:
                    self._close(descriptor)
                    self._watched[identity] = None

    def _close(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def _look(self, now: float) -> None:
        with self._lock:
            watched = list(self._watched)
        for identity in watched:
            if evidence := self._evidence(identity, now):
                with self._lock:
                    if identity in self._watched:
                        self._drop(identity)
                self._told(identity, evidence)

    def _evidence(self, identity: Identity, now: float) -> str | None:
        verdict = check(identity, self._here)
        if verdict.life is Life.DEAD:
            return verdict.reason
        if verdict.life is not Life.ALIVE or not _stands_still(identity.pid):
            self._still_since.pop(identity, None)
            return None
        return STOPPED if now - self._still_since.setdefault(identity, now) >= self._lease_seconds else None


def _stands_still(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
    except psutil.Error:
        return False
