"""A backlog and its log, kept saying the same.

A change is written, then applied in memory. After anything unexpected in between (a signal handler's exception,
a crash point in a test), the log decides: it is read again before the next use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Self

from ..ledger.errors import PermissionDenied, Unavailable
from .backlog import Backlog, read_log
from .journal import FIRST, Change, Meta, frame
from .journal_file import JournalFile

_log = logging.getLogger(__name__)


class Framed(NamedTuple):
    """Changes with the bytes of their records, ready to be written."""

    changes: Sequence[Change]
    blocks: list[bytes]
    digest: bytes

    @property
    def size(self) -> int:
        """How many bytes they take in the log."""
        return sum(map(len, self.blocks))


class DurableBacklog:
    """One process' hold on a log and on what it says; `reading` and `writing` serialise its threads."""

    def __init__(
        self,
        file: JournalFile,
        backlog: Backlog,
        *,
        admit: Callable[[Meta], None],
        compact_bytes: int,
        fault: Callable[[str], None],
    ) -> None:
        """Use `open`."""
        self._file = file
        self._backlog = backlog
        self._admit = admit
        self._compact_bytes = self._compact_above = compact_bytes
        self._fault = fault
        self._digest = FIRST
        self._unsure = False  # a change began and is not known to have ended
        self._closed = False
        self._pid = os.getpid()
        self._lock = Lock()

    @classmethod
    def open(
        cls,
        directory: Path,
        first: Meta,
        *,
        admit: Callable[[Meta], None],
        compact_bytes: int,
        fault: Callable[[str], None],
    ) -> Self:
        """Open the log of `first.execution_id`, or make one that begins with `first`.

        Raises:
            ConfigurationError, OutboxCorrupt, Unavailable: as `Outbox.open`; and whatever `admit` raises.
        """
        file = JournalFile.open(directory, first.execution_id)
        with ExitStack() as undo:
            undo.callback(file.close)
            held = cls(file, Backlog(first), admit=admit, compact_bytes=compact_bytes, fault=fault)
            if file.exists:
                held._load()
            else:
                held._rewrite(lambda _point: None)
            undo.pop_all()
        return held

    @property
    def path(self) -> Path:
        """The log file."""
        return self._file.path

    @contextmanager
    def reading(self) -> Iterator[Backlog]:
        """Hold the backlog still for a look.

        Raises:
            PermissionDenied: this process is a fork of the one that opened it.
            Unavailable: it is closed.
        """
        # Before the lock: at the fork another thread may have held it, and in the child nobody would release it.
        if (pid := os.getpid()) != self._pid:
            raise PermissionDenied(f"the outbox {self.path} is process {self._pid}'s, this is its fork {pid}")
        with self._lock:
            if self._closed:
                raise Unavailable(f"the outbox {self.path} is closed", {"path": str(self.path)})
            if self._unsure:
                self._file.reopen()
                self._load()
            yield self._backlog

    @contextmanager
    def writing(self) -> Iterator[Backlog]:
        """Hold the backlog for changes by `commit`, `change` or `unlink`.

        Raises:
            PermissionDenied, Unavailable: as `reading`; or the disk refuses.
        """
        with self.reading() as backlog:
            if self._file.stale:
                self._rewrite(self._fault)
            yield backlog

    def frame(self, changes: Sequence[Change]) -> Framed:
        """Make the records of changes, to be written next."""
        return Framed(changes, *frame(changes, self._digest))

    def commit(self, framed: Framed, *, durable: bool) -> None:
        """Write and apply changes; when the disk refuses, neither.

        Raises:
            Unavailable: the disk refuses.
        """
        self._unsure = True
        try:
            self._file.append(b"".join(framed.blocks), durable=durable)
        except Unavailable:
            self._unsure = False  # the file took back what it had written
            raise
        self._digest = framed.digest
        for change, block in zip(framed.changes, framed.blocks, strict=True):
            self._backlog.apply(change, len(block))
        self._unsure = False

    def change(self, change: Change, *, durable: bool) -> None:
        """Write and apply one change that makes records superfluous, and compact the log when that pays.

        Raises:
            Unavailable: the disk refuses.
        """
        self.commit(self.frame([change]), durable=durable)
        settled = self._file.length - self._backlog.live_bytes
        if settled > self._compact_above and 2 * settled > self._file.length:
            self._compact(settled)

    def unlink(self) -> None:
        """Remove the log and its lock, and close.

        Raises:
            Unavailable: the disk refuses.
        """
        self._closed = True
        self._file.unlink()

    def close(self) -> None:
        """Release the log for the next opener. In a forked child, the parent keeps it."""
        with self._lock if os.getpid() == self._pid else nullcontext():
            if not self._closed:
                self._closed = True
                self._file.close()

    def _load(self) -> None:
        self._backlog, length, self._digest = read_log(self._file.read(), self.path, self._admit)
        self._file.keep(length)
        self._unsure = False

    def _rewrite(self, fault: Callable[[str], None]) -> None:
        blocks, digest = frame(self._backlog.snapshot(), FIRST)
        self._unsure = True
        try:
            self._file.replace(b"".join(blocks), fault)
        except Unavailable:
            self._unsure = False  # the old log stands, or the file is stale and this will be done again
            raise
        self._digest, self._unsure = digest, False
        self._compact_above = self._compact_bytes

    def _compact(self, settled: int) -> None:
        try:
            self._rewrite(self._fault)
        except Unavailable as error:
            # The change itself is done; a log that is longer than it need be is no reason to fail it.
            _log.warning("outbox not compacted: %s", error.explain())
            self._compact_above = settled + self._compact_bytes
