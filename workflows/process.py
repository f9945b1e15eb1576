"""The client of this process, made when it is first needed and anew after a fork."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import signals

from ..config import Settings
from ..ledger.errors import TenureError
from ..tasks.client import Client

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_client: Client | None = None


def current_client() -> Client:
    """Return this process' client, connected as its environment says.

    Raises:
        ConfigurationError: a setting is wrong, or the key file is missing.
    """
    global _client  # noqa: PLW0603 (one for each process, which is what a module is)
    with _lock:
        if _client is None or _client.forked:
            _client = Client.connect(Settings.from_environ(os.environ))
            atexit.register(_client.close)
        return _client


@contextmanager
def using(client: Client) -> Iterator[Client]:
    """Make a client this process' one for a while: a test's, or one that is its own owner."""
    global _client  # noqa: PLW0603 (as above)
    with _lock:
        before, _client = _client, client
    try:
        yield client
    finally:
        with _lock:
            _client = before


def _after_fork() -> None:
    """A child process starts without a client, and with a lock that nobody holds."""
    global _client, _lock
    _client, _lock = None, threading.Lock()


def _begin(**_kwargs: Any) -> None:
    """Connect a worker's new process before its first order comes: a takeover waits for it."""
    try:
        current_client()
    except TenureError as error:  # it may never be needed; where it is, whoever needs it is told again
        logger.info("no client yet: %s", error.explain())


signals.worker_process_init.connect(_begin, weak=False)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
