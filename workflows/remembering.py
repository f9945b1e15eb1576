"""An execution that remembers: what it did before, in whatever process, is handed out again instead of being done."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..ledger import Receipt
from ..ledger.canonical import digest
from ..ledger.errors import AdmissionConflict, TenureError
from ..tasks.wire import Control
from . import steps
from .errors import HandleClosed
from .execution import Execution
from .replay import Past, Replay

HISTORY_PAGE = 500


class Remembering(Execution):
    """An execution whose first operations may be answered from its past."""

    request_id: str = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Use `Execution.start`, or get it as a workflow's first argument."""
        super().__init__(*args, **kwargs)
        self._replay = Replay()

    @property
    def finished(self) -> bool:
        """Whether it has been finished through this handle."""
        return self._finished

    @property
    def replaying(self) -> bool:
        """Whether the workflow is still where it has been before."""
        return self._replay.active

    @property
    def stopped(self) -> TenureError | None:
        """Why this execution can write no more, as where it was retired or taken over; None where it can."""
        return self._stream.broken

    def abandon_replay(self) -> None:
        """Go on behind everything that was done before, whatever it was."""
        self._replay.abandon()

    def recall(self) -> None:
        """Fetch what this execution did before, under whatever process, so that it can be replayed.

        Raises:
            TimeoutError: no owner answered in time.
        """
        journalled = self._settle_journal()
        if not journalled and self._stream.hold.last_sequence == 0:
            return
        past: list[Past] = []
        while True:
            body = self.client.prove(Control.HISTORY, self._stream.hold, self._stream.claim)
            page = self.client.ask(
                Control.HISTORY, body | {"after": len(past), "limit": HISTORY_PAGE}, within=self.within
            )["receipts"]
            past.extend(_past(receipt) for receipt in page)
            if len(page) < HISTORY_PAGE:
                break
        self._replay = Replay(past)

    def _settle_journal(self) -> bool:
        """Have everything answered that an earlier process had journalled here; returns whether there was anything."""
        promises = list(self._stream.promises.values())
        for promise in promises:
            # Another process, elsewhere, may have come to this place since and done otherwise: that stands.
            with suppress(AdmissionConflict):
                self._wait(promise)
        return bool(promises)

    def submit(self, operation: str, payload: dict[str, Any]) -> Future[Receipt]:
        """Journal an operation, or answer it from the past; see `Execution.submit`.

        Raises:
            WorkflowChanged: the code did something else at this place before.
            StepInStep: a step is running: when it is not run again, this would be missing.
        """
        self.check_open()
        steps.refuse_nesting(operation)
        if not self._replay.active:
            return super().submit(operation, payload)
        past = self._replay.take(operation, digest(operation, self.client.encode(operation, payload)))
        assert past is not None  # it is active
        promise: Future[Receipt] = Future()
        promise.set_result(Receipt(self.execution_id, past.sequence, operation, past.result, replayed=True))
        return promise

    def check_open(self) -> None:
        """Check that this handle may still be used, here.

        Raises:
            HandleClosed: it was finished or closed, or belongs to another process.
        """
        if self._finished or self._closed:
            raise HandleClosed(f"execution {self.execution_id} was {'finished' if self._finished else 'closed'}")
        if self.client.forked:
            raise HandleClosed("the handle belongs to the process that this one was forked from")


def _past(value: dict[str, Any]) -> Past:
    step = value.get("step")
    return Past(
        value["sequence"],
        value["operation"],
        value["digest"],
        value["result"],
        None if step is None else (step["name"], step["input_digest"], step["result"]),
    )
