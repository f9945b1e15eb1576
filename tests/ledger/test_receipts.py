"""The receipt engine: the order of its checks, replays, gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tenure.ledger import Death, Ledger, Request, secret_digest
from tenure.ledger.errors import (
    AdmissionConflict,
    InvalidParams,
    NotFound,
    OwnerSuperseded,
    PermissionDenied,
    SequenceGap,
    StaleEpoch,
    StaleGeneration,
    TenureError,
)
from tenure.ledger.schema import sessions, worker_executions, worker_receipts
from tests.ledger.kit import HERE, Worker, dump, row, rows

APPEND = "transcript.append"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
OTHER = {"messages": [{"role": "user", "content": "something else"}]}
IMPOSTOR = "not the secret of anybody"


def finished(ledger: Ledger, epoch: int) -> Worker:
    """Return a worker that has said hello and finished, in two operations."""
    worker = Worker(ledger, epoch).register()
    worker.apply(APPEND, HELLO)
    worker.finish()
    return worker


class Rungs:
    """Requests that are wrong in two neighbouring ways, and the error of the way that is checked first."""

    def __init__(self, ledger: Ledger, epoch: int) -> None:
        self.ledger, self.epoch = ledger, epoch
        self.worker = Worker(ledger, epoch).register()
        self.worker.apply(APPEND, HELLO)
        self.other = Worker(ledger, epoch).register()
        self.done = finished(ledger, epoch)
        self.unknown = Worker(ledger, epoch).register()
        ledger.recover(epoch, deaths=[Death(self.unknown.execution_id, HERE, "no_such_process")])
        self.unadopted = Worker(ledger, epoch).register()
        self.unadopted.apply(APPEND, HELLO)
        self._make_unadopted()

    def _make_unadopted(self) -> None:
        """Begin a new epoch, and adopt everybody but one."""
        self.epoch = self.ledger.begin_epoch("the second owner")
        for worker in (self.worker, self.other, self.done):
            worker.adopt(self.epoch)
        self.unadopted.epoch = self.epoch
        self.unknown.adopt(self.epoch)
        self.ledger.recover(self.epoch, deaths=[Death(self.unknown.execution_id, HERE, "no_such_process")])

    def impostor(self, worker: Worker) -> Worker:
        return replace(worker, secret=IMPOSTOR)

    def shape_before_epoch(self) -> Request:
        return self.worker.request(APPEND, {"messages": []}, epoch=self.epoch - 1)

    def epoch_before_existence(self) -> Request:
        return self.worker.request(APPEND, HELLO, epoch=self.epoch - 1, execution_id="nobody")

    def future_epoch_before_existence(self) -> Request:
        return self.worker.request(APPEND, HELLO, epoch=self.epoch + 1, execution_id="nobody")

    def existence_before_session(self) -> Request:
        return self.worker.request(APPEND, HELLO, execution_id="nobody", session_id=self.other.session_id)

    def session_before_generation(self) -> Request:
        return self.worker.request(APPEND, HELLO, session_id=self.other.session_id, generation=2)

    def generation_before_claim(self) -> Request:
        return self.impostor(self.worker).request(APPEND, HELLO, generation=2)

    def claim_before_adoption(self) -> Request:
        return self.impostor(self.unadopted).request(APPEND, HELLO)

    def adoption_before_replay(self) -> Request:
        return self.unadopted.request(APPEND, HELLO, sequence=1)

    def adoption_before_conflict(self) -> Request:
        return self.unadopted.request(APPEND, OTHER, sequence=1)

    def conflict_before_terminal(self) -> Request:
        return self.done.request(APPEND, OTHER, sequence=1)

    def terminal_before_gap(self) -> Request:
        return self.done.request(APPEND, HELLO, sequence=9)

    def unknown_before_gap(self) -> Request:
        return self.unknown.request(APPEND, HELLO, sequence=9)

    def gap_before_handler(self) -> Request:
        self.ledger.drain("an upgrade")  # so that the handler would refuse
        return self.worker.request("child.reserve", {"secret_digest": secret_digest(IMPOSTOR)}, sequence=3)


RUNGS: list[tuple[Callable[[Rungs], Request], type[TenureError], str]] = [
    (Rungs.shape_before_epoch, InvalidParams, "transcript.append: Expected `array` of length >= 1 - at `$.messages`"),
    (Rungs.epoch_before_existence, StaleEpoch, "epoch_mismatch"),
    (Rungs.future_epoch_before_existence, StaleEpoch, "epoch_mismatch"),
    (Rungs.existence_before_session, NotFound, "execution"),
    (Rungs.session_before_generation, PermissionDenied, "other_session"),
    (Rungs.generation_before_claim, StaleGeneration, "generation_mismatch"),
    (Rungs.claim_before_adoption, PermissionDenied, "claim_mismatch"),
    (Rungs.adoption_before_replay, StaleEpoch, "not_adopted"),
    (Rungs.adoption_before_conflict, StaleEpoch, "not_adopted"),
    (Rungs.conflict_before_terminal, AdmissionConflict, "other_payload"),
    (Rungs.terminal_before_gap, StaleGeneration, "execution_terminal"),
    (Rungs.unknown_before_gap, StaleGeneration, "execution_unknown"),
    (Rungs.gap_before_handler, SequenceGap, "missing"),
]


def test_each_rung_is_checked_before_the_next_and_nothing_is_written(ledger, epoch, subtests):
    rungs = Rungs(ledger, epoch)
    for violate, error, detail in RUNGS:
        with subtests.test(violate.__name__):
            request = violate(rungs)
            before = dump(ledger)
            for careful in (False, True):
                with pytest.raises(TenureError) as caught:
                    ledger.apply(rungs.epoch, request, careful=careful)
                assert (type(caught.value), caught.value.detail) == (error, detail)
            assert dump(ledger) == before


def test_shape_is_checked_before_the_owner_and_the_owner_before_the_request(ledger, epoch, worker):
    now = ledger.begin_epoch("the second owner")
    with pytest.raises(InvalidParams):
        ledger.apply(epoch, worker.request(APPEND, {}))
    with pytest.raises(OwnerSuperseded) as superseded:
        ledger.apply(epoch, worker.request(APPEND, HELLO, epoch=now + 5))
    assert superseded.value.data == {"presented": epoch, "epoch": now}


def test_errors_say_what_is_current(ledger, epoch, worker):
    with pytest.raises(StaleEpoch) as stale:
        worker.send(worker.request(APPEND, HELLO, epoch=epoch + 7))
    assert stale.value.data == {"epoch": epoch}
    with pytest.raises(StaleGeneration) as generation:
        worker.send(worker.request(APPEND, HELLO, generation=7))
    assert generation.value.data == {"generation": 1}


def test_a_generation_is_fenced_by_the_execution_and_by_the_session(ledger, epoch, worker):
    with ledger.transaction(epoch) as tx:
        tx.session(worker.session_id).generation = 2
    for generation in (1, 2):
        with pytest.raises(StaleGeneration, check=lambda error: error.detail == "generation_mismatch"):
            worker.send(worker.request(APPEND, HELLO, generation=generation))


def test_a_finished_execution_answers_a_replay_of_each_of_its_operations(ledger, epoch):
    worker = Worker(ledger, epoch).register()
    said = worker.apply(APPEND, HELLO)
    ended = worker.finish({"outcome": "failed", "result": {"why": ["this", 1.5, None]}})
    before = dump(ledger)
    for first, payload in ((said, HELLO), (ended, {"outcome": "failed", "result": {"why": ["this", 1.5, None]}})):
        again = worker.send(worker.request(first.operation, payload, sequence=first.sequence))
        assert again == replace(first, replayed=True)
        assert not first.replayed
    assert dump(ledger) == before


def test_a_replay_is_known_by_its_content_not_by_its_key_order(worker):
    first = worker.apply("usage.record", {"model": "m", "cost": 0.5, "task": "t"})
    again = worker.send(worker.request("usage.record", {"task": "t", "cost": 0.5, "model": "m"}, sequence=1))
    assert again == replace(first, replayed=True)


def test_another_payload_or_operation_at_the_same_sequence_conflicts(ledger, worker, subtests):
    worker.apply(APPEND, HELLO)
    before = dump(ledger)
    for operation, payload in (
        (APPEND, OTHER),
        (APPEND, {"messages": [{"role": "user", "content": "hello", "name": None}]}),
        ("session.end", {"end_reason": "done"}),
        ("execution.finish", {}),
    ):
        with subtests.test(operation, payload=payload):
            with pytest.raises(AdmissionConflict) as conflict:
                worker.send(worker.request(operation, payload, sequence=1))
            assert (conflict.value.detail, conflict.value.data) == ("other_payload", {"operation": APPEND})
    assert dump(ledger) == before


def test_a_gap_tells_the_sequence_to_send_from(ledger, worker):
    for expected in (1, 2, 3):
        for sequence in (expected + 1, expected + 100, 2**63 - 1):
            with pytest.raises(SequenceGap) as gap:
                worker.send(worker.request(APPEND, HELLO, sequence=sequence))
            assert gap.value.data == {"expected": expected}
        worker.apply(APPEND, HELLO)
    assert [receipt.sequence for receipt in rows(ledger, worker_receipts)] == [1, 2, 3]


@pytest.mark.parametrize("careful", [False, True])
def test_sequences_that_are_none_are_refused(ledger, worker, subtests, careful):
    worker.apply(APPEND, HELLO)
    before = dump(ledger)
    for sequence in (True, False, 0, -1, -(2**70), "1", "", 1.0, float("nan"), None, [1], b"1", 2**63, 10**5000):
        with subtests.test(repr(sequence) if sequence != 10**5000 else "huge"):
            request = replace(worker.request(APPEND, HELLO), sequence=sequence)
            with pytest.raises(InvalidParams) as refused:
                worker.send(request, careful=careful)
            assert refused.value.detail.startswith("sequence: ")
    assert dump(ledger) == before


def test_a_receipt_keeps_what_it_was_given_under(ledger, epoch, worker):
    receipt = worker.apply(APPEND, HELLO)
    stored = row(ledger, worker_receipts, execution_id=worker.execution_id)
    assert (stored.sequence, stored.operation, stored.epoch, stored.generation) == (1, APPEND, epoch, 1)
    assert stored.result == '{"positions":[1]}'
    assert stored.created_at == ledger.clock()
    assert (receipt.execution_id, receipt.sequence, receipt.refused) == (worker.execution_id, 1, None)
    assert row(ledger, worker_executions, execution_id=worker.execution_id).last_sequence == 1


def test_a_refusal_is_a_receipt_and_moves_no_revision(ledger, worker):
    worker.apply("session.end", {"end_reason": "done"})
    revision = row(ledger, sessions, session_id=worker.session_id).revision
    refused = worker.apply(APPEND, HELLO)
    assert refused.refused == "session_ended"
    assert worker.send(worker.request(APPEND, HELLO, sequence=2)) == replace(refused, replayed=True)
    assert row(ledger, sessions, session_id=worker.session_id).revision == revision
    assert worker.finish().sequence == 3


def test_one_execution_cannot_be_written_with_the_claim_of_another(ledger, epoch, worker):
    other = Worker(ledger, epoch).register()
    stolen = replace(other.request(APPEND, HELLO), proof=worker.proof)
    with pytest.raises(PermissionDenied, check=lambda error: error.detail == "claim_mismatch"):
        other.send(stolen)
