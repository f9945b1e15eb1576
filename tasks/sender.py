"""The sender: carries every stream's runs, and errands such as a registration, until each is answered.

`step` is one turn without the loop. Through a broker a thread turns it, so that no caller ever waits for a broker that
accepts and does not answer; with a ledger in the same process, the caller who waits turns it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from ..ledger.errors import TenureError, Unavailable, from_wire
from .stream import MAX_PAUSE_SECONDS, Adoption, Run, Stream
from .wire import Answer, Control, claim_proof

logger = logging.getLogger(__name__)

R = TypeVar("R")
_IDLE_SECONDS = 60.0


class Transport(Protocol):
    """A way to an owner. Answers come back from the call itself or, later, through `Sender.receive`."""

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        """Carry a control message; raises `Unavailable` when it cannot be sent now."""

    def run(self, run: Run) -> list[Answer]:
        """Carry a run; raises `Unavailable` when it cannot be sent now."""


@dataclass(slots=True)
class Errand:
    """A control message that is carried until it is answered or its caller gives up."""

    kind: Control
    body: dict[str, Any]
    pause: float
    due: float = 0.0
    request: str = field(default_factory=lambda: uuid4().hex)
    promise: Future[dict[str, Any]] = field(default_factory=Future)


class Sender:
    """Everything of one process that is on its way to an owner."""

    def __init__(
        self,
        transport: Transport,
        *,
        resend_seconds: float,
        threaded: bool,
        monotonic: Callable[[], float] = time.monotonic,
        fault: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self.resend_seconds = resend_seconds
        self._transport, self._monotonic, self._fault = transport, monotonic, fault
        self._changed = threading.Condition(threading.RLock())
        self._streams: dict[str, Stream] = {}
        self._errands: dict[str, Errand] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="tenure-sender", daemon=True)
            self._thread.start()

    def add(self, stream: Stream) -> None:
        """Carry this stream from now on."""
        with self._changed:
            self._streams[stream.hold.execution_id] = stream
            self._changed.notify_all()

    def remove(self, stream: Stream) -> None:
        """Carry it no longer. What it has journalled stays in its outbox."""
        with self._changed:
            self._streams.pop(stream.hold.execution_id, None)

    def append(self, stream: Stream, operation: str, payload: str) -> Future[Any]:
        """Journal an operation on a stream and see that it is sent.

        Raises:
            TenureError: as `Stream.append`; nothing was journalled.
        """
        with self._changed:
            promise = stream.append(operation, payload)
            self._changed.notify_all()
        return promise

    def ask(self, kind: Control, body: dict[str, Any], *, within: float) -> dict[str, Any]:
        """Carry a control message and return its answer.

        Raises:
            TimeoutError: there was no answer within so many seconds.
            TenureError: what the owner answered.
        """
        errand = Errand(kind, body, self.resend_seconds)
        with self._changed:
            self._errands[errand.request] = errand
            self._changed.notify_all()
        try:
            return self.wait(errand.promise, within)
        finally:
            with self._changed:
                self._errands.pop(errand.request, None)

    def wait(self, promise: Future[R], within: float | None) -> R:
        """Return what was promised, turning the sender meanwhile if no thread does.

        Raises:
            TimeoutError: not within so many seconds; what was journalled stays journalled.
            TenureError: what became of it instead.
        """
        if self._thread is not None:
            return promise.result(within)
        give_up = None if within is None else self._monotonic() + within
        while not promise.done():
            due = self.step()
            now = self._monotonic()
            if promise.done():
                break
            if give_up is not None and now >= give_up:
                raise TimeoutError
            ends = [t for t in (due, give_up) if t is not None]
            with self._changed:
                if not promise.done():  # another caller's turn may have brought it since
                    self._changed.wait(max(0.0, min(ends) - now) if ends else _IDLE_SECONDS)
        return promise.result()

    def step(self) -> float | None:
        """Send what is due; returns when the next is, on this sender's clock, or None."""
        with self._changed:
            now = self._monotonic()
            parcels = [parcel for stream in self._streams.values() if (parcel := stream.poll(now)) is not None]
            errands = [e for e in self._errands.values() if e.due <= now and not e.promise.done()]
            for errand in errands:
                errand.due = now + errand.pause
                errand.pause = min(errand.pause * 2, MAX_PAUSE_SECONDS)
        for errand in errands:
            self._survive(partial(self._run, errand))
        for parcel in parcels:
            self._survive(partial(self._carry, partial(self._send, parcel)))
        with self._changed:
            return self._next_due()

    def _survive(self, carry: Callable[[], None]) -> None:
        """Carry one thing. What that raises is for the caller whose turn it is; the thread goes on for all others."""
        try:
            carry()
        except Exception:
            if self._thread is None:
                raise
            logger.exception("not sent, will be again")

    def _run(self, errand: Errand) -> None:
        try:
            self._carry(partial(self._transport.control, errand.kind, errand.body, errand.request))
        except TenureError as error:  # no message can be made of it; whoever asked has to know, nobody else
            with self._changed:
                if not errand.promise.done():
                    errand.promise.set_exception(error)
                self._changed.notify_all()

    def _send(self, parcel: Run | Adoption) -> list[Answer]:
        if isinstance(parcel, Run):
            return self._transport.run(parcel)
        hold = parcel.hold
        body = {
            "epoch": parcel.epoch,
            "execution": hold.execution_id,
            "session": hold.session_id,
            "generation": hold.generation,
            "proof": claim_proof(parcel.claim, Control.ADOPT, hold.execution_id, parcel.epoch),
        }
        return self._transport.control(Control.ADOPT, body, parcel.request)

    def _carry(self, send: Callable[[], list[Answer]]) -> None:
        self._fault("before_send")
        try:
            answers = send()
        except Unavailable as error:
            logger.info("not sent, will be again: %s", error.explain())
            return
        self._fault("after_send")
        self.receive(answers)

    def receive(self, answers: list[Answer]) -> None:
        """Take answers in, from whatever thread they come."""
        with self._changed:
            for answer in answers:
                if errand := self._errands.get(answer.request):
                    _settle(errand, answer)
                for stream in self._addressed(answer):
                    stream.receive(answer)
            self._changed.notify_all()

    def _addressed(self, answer: Answer) -> list[Stream]:
        if answer.execution:
            found = self._streams.get(answer.execution)
            return [found] if found else []
        return [stream for stream in self._streams.values() if stream.request == answer.request]

    def abandon(self) -> None:
        """Drop every stream and give its outbox free, as the end of the process would."""
        with self._changed:
            for stream in self._streams.values():
                stream.outbox.close()
            self._streams.clear()

    def close(self) -> None:
        """Stop carrying; what is journalled stays journalled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._closed:
            due = self.step()
            with self._changed:
                if not self._awake():
                    pause = _IDLE_SECONDS if due is None else max(0.0, due - self._monotonic())
                    self._changed.wait(pause)

    def _awake(self) -> bool:
        """Whether something became due, or the end came, while the last turn was sending."""
        due = self._next_due()
        return self._closed or (due is not None and due <= self._monotonic())

    def _next_due(self) -> float | None:
        dues = [due for stream in self._streams.values() if (due := stream.due()) is not None]
        dues += [errand.due for errand in self._errands.values() if not errand.promise.done()]
        earliest: float | None = min(dues, default=None)
        return earliest


def _settle(errand: Errand, answer: Answer) -> None:
    if errand.promise.done():
        return
    if answer.error is None:
        errand.promise.set_result(answer.value or {})
        return
    error = from_wire(answer.error)
    if not isinstance(error, Unavailable):  # that one is asked again
        errand.promise.set_exception(error)
