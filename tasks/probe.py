"""A host's probe: it vouches for the processes of its host, and tells the owner at once when one has gone.

An owner sees the processes of its own host by itself. Every other host of a fleet runs one probe, beside its
workers and in their process namespace. When a host falls silent for two leases, what its processes held is given up
as gone.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..ledger import Identity
from ..ledger.errors import TenureError
from .client import Client
from .watch import Watcher
from .wire import Control

logger = logging.getLogger(__name__)


class Probe:
    """Renews its host's lease and watches the processes that the owner names."""

    def __init__(self, client: Client, *, lease_seconds: float) -> None:
        self._client, self._lease_seconds = client, lease_seconds
        self._lost: queue.SimpleQueue[tuple[Identity, str]] = queue.SimpleQueue()
        self._untold: list[dict[str, Any]] = []
        self._watcher = Watcher(client.identity, lease_seconds=lease_seconds, told=self._note)

    def _note(self, identity: Identity, evidence: str) -> None:
        self._lost.put((identity, evidence))

    def step(self) -> None:
        """Tell the owner what is lost, renew the lease, and watch what the owner says is held here."""
        while not self._lost.empty():
            identity, evidence = self._lost.get()
            self._untold.append({"identity": asdict(identity), "evidence": evidence})
        here = self._client.identity
        body = {"host": here.host, "boot": here.boot, "seconds": self._lease_seconds, "lost": self._untold}
        told = self._client.ask(Control.PROBE, body, within=self._lease_seconds)
        self._untold = []
        held = [Identity(**identity) for identity in told["watch"]]
        self._watcher.forget_others(held)
        self._watcher.watch(held)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Step three times in each lease, and at once when a process is lost, until stopped."""
        while not stopped():
            began = time.monotonic()
            try:
                self.step()
            except (TimeoutError, TenureError) as error:
                logger.warning("the owner was not told, it will be: %s", error)
            self._wait(began + self._lease_seconds / 3)

    def _wait(self, until: float) -> None:
        try:
            first = self._lost.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return
        self._lost.put(first)

    def close(self) -> None:
        """Stop watching."""
        self._watcher.stop()
