"""What an outbox holds, as the sum of its log's records.

The same `apply` runs when a record has been written and when a log is read, so memory and disk cannot differ.
It refuses what no outbox would have written.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NoReturn, assert_never

from msgspec.structs import replace

from ..ledger.errors import ConfigurationError
from .journal import (
    VERSION,
    Advance,
    Block,
    Change,
    Entry,
    Meta,
    Record,
    Reject,
    Rejected,
    Settle,
    corrupt,
    decode,
    decode_version,
    framed_size,
    scan,
)

REJECTED_KEPT = 100  # the newest stay readable, up to this number
REJECTED_BYTES = 4 * 2**20  # and, but for the newest one, up to these bytes


class ImpossibleChange(ValueError):
    """A change that cannot follow what the outbox holds."""


class Backlog:
    """Operations without a receipt, in order, and those given up lately."""

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        self.generation = meta.generation
        self.next_sequence = meta.next_sequence
        # By sequence, ascending; unlike a dict, finding the first stays cheap while the front is settled.
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self.rejected: deque[Rejected] = deque()
        self.pending_bytes = 0
        self._sizes: dict[int, int] = {}
        self._rejected_bytes = 0

    @property
    def live_bytes(self) -> int:
        """How many bytes of a log would survive its rewriting, but for the first record and marks."""
        return self.pending_bytes + self._rejected_bytes

    def apply(self, change: Change, size: int) -> None:
        """Take in one change whose record has `size` bytes.

        Raises:
            ImpossibleChange: it cannot follow what is held; nothing was changed.
        """
        match change:
            case Entry():
                self._append(change, size)
            case Settle():
                self._settle(change.sequences)
            case Reject():
                self._reject(change)
            case Advance():
                self._advance(change)
            case Rejected():
                self._remember(change)
            case _:
                assert_never(change)

    def from_sequence(self, start: int, limit: int | None) -> list[Entry]:
        """Return pending operations in order, from sequence `start` on, at most `limit`."""
        return list(islice((entry for n, entry in self.entries.items() if n >= start), limit))

    def behind(self, sequence: int) -> range | None:
        """Return the sequences behind this one, None unless every one of them is pending."""
        later = range(sequence + 1, self.next_sequence)
        return later if all(n in self.entries for n in later) else None

    def snapshot(self) -> Iterator[Record]:
        """Yield the shortest log that says the same."""
        at = next(iter(self.entries), self.next_sequence)
        yield replace(self.meta, generation=self.generation, next_sequence=at)
        yield from self.rejected
        for sequence, entry in self.entries.items():
            if sequence > at:
                yield Advance(self.generation, sequence)
            yield entry
            at = sequence + 1
        if at < self.next_sequence:
            yield Advance(self.generation, self.next_sequence)

    def _append(self, entry: Entry, size: int) -> None:
        if entry.sequence != self.next_sequence:
            raise ImpossibleChange(f"operation {entry.sequence} where {self.next_sequence} is next")
        self._hold(entry, size)
        self.next_sequence += 1

    def _settle(self, sequences: list[int]) -> None:
        if len(set(sequences)) < len(sequences) or not self.entries.keys() >= set(sequences):
            raise ImpossibleChange(f"receipts for {sequences}, not all of which are pending")
        for sequence in sequences:
            self._release(sequence)

    def _reject(self, change: Reject) -> None:
        later = self.behind(change.sequence)
        if change.sequence not in self.entries or (change.renumber and later is None):
            raise ImpossibleChange(f"operation {change.sequence} cannot be given up")
        entry, _ = self._release(change.sequence)
        self._remember(
            Rejected(entry.sequence, entry.operation, entry.payload, change.reason, change.detail),
        )
        if change.renumber and later is not None:
            self._renumber(later)

    def _renumber(self, later: range) -> None:
        for old in later:
            entry, size = self._release(old)
            shorter = len(str(old)) - len(str(old - 1))
            self._hold(replace(entry, sequence=old - 1), size - shorter)
        self.next_sequence -= 1

    def _advance(self, change: Advance) -> None:
        if change.generation < self.generation or change.next_sequence < self.next_sequence:
            raise ImpossibleChange("generation or next sequence would go back")
        self.generation, self.next_sequence = change.generation, change.next_sequence

    def _remember(self, rejected: Rejected) -> None:
        self.rejected.append(rejected)
        self._rejected_bytes += framed_size(rejected)
        while len(self.rejected) > REJECTED_KEPT or (len(self.rejected) > 1 and self._rejected_bytes > REJECTED_BYTES):
            self._rejected_bytes -= framed_size(self.rejected.popleft())

    def _hold(self, entry: Entry, size: int) -> None:
        self.entries[entry.sequence] = entry
        self._sizes[entry.sequence] = size
        self.pending_bytes += size

    def _release(self, sequence: int) -> tuple[Entry, int]:
        size = self._sizes.pop(sequence)
        self.pending_bytes -= size
        return self.entries.pop(sequence), size


def read_log(data: bytes, path: Path, admit: Callable[[Meta], None]) -> tuple[Backlog, int, bytes]:
    """Read a log; return what it holds, its good length in bytes and its last digest.

    `admit` sees the first record before anything else is believed, and raises to refuse it.

    Raises:
        OutboxCorrupt: the log does not check.
        ConfigurationError: a newer version of tenure wrote it.
    """
    blocks = scan(data, path)
    block = next(blocks, None) or _no_first_record(path)
    backlog = Backlog(_meta(block, path, admit))
    for block in blocks:
        record = decode(block, path)
        if isinstance(record, Meta):
            raise corrupt(path, block.start, "a second first record")
        try:
            backlog.apply(record, block.end - block.start)
        except ImpossibleChange as error:
            raise corrupt(path, block.start, str(error)) from error
    return backlog, block.end, block.digest


def _meta(block: Block, path: Path, admit: Callable[[Meta], None]) -> Meta:
    if (version := decode_version(block, path)) != VERSION:
        raise ConfigurationError(f"{path} has version {version}, this tenure reads version {VERSION}")
    record = decode(block, path)
    if not isinstance(record, Meta):
        raise corrupt(path, block.start, "the first record does not say whose log it is")
    admit(record)
    return record


def _no_first_record(path: Path) -> NoReturn:
    raise corrupt(path, 0, "there is no whole first record")
