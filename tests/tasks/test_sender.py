"""The sender: turned by hand with a clock that the test sets, or by its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.ledger import Hold, Kind, Receipt, Status
from tenure.ledger.errors import (
    AdmissionConflict,
    InvalidParams,
    OwnerSuperseded,
    RuntimeDraining,
    StaleEpoch,
    TenureError,
    Unavailable,
    to_wire,
)
from tenure.tasks.sender import Errand, Sender
from tenure.tasks.stream import Run, Stream
from tenure.tasks.wire import Answer, Control, claim_proof
from tests.services import wait_until
from tests.tasks.kit import HangingTransport, Holder, RecordingTransport, SettableMonotonic, stream_of

HOLD = Hold("x1", "s1", Kind.COMPUTE, Status.REGISTERED, epoch=5, generation=1, last_sequence=0)
HOLDER = Holder(HOLD, "the secret of x1")
RESEND = 2.0
SOON = 10.0  # seconds within which a thread does something


@pytest.fixture
def clock() -> SettableMonotonic:
    return SettableMonotonic()


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
def sender(transport: RecordingTransport, clock: SettableMonotonic) -> Sender:
    """A sender that is turned by hand."""
    return Sender(transport, resend_seconds=RESEND, threaded=False, monotonic=clock)


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = stream_of(HOLDER, tmp_path, resend_seconds=RESEND)
    yield made
    made.outbox.close()


@pytest.fixture
def impatient(stream: Stream) -> Stream:
    """The stream, sending again soon."""
    stream._pause = stream._resend_seconds = 0.02
    return stream


def answers(stream: Stream, *sequences: int) -> list[Answer]:
    return [Answer({"number": n}, None, stream.hold.execution_id, n, stream.request) for n in sequences]


def asked(sender: Sender, kind: Control, body: dict[str, Any], *, within: float) -> Future[dict[str, Any]]:
    """Ask from a thread, as a caller does."""
    promise: Future[dict[str, Any]] = Future()

    def ask() -> None:
        try:
            promise.set_result(sender.ask(kind, body, within=within))
        except (TenureError, TimeoutError) as error:
            promise.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return promise


# Turned by hand.


def test_a_turn_sends_what_is_due_and_says_when_the_next_is(sender, transport, stream, clock):
    sender.add(stream)
    assert sender.step() is None
    sender.append(stream, "op", "{}")
    assert sender.step() == clock.now + RESEND
    (run,) = transport.sent
    assert isinstance(run, Run)
    assert [entry.sequence for entry in run.entries] == [1]
    assert sender.step() == clock.now + RESEND
    assert len(transport.sent) == 1


def test_answers_of_the_transport_are_taken_in_at_once(sender, transport, stream):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    transport.answers.append(answers(stream, 1))
    assert sender.step() is None
    assert promise.result(0) == Receipt("x1", 1, "op", {"number": 1})


def test_what_cannot_be_sent_now_is_sent_after_the_pause(sender, transport, stream, clock):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    transport.away = True
    assert sender.step() == clock.now + RESEND
    transport.away = False
    clock.advance(RESEND)
    transport.answers.append(answers(stream, 1))
    sender.step()
    assert promise.result(0).sequence == 1


def test_streams_are_told_apart(sender, transport, stream, tmp_path):
    other = stream_of(Holder(replace(HOLD, execution_id="x2", session_id="s2"), "the secret of x2"), tmp_path)
    for one in (stream, other):
        sender.add(one)
    first, second = (sender.append(one, "op", "{}") for one in (stream, other))
    sender.step()
    assert {run.hold.execution_id for run in transport.sent} == {"x1", "x2"}
    sender.receive(answers(other, 1))
    assert (first.done(), second.done()) == (False, True)
    other.outbox.close()


def test_an_answer_for_nobody_is_left_aside(sender, stream):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    sender.step()
    sender.receive([Answer({}, None, "x9", 1, stream.request), Answer({"epoch": 7}, request="unknown"), Answer()])
    assert not promise.done()
    assert stream.hold.epoch == 5


def test_a_stream_that_was_removed_is_carried_no_longer_and_stays_journalled(sender, transport, stream):
    sender.add(stream)
    sender.append(stream, "op", "{}")
    sender.remove(stream)
    assert sender.step() is None
    sender.receive(answers(stream, 1))
    assert transport.sent == []
    assert len(stream.outbox.pending()) == 1


def test_an_adoption_travels_with_a_proof_for_its_epoch_and_its_answer_comes_back(sender, transport, stream):
    sender.add(stream)
    sender.append(stream, "op", "{}")
    transport.answers.append(
        [Answer(None, to_wire(StaleEpoch("epoch_mismatch", {"epoch": 8})), "x1", 1, stream.request)]
    )
    sender.step()
    transport.answers.append([Answer({"epoch": 8}, request=stream.request)])
    sender.step()
    kind, body, request = transport.sent[-1]
    proof = claim_proof(HOLDER.credential.claim(HOLD), Control.ADOPT, "x1", 8)
    assert (kind, request) == (Control.ADOPT, stream.request)
    assert body == {"epoch": 8, "execution": "x1", "session": "s1", "generation": 1, "proof": proof}
    sender.step()
    assert transport.sent[-1].hold.epoch == 8


def test_faults_are_told_around_every_send(transport, stream):
    points = []
    sender = Sender(transport, resend_seconds=RESEND, threaded=False, fault=points.append)
    sender.add(stream)
    sender.append(stream, "op", "{}")
    sender.step()
    assert points == ["before_send", "after_send"]


class Fault(Exception):
    """Something that no transport should raise."""


def test_in_a_callers_turn_what_the_transport_raises_is_the_callers(sender, transport, stream):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    for error in (OwnerSuperseded("owner_superseded"), Fault("x")):
        transport.error = error
        stream._send_again()
        with pytest.raises(type(error)):
            sender.wait(promise, 5)
    assert len(stream.outbox.pending()) == 1
    transport.error = OwnerSuperseded("owner_superseded")
    with pytest.raises(OwnerSuperseded):
        sender.ask(Control.ADOPT, {}, within=5)


# Waiting, turned by the caller.


def test_a_caller_who_waits_turns_the_sender(sender, transport, stream):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    transport.answers.append(answers(stream, 1))
    assert sender.wait(promise, 5).sequence == 1


def test_a_caller_waits_no_longer_than_it_said_and_the_operation_stays_journalled(transport, impatient):
    sender = Sender(transport, resend_seconds=0.01, threaded=False)
    sender.add(impatient)
    promise = sender.append(impatient, "op", "{}")
    with pytest.raises(TimeoutError):
        sender.wait(promise, 0.05)
    assert len(impatient.outbox.pending()) == 1
    assert not promise.done()
    transport.answers.append(answers(impatient, 1))
    assert sender.wait(promise, 5).sequence == 1  # asked again later, it is there


def test_a_caller_is_woken_by_an_answer_that_comes_from_elsewhere(transport, stream):
    """An hour is never waited for: the answer ends it."""
    sender = Sender(transport, resend_seconds=3600.0, threaded=False)
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")

    def answer() -> None:
        wait_until(lambda: transport.sent, within=SOON, what="it is sent")
        sender.receive(answers(stream, 1))

    thread = threading.Thread(target=answer)
    thread.start()
    assert sender.wait(promise, 60).sequence == 1
    thread.join()


class Door:
    """A condition at whose door, after a turn, somebody else's answer comes in first."""

    def __init__(self, condition: threading.Condition, arrive: Callable[[], None]) -> None:
        self.condition, self.arrive, self.turned = condition, arrive, False

    def __enter__(self) -> None:
        if self.turned:
            self.turned = False
            self.arrive()
        self.condition.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.condition.__exit__(*exc)

    def notify_all(self) -> None:
        self.condition.notify_all()

    def wait(self, timeout: float) -> None:
        pytest.fail(f"waits {timeout} s for what is there")


def test_an_answer_that_another_callers_turn_has_just_brought_is_not_waited_for(sender, stream, monkeypatch):
    sender.add(stream)
    promise = sender.append(stream, "op", "{}")
    door = Door(sender._changed, lambda: sender.receive(answers(stream, 1)))
    step = sender.step

    def turn() -> float | None:
        due = step()
        door.turned = True
        return due

    monkeypatch.setattr(sender, "_changed", door)
    monkeypatch.setattr(sender, "step", turn)
    assert sender.wait(promise, 60).sequence == 1


# Errands.


def test_an_errand_is_carried_until_it_is_answered(sender, transport, clock):
    errand = Errand(Control.REGISTER, {"a": 1}, RESEND)
    sender._errands[errand.request] = errand  # as `ask` does, which would take turns of its own
    sender.step()
    (kind, body, request) = transport.sent[0]
    assert (kind, body, request) == (Control.REGISTER, {"a": 1}, errand.request)
    for pause in (2, 4, 8, 16, 30, 30):
        sent = len(transport.sent)
        clock.advance(pause - 0.5)
        sender.step()
        assert len(transport.sent) == sent
        clock.advance(0.5)
        sender.step()
        assert transport.sent[sent:] == [(kind, body, request)]
    sender.receive([Answer({"told": 1}, request=request)])
    assert errand.promise.result(0) == {"told": 1}
    assert sender.step() is None


def test_an_errand_that_is_unavailable_now_is_asked_again(sender, transport):
    sender.resend_seconds = 0.01
    sender._monotonic = time.monotonic
    unavailable = Answer(None, to_wire(Unavailable("now")), request="")

    def control(kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        transport.sent.append(request)
        told = [unavailable, unavailable, Answer({"told": 1})][len(transport.sent) - 1]
        return [replace(told, request=request)]

    transport.control = control
    assert sender.ask(Control.REGISTER, {}, within=SOON) == {"told": 1}
    assert len(transport.sent) == 3
    assert len(set(transport.sent)) == 1


@pytest.mark.parametrize("error", [AdmissionConflict("session_held"), RuntimeDraining("an upgrade")], ids=str)
def test_an_errand_tells_what_the_owner_answered(sender, transport, error):
    def control(kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        return [Answer(None, to_wire(error), request=request)]

    transport.control = control
    with pytest.raises(type(error)) as told:
        sender.ask(Control.REGISTER, {}, within=5)
    assert told.value.detail == error.detail


def test_an_errand_without_an_answer_is_given_up_and_forgotten(transport):
    sender = Sender(transport, resend_seconds=0.01, threaded=False)
    with pytest.raises(TimeoutError):
        sender.ask(Control.REGISTER, {}, within=0.05)
    sent = len(transport.sent)
    assert sent > 1
    assert sender.step() is None
    sender.receive([Answer({}, request=transport.sent[0][2])])
    assert len(transport.sent) == sent


def test_an_errand_that_is_answered_while_it_is_sent_again_keeps_its_answer(sender, transport):
    def control(kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        sender.receive([Answer({"n": 1}, request=request)])
        raise InvalidParams("no message can be made of it now")

    transport.control = control
    assert sender.ask(Control.INSPECT, {}, within=5) == {"n": 1}


def test_an_errand_that_is_answered_twice_keeps_the_first_answer(sender, transport):
    def control(kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        return [Answer({"n": 1}, request=request), Answer({"n": 2}, request=request)]

    transport.control = control
    assert sender.ask(Control.INSPECT, {}, within=5) == {"n": 1}


# Its own thread.


@pytest.fixture
def threaded(transport: RecordingTransport, stream: Stream) -> Iterator[Sender]:
    """A sender with a thread, closed before the stream is."""
    made = Sender(transport, resend_seconds=0.05, threaded=True)
    yield made
    made.close()


def test_the_thread_sends_what_is_appended_and_repeats_it(threaded, transport, impatient):
    threaded.add(impatient)
    promise = threaded.append(impatient, "op", "{}")
    wait_until(lambda: len(transport.sent) >= 3, within=SOON, what="it is sent again")
    threaded.receive(answers(impatient, 1))
    assert threaded.wait(promise, SOON).sequence == 1


def test_the_thread_wakes_for_what_is_appended_while_it_sleeps(transport, stream):
    sender = Sender(transport, resend_seconds=3600.0, threaded=True)
    sender.add(stream)
    for sequence in (1, 2, 3):
        promise = sender.append(stream, "op", "{}")
        wait_until(lambda n=sequence: len(transport.sent) == n, within=SOON, what="it is sent")
        sender.receive(answers(stream, sequence))
        assert sender.wait(promise, SOON).sequence == sequence
    sender.close()


def test_the_thread_carries_errands(threaded, transport):
    promise = asked(threaded, Control.REGISTER, {"a": 1}, within=SOON)
    wait_until(lambda: len(transport.sent) >= 2, within=SOON, what="it is asked again")
    threaded.receive([Answer({"told": 1}, request=transport.sent[0][2])])
    assert promise.result(SOON) == {"told": 1}


def test_a_request_of_which_no_message_can_be_made_is_told_to_whoever_asked(threaded, transport, impatient):
    transport.error = InvalidParams("body.session: text holds a NUL character")
    with pytest.raises(InvalidParams):
        threaded.ask(Control.REGISTER, {}, within=SOON)
    transport.error = None
    threaded.add(impatient)
    promise = threaded.append(impatient, "op", "{}")
    transport.answers.append(answers(impatient, 1))
    assert threaded.wait(promise, SOON).sequence == 1  # everybody else is still carried


def test_whatever_a_transport_raises_the_thread_goes_on_and_the_log_has_it(threaded, transport, impatient, caplog):
    transport.error = Fault("what no transport should raise")
    threaded.add(impatient)
    promise = threaded.append(impatient, "op", "{}")
    wait_until(lambda: "what no transport should raise" in caplog.text, within=SOON, what="it is logged")
    transport.error = None
    transport.answers.append(answers(impatient, 1))
    assert threaded.wait(promise, SOON).sequence == 1


def test_one_stream_that_cannot_be_sent_does_not_keep_the_others(transport, stream, tmp_path, caplog):
    other = stream_of(Holder(replace(HOLD, execution_id="x2", session_id="s2"), "the secret of x2"), tmp_path)

    class Choosy(RecordingTransport):
        def run(self, run: Run) -> list[Answer]:
            if run.hold.execution_id == "x1":
                raise Fault("no")
            return answers(other, *(entry.sequence for entry in run.entries))

    sender = Sender(Choosy(), resend_seconds=0.05, threaded=True)
    for one in (stream, other):
        sender.add(one)
    sender.append(stream, "op", "{}")
    assert sender.wait(sender.append(other, "op", "{}"), SOON).sequence == 1
    sender.close()
    other.outbox.close()


def test_a_caller_never_waits_for_a_transport_that_hangs(impatient):
    transport = HangingTransport()
    sender = Sender(transport, resend_seconds=0.05, threaded=True)
    try:
        sender.add(impatient)
        first = sender.append(impatient, "op", "{}")
        assert transport.reached.wait(SOON)
        # The transport holds the sender's thread now; these return all the same, or the test runs out of time.
        second = sender.append(impatient, "op", "{}")
        with pytest.raises(TimeoutError):
            sender.wait(first, 0.05)
        with pytest.raises(TimeoutError):
            sender.ask(Control.INSPECT, {}, within=0.05)
        assert [entry.sequence for entry in impatient.outbox.pending()] == [1, 2]
        sender.receive(answers(impatient, 1, 2))  # answers are taken in as well
        assert [first.result(0).sequence, second.result(0).sequence] == [1, 2]
        sender.remove(impatient)
    finally:
        transport.let_go.set()
        sender.close()


def test_after_closing_nothing_is_sent_and_what_was_journalled_stays(transport, impatient):
    sender = Sender(transport, resend_seconds=0.01, threaded=True)
    sender.add(impatient)
    sender.append(impatient, "op", "{}")
    wait_until(lambda: transport.sent, within=SOON, what="it is sent")
    thread = sender._thread
    sender.close()
    assert thread is not None
    assert not thread.is_alive()
    sent = len(transport.sent)
    assert [entry.sequence for entry in impatient.outbox.pending()] == [1]
    sender.append(impatient, "op", "{}")
    assert len(transport.sent) == sent
    sender.close()  # twice is once


def test_many_callers_at_once_each_get_their_own(transport, stream):
    def run(run: Run) -> list[Answer]:
        return [Answer({"p": e.payload}, None, "x1", e.sequence, run.request) for e in run.entries]

    transport.run = run
    sender = Sender(transport, resend_seconds=5.0, threaded=True)
    sender.add(stream)
    got: dict[int, Any] = {}

    def call(number: int) -> None:
        got[number] = sender.wait(sender.append(stream, "op", str(number)), SOON).result["p"]

    threads = [threading.Thread(target=call, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.close()
    assert got == {number: str(number) for number in range(20)}
    assert stream.idle
