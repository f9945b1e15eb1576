"""The worker's handle, over an owner in the same process, on both databases."""

from __future__ import annotations

import contextvars
import hashlib
import hmac
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenure.ledger import Hold, Kind, Ledger, Limits, Outcome, Refusal, Status, claim_digest, reads, secret_digest
from tenure.ledger.errors import (
    AdmissionConflict,
    ConfigurationError,
    InvalidParams,
    OwnerSuperseded,
    PermissionDenied,
    Refused,
    RuntimeDraining,
    StaleEpoch,
    StaleGeneration,
    Unavailable,
)
from tenure.ledger.laws import LAWS
from tenure.ledger.schema import messages, sessions, worker_executions, worker_receipts
from tenure.tasks.keys import Principal
from tenure.tasks.stream import Run
from tenure.tasks.transports import DirectTransport
from tenure.tasks.wire import Answer, Control
from tenure.workflows import Client, Execution
from tests.ledger.kit import dump, row, rows
from tests.tasks.kit import ELSEWHERE, HERE, entry, open_ledger, said, say


class Switchboard:
    """The way to whichever owner is the current one, as a broker is; it can lose what it carries."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.current = DirectTransport(ledger, HERE)
        self.principal = self.current.principal
        self.lost_answers = self.lost_messages = 0  # how many are still to be lost

    def begin(self) -> int:
        """Have another owner begin; the older one is gone without a word."""
        self.current = DirectTransport(self.ledger, HERE)
        return self.current.owner.epoch

    def control(self, kind: Control, body: dict[str, Any], request: str) -> list[Answer]:
        return self._carry(self.current.control, kind, body, request)

    def run(self, run: Run) -> list[Answer]:
        return self._carry(self.current.run, run)

    def _carry(self, send: Any, *what: Any) -> list[Answer]:
        if self.lost_messages:
            self.lost_messages -= 1
            return []
        answers: list[Answer] = send(*what)
        if self.lost_answers:
            self.lost_answers -= 1
            return []
        return answers

    def close(self) -> None:
        self.current.close()


@pytest.fixture
def ledger(emptied_url: str) -> Iterator[Ledger]:
    with open_ledger(emptied_url, limits=Limits(2, 1)) as opened:
        yield opened


@pytest.fixture
def lawful(ledger: Ledger) -> Iterator[None]:
    """What the test leaves in the ledger must be lawful."""
    yield
    with ledger.read() as connection:
        assert [violation for law in LAWS for violation in law(connection, ledger.limits)] == []


@pytest.fixture
def board(ledger: Ledger) -> Switchboard:
    return Switchboard(ledger)


def connected(board: Switchboard, folder: Path, *, identity: Any = HERE, principal: Principal | None = None) -> Client:
    """Return a client as another process has it: with its own folder and, if given, its own identity."""
    client = Client(state_dir=folder, identity=identity, resend_seconds=0.01, registry=board.ledger.registry)
    client._use(board, threaded=False)  # type: ignore[arg-type]  # it does what a transport does
    client.principal = principal or board.principal
    return client


@pytest.fixture
def client(board: Switchboard, tmp_path: Path) -> Iterator[Client]:
    with connected(board, tmp_path / "here") as made:
        yield made


@pytest.fixture
def elsewhere(board: Switchboard, tmp_path: Path) -> Iterator[Client]:
    """A client of a process on another host."""
    with connected(board, tmp_path / "elsewhere", identity=ELSEWHERE) as made:
        yield made


@pytest.fixture
def run(client: Client) -> Iterator[Execution]:
    with Execution.start(client, "s1", within=5) as started:
        yield started


def user(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def child_of(parent: Execution) -> Execution:
    child = parent.reserve_child()
    assert isinstance(child, Execution)
    return child


def stands(ledger: Ledger, execution: Execution) -> Any:
    with ledger.read() as connection:
        return reads.execution(connection, execution.execution_id)


# One life.


@pytest.mark.usefixtures("lawful")
def test_an_execution_from_its_start_to_its_end(client, ledger):
    with Execution.start(client, "invoice-17", kind=Kind.CRON, profile="shop", source="beat", within=5) as run:
        run.create_session(source="cron", model="m1", model_config={"temperature": 0.5}, system_prompt="Be kind.")
        assert run.append(user("one", "two")) == [1, 2]
        assert run.append([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]) == [3]
        run.record_usage("m1", input_tokens=10, output_tokens=5, cost=0.25, task="title")
        run.record_step("fetch", "0" * 64, {"rows": [1, 2]})
        assert run.end_session("done")
        assert not run.end_session("done again")
        assert run.finish(outcome=Outcome.FAILED, result={"why": "no stock"}) == []
    with ledger.read() as connection:
        session = reads.session(connection, "invoice-17")
        execution = reads.execution(connection, run.execution_id)
        (step,) = reads.steps(connection, run.execution_id)
        transcript = list(reads.transcript(connection, "invoice-17"))
    assert (session.source, session.profile, session.model, session.system_prompt) == ("cron", "shop", "m1", "Be kind.")
    assert (session.input_tokens, session.output_tokens, session.cost_nanos) == (10, 5, 250_000_000)
    assert (session.end_reason, session.message_count) == ("done", 3)
    assert [message["content"] for message in transcript[:2]] == ["one", "two"]
    assert (step.name, step.result) == ("fetch", {"rows": [1, 2]})
    assert (execution.kind, execution.status, execution.outcome) == ("cron", "terminal", "failed")
    assert (execution.result, execution.last_sequence) == ('{"why":"no stock"}', 8)


def test_a_session_has_one_holder_at_a_time(client, run):
    with pytest.raises(AdmissionConflict):
        Execution.start(client, "s1", within=5)
    run.append(user("first"))
    run.finish()
    with Execution.start(client, "s1", within=5) as successor:
        assert successor.append(user("second")) == [2]
        assert successor._stream.hold.generation == 2


@pytest.mark.parametrize("secret", ["x" * 15, "x" * 257])
def test_a_secret_of_another_length_is_refused_and_nothing_is_sent(client, ledger, secret):
    before = dump(ledger)
    with pytest.raises(InvalidParams) as refused:
        Execution.start(client, "s1", secret=secret, within=5)
    assert "secret" in refused.value.detail
    assert secret not in refused.value.detail
    assert dump(ledger) == before


def test_nobody_starts_a_child(client):
    with pytest.raises(InvalidParams):
        Execution.start(client, "s1", kind=Kind.CHILD, within=5)


def test_after_the_session_has_ended_an_append_is_refused_and_the_execution_goes_on(run):
    run.append(user("in time"))
    run.end_session("done")
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            run.append(user("late"))
        assert (refused.value.detail, refused.value.data) == ("session_ended", {"end_reason": "done"})
    run.record_usage("m1", input_tokens=1)
    run.finish()


def test_a_refusal_is_a_receipt_to_who_applies_and_an_error_to_who_calls(run):
    run.end_session("done")
    receipt = run.apply("transcript.append", say("late"))
    assert (receipt.refused, receipt.sequence) == ("session_ended", 2)


def test_after_its_end_an_execution_writes_no_more(run):
    run.finish()
    with pytest.raises(StaleGeneration):
        run.append(user("late"))
    with pytest.raises(StaleGeneration):
        run.append(user("later"))


def test_a_drained_runtime_takes_no_new_ones_and_lets_the_others_finish(client, ledger, run):
    ledger.drain("an upgrade")
    with pytest.raises(RuntimeDraining) as refused:
        Execution.start(client, "s2", within=5)
    assert refused.value.detail == "an upgrade"
    assert run.reserve_child() == Refusal("runtime_draining", {"detail": "an upgrade"})
    run.append(user("still"))
    run.finish()


# What is lost on the way.


@pytest.mark.usefixtures("lawful")
def test_lost_messages_and_answers_cost_time_and_nothing_else(board, client, ledger):
    board.lost_messages = 1
    board.lost_answers = 1
    with Execution.start(client, "s1", within=5) as run:
        for number in range(1, 6):
            board.lost_messages, board.lost_answers = number % 2, number % 3
            assert run.append(user(f"m{number}")) == [number]
        board.lost_answers = 2
        child_of(run)
        board.lost_answers = 2
        assert len(run.children()) == 1
    assert said(ledger, "s1") == [f"m{number}" for number in range(1, 6)]
    assert len(rows(ledger, worker_receipts, execution_id=run.execution_id)) == 6


def test_without_an_answer_the_caller_is_told_and_the_operation_stays_journalled(board, client, ledger, run):
    run.within = 0.05
    board.lost_messages = 10**6
    with pytest.raises(TimeoutError) as told:
        run.append(user("a"))
    assert run.execution_id in str(told.value)
    assert "journalled" in str(told.value)
    with pytest.raises(TimeoutError):
        run.flush()
    assert said(ledger, "s1") == []
    board.lost_messages, run.within = 0, 5
    run.flush()
    assert said(ledger, "s1") == ["a"]
    assert run.append(user("b")) == [2]


def test_a_start_without_an_answer_is_told(board, client):
    board.lost_messages = 10**6
    with pytest.raises(TimeoutError):
        Execution.start(client, "s1", within=0.05)
    assert client.sender.step() is None


def test_what_is_submitted_is_kept_in_order_and_its_receipts_come(run, ledger):
    promises = [run.submit("transcript.append", say(f"m{number}")) for number in range(70)]
    assert all(isinstance(promise, Future) for promise in promises)
    run.flush()
    assert [promise.result(0).result["positions"] for promise in promises] == [[n] for n in range(1, 71)]
    assert said(ledger, "s1") == [f"m{number}" for number in range(70)]


def test_threads_may_share_a_handle(run, ledger):
    with ThreadPoolExecutor(4) as pool:
        positions = list(pool.map(lambda number: run.append(user(f"m{number}"))[0], range(20)))
    assert sorted(positions) == list(range(1, 21))
    assert [said(ledger, "s1")[position - 1] for position in positions] == [f"m{number}" for number in range(20)]


# What can never be applied.


MALFORMED: list[tuple[Callable[[Execution], Any], str]] = [
    (lambda run: run.append([]), "$.messages"),
    (lambda run: run.append(user("a\0b")), "messages[0].content"),
    (lambda run: run.append([{"role": "user", "content": "a", "more": 1}]), "more"),
    (lambda run: run.record_usage("m", input_tokens=-1), "input_tokens"),
    (lambda run: run.record_usage("m", tokens=1), "tokens"),
    (lambda run: run.record_step("n", "no digest", 1), "input_digest"),
    (lambda run: run.record_step("n", "0" * 64, {1, 2}), "payload.result"),
    (lambda run: run.end_session(""), "end_reason"),
    (lambda run: run.create_session(source=""), "source"),
    (lambda run: run.finish(result=float("inf")), "payload.result"),
    (lambda run: run.apply("no.such", {}), "no.such"),
    (lambda run: run.reserve_child(secret="short"), "secret"),
]


def test_a_malformed_payload_is_refused_by_its_field_before_it_is_journalled(run, ledger, subtests):
    outbox = run._stream.outbox
    before = (dump(ledger), outbox.next_sequence, outbox.path.stat().st_size)
    for write, field in MALFORMED:
        with subtests.test(field):
            with pytest.raises(InvalidParams) as refused:
                write(run)
            assert field in refused.value.detail
    assert (dump(ledger), outbox.next_sequence, outbox.path.stat().st_size) == before
    assert run.append(user("valid")) == [1]


@pytest.mark.usefixtures("lawful")
def test_an_operation_that_only_the_owner_refuses_is_raised_recorded_and_blocks_nothing(run, ledger, monkeypatch):
    """As when the owner is of an older version than this worker."""
    with monkeypatch.context() as patched:
        patched.setattr(run.client, "encode", lambda _name, _payload: "{}")
        wrong = run.submit("invoice.add", {})
    behind = run.submit("transcript.append", say("behind it"))
    run.append(user("last"))
    assert isinstance(wrong.exception(0), InvalidParams)
    assert behind.result(0).sequence == 1
    assert said(ledger, "s1") == ["behind it", "last"]
    assert [given.operation for given in run._stream.outbox.rejected()] == ["invoice.add"]


# Children.


@pytest.mark.usefixtures("lawful")
def test_at_the_cap_a_reservation_is_refused_with_cap_and_count_and_the_parent_goes_on(run, ledger):
    first, second = child_of(run), child_of(run)
    before = len(rows(ledger, worker_executions)), len(rows(ledger, sessions))
    assert run.reserve_child() == Refusal("delegation_capacity", {"max_concurrent_children": 2, "live_children": 2})
    assert (len(rows(ledger, worker_executions)), len(rows(ledger, sessions))) == before
    assert run.append(user("I go on")) == [1]
    first.close()
    third = child_of(run)
    assert {second.execution_id, third.execution_id} == {
        child.execution_id for child in run.children() if child.status is Status.RUNNING
    }


def test_a_child_at_the_greatest_depth_may_not_have_its_own(run):
    child = child_of(run)
    assert child.reserve_child() == Refusal("delegation_depth_exceeded", {"max_spawn_depth": 1, "depth": 1})
    assert child.append(user("I go on")) == [1]


def test_a_child_has_a_session_of_its_own_and_writes_there_only(run, ledger):
    child = child_of(run)
    run.append(user("I am the parent"))
    child.append(user("I am the child"))
    child.create_session(source="anything", model_config={"_delegate_from": "forged", "temperature": 0})
    assert (said(ledger, "s1"), said(ledger, child.session_id)) == (["I am the parent"], ["I am the child"])
    session = row(ledger, sessions, session_id=child.session_id)
    assert (session.parent_session_id, session.source) == ("s1", "subagent")
    assert session.model_config == '{"_delegate_from":"s1","temperature":0}'


def forged(run: Execution, hold: Hold) -> list[Answer]:
    """Send an append under another hold, with the claim that this execution's holder has on it."""
    parcel = Run(hold, run._credential.claim(hold), "tag", [entry(1, "transcript.append", say("forged"))])
    answers: list[Answer] = run.client._transport.run(parcel)
    return answers


def test_a_child_cannot_write_to_its_parents_session(run, ledger):
    child = child_of(run)
    of_child, of_parent = child._stream.hold, run._stream.hold
    before = dump(ledger)
    for hold in (
        replace(of_child, session_id="s1"),
        replace(of_parent, execution_id=child.execution_id),
        of_parent,
        replace(of_parent, session_id=child.session_id),
    ):
        (answer,) = forged(child, hold)
        assert answer.error is not None
        assert answer.error["reason"] == "permission_denied"
        (answer,) = forged(run, hold) if hold is not of_parent else [answer]
        assert answer.error is not None
    assert dump(ledger) == before


def test_a_childs_secret_is_derived_from_its_parents_and_the_order_of_reservation(client, ledger):
    secret = "the secret of the parent"
    with Execution.start(client, "s1", secret=secret, within=5) as run:
        children = [child_of(run), child_of(run)]
        for ordinal, child in enumerate(children, 1):
            text = f"tenure.child\0{run.execution_id}\0{ordinal}"
            derived = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()
            claim = claim_digest(
                profile="default",
                session_id=child.session_id,
                execution_id=child.execution_id,
                generation=1,
                identity=HERE,
                secret_digest=secret_digest(derived),
                principal=client.principal.name,
            )
            assert row(ledger, worker_executions, execution_id=child.execution_id).claim_digest == claim


def test_a_childs_secret_may_be_given(run):
    child = run.reserve_child(secret="a secret that was given")
    assert isinstance(child, Execution)
    assert child._secret == "a secret that was given"
    assert child.append(user("held")) == [1]


def test_closing_a_child_that_was_never_used_finishes_it_and_frees_its_slot(run, ledger):
    child = child_of(run)
    path = child._stream.outbox.path
    child.close()
    child.close()
    found = stands(ledger, child)
    assert (found.status, found.outcome, found.status_reason) == ("terminal", "interrupted", "finished")
    assert row(ledger, sessions, session_id=child.session_id).end_reason == "agent_close"
    assert not path.exists()
    assert [type(run.reserve_child()) for _ in range(3)] == [Execution, Execution, Refusal]


def test_closing_a_child_that_was_used_does_not_finish_it(run, ledger):
    child = child_of(run)
    child.append(user("a"))
    child.close()
    assert stands(ledger, child).status == "running"


def test_closing_a_parent_finishes_neither_it_nor_its_children(client, ledger):
    with Execution.start(client, "s1", within=5) as run:
        child = child_of(run)
    assert stands(ledger, run).status == "running"
    assert stands(ledger, child).status == "running"
    unused = Execution.start(client, "s2", within=5)
    unused.close()
    assert stands(ledger, unused).status == "registered"


def test_a_parents_end_ends_its_children_and_says_which(run, ledger):
    child, done = child_of(run), child_of(run)
    child.append(user("a"))
    done.finish()
    assert run.finish() == [child.execution_id]
    with pytest.raises(StaleGeneration) as told:
        child.append(user("b"))
    assert told.value.data == {"reason": "parent_finished"}
    child.close()


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.usefixtures("lawful")
def test_a_parent_sees_what_became_of_every_child(run, board, ledger):
    done, unused = child_of(run), child_of(run)
    done.append(user("a"))
    result = {"answer": 42, "deep": deep(97)}
    done.finish(result=result)
    unused.close()
    failed, retired = child_of(run), child_of(run)
    failed.finish(outcome=Outcome.FAILED)
    board.begin()
    run.append(user("after the restart"))
    live = child_of(run)
    told = {child.execution_id: child for child in run.children()}
    assert [child.sequence for child in told.values()] == [1, 2, 3, 4, 6]
    outcomes = {key: (child.status, child.outcome, child.reason) for key, child in told.items()}
    assert outcomes == {
        done.execution_id: (Status.TERMINAL, Outcome.COMPLETED, "finished"),
        unused.execution_id: (Status.TERMINAL, Outcome.INTERRUPTED, "finished"),
        failed.execution_id: (Status.TERMINAL, Outcome.FAILED, "finished"),
        retired.execution_id: (Status.TERMINAL, Outcome.INTERRUPTED, "owner_restarted"),
        live.execution_id: (Status.RUNNING, None, "reserved"),
    }
    assert all(child.outcome is None or isinstance(child.outcome, Outcome) for child in told.values())
    assert (told[done.execution_id].result, told[failed.execution_id].result) == (result, None)
    assert told[done.execution_id].session_id == done.session_id
    assert told[done.execution_id].last_sequence == 2
    run.finish()
    assert [child.reason for child in run.children()][-1] == "parent_finished"


def test_a_handle_whose_stream_is_broken_closes_without_a_word(run, board, ledger):
    child = child_of(run)
    board.begin()
    with pytest.raises(StaleGeneration):
        child.append(user("a"))
    path = child._stream.outbox.path
    child.close()
    assert path.exists()  # what it had journalled stays


def test_an_unused_child_that_has_ended_already_is_closed_without_a_word(run, board, ledger):
    child = child_of(run)
    board.begin()
    child.close()
    with child_of(run) as another:
        run.finish()
    reasons = [stands(ledger, ended).status_reason for ended in (child, another)]
    assert reasons == ["owner_restarted", "parent_finished"]
    with pytest.raises(ConfigurationError):
        child.append(user("a"))


# Tickets.


@pytest.mark.usefixtures("lawful")
def test_a_child_goes_on_in_the_process_that_attaches(run, elsewhere, ledger):
    child = child_of(run)
    path = child._stream.outbox.path
    ticket = child.ticket()
    assert not path.exists()
    assert stands(ledger, child).status == "running"  # letting go of it has not finished it
    with Execution.attach(elsewhere, ticket, within=5) as attached:
        assert (attached.execution_id, attached.session_id) == (child.execution_id, child.session_id)
        assert attached.append(user("from elsewhere")) == [1]
        attached.finish(result="done")
    assert stands(ledger, child).host == ELSEWHERE.host
    assert [found.result for found in run.children()] == ["done"]
    with pytest.raises(ConfigurationError):
        child.append(user("from here"))


def test_a_ticket_says_nothing(run):
    child = child_of(run)
    ticket = child.ticket()
    for hidden in (child._secret, child.execution_id, child.session_id, secret_digest(child._secret)):
        assert hidden not in ticket


def test_a_second_process_cannot_attach(run, board, elsewhere, tmp_path):
    ticket = child_of(run).ticket()
    first = Execution.attach(elsewhere, ticket, within=5)
    third = connected(board, tmp_path / "third", identity=replace(ELSEWHERE, pid=8))
    with pytest.raises(PermissionDenied) as refused:
        Execution.attach(third, ticket, within=5)
    assert refused.value.detail == "attached_elsewhere"
    assert first.append(user("still mine")) == [1]
    first.close()


def test_the_same_process_may_ask_again(board, run, elsewhere):
    ticket = child_of(run).ticket()
    board.lost_answers = 1
    attached = Execution.attach(elsewhere, ticket, within=5)
    assert attached.append(user("a")) == [1]
    attached.close()


def test_the_ticket_of_another_principal_is_refused(run, board, tmp_path):
    ticket = child_of(run).ticket()
    stranger = connected(board, tmp_path / "stranger", principal=Principal.of("local", b"another key"))
    for given in (ticket, "", "nonsense", ticket[:-8]):
        with pytest.raises(PermissionDenied) as refused:
            Execution.attach(stranger if given is ticket else run.client, given, within=5)
        assert refused.value.detail == "bad_seal"


def test_a_ticket_is_for_a_child_that_was_not_written_to(client, run):
    child = child_of(run)
    child.append(user("a"))
    with Execution.start(client, "s2", within=5) as unused_root:
        for execution in (child, run, unused_root):
            with pytest.raises(ConfigurationError):
                execution.ticket()
    assert child.append(user("b")) == [2]
    closed = child_of(run)
    closed.close()
    with pytest.raises(ConfigurationError):
        closed.ticket()


def test_a_child_that_was_written_to_meanwhile_cannot_be_attached(run, elsewhere, ledger):
    child = child_of(run)
    secret, hold = child._secret, child._stream.hold
    ticket = child.ticket()
    again = Execution(run.client, hold, child._credential, secret, within=5)  # as a copy of the process could
    again.append(user("from here"))
    with pytest.raises(StaleGeneration):
        Execution.attach(elsewhere, ticket, within=5)
    again.close()


def test_a_child_that_has_ended_meanwhile_cannot_be_attached(run, elsewhere, board):
    ticket = child_of(run).ticket()
    run.finish()
    with pytest.raises(StaleGeneration):
        Execution.attach(elsewhere, ticket, within=5)


def test_a_child_of_an_older_epoch_cannot_be_attached(run, elsewhere, board):
    ticket = child_of(run).ticket()
    board.begin()
    with pytest.raises(StaleEpoch):
        Execution.attach(elsewhere, ticket, within=5)


# A new owner behind its back.


@pytest.mark.usefixtures("lawful")
def test_under_a_new_owner_an_execution_adopts_by_itself_and_goes_on(run, board, ledger):
    run.append(user("before"))
    assert run.epoch == 1
    assert board.begin() == 2
    assert stands(ledger, run).status == "unknown"
    assert run.append(user("after")) == [2]
    assert (run.epoch, stands(ledger, run).status) == (2, "running")
    child = child_of(run)
    assert (child.epoch, child.append(user("a"))) == (2, [1])
    for _ in range(3):
        board.begin()
    assert run.append(user("much later")) == [3]
    assert run.epoch == 5


def test_what_was_applied_before_the_owner_died_is_not_applied_again(run, board, ledger):
    board.lost_answers = 1
    promise = run.submit("transcript.append", say("a"))
    run.client.sender.step()
    assert said(ledger, "s1") == ["a"]
    assert not promise.done()
    board.begin()
    run.flush()
    assert promise.result(0).result == {"positions": [1]}
    assert said(ledger, "s1") == ["a"]


@pytest.mark.usefixtures("lawful")
def test_a_child_of_an_older_owner_has_ended_and_its_parent_delegates_anew(run, board, ledger):
    child = child_of(run)
    child.append(user("before"))
    board.begin()
    with pytest.raises(StaleGeneration) as told:
        child.append(user("after"))
    assert told.value.detail == "child_not_adoptable"
    run.append(user("the parent goes on"))
    assert child_of(run).append(user("anew")) == [1]
    assert said(ledger, child.session_id) == ["before"]


def test_a_reservation_whose_answer_was_lost_with_its_owner_is_told_of_a_child_that_has_ended(run, board):
    board.lost_answers = 1
    promise = run.submit("child.reserve", {"secret_digest": secret_digest("the secret of a child")})
    run.client.sender.step()
    assert not promise.done()
    board.begin()
    run.flush()
    minted = promise.result(0).result["execution_id"]
    assert [(found.execution_id, found.reason) for found in run.children()] == [(minted, "owner_restarted")]


def test_a_client_whose_own_owner_is_replaced_is_told_and_keeps_what_it_journalled(ledger, tmp_path):
    first = Client.direct(ledger, tmp_path / "first")
    run = Execution.start(first, "s1", within=5)
    run.append(user("a"))
    second = Client.direct(ledger, tmp_path / "second")
    with pytest.raises(OwnerSuperseded):
        run.append(user("b"))
    assert len(run._stream.outbox.pending()) == 1
    assert said(ledger, "s1") == ["a"]
    run.close()
    first.close()
    second.close()


# Its outbox.


def test_after_its_end_an_executions_outbox_is_removed(client):
    with Execution.start(client, "s1", within=5) as run:
        path = run._stream.outbox.path
        assert path.exists()
        run.finish()
    assert not path.exists()


def test_what_has_no_receipt_stays_in_the_outbox_when_the_handle_is_closed(board, client):
    run = Execution.start(client, "s1", within=0.05)
    board.lost_messages = 10**6
    with pytest.raises(TimeoutError):
        run.finish()
    path = run._stream.outbox.path
    run.close()
    assert path.exists()
    assert client.sender.step() is None  # it is not carried any more
    again = client.open_stream(run._stream.hold, run._credential)
    assert [found.operation for found in again.outbox.pending()] == ["execution.finish"]
    client.sender.remove(again)
    again.outbox.close()


def test_an_outbox_of_another_scope_or_secret_is_not_opened(client):
    run = Execution.start(client, "s1", within=5)
    hold, own = run._stream.hold, run._credential
    run.close()
    for scope, credential in (
        (replace(hold, session_id="s2"), own),
        (hold, replace(own, profile="other")),
        (hold, replace(own, secret_digest=secret_digest("not the secret of anybody"))),
    ):
        with pytest.raises(PermissionDenied):
            Execution(client, scope, credential, "a secret", within=5)


def test_one_handle_has_the_outbox(client, run):
    with pytest.raises(Unavailable):
        Execution(client, run._stream.hold, run._credential, run._secret, within=5)


def test_a_closed_handle_writes_nothing(run, ledger):
    run.close()
    before = dump(ledger)
    with pytest.raises(ConfigurationError) as refused:
        run.append(user("a"))
    assert run.execution_id in refused.value.detail
    assert dump(ledger) == before


# Nothing ambient.


def test_nothing_ambient_gives_anybody_the_parents_stream(client, ledger):
    """There is nowhere to inherit from: who holds no handle, and no ticket, holds nothing."""
    environment, context = dict(os.environ), dict(contextvars.copy_context())
    local = set(vars(threading.current_thread()))
    module = sys.modules[Execution.__module__]
    globals_before = {name: id(value) for name, value in vars(module).items()}
    with Execution.start(client, "s1", within=5) as run:
        child = child_of(run)
        run.append(user("I am the parent"))
        assert dict(os.environ) == environment
        assert dict(contextvars.copy_context()) == context
        assert set(vars(threading.current_thread())) == local
        assert {name: id(value) for name, value in vars(module).items()} == globals_before
        # In the parent's own thread and context, in between its own writes, a child writes as itself.
        child.append(user("I am the child"))
        run.append(user("I am the parent still"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(contextvars.copy_context().run, child.append, user("in a thread")).result()
        assert (child._stream, child._secret) != (run._stream, run._secret)
        assert child._credential.secret_digest != run._credential.secret_digest
    assert said(ledger, "s1") == ["I am the parent", "I am the parent still"]
    assert said(ledger, child.session_id) == ["I am the child", "in a thread"]


def test_a_childs_finish_is_not_its_parents(run, ledger):
    child = child_of(run)
    child.finish(result="mine")
    assert stands(ledger, run).status == "running"
    assert stands(ledger, child).result == '"mine"'
    assert run.append(user("I go on")) == [1]


# Forks.


FORKED = """
import os, sys
from pathlib import Path
from tenure.ledger import Ledger
from tenure.ledger.errors import ConfigurationError
from tenure.workflows import Client, Execution

def refused(what):
    try:
        what()
    except ConfigurationError as error:
        assert "fork" in error.detail, error.detail
    else:
        raise AssertionError("not refused")

say = lambda text: [{"role": "user", "content": text}]
ledger = Ledger.open(sys.argv[1])
client = Client.direct(ledger, Path(sys.argv[2]))
run = Execution.start(client, "s1")
child = run.reserve_child()
run.append(say("before"))
done = Execution.start(client, "s2")
done.finish()
pid = os.fork()
if pid == 0:
    status = 1
    try:
        for write in (lambda: run.append(say("forked")), child.ticket, run.children, run.finish,
                      lambda: Execution.start(client, "s3"), run.reserve_child,
                      lambda: Execution(client, run._stream.hold, run._credential, run._secret)):
            refused(write)
        for held in (child, run, done, client):
            held.close()
        refused(lambda: run.append(say("forked")))
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert all(held._stream.outbox.path.exists() for held in (run, child, done))
run.append(say("after"))
child.append(say("mine"))
run.finish()
for held in (run, child, done, client):
    held.close()
print("as it should be")
"""


def test_a_forked_child_can_write_nothing_and_takes_nothing_away(emptied_url, ledger, spawn, tmp_path):
    process = spawn(sys.executable, "-c", FORKED, emptied_url, tmp_path / "state")
    process.says("as it should be", within=60)
    assert process.wait(within=10) == 0
    assert said(ledger, "s1") == ["before", "after"]
    assert len(rows(ledger, messages)) == 3
