"""One execution's way to its receipts: a state machine, under a clock that the test sets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenure.ledger import Hold, Kind, Status
from tenure.ledger.errors import (
    AdmissionConflict,
    InvalidParams,
    NotFound,
    OutboxCorrupt,
    OutboxFull,
    PermissionDenied,
    SequenceGap,
    StaleEpoch,
    StaleGeneration,
    TenureError,
    Unavailable,
    to_wire,
)
from tenure.tasks.stream import RUN_BYTES, RUN_LENGTH, Adoption, Run, Stream
from tenure.tasks.wire import Answer
from tests.tasks.kit import Holder, outbox_of

HOLD = Hold("x1", "s1", Kind.COMPUTE, Status.REGISTERED, epoch=5, generation=1, last_sequence=0)
HOLDER = Holder(HOLD, "the secret of x1")
RESEND = 2.0


class Course:
    """A stream, its outbox, and a clock: what is sent is looked at, what is answered is made up."""

    def __init__(self, folder: Any) -> None:
        self.outbox = outbox_of(HOLD, HOLDER.credential, folder)
        self.stream = Stream(self.outbox, HOLD, HOLDER.credential, resend_seconds=RESEND)
        self.now = 1000.0

    def append(self, *texts: str) -> list[Any]:
        return [self.stream.append("op", json.dumps(text)) for text in texts]

    def poll(self) -> Run | Adoption | None:
        return self.stream.poll(self.now)

    def sends(self) -> list[tuple[int, str]]:
        """Poll; return the operations that are sent."""
        run = self.poll()
        assert isinstance(run, Run)
        assert run.request == self.stream.request
        return [(entry.sequence, json.loads(entry.payload)) for entry in run.entries]

    def silent(self) -> bool:
        return self.poll() is None

    def ok(self, *sequences: int, request: str | None = None) -> None:
        for sequence in sequences:
            tag = self.stream.request if request is None else request
            self.stream.receive(Answer({"number": sequence}, None, "x1", sequence, tag))

    def error(self, error: TenureError, sequence: int = 0, *, request: str | None = None) -> None:
        tag = self.stream.request if request is None else request
        execution = "x1" if sequence else ""
        self.stream.receive(Answer(None, to_wire(error), execution, sequence, tag))

    def adopted(self, epoch: int) -> None:
        self.stream.receive(Answer({"epoch": epoch}, request=self.stream.request))

    def pending(self) -> list[tuple[int, str]]:
        return [(entry.sequence, json.loads(entry.payload)) for entry in self.outbox.pending()]

    def rejected(self) -> list[tuple[int, str, str, str]]:
        return [(r.sequence, json.loads(r.payload), r.reason, r.detail) for r in self.outbox.rejected()]


@pytest.fixture
def course(tmp_path):
    made = Course(tmp_path)
    yield made
    made.outbox.close()


# Journal, send, receipt, trim.


def test_an_operation_is_journalled_sent_answered_and_trimmed_in_this_order(course):
    (promise,) = course.append("a")
    assert course.pending() == [(1, "a")]
    assert not promise.done()
    assert course.sends() == [(1, "a")]
    assert course.pending() == [(1, "a")]
    assert not promise.done()
    course.ok(1)
    assert course.pending() == []
    receipt = promise.result(0)
    assert (receipt.execution_id, receipt.sequence, receipt.operation) == ("x1", 1, "op")
    assert receipt.result == {"number": 1}


def test_an_operation_is_trimmed_before_its_promise_is_kept(course):
    (promise,) = course.append("a")
    course.sends()
    seen = []
    promise.add_done_callback(lambda _promise: seen.append(course.pending()))
    course.ok(1)
    assert seen == [[]]


def test_what_the_journal_refuses_is_never_sent(course, monkeypatch):
    def full(*_what):
        raise OutboxFull("full")

    monkeypatch.setattr(course.outbox, "append", full)
    with pytest.raises(OutboxFull):
        course.append("a")
    assert course.stream.idle
    assert course.silent()
    assert course.stream.promises == {}


def test_an_idle_stream_sends_nothing_and_has_no_date(course):
    assert course.stream.idle
    assert course.stream.due() is None
    assert course.silent()
    course.append("a")
    assert not course.stream.idle
    due = course.stream.due()
    assert due is not None
    assert due <= course.now


def test_a_run_names_what_it_is_sent_under(course):
    course.append("a")
    run = course.poll()
    assert isinstance(run, Run)
    assert (run.hold, run.claim) == (HOLD, HOLDER.credential.claim(HOLD))


def test_runs_and_credentials_do_not_show_what_they_hold(course):
    course.append("what nobody may read")
    run = course.poll()
    shown = repr([run, course.stream.credential, Adoption(HOLD, run.claim, 6, "tag"), run.entries])
    assert "what nobody may read" not in shown
    assert run.claim not in shown
    assert HOLDER.credential.secret_digest not in shown


# What is lost is sent again.


def test_without_an_answer_it_is_sent_again_after_pauses_that_double_to_thirty_seconds(course):
    course.append("a")
    start, pauses = course.now, []
    course.sends()
    for _ in range(7):
        due = course.stream.due()
        assert due is not None
        course.now = due - 0.001
        assert course.silent()
        course.now = due
        assert course.sends() == [(1, "a")]
        pauses.append(due - start)
        start = due
    assert pauses == [2, 4, 8, 16, 30, 30, 30]


def test_progress_ends_the_long_pauses(course):
    course.append("a")
    for _ in range(5):
        course.sends()
        course.now = course.stream.due()
    course.ok(1)
    course.append("b")
    assert course.sends() == [(2, "b")]
    assert course.stream.due() == course.now + RESEND


def test_a_lost_answer_costs_a_repeated_send_that_the_receipt_answers(course):
    (promise,) = course.append("a")
    first = course.sends()
    course.now += RESEND
    assert course.sends() == first
    course.ok(1)
    assert promise.result(0).sequence == 1
    course.ok(1)  # the first answer comes after all
    assert course.stream.idle


def test_what_is_unavailable_now_is_kept_and_sent_again_after_the_pause(course):
    (promise,) = course.append("a")
    course.sends()
    course.error(Unavailable("the database is away"), 1)
    assert course.silent()
    assert course.pending() == [(1, "a")]
    assert not promise.done()
    course.now += RESEND
    assert course.sends() == [(1, "a")]
    course.ok(1)
    assert promise.result(0).sequence == 1


# One run at a time.


def test_nothing_is_sent_while_a_run_is_in_flight(course):
    course.append("a", "b")
    assert course.sends() == [(1, "a"), (2, "b")]
    course.append("c")
    assert course.silent()
    course.ok(1)
    assert course.silent()
    course.ok(2)
    assert course.sends() == [(3, "c")]


def test_a_repeated_send_takes_along_what_has_come_since(course):
    course.append("a")
    course.sends()
    course.append("b")
    course.now += RESEND
    assert course.sends() == [(1, "a"), (2, "b")]


def test_the_rest_of_a_run_that_was_answered_in_part_is_sent_again(course):
    course.append("a", "b", "c")
    course.sends()
    course.ok(1)
    course.error(Unavailable("now"), 2)
    assert course.silent()
    course.now += RESEND
    assert course.sends() == [(2, "b"), (3, "c")]


def test_a_run_holds_so_many_operations_and_no_more(course):
    course.append(*(str(number) for number in range(RUN_LENGTH + 3)))
    assert [sequence for sequence, _ in course.sends()] == list(range(1, RUN_LENGTH + 1))
    course.ok(*range(1, RUN_LENGTH + 1))
    assert [sequence for sequence, _ in course.sends()] == [RUN_LENGTH + 1, RUN_LENGTH + 2, RUN_LENGTH + 3]


def test_a_run_is_cut_by_its_size(course):
    third = "x" * (RUN_BYTES // 3)
    course.append(third, third, third, "y")
    assert [sequence for sequence, _ in course.sends()] == [1, 2]
    course.ok(1, 2)
    assert [sequence for sequence, _ in course.sends()] == [3, 4]


def test_an_operation_greater_than_a_run_travels_alone(course):
    course.append("a", "x" * (RUN_BYTES + 1), "b")
    for sequence in (1, 2, 3):
        assert [number for number, _ in course.sends()] == [sequence]
        course.ok(sequence)


def test_a_run_holds_no_gap(course):
    course.append("a", "b", "c", "d")
    course.outbox.settle(2)
    assert course.sends() == [(1, "a")]
    course.ok(1)
    assert course.sends() == [(3, "c"), (4, "d")]


# A new epoch.


def test_a_new_epoch_is_adopted_and_then_the_run_is_sent_under_it(course):
    (promise,) = course.append("a")
    course.sends()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 1)
    adoption = course.poll()
    assert isinstance(adoption, Adoption)
    assert (adoption.epoch, adoption.hold.epoch, adoption.request) == (8, 5, course.stream.request)
    assert adoption.claim == HOLDER.credential.claim(HOLD)
    course.adopted(8)
    run = course.poll()
    assert isinstance(run, Run)
    assert (run.hold.epoch, run.hold.generation) == (8, 1)
    assert course.stream.hold.epoch == 8
    course.ok(1)
    assert promise.result(0).sequence == 1


def test_an_adoption_without_an_answer_is_asked_again_and_nothing_else_is_sent(course):
    course.append("a")
    course.sends()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 1)
    assert isinstance(course.poll(), Adoption)
    assert course.silent()
    for pause in (2, 4, 8):
        assert course.stream.due() == course.now + pause
        course.now += pause
        assert isinstance(course.poll(), Adoption)
    course.error(Unavailable("now"))
    assert course.silent()
    course.now = course.stream.due()
    assert isinstance(course.poll(), Adoption)


def test_an_adoption_is_asked_for_even_when_everything_is_answered_meanwhile(course):
    """An execution that nobody adopts is `unknown`, and may be discarded, however little it writes."""
    course.append("a")
    course.sends()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 1)
    course.ok(1)  # the late answer of the older owner
    assert course.pending() == []
    assert not course.stream.idle
    assert isinstance(course.poll(), Adoption)
    course.adopted(8)
    assert course.stream.idle
    assert course.silent()


def test_a_third_epoch_meanwhile_is_adopted_in_its_turn(course):
    course.append("a")
    course.sends()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 1)
    course.poll()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 9}))
    adoption = course.poll()
    assert isinstance(adoption, Adoption)
    assert adoption.epoch == 9
    course.adopted(8)  # the answer to the first comes late
    assert course.silent()
    assert course.stream.hold.epoch == 5
    course.adopted(9)
    assert course.stream.hold.epoch == 9
    assert course.sends() == [(1, "a")]


def test_a_late_answer_about_an_older_epoch_changes_nothing(course):
    course.append("a")
    course.sends()
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 1)
    course.poll()
    course.adopted(8)
    course.sends()
    course.ok(1)
    course.adopted(8)
    course.adopted(6)
    assert course.stream.hold.epoch == 8
    assert course.stream.idle


def test_what_is_answered_before_an_adoption_counts(course):
    first, second = course.append("a", "b")
    course.sends()
    course.ok(1)
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 2)
    course.poll()
    course.adopted(8)
    assert first.done()
    assert course.sends() == [(2, "b")]
    assert not second.done()


@pytest.mark.parametrize(
    "error",
    [
        StaleGeneration("child_not_adoptable", {"status": "terminal"}),
        PermissionDenied("claim_mismatch"),
        NotFound("execution"),
        InvalidParams("epoch: no"),
    ],
    ids=lambda error: error.reason,
)
def test_a_refused_adoption_ends_the_stream_and_keeps_the_operations(course, error):
    promises = course.append("a", "b")
    course.sends()
    course.error(StaleEpoch("not_adopted", {"epoch": 8}), 1)
    course.poll()
    course.error(error)
    for promise in promises:
        with pytest.raises(type(error)) as failed:
            promise.result(0)
        assert failed.value.detail == error.detail
    assert course.pending() == [(1, "a"), (2, "b")]
    assert course.silent()
    assert course.stream.due() is None
    with pytest.raises(type(error)):
        course.append("c")
    assert course.pending() == [(1, "a"), (2, "b")]


# What can never be applied.


@pytest.mark.parametrize(
    "error",
    [
        StaleGeneration("execution_terminal"),
        PermissionDenied("claim_mismatch"),
        NotFound("execution"),
        TenureError("a reason of a newer owner"),
    ],
    ids=lambda error: error.reason,
)
def test_where_no_operation_can_be_applied_any_more_every_promise_says_so(course, error):
    first, second, third = course.append("a", "b", "c")
    course.sends()
    course.ok(1)
    course.error(error, 2)
    assert first.result(0)
    for promise in (second, third):
        with pytest.raises(type(error)):
            promise.result(0)
    assert course.pending() == [(2, "b"), (3, "c")]
    course.now += 1000
    assert course.silent()
    assert course.stream.broken is not None
    course.ok(2)  # whatever comes now is too late
    assert course.pending() == [(2, "b"), (3, "c")]


def test_a_malformed_operation_is_given_up_and_those_behind_it_go_on(course):
    first, second, third, fourth = course.append("a", "wrong", "c", "d")
    course.sends()
    course.ok(1)
    course.error(InvalidParams("messages: none"), 2)
    with pytest.raises(InvalidParams) as refused:
        second.result(0)
    assert refused.value.detail == "messages: none"
    assert course.rejected() == [(2, "wrong", "invalid_params", "messages: none")]
    assert course.pending() == [(2, "c"), (3, "d")]
    assert course.sends() == [(2, "c"), (3, "d")]
    course.ok(2, 3)
    assert [p.result(0).sequence for p in (first, third, fourth)] == [1, 2, 3]
    assert course.stream.promises == {}
    (fifth,) = course.append("e")
    assert course.sends() == [(4, "e")]
    course.ok(4)
    assert fifth.result(0).sequence == 4


def test_late_answers_about_the_old_numbers_mean_nothing(course):
    _wrong, second, _third = course.append("wrong", "b", "c")
    course.sends()
    before = course.stream.request
    course.error(InvalidParams("messages: none"), 1)
    assert course.stream.request != before
    course.sends()
    course.ok(1, 2, request=before)
    course.error(InvalidParams("messages: none"), 1, request=before)
    course.error(StaleGeneration("execution_terminal"), 2, request=before)
    assert course.pending() == [(1, "b"), (2, "c")]
    assert not second.done()
    assert len(course.rejected()) == 1
    course.ok(1, 2)
    assert second.result(0).sequence == 1


def test_several_malformed_operations_are_given_up_one_by_one(course):
    promises = course.append("w1", "w2", "c", "w3", "e")
    for sequence, rest in ((1, "w2 c w3 e"), (1, "c w3 e"), (2, "c e")):
        course.sends()
        course.error(InvalidParams("no"), sequence)
        assert [text for _, text in course.pending()] == rest.split()
    course.sends()
    course.ok(1, 2)
    outcomes = [type(p.exception(0)).__name__ if p.exception(0) else p.result(0).sequence for p in promises]
    assert outcomes == ["InvalidParams", "InvalidParams", 1, "InvalidParams", 2]
    assert [text for _, text, _, _ in course.rejected()] == ["w1", "w2", "w3"]


def test_an_operation_whose_number_is_taken_is_dropped_and_the_others_keep_theirs(course):
    first, second, third = course.append("a", "b", "c")
    course.sends()
    course.ok(1)
    request = course.stream.request
    course.error(AdmissionConflict("other_payload", {"operation": "op"}), 2)
    with pytest.raises(AdmissionConflict):
        second.result(0)
    assert course.rejected() == [(2, "b", "admission_conflict", "other_payload")]
    assert course.stream.request == request
    assert course.sends() == [(3, "c")]
    course.ok(3)
    assert (first.result(0).sequence, third.result(0).sequence) == (1, 3)


@pytest.mark.parametrize("error", [InvalidParams("no"), AdmissionConflict("other_payload")], ids=lambda e: e.reason)
def test_what_was_given_up_or_applied_already_is_not_given_up_again(course, error):
    course.append("a", "b")
    course.sends()
    course.ok(1)
    course.error(error, 1)
    assert course.rejected() == []
    assert course.pending() == [(2, "b")]
    assert course.stream.broken is None


# Gaps.


def test_at_a_gap_it_goes_back_to_the_first_without_a_receipt(course):
    course.append("a", "b")
    course.sends()
    course.error(SequenceGap("missing", {"expected": 1}), 2)
    assert course.sends() == [(1, "a"), (2, "b")]


def test_a_gap_that_the_ledger_fills_from_its_receipts_is_no_gap(course):
    course.append("a", "b", "c")
    course.sends()
    course.error(SequenceGap("missing", {"expected": 3}), 1)  # it has the first two, this side does not know yet
    assert course.sends() == [(1, "a"), (2, "b"), (3, "c")]
    course.ok(1, 2, 3)
    assert course.stream.idle


def test_a_ledger_that_lacks_what_it_had_acknowledged_ends_the_stream(course):
    first, second = course.append("a", "b")
    course.sends()
    course.ok(1)
    course.error(SequenceGap("missing", {"expected": 1}), 2)
    assert first.result(0)
    with pytest.raises(SequenceGap) as failed:
        second.result(0)
    assert (failed.value.detail, failed.value.data) == ("ledger_behind", {"expected": 1})
    assert course.pending() == [(2, "b")]


# Answers that come twice, late, or to somebody else.


def test_answers_that_come_twice_or_for_nothing_known_change_nothing(course):
    first, second = course.append("a", "b")
    course.sends()
    course.ok(1)
    course.ok(1, 7, 1)
    assert course.silent()  # the second is still in flight
    assert not second.done()
    course.ok(2)
    assert first.result(0).result == {"number": 1}
    assert course.stream.idle


def test_answers_with_another_tag_change_nothing(course):
    (promise,) = course.append("a")
    course.sends()
    course.ok(1, request="another")
    course.ok(1, request="")
    course.error(InvalidParams("no"), 1, request="another")
    course.error(StaleEpoch("epoch_mismatch", {"epoch": 8}), 0, request="another")
    assert not promise.done()
    assert course.pending() == [(1, "a")]
    assert course.silent()


def test_an_answer_that_the_disk_does_not_take_is_left_aside_and_comes_again(course, monkeypatch):
    def refuse(*_what):
        raise Unavailable("the disk is full")

    first, second = course.append("wrong", "b")
    course.sends()
    with monkeypatch.context() as patched:
        patched.setattr(course.outbox, "settle", refuse)
        patched.setattr(course.outbox, "reject", refuse)
        patched.setattr(course.outbox, "drop", refuse)
        course.ok(1)
        course.error(InvalidParams("no"), 1)
        course.error(AdmissionConflict("other_payload"), 1)
    assert course.pending() == [(1, "wrong"), (2, "b")]
    assert not first.done()
    course.now += RESEND
    course.sends()
    course.error(InvalidParams("no"), 1)
    assert course.sends() == [(1, "b")]
    course.ok(1)
    assert isinstance(first.exception(0), InvalidParams)
    assert second.result(0).sequence == 1


def test_an_outbox_that_cannot_be_read_now_is_read_after_the_pause(course, monkeypatch):
    def refuse(*_what, **_options):
        raise Unavailable("the disk does not answer")

    (promise,) = course.append("a")
    with monkeypatch.context() as patched:
        patched.setattr(course.outbox, "pending", refuse)
        for pause in (2, 4, 8):
            assert course.silent()
            assert course.stream.due() == course.now + pause
            course.now += pause
        course.ok(1)
        assert not promise.done()
    assert course.sends() == [(1, "a")]
    course.ok(1)
    assert promise.result(0).sequence == 1


@pytest.mark.parametrize("when", ["it sends", "it takes an answer in"])
def test_an_outbox_that_is_damaged_ends_the_stream(course, monkeypatch, when):
    def refuse(*_what, **_options):
        raise OutboxCorrupt("a record does not check", {"offset": 7})

    (promise,) = course.append("a")
    if when == "it sends":
        monkeypatch.setattr(course.outbox, "pending", refuse)
        assert course.silent()
    else:
        course.sends()
        monkeypatch.setattr(course.outbox, "settle", refuse)
        course.ok(1)
    assert isinstance(promise.exception(0), OutboxCorrupt)
    assert course.stream.due() is None
    with pytest.raises(OutboxCorrupt):
        course.append("b")


def test_an_outbox_that_was_left_by_another_process_is_sent(course, tmp_path):
    course.append("a", "b")
    course.outbox.close()
    again = Course(tmp_path)
    assert again.sends() == [(1, "a"), (2, "b")]
    again.ok(1, 2)
    assert again.stream.idle
    again.outbox.close()
