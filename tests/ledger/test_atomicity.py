"""An operation is written whole or not at all: every statement of it is made to fail, and so is its commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from tenure.ledger import Address, Claim, Death, Ledger, secret_digest
from tenure.ledger.errors import Unavailable
from tenure.ledger.schema import operation_attempts, sessions, worker_executions, worker_receipts
from tests.ledger.kit import ELSEWHERE, HERE, Failing, Worker, database_fault, dump, row

DIGEST = "0123456789abcdef" * 4
RESERVE = {"secret_digest": secret_digest("the secret of a child")}
OPERATIONS: dict[str, dict[str, Any]] = {
    "session.create": {"source": "s", "model": "m", "model_config": {"a": 1}, "system_prompt": "p"},
    "transcript.append": {"messages": [{"role": "user", "content": "one"}, {"role": "tool", "content": "two"}]},
    "usage.record": {"model": "m", "input_tokens": 5, "cost": 0.5},
    "step.record": {"name": "n", "input_digest": DIGEST, "result": [1]},
    "child.reserve": RESERVE,
    "session.end": {"end_reason": "done"},
    "execution.finish": {"outcome": "failed", "result": {"why": "so"}},
}
MOVES_THE_REVISION = set(OPERATIONS) - {"execution.finish"}


def fail_each_statement(ledger: Ledger, action: Callable[[], Any]) -> tuple[int, Any]:
    """Do something, made to fail at its first statement, at its second, and so on until nothing fails.

    After each failure the ledger must be as it was. Returns how many statements it took, and the answer.
    """
    before = dump(ledger)
    for number in range(1, 100):
        failing = Failing(ledger, "before_cursor_execute", number=number)
        try:
            with failing:
                answer = action()
        except Unavailable:
            assert dump(ledger) == before, number
        else:
            assert not failing.failed, f"the failure of statement {number} went unnoticed"
            return number - 1, answer
    raise AssertionError("no end")


def a_child_that_has_a_child(ledger: Ledger, epoch: int) -> Worker:
    root = Worker(ledger, epoch).register()
    child = root.reserve()
    child.reserve()
    return child


def holder_of(kind: str, ledger: Ledger, epoch: int) -> Worker:
    ledger.limits = type(ledger.limits)(3, 3)
    if kind == "child":
        return a_child_that_has_a_child(ledger, epoch)
    root = Worker(ledger, epoch).register()
    if kind == "running root":
        root.say("hello")
        root.reserve().reserve()
    return root


HOLDERS = {
    "running root": list(OPERATIONS),
    "registered root": ["transcript.append", "execution.finish"],
    "child": ["session.create", "child.reserve", "execution.finish"],
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_an_operation_whose_any_statement_fails_leaves_nothing_and_succeeds_next_time(ledger, epoch, subtests, kind):
    for operation in HOLDERS[kind]:
        payload = OPERATIONS[operation]
        with subtests.test(operation):
            worker = holder_of(kind, ledger, epoch)
            expected = worker.sequence + 1
            revision = row(ledger, sessions, session_id=worker.session_id).revision
            request = worker.request(operation, payload)
            statements, receipt = fail_each_statement(ledger, lambda: worker.send(request))  # noqa: B023 (called here)
            assert statements >= 5  # the epoch's, the execution's, the session's, the receipt's, a write at least
            assert (receipt.sequence, receipt.refused, receipt.replayed) == (expected, None, False)
            changed = operation in MOVES_THE_REVISION or kind == "child"
            assert row(ledger, sessions, session_id=worker.session_id).revision == revision + changed
            assert row(ledger, worker_executions, execution_id=worker.execution_id).last_sequence == expected
            assert row(ledger, worker_receipts, execution_id=worker.execution_id, sequence=expected)


def test_a_commit_that_fails_leaves_nothing(ledger, epoch, subtests):
    for operation, payload in OPERATIONS.items():
        with subtests.test(operation):
            worker = holder_of("running root", ledger, epoch)
            before = dump(ledger)
            request = worker.request(operation, payload)
            with Failing(ledger, "commit"), pytest.raises(Unavailable):
                worker.send(request)
            assert dump(ledger) == before
            assert not worker.send(request).replayed


def test_a_commit_whose_answer_is_lost_is_answered_from_its_receipt(ledger, epoch, subtests, monkeypatch):
    commit = ledger.store.engine.dialect.do_commit

    def commit_and_lose(connection: Any) -> None:
        commit(connection)
        raise database_fault(ledger).orig

    for operation, payload in OPERATIONS.items():
        with subtests.test(operation):
            worker = holder_of("running root", ledger, epoch)
            request = worker.request(operation, payload)
            with monkeypatch.context() as patch:
                patch.setattr(ledger.store.engine.dialect, "do_commit", commit_and_lose)
                with pytest.raises(Unavailable):
                    worker.send(request)
            before = dump(ledger)
            assert worker.send(request).replayed
            assert dump(ledger) == before


def test_a_careful_operation_whose_any_statement_fails_leaves_no_attempt_that_counts(ledger, worker, subtests):
    for number in range(1, 100):
        request = worker.request("transcript.append", OPERATIONS["transcript.append"])
        with Failing(ledger, "before_cursor_execute", number=number) as failing:
            try:
                worker.send(request, careful=True)
            except Unavailable:
                assert failing.failed
            else:
                break
        with ledger.read() as connection:
            assert connection.execute(operation_attempts.select().where(operation_attempts.c.attempts > 0)).all() == []
    assert number > 10
    assert dump(ledger)["operation_attempts"] == []


def test_admission_and_recovery_fail_whole(ledger, epoch, subtests):
    """The same for what is no operation: nothing of it is kept when any statement fails."""
    ledger.limits = type(ledger.limits)(3, 2)
    first = Worker(ledger, epoch).register()
    first.finish()
    again = Worker(ledger, epoch, session_id=first.session_id)
    parent = Worker(ledger, epoch).register()
    child = parent.reserve()
    child.reserve()
    fresh = parent.reserve()
    lost = Worker(ledger, epoch).register()
    deaths = [Death(lost.execution_id, HERE, "no_such_process"), Death(child.execution_id, HERE, "reused_pid")]
    actions: dict[str, Callable[[], Any]] = {
        "register": lambda: ledger.register(epoch, Worker(ledger, epoch).registration),
        "register on a session that was held": lambda: ledger.register(epoch, again.registration),
        "attach": lambda: ledger.attach(
            epoch, fresh.address, secret_digest=secret_digest(fresh.secret), identity=ELSEWHERE
        ),
        "adopt": lambda: ledger.adopt(epoch, lost.address, lost.proof),
        "recover": lambda: ledger.recover(epoch, deaths=deaths),
        "discard": lambda: ledger.discard(lost.execution_id, by="operator"),
        "drain": lambda: ledger.drain("an upgrade"),
        "begin_epoch": lambda: ledger.begin_epoch("the second owner"),
        "recover after a restart": lambda: ledger.recover(epoch + 1),
        "adopt after a restart": lambda: ledger.adopt(
            epoch + 1, Address(epoch + 1, parent.execution_id, parent.session_id, 1), Claim(parent.claim)
        ),
        "release": lambda: ledger.release(epoch + 1),
    }
    for name, action in actions.items():
        with subtests.test(name):
            before = dump(ledger)
            statements, _ = fail_each_statement(ledger, action)
            assert statements >= 2
            assert dump(ledger) != before


def test_a_failure_is_seen_before_the_database_does(ledger, worker):
    """The tool of these tests: without a failure it does nothing, with one the statement is not sent."""
    sent: list[str] = []
    listen = lambda _c, _cursor, statement, *_more: sent.append(statement)  # noqa: E731
    event.listen(ledger.store.engine, "after_cursor_execute", listen)
    with pytest.raises(Unavailable), Failing(ledger, "before_cursor_execute"):
        worker.say("hello")
    assert sent == []
    worker.say("hello")
    assert len(sent) > 5
