"""Workers, owners, and a post that loses, repeats and delays in both directions, through any course of events.

Whatever happens: what a promise calls applied is in the ledger, once and in order, and the ledger is lawful.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tenure.ledger import Kind, Ledger, Limits, Status, reads, secret_digest
from tenure.ledger.errors import InvalidParams, OwnerSuperseded, StaleGeneration, TenureError, Unavailable
from tenure.ledger.laws import LAWS
from tenure.tasks import wire
from tenure.tasks.sender import Sender
from tenure.tasks.stream import Run, Stream
from tenure.tasks.transports import control_message, run_message
from tenure.tasks.wire import Answer, Control
from tests.ledger.kit import Failing
from tests.tasks.kit import (
    ALICE,
    REPLY_TO,
    Desk,
    Holder,
    SettableMonotonic,
    open_ledger,
    said,
    say,
    stream_of,
    through_kombu,
)

LIMITS = Limits(2, 1)
MALFORMED = [("no.such", "{}"), ("transcript.append", '{"messages":[]}'), ("transcript.append", '{"messages":7}')]

EXAMPLES = int(os.environ.get("TENURE_TEST_EXAMPLES", "100"))  # a nightly run may want thousands


@dataclass
class Line:
    """One execution as its worker sees it: what it wanted written, and what became of that."""

    holder: Holder
    stream: Stream
    wanted: list[tuple[str, Future[Any]]] = field(default_factory=list)  # well-formed messages
    malformed: list[Future[Any]] = field(default_factory=list)
    reserved: list[tuple[str, Future[Any]]] = field(default_factory=list)  # secrets of children


class Post:
    """A way to an owner that delivers nothing by itself."""

    def __init__(self) -> None:
        self.letters: list[Any] = []
        self.replies: list[Any] = []

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        message = control_message(kind, body, request, principal=ALICE, reply_to=REPLY_TO)
        self.letters.append(through_kombu(message))
        return []

    def run(self, run: Run) -> list[Answer]:
        self.letters.append(through_kombu(run_message(run, principal=ALICE, reply_to=REPLY_TO)))
        return []


places = st.integers(0, 7)  # which letter or reply, counted from the oldest


class Delivery(RuleBasedStateMachine):
    ledger: Ledger  # one for all courses: each has executions of its own, and begins with an epoch of its own

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock, self.post = SettableMonotonic(), Post()
        self.sender = Sender(self.post, resend_seconds=2.0, threaded=False, monotonic=self.clock)
        self.desks = [Desk(self.ledger)]
        self.lines: list[Line] = []
        self.serial = 0

    @initialize(roots=st.integers(1, 2))
    def register(self, roots: int) -> None:
        for _ in range(roots):
            self.hold(self.desks[-1].register())

    def hold(self, holder: Holder) -> None:
        stream = stream_of(holder, self.folder)
        self.sender.add(stream)
        self.lines.append(Line(holder, stream))

    def line(self, which: int) -> Line:
        return self.lines[which % len(self.lines)]

    def append(self, line: Line, operation: str, payload: str) -> Future[Any] | None:
        if line.stream.broken:  # no root's ever is
            assert line.holder.hold.kind is Kind.CHILD
            return None
        return self.sender.append(line.stream, operation, payload)

    # What workers do.

    @rule(which=st.integers(0, 3), times=st.integers(1, 3))
    def write(self, which: int, times: int) -> None:
        line = self.line(which)
        for _ in range(times):
            self.serial += 1
            text = f"m{self.serial}"
            if promise := self.append(line, "transcript.append", wire.canonical(say(text))):
                line.wanted.append((text, promise))

    @rule(which=st.integers(0, 3), wrong=st.sampled_from(MALFORMED))
    def write_nonsense(self, which: int, wrong: tuple[str, str]) -> None:
        line = self.line(which)
        if promise := self.append(line, *wrong):
            line.malformed.append(promise)

    @rule(which=st.integers(0, 1))
    def reserve(self, which: int) -> None:
        line = self.line(which)
        self.serial += 1
        secret = f"the secret of the child {self.serial}"
        payload = wire.canonical({"secret_digest": secret_digest(secret)})
        if promise := self.append(line, "child.reserve", payload):
            line.reserved.append((secret, promise))

    @rule()
    def take_up_children(self) -> None:
        for parent in list(self.lines):
            for secret, promise in [found for found in parent.reserved if found[1].done()]:
                parent.reserved.remove((secret, promise))
                if not promise.exception(0) and not promise.result(0).refused:
                    self.hold(self.child(parent, secret, promise.result(0).result))

    def child(self, parent: Line, secret: str, minted: dict[str, Any]) -> Holder:
        hold = replace(
            parent.stream.hold,
            execution_id=minted["execution_id"],
            session_id=minted["session_id"],
            generation=minted["generation"],
            kind=Kind.CHILD,
            status=Status.RUNNING,
        )
        return Holder(hold, secret)

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.sender.step()

    @rule()
    def send(self) -> None:
        self.sender.step()

    # What the post does.

    @precondition(lambda self: self.post.letters)
    @rule(place=places, keep=st.booleans())
    def deliver(self, place: int, keep: bool) -> None:
        self.serve(self.desks[-1], taken(self.post.letters, place, keep=keep))

    @precondition(lambda self: self.post.letters)
    @rule(place=places, number=st.integers(1, 3))
    def deliver_while_the_database_fails(self, place: int, number: int) -> None:
        letter = taken(self.post.letters, place)
        with Failing(self.ledger, "commit", number=number), suppress(Unavailable):  # then nothing is answered
            self.serve(self.desks[-1], letter)

    def serve(self, desk: Desk, letter: Any) -> None:
        duty = desk.owner.apply if "run" in letter else desk.owner.control
        reply = duty(letter)
        assert reply is not None
        self.post.replies.append(through_kombu(reply.message))

    @precondition(lambda self: self.post.replies)
    @rule(place=places, keep=st.booleans())
    def hear(self, place: int, keep: bool) -> None:
        self.sender.receive(wire.read_reply(taken(self.post.replies, place, keep=keep), ALICE)[1])

    @precondition(lambda self: self.post.letters)
    @rule(place=places)
    def lose_letter(self, place: int) -> None:
        taken(self.post.letters, place)

    @precondition(lambda self: self.post.replies)
    @rule(place=places)
    def lose_reply(self, place: int) -> None:
        taken(self.post.replies, place)

    @rule()
    def lose_everything(self) -> None:
        self.post.letters.clear()
        self.post.replies.clear()

    # What owners do.

    @rule(in_good_order=st.booleans())
    def another_owner_begins(self, in_good_order: bool) -> None:
        if in_good_order:
            self.ledger.release(self.desks[-1].owner.epoch)
        self.desks.append(Desk(self.ledger))

    @precondition(lambda self: self.post.letters and len(self.desks) > 1)
    @rule(place=places, age=st.integers(0, 3))
    def an_older_owner_wakes_up(self, place: int, age: int) -> None:
        desk = self.desks[age % (len(self.desks) - 1)]
        with pytest.raises(OwnerSuperseded):
            self.serve(desk, taken(self.post.letters, place, keep=True))

    # What is always true, and what is true in the end.

    @invariant()
    def no_root_is_broken(self) -> None:
        for line in self.lines:
            assert line.stream.broken is None or line.holder.hold.kind is Kind.CHILD

    @invariant()
    def a_run_in_flight_is_alone(self) -> None:
        for line in self.lines:
            assert line.stream._in_flight <= len(line.stream.outbox.pending())

    def teardown(self) -> None:
        try:
            if self.lines:
                self.settle()
                self.take_up_children()
                self.settle()
                for letter in list(self.post.letters):  # the last late copies
                    self.serve(self.desks[-1], letter)
                for line in self.lines:
                    self.check(line)
                self.finish()
        finally:
            for line in self.lines:
                line.stream.outbox.close()
            shutil.rmtree(self.folder)

    def settle(self) -> None:
        """Let the post work: everything arrives, late copies included, until everything is answered."""
        for _ in range(200):
            self.sender.step()
            while self.post.letters:
                self.deliver(0, keep=False)
            while self.post.replies:
                self.hear(0, keep=False)
            if all(line.stream.broken or line.stream.idle for line in self.lines):
                return
            self.clock.advance(40)
        pytest.fail("it never comes to rest")

    def check(self, line: Line) -> None:
        transcript = said(self.ledger, line.holder.hold.session_id)
        wanted = [text for text, _ in line.wanted]
        applied = [text for text, promise in line.wanted if not failed(promise)]
        assert all(isinstance(failed(promise), (InvalidParams, StaleGeneration)) for promise in line.malformed)
        if line.holder.hold.kind is Kind.CHILD:
            # Its owner's end may have come between an operation and its answer.
            assert transcript == wanted[: len(transcript)]
            assert transcript[: len(applied)] == applied
            return
        assert transcript == applied == wanted
        assert [type(failed(promise)) for promise in line.malformed] == [InvalidParams] * len(line.malformed)
        given_up = [found.operation for found in line.stream.outbox.rejected()]
        assert len(given_up) == len(line.malformed)
        assert not line.stream.promises
        assert not line.stream.outbox.pending()

    def finish(self) -> None:
        """End everything, so that the next course finds nothing to do but its own."""
        roots = [line for line in self.lines if line.holder.hold.kind is not Kind.CHILD]
        for line in roots:
            self.append(line, "execution.finish", "{}")
        self.settle()
        with self.ledger.read() as connection:
            assert list(reads.executions(connection, live_only=True)) == []
            for line in roots:
                found = reads.execution(connection, line.holder.hold.execution_id)
                assert found.last_sequence == line.stream.outbox.next_sequence - 1


def taken(letters: list[Any], place: int, *, keep: bool = False) -> Any:
    index = place % len(letters)
    return letters[index] if keep else letters.pop(index)


def failed(promise: Future[Any]) -> TenureError | None:
    """Return what became of an operation instead of a receipt; each has become something."""
    error = promise.exception(0)
    assert error is None or isinstance(error, TenureError)
    return error


@pytest.mark.timeout(600)
def test_what_a_receipt_was_given_for_is_in_the_ledger_once_and_in_order(sqlite_url, monkeypatch):
    for sync in ("fsync", "fdatasync"):  # no plug is pulled here, so no disk has to be waited for
        monkeypatch.setattr(os, sync, lambda _fd: None, raising=False)
    with open_ledger(sqlite_url, limits=LIMITS) as ledger:
        monkeypatch.setattr(Delivery, "ledger", ledger, raising=False)
        slow = [HealthCheck.too_slow]
        run_state_machine_as_test(
            Delivery,
            settings=settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None, suppress_health_check=slow),
        )
        with ledger.read() as connection:
            assert [violation for law in LAWS for violation in law(connection, LIMITS)] == []
