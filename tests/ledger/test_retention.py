"""Retention: whole trees go once they are old, what is busy stays, and the ledger stays lawful."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select

from tenure.ledger import Ledger, Limits, schema
from tenure.ledger.errors import NotFound
from tenure.ledger.laws import audit
from tenure.ledger.reads import session
from tests.ledger.kit import SettableClock, Worker

DAY = timedelta(days=1)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def ledger(ledger_url, clock):
    with Ledger.open(ledger_url, limits=Limits(3, 2), clock=clock) as ledger:
        yield ledger


def worked(ledger: Ledger, epoch: int, *, end: bool = True, finish: bool = True) -> Worker:
    """A root with a child and a grandchild, all of which have written."""
    root = Worker(ledger, epoch).register()
    root.say("hello")
    child = root.reserve()
    child.say("hello")
    child.reserve().say("hello")
    root.apply("usage.record", {"model": "m", "input_tokens": 1})
    root.apply("step.record", {"name": "s", "input_digest": "0" * 64, "result": 1})
    if end:
        root.apply("session.end", {"end_reason": "done"})
    if finish:
        root.apply("execution.finish", {})
    return root


def kept(ledger: Ledger, worker: Worker) -> bool:
    with ledger.read() as connection:
        try:
            session(connection, worker.session_id)
        except NotFound:
            return False
    return True


def test_only_what_has_ended_for_long_is_pruned(ledger: Ledger, clock: SettableClock) -> None:
    epoch = ledger.begin_epoch("test")
    old, unended, unfinished = worked(ledger, epoch), worked(ledger, epoch, end=False), None
    unfinished = worked(ledger, epoch, finish=False)
    clock.advance(days=10)
    young = worked(ledger, epoch)
    clock.advance(hours=12)
    assert ledger.recover(epoch).pruned == []
    report = ledger.recover(epoch, retention=DAY)
    assert report.pruned == [old.session_id]
    assert [kept(ledger, w) for w in (old, unended, unfinished, young)] == [False, True, True, True]
    with ledger.read() as connection:
        assert list(audit(connection, ledger.limits)) == []
        for table in (schema.worker_receipts, schema.execution_transitions, schema.messages, schema.steps):
            rows = connection.execute(select(table.c.execution_id)).scalars().all()
            assert rows
            assert old.execution_id not in rows
    assert ledger.recover(epoch, retention=DAY).pruned == []


def test_a_tree_that_is_busy_below_is_stepped_over(ledger: Ledger, clock: SettableClock) -> None:
    epoch = ledger.begin_epoch("test")
    first, second = worked(ledger, epoch), worked(ledger, epoch)
    clock.advance(days=10)
    with ledger.store.write() as connection:  # as a future kind of child might be: ended late, below an old root
        late = select(schema.sessions.c.session_id).where(schema.sessions.c.parent_session_id == first.session_id)
        connection.execute(
            schema.sessions.update().where(schema.sessions.c.session_id.in_(late)).values(ended_at=clock())
        )
    assert ledger.recover(epoch, retention=DAY).pruned == [second.session_id]
    assert kept(ledger, first)
