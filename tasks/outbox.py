"""The worker's durable journal of operations that have no receipt yet.

`append` returns when its operation survives the machine; `settle` trims what has its receipt. One process at a
time holds an outbox, and only one that knows the secret and the scope it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from ..ledger.errors import AdmissionConflict, InvalidParams, OutboxFull, StaleGeneration
from .backlog import Backlog
from .durable_backlog import DurableBacklog
from .journal import Advance, Entry, Reject, Rejected, Settle
from .outbox_scope import Scope, all_text, check_minima, first_record, refuse_other

__all__ = ["Entry", "Outbox", "Rejected", "Scope"]

CAP_BYTES = 64 * 2**20
COMPACT_BYTES = 2**20
_DETAIL_CHARS = 2000


def _no_fault(_point: str) -> None:
    """Go on: faults are for tests."""


class Outbox:
    """Operations without a receipt, in order. Sequences are dense and outlive their operations.

    Any thread may call any method; a forked child may call `close` only. A method that writes raises `Unavailable`
    when the disk refuses: then nothing has changed, here or there. Every method raises it once closed. Whatever else
    interrupts a change, as a signal handler's exception, leaves it done or not done.
    """

    def __init__(self, held: DurableBacklog, *, cap_bytes: int, fault: Callable[[str], None]) -> None:
        """Use `open`."""
        self._held = held
        self._cap_bytes = cap_bytes
        self._fault = fault

    @classmethod
    def open(
        cls,
        directory: Path,
        scope: Scope,
        *,
        secret_digest: str,
        generation: int = 0,
        first_sequence: int = 1,
        cap_bytes: int = CAP_BYTES,
        compact_bytes: int = COMPACT_BYTES,
        fault: Callable[[str], None] = _no_fault,
    ) -> Self:
        """Open the outbox of an execution under `directory`/outbox; it is created when missing.

        `generation` (0: not known yet) and `first_sequence` are minima, see `advance`. `cap_bytes` bounds the
        encoded size of what is pending; above `compact_bytes` of settled records the log is rewritten once they are
        the greater part of it. `fault` is called with the name of each crash point that is reached: `before_journal`
        and `after_journal` of an append, `before_rename` and `after_rename` of a compaction.

        Raises:
            InvalidParams: a part of the scope or the secret's digest is malformed.
            PermissionDenied: it was made with another scope or secret.
            StaleGeneration: a later generation has used it.
            ConfigurationError: folder or file are not private to this user, or of a newer version.
            OutboxCorrupt: the log does not check.
            Unavailable: it is open already, here or in another process, or the disk refuses.
        """
        first = first_record(scope, secret_digest, generation, first_sequence)
        admit = partial(refuse_other, first)
        held = DurableBacklog.open(directory, first, admit=admit, compact_bytes=compact_bytes, fault=fault)
        outbox = cls(held, cap_bytes=cap_bytes, fault=fault)
        try:
            outbox.advance(generation=generation, next_sequence=first_sequence)
        except BaseException:
            outbox.close()
            raise
        return outbox

    @property
    def path(self) -> Path:
        """The log file."""
        return self._held.path

    @property
    def generation(self) -> int:
        """The highest generation this outbox was told, 0 when none was."""
        with self._held.reading() as backlog:
            return backlog.generation

    @property
    def next_sequence(self) -> int:
        """The sequence of the next operation appended."""
        with self._held.reading() as backlog:
            return backlog.next_sequence

    @property
    def pending_bytes(self) -> int:
        """The encoded size of what is pending, which the cap bounds."""
        with self._held.reading() as backlog:
            return backlog.pending_bytes

    def pending(self, *, start: int = 1, limit: int | None = None) -> list[Entry]:
        """Return the operations without a receipt, in order, from sequence `start` on, at most `limit`."""
        with self._held.reading() as backlog:
            return backlog.from_sequence(start, limit)

    def rejected(self) -> list[Rejected]:
        """Return the operations given up, oldest first; the newest hundred or 4 MiB of them are kept."""
        with self._held.reading() as backlog:
            return list(backlog.rejected)

    def append(self, operation: str, payload: str) -> Entry:
        """Journal an operation under the next sequence; `payload` is canonical JSON text.

        Raises:
            InvalidParams, OutboxFull, Unavailable: as `append_many`.
        """
        return self.append_many([(operation, payload)])[0]

    def append_many(self, items: Sequence[tuple[str, str]]) -> list[Entry]:
        """Journal (operation, payload) pairs with one write; a crash before it returns may keep the first few.

        Raises:
            InvalidParams: an item is not text that UTF-8 can carry.
            OutboxFull: what is pending would exceed the cap; nothing was written. Waiting cannot help where
                `needed` alone exceeds `cap`.
            Unavailable: the disk refuses; nothing was kept.
        """
        _check_items(items)
        with self._held.writing() as backlog:
            at = backlog.next_sequence
            entries = [Entry(at + index, *item) for index, item in enumerate(items)]
            if entries:
                framed = self._held.frame(entries)
                self._refuse_overflow(backlog.pending_bytes, framed.size)
                self._fault("before_journal")
                self._held.commit(framed, durable=True)
                self._fault("after_journal")
        return entries

    def settle(self, sequence: int) -> bool:
        """Trim an operation whose receipt came; return whether it was pending.

        Raises:
            Unavailable: the disk refuses.
        """
        return bool(self.settle_many([sequence]))

    def settle_many(self, sequences: Sequence[int]) -> list[int]:
        """Trim operations whose receipts came, in any order; return those that were pending.

        This waits for no disk: forgotten in a power loss, it costs a re-send that the same receipt answers.

        Raises:
            Unavailable: the disk refuses.
        """
        with self._held.writing() as backlog:
            found = [backlog.entries[n].sequence for n in dict.fromkeys(sequences) if n in backlog.entries]
            if found:
                self._held.change(Settle(found), durable=False)
        return found

    def reject(self, sequence: int, reason: str, detail: str) -> list[tuple[int, int]]:
        """Give up an operation that consumed no sequence; those behind it move down by one.

        One durable record does both. Return the (old, new) sequences of those that moved.

        Raises:
            InvalidParams: it is not pending.
            AdmissionConflict: a later sequence is taken already, hence this one is too: `drop` it.
            Unavailable: the disk refuses.
        """
        with self._held.writing() as backlog:
            entry = _pending(backlog, sequence)
            later = backlog.behind(entry.sequence)
            if later is None:
                raise AdmissionConflict(f"sequence: one behind {sequence} has its receipt", {"sequence": sequence})
            self._give_up(entry, reason, detail, renumber=True)
        return [(old, old - 1) for old in later]

    def drop(self, sequence: int, reason: str, detail: str) -> None:
        """Give up an operation whose sequence is taken in the ledger; those behind keep theirs.

        Raises:
            InvalidParams: it is not pending.
            Unavailable: the disk refuses.
        """
        with self._held.writing() as backlog:
            self._give_up(_pending(backlog, sequence), reason, detail, renumber=False)

    def advance(self, *, generation: int = 0, next_sequence: int = 1) -> None:
        """Record durably, before it is used, what the owner answered to a takeover.

        Generation 0 means not known. The next sequence only rises: being behind this outbox' own changes nothing.

        Raises:
            InvalidParams: not whole numbers of at least 0 and 1.
            StaleGeneration: a later generation has used this outbox; its holder is the one to write.
            Unavailable: the disk refuses.
        """
        check_minima(generation, next_sequence)
        with self._held.writing() as backlog:
            now = Advance(backlog.generation, backlog.next_sequence)
            if 0 < generation < now.generation:
                raise StaleGeneration("generation_mismatch", {"generation": now.generation})
            wanted = Advance(max(generation, now.generation), max(next_sequence, now.next_sequence))
            if wanted != now:
                self._held.change(wanted, durable=True)

    def unlink(self) -> None:
        """Remove an outbox that is not needed any more, with its lock and all it knew, and close it.

        Raises:
            InvalidParams: operations are pending.
            Unavailable: the disk refuses.
        """
        with self._held.writing() as backlog:
            if count := len(backlog.entries):
                raise InvalidParams(f"{self.path}: {count} operations have no receipt yet")
            self._held.unlink()

    def close(self) -> None:
        """Release the outbox for the next opener. In a forked child, the parent keeps it."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_overflow(self, pending: int, needed: int) -> None:
        if pending + needed > self._cap_bytes:
            raise OutboxFull(
                f"{pending} bytes are pending, {needed} more would exceed the cap of {self._cap_bytes}",
                {"cap": self._cap_bytes, "pending": pending, "needed": needed},
            )

    def _give_up(self, entry: Entry, reason: str, detail: str, *, renumber: bool) -> None:
        self._held.change(Reject(entry.sequence, _plain(reason), _plain(detail), renumber), durable=True)


def _pending(backlog: Backlog, sequence: int) -> Entry:
    if (entry := backlog.entries.get(sequence)) is None:
        raise InvalidParams(f"sequence: {sequence} is not pending")
    return entry


def _check_items(items: Sequence[tuple[str, str]]) -> None:
    # What a record cannot hold faithfully would make the whole log unreadable.
    for operation, payload in items:
        if not all_text(operation, payload) or not operation:
            raise InvalidParams("operation, payload: a name and canonical JSON text")


def _plain(text: str) -> str:
    # What a refusal says must never be the reason why it cannot be recorded.
    return text[:_DETAIL_CHARS].encode("utf-8", "backslashreplace").decode()
