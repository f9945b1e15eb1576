"""A lawful ledger breaks no law; a ledger with one row tampered with breaks the law that guards it, at that row.

Each tampering is done by plain SQL on a database whose own constraints are gone, in a transaction that is undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)

from tenure.ledger import Death, Ledger, Limits, Work, engine, laws, operation, secret_digest
from tenure.ledger import schema as t
from tenure.ledger.canonical import canonical
from tenure.ledger.errors import InvalidParams
from tests.ledger.kit import ELSEWHERE, SettableClock, Worker

LIMITS = Limits(2, 2)
SECRET = 'a "secret" – kept by its holder'

runtime, epochs, sessions, messages = t.runtime_epoch, t.epochs, t.sessions, t.messages
executions, receipts, history = t.worker_executions, t.worker_receipts, t.execution_transitions
usage, models, steps, passes = t.usage_records, t.session_models, t.steps, t.recovery_passes


@operation("test.fail")
def fail(work: Work, payload: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError


@dataclass
class Lawful:
    """A ledger with a bit of everything, made by real operations in two epochs."""

    ledger: Ledger
    agent: Worker = field(init=False)  # adopted; 1 create, 2 append of two, 3 usage, 4 step, 5 and 6 children,
    # 7 a reservation refused, 8 usage, 9 failed; adopted again; 10 append, 11 and 12 children that live
    closed: Worker = field(init=False)  # a child that finished; 1 create, 2 append, 3 child, 4 finish
    grandchild: Worker = field(init=False)  # retired with its parent; 1 append, 2 a reservation refused
    ended: Worker = field(init=False)  # a child retired by a restart; 1 end of session, 2 append refused
    live: Worker = field(init=False)
    first_holder: Worker = field(init=False)  # finished; 1 append, 2 finish
    second_holder: Worker = field(init=False)  # of the same session; 1 append; adopted; 2 append
    own_words: Worker = field(init=False)  # ended its session as only tenure does; 1 end, 2 finish
    discarded: Worker = field(init=False)
    silent: Worker = field(init=False)  # registered, never heard of again
    dead: Worker = field(init=False)  # its process is gone; 1 child
    orphan: Worker = field(init=False)  # its child, elsewhere; 1 append

    def __post_init__(self) -> None:
        first = self.ledger.begin_epoch("the first owner")
        self.ledger.recover(first)
        self.agent = Worker(self.ledger, first, secret=SECRET).register()
        self._work_of_the_agent()
        self._children()
        self._other_roots(first)
        second = self.ledger.begin_epoch("the second owner")
        self.ledger.recover(second)
        self._second_epoch(second)

    def _work_of_the_agent(self) -> None:
        agent = self.agent
        facts = {"source": "cli", "model": "m1", "model_config": {"b": [1.5], "a": "ä"}, "system_prompt": "be brief"}
        agent.apply("session.create", facts)
        agent.say("hello", "world")
        agent.apply("usage.record", {"model": "m1", "input_tokens": 7, "cost": 0.25})
        agent.apply("step.record", {"name": "fetch", "input_digest": "0" * 64, "result": [None, "refused"]})
        self.closed, self.ended = agent.reserve(), agent.reserve()
        full = agent.apply("child.reserve", {"secret_digest": secret_digest("a secret of nobody")})
        assert full.refused == "delegation_capacity"
        agent.apply("usage.record", {"model": "m2", "output_tokens": 5, "reasoning_tokens": 2})
        assert agent.apply("test.fail").refused == "operation_failed"

    def _children(self) -> None:
        self.closed.apply("session.create", {"source": "cli", "model_config": {"temperature": 0}})
        self.closed.say("on it")
        self.grandchild = self.closed.reserve()
        self.grandchild.say("deeper")
        too_deep = self.grandchild.apply("child.reserve", {"secret_digest": secret_digest("a secret of nobody")})
        assert too_deep.refused == "delegation_depth_exceeded"
        assert self.closed.finish({"result": {"found": 1}}).result["retired"] == [self.grandchild.execution_id]
        self.ended.apply("session.end", {"end_reason": "done"})
        assert self.ended.say("too late").refused == "session_ended"

    def _other_roots(self, epoch: int) -> None:
        self.first_holder = Worker(self.ledger, epoch, session_id="shared").register()
        self.first_holder.say("one")
        self.first_holder.finish({"result": "ok"})
        self.second_holder = Worker(self.ledger, epoch, session_id="shared").register()
        assert self.second_holder.generation == 2
        self.second_holder.say("two")
        self.own_words = Worker(self.ledger, epoch).register()
        self.own_words.apply("session.end", {"end_reason": "agent_close"})
        self.own_words.finish()
        self.discarded = Worker(self.ledger, epoch).register()
        self.discarded.say("lost")
        self.silent = Worker(self.ledger, epoch).register()

    def _second_epoch(self, epoch: int) -> None:
        self.agent.adopt(epoch)
        self.ledger.discard(self.discarded.execution_id, by="an operator")
        self.agent.say("back")
        self.live = self.agent.reserve()
        self.agent.reserve()
        self.second_holder.adopt(epoch)
        self.second_holder.say("three")
        self.dead = Worker(self.ledger, epoch).register()
        self.orphan = self.dead.reserve()
        self.orphan.attach(ELSEWHERE)
        self.orphan.say("still here")
        death = Death(self.dead.execution_id, self.dead.identity, "no_such_process")
        assert self.ledger.recover(epoch, deaths=[death]).unknown == [self.dead.execution_id]


@pytest.fixture
def lawful(ledger_url: str, clock: SettableClock) -> Iterator[Lawful]:
    with Ledger.open(ledger_url, limits=LIMITS, operations=[fail], clock=clock) as opened:
        yield Lawful(opened)


@pytest.fixture
def unguarded(lawful: Lawful) -> Iterator[Engine]:
    """An engine on the same database, which now lets everything happen that SQL can say."""
    plain = create_engine(lawful.ledger.store.url)
    if plain.dialect.name == "sqlite":  # foreign keys are off where nobody turns them on
        event.listen(plain, "connect", lambda raw, _record: raw.execute("PRAGMA ignore_check_constraints = ON"))
    with plain.begin() as connection:
        connection.execute(text("DROP INDEX uq_worker_executions_live_session"))
        if plain.dialect.name == "postgresql":
            _drop_constraints(connection)
    yield plain
    plain.dispose()


def _drop_constraints(connection: Connection) -> None:
    found = inspect(connection)
    for table in found.get_table_names():
        for constraint in found.get_check_constraints(table) + found.get_foreign_keys(table):
            connection.execute(text(f'ALTER TABLE {table} DROP CONSTRAINT "{constraint["name"]}"'))


# --- a lawful ledger -------------------------------------------------------------------------------------------


def test_a_lawful_ledger_breaks_no_law(lawful: Lawful) -> None:
    with lawful.ledger.read() as connection:
        assert list(laws.audit(connection, LIMITS)) == []


def test_an_empty_ledger_breaks_no_law(ledger_url: str) -> None:
    with Ledger.open(ledger_url) as ledger, ledger.read() as connection:
        assert list(laws.audit(connection, ledger.limits)) == []


def test_between_its_beginning_and_its_recovery_an_epoch_breaks_no_law(lawful: Lawful) -> None:
    lawful.ledger.begin_epoch("the third owner")
    with lawful.ledger.read() as connection:
        assert list(laws.audit(connection, LIMITS)) == []


def test_a_clock_that_was_set_back_breaks_no_law(lawful: Lawful, clock: SettableClock) -> None:
    clock.now -= timedelta(days=1)
    third = lawful.ledger.begin_epoch("an owner whose clock is behind")
    lawful.ledger.recover(third)
    lawful.agent.adopt(third)
    lawful.agent.say("yesterday")
    with lawful.ledger.read() as connection:
        assert list(laws.audit(connection, LIMITS)) == []


# --- a ledger that was tampered with ---------------------------------------------------------------------------

Key = dict[str, Any]
Tamper = Callable[[Connection, Lawful], Key | list[Key]]


@dataclass(frozen=True)
class Tampering:
    """One row changed; `implied` are the other laws that it breaks, too."""

    law: laws.Law
    table: Table
    tamper: Tamper
    implied: frozenset[str]
    limits: Limits


TAMPERINGS: list[Tampering] = []


def tampers(law: laws.Law, table: Table, *implied: laws.Law, limits: Limits = LIMITS) -> Callable[[Tamper], Tamper]:
    """Tell which law finds what the function does, at the row or rows whose keys it returns."""

    def keep(tamper: Tamper) -> Tamper:
        TAMPERINGS.append(Tampering(law, table, tamper, frozenset(other.name for other in implied), limits))
        return tamper

    return keep


def put(connection: Connection, table: Table, key: Key, **values: Any) -> Key:
    """Change the one row that has the key; returns the key."""
    done = connection.execute(update(table).where(*(table.c[name] == at for name, at in key.items())).values(values))
    assert done.rowcount == 1, (table.name, key)
    return key


def drop(connection: Connection, table: Table, key: Key) -> Key:
    """Delete the one row that has the key; returns the key."""
    done = connection.execute(delete(table).where(*(table.c[name] == at for name, at in key.items())))
    assert done.rowcount == 1, (table.name, key)
    return key


def copy(connection: Connection, table: Table, key: Key, **values: Any) -> None:
    """Insert a row that is like the one that has the key, but for these values."""
    row = connection.execute(select(table).where(*(table.c[name] == at for name, at in key.items()))).mappings().one()
    connection.execute(insert(table).values({**row, **values}))


def x(worker: Worker) -> Key:
    return {"execution_id": worker.execution_id}


def s(worker: Worker) -> Key:
    return {"session_id": worker.session_id}


def op(worker: Worker, sequence: int) -> Key:
    return {"execution_id": worker.execution_id, "sequence": sequence}


def message(worker: Worker, position: int) -> Key:
    return {"session_id": worker.session_id, "position": position}


def move(connection: Connection, worker: Worker, number: int) -> Key:
    """Return the key of the n-th line of an execution's history, counted as Python does."""
    ids = select(history.c.id).where(history.c.execution_id == worker.execution_id).order_by(history.c.id)
    return {"id": connection.execute(ids).scalars().all()[number]}


def newest(connection: Connection, table: Table) -> Key:
    return {"id": connection.execute(select(table.c.id).order_by(table.c.id.desc()).limit(1)).scalar_one()}


@tampers(laws.references_hold, sessions, laws.delegation_marker)
def a_parent_session_is_gone(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.live), parent_session_id="nowhere")


@tampers(laws.epochs_increase, runtime)
def the_runtime_row_is_gone(c: Connection, w: Lawful) -> Key:
    return drop(c, runtime, {"id": 1})


@tampers(laws.epochs_increase, epochs)
def an_epoch_is_missing(c: Connection, w: Lawful) -> Key:
    drop(c, epochs, {"epoch": 1})
    return {"epoch": 2}


@tampers(laws.epochs_increase, runtime)
def an_epoch_nobody_began(c: Connection, w: Lawful) -> Key:
    copy(c, epochs, {"epoch": 2}, epoch=3)
    return {"id": 1}


@tampers(laws.epochs_increase, runtime)
def an_epoch_with_another_beginning(c: Connection, w: Lawful) -> Key:
    return put(c, runtime, {"id": 1}, began_at=w.ledger.clock() + timedelta(seconds=1))


@tampers(laws.older_epochs_are_settled, executions, laws.status_history)
def a_root_of_an_older_epoch_may_write(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.silent), status="registered")


@tampers(laws.older_epochs_are_settled, executions)
def a_child_of_an_unknown_parent_is_of_an_older_epoch(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.orphan, 1), epoch=1)
    return put(c, executions, x(w.orphan), epoch=1)


@tampers(laws.dense_sequences, executions)
def a_receipt_in_the_middle_is_gone(c: Connection, w: Lawful) -> Key:
    drop(c, receipts, op(w.agent, 9))
    return x(w.agent)


@tampers(laws.dense_sequences, executions)
def the_last_sequence_has_no_receipt(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.silent), last_sequence=1)


@tampers(laws.dense_sequences, executions)
def a_receipt_is_beyond_the_last_sequence(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.ended, 2), sequence=3)
    return x(w.ended)


@tampers(laws.dense_sequences, executions)
def a_receipt_is_before_the_first(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.ended, 1), sequence=-1)
    return x(w.ended)


@tampers(laws.finish_is_last, receipts)
def a_receipt_after_the_finish(c: Connection, w: Lawful) -> Key:
    copy(c, receipts, op(w.own_words, 1), sequence=3)
    put(c, executions, x(w.own_words), last_sequence=3)
    return op(w.own_words, 2)


@tampers(laws.finish_is_last, receipts, laws.status_history)
def a_finished_execution_that_waits(c: Connection, w: Lawful) -> Key:
    put(c, executions, x(w.own_words), status="unknown")
    return op(w.own_words, 2)


@tampers(laws.one_live_execution_per_session, sessions)
def a_twin(c: Connection, w: Lawful) -> Key:
    copy(c, executions, x(w.agent), execution_id="twin", last_sequence=0)
    for number in range(3):
        at = newest(c, history)["id"] + 1
        moved = ("registered", "running", "unknown", "running")
        facts = {"reason": "adopted", "by": w.agent.execution_id, "epoch": 2, "execution_id": "twin"}
        line = {"from_status": moved[number - 1] if number else None, "to_status": moved[number], "id": at}
        copy(c, history, newest(c, history), **line, **facts)
    put(c, executions, x(w.agent) | {"execution_id": "twin"}, status="unknown")
    return s(w.agent)


@tampers(laws.writes_in_own_session_only, steps)
def a_step_in_another_session(c: Connection, w: Lawful) -> Key:
    return put(c, steps, op(w.agent, 4), session_id=w.closed.session_id)


@tampers(laws.writes_in_own_session_only, usage, laws.counters_equal_rows)
def a_usage_record_in_another_session(c: Connection, w: Lawful) -> Key:
    return put(c, usage, op(w.agent, 3), session_id=w.closed.session_id)


@tampers(laws.writes_in_own_session_only, messages, laws.counters_equal_rows)
def a_child_writes_its_parents_session(c: Connection, w: Lawful) -> Key:
    put(c, messages, message(w.orphan, 1), session_id=w.dead.session_id)
    return message(w.dead, 1)


@tampers(laws.writes_in_own_session_only, messages)
def a_message_that_was_refused(c: Connection, w: Lawful) -> Key:
    key = message(w.ended, 1)
    copy(c, messages, message(w.closed, 1), **key, **op(w.ended, 2))
    put(c, sessions, s(w.ended), message_count=1)
    return key


@tampers(laws.writes_in_own_session_only, messages, laws.acknowledged_is_stored)
def a_message_by_another_operation(c: Connection, w: Lawful) -> Key:
    return put(c, messages, message(w.agent, 2), sequence=4)


@tampers(laws.writes_in_own_session_only, messages, laws.acknowledged_is_stored)
def a_message_without_a_receipt(c: Connection, w: Lawful) -> Key:
    return put(c, messages, message(w.agent, 3), sequence=99)


@tampers(laws.writes_in_own_session_only, usage, laws.acknowledged_is_stored)
def a_usage_record_by_another_operation(c: Connection, w: Lawful) -> Key:
    put(c, usage, op(w.agent, 3), sequence=4)
    return op(w.agent, 4)


@tampers(laws.writes_in_own_session_only, steps, laws.acknowledged_is_stored)
def a_step_by_another_operation(c: Connection, w: Lawful) -> Key:
    put(c, steps, op(w.agent, 4), sequence=3)
    return op(w.agent, 3)


@tampers(laws.writes_in_own_session_only, steps)
def a_step_of_nobody(c: Connection, w: Lawful) -> Key:
    copy(c, steps, op(w.agent, 4), execution_id="nobody")
    return {"execution_id": "nobody", "sequence": 4}


@tampers(laws.acknowledged_is_stored, receipts)
def an_acknowledged_message_is_gone(c: Connection, w: Lawful) -> Key:
    drop(c, messages, message(w.agent, 3))
    put(c, sessions, s(w.agent), message_count=2)
    return op(w.agent, 10)


@tampers(laws.acknowledged_is_stored, receipts)
def another_position_was_acknowledged(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 10), result='{"positions":[4]}')


@tampers(laws.acknowledged_is_stored, receipts, laws.no_write_after_fence)
def the_messages_of_two_appends_are_mixed(c: Connection, w: Lawful) -> list[Key]:
    put(c, messages, message(w.agent, 2), sequence=10)
    put(c, messages, message(w.agent, 3), sequence=2)
    put(c, receipts, op(w.agent, 10), result='{"positions":[2]}')
    return [put(c, receipts, op(w.agent, 2), result='{"positions":[1,2,3]}')]


@tampers(laws.acknowledged_is_stored, receipts)
def an_acknowledged_step_is_gone(c: Connection, w: Lawful) -> Key:
    return drop(c, steps, op(w.agent, 4))


@tampers(laws.acknowledged_is_stored, receipts, laws.counters_equal_rows)
def an_acknowledged_usage_record_is_gone(c: Connection, w: Lawful) -> Key:
    return drop(c, usage, op(w.agent, 3))


@tampers(laws.counters_equal_rows, sessions)
def a_message_counter_is_twice_the_rows(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.agent), message_count=6)


@tampers(laws.counters_equal_rows, sessions)
def a_message_counter_without_rows(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.silent), message_count=1)


@tampers(laws.counters_equal_rows, sessions, laws.acknowledged_is_stored)
def a_position_is_skipped(c: Connection, w: Lawful) -> Key:
    put(c, messages, message(w.agent, 3), position=4)
    return s(w.agent)


@tampers(laws.counters_equal_rows, sessions, laws.acknowledged_is_stored)
def a_position_before_the_first(c: Connection, w: Lawful) -> Key:
    put(c, messages, message(w.agent, 1), position=0)
    return s(w.agent)


def a_counter_is_wrong(name: str) -> None:
    """Tamper with one counter of a session and of a model."""

    def of_a_session(c: Connection, w: Lawful) -> Key:
        return put(c, sessions, s(w.agent), **{name: sessions.c[name] + 1})

    def of_a_model(c: Connection, w: Lawful) -> Key:
        return put(c, models, s(w.agent) | {"model": "m2"}, **{name: models.c[name] + 1})

    tampers(laws.counters_equal_rows, sessions)(of_a_session)
    tampers(laws.counters_equal_rows, models)(of_a_model)


for counter in t.COUNTERS:
    a_counter_is_wrong(counter)


@tampers(laws.counters_equal_rows, models)
def the_records_of_a_model_are_miscounted(c: Connection, w: Lawful) -> Key:
    return put(c, models, s(w.agent) | {"model": "m1"}, records=2)


@tampers(laws.counters_equal_rows, models)
def the_counters_of_a_model_are_gone(c: Connection, w: Lawful) -> Key:
    return drop(c, models, s(w.agent) | {"model": "m1"})


@tampers(laws.counters_equal_rows, models)
def a_model_nobody_used(c: Connection, w: Lawful) -> Key:
    copy(c, models, s(w.agent) | {"model": "m1"}, model="m3")
    return s(w.agent) | {"model": "m3"}


@tampers(laws.receipts_follow_epochs, receipts)
def a_receipt_of_an_older_owner(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.agent, 8), epoch=2)
    return op(w.agent, 9)


@tampers(laws.receipts_follow_epochs, receipts, laws.no_write_after_fence)
def a_receipt_of_an_older_holder(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.second_holder, 2), generation=1)


@tampers(laws.receipts_follow_epochs, receipts)
def a_receipt_of_an_epoch_that_never_was(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 12), epoch=3)


@tampers(laws.receipts_follow_epochs, receipts)
def a_receipt_of_a_generation_that_never_was(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 12), generation=2)


@tampers(laws.receipts_follow_epochs, executions)
def an_execution_of_an_epoch_that_never_was(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.agent), epoch=3)


@tampers(laws.receipts_follow_epochs, executions)
def an_execution_of_a_generation_that_never_was(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.first_holder), generation=3)


@tampers(laws.receipts_follow_epochs, executions)
def a_live_execution_that_lost_its_session(c: Connection, w: Lawful) -> Key:
    put(c, sessions, s(w.agent), generation=2)
    return x(w.agent)


@tampers(laws.no_write_after_fence, history)
def an_older_owner_moves_an_execution(c: Connection, w: Lawful) -> Key:
    return put(c, history, move(c, w.dead, -1), epoch=1)


@tampers(laws.no_write_after_fence, history)
def an_owner_that_never_was_moves_an_execution(c: Connection, w: Lawful) -> Key:
    return put(c, history, newest(c, history), epoch=3)


@tampers(laws.no_write_after_fence, passes)
def an_older_owner_recovers(c: Connection, w: Lawful) -> Key:
    return put(c, passes, newest(c, passes), epoch=1)


@tampers(laws.no_write_after_fence, messages)
def an_older_holder_answers_after_the_new_one(c: Connection, w: Lawful) -> Key:
    # The two holders of a session change places: each alone is in order.
    put(c, messages, message(w.second_holder, 1), **op(w.second_holder, 1))
    put(c, messages, message(w.second_holder, 2), **op(w.first_holder, 1))
    put(c, receipts, op(w.first_holder, 1), result='{"positions":[2]}')
    put(c, receipts, op(w.second_holder, 1), result='{"positions":[1]}')
    return message(w.second_holder, 2)


@tampers(laws.status_history, history)
def a_move_from_where_it_did_not_stand(c: Connection, w: Lawful) -> Key:
    return put(c, history, move(c, w.agent, -1), from_status="registered")


@tampers(laws.status_history, history)
def a_move_that_is_not_allowed(c: Connection, w: Lawful) -> Key:
    drop(c, history, move(c, w.silent, 0))
    return put(c, history, move(c, w.silent, 0), from_status=None)


def a_status_differs(name: str, value: Any) -> None:
    @tampers(laws.status_history, executions)
    def from_its_history(c: Connection, w: Lawful) -> Key:
        return put(c, executions, x(w.agent), **{name: value})


a_status_differs("status", "unknown")
a_status_differs("status_reason", "first_receipt")
a_status_differs("status_by", "somebody")
a_status_differs("status_at", SettableClock().now - timedelta(days=1))


@tampers(laws.status_history, executions)
def an_execution_without_a_history(c: Connection, w: Lawful) -> Key:
    for _ in range(2):
        drop(c, history, move(c, w.silent, -1))
    return x(w.silent)


@tampers(laws.child_cap, executions, limits=Limits(1, 2))
def one_child_too_many(c: Connection, w: Lawful) -> Key:
    return x(w.agent)


@tampers(laws.depth_cap, executions)
def a_root_that_is_deep(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.silent), depth=1)


@tampers(laws.depth_cap, executions, laws.children_come_from_reservations)
def a_child_as_high_as_its_parent(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.live), depth=0)


@tampers(laws.depth_cap, executions, limits=Limits(2, 1))
def a_live_execution_too_deep(c: Connection, w: Lawful) -> Key:
    # The grandchild has ended, under other limits: that is lawful. This one lives.
    put(c, executions, x(w.agent), depth=1)
    put(c, executions, x(w.closed), depth=2)
    put(c, executions, x(w.ended), depth=2)
    put(c, executions, x(w.grandchild), depth=3)
    put(c, executions, x(w.live), depth=2)
    return x(w.live)


@tampers(laws.no_live_descendant_of_terminal, executions)
def a_child_is_forgotten_by_its_parents_end(c: Connection, w: Lawful) -> Key:
    end = {"status": "terminal", "outcome": "interrupted", "ended_at": w.ledger.clock()}
    put(c, executions, x(w.dead), **end)
    line = {"from_status": "unknown", "to_status": "terminal", "id": newest(c, history)["id"] + 1}
    copy(c, history, move(c, w.dead, -1), **line)
    return x(w.orphan)


@tampers(laws.terminal_child_session_ended, sessions)
def a_childs_session_goes_on(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.grandchild), ended_at=None, end_reason=None)


@tampers(laws.only_child_sessions_closed, sessions)
def a_roots_session_is_closed(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.agent), ended_at=w.ledger.clock(), end_reason="agent_close")


@tampers(laws.only_child_sessions_closed, sessions)
def a_live_childs_session_is_closed(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.live), ended_at=w.ledger.clock(), end_reason="agent_close")


@tampers(laws.only_child_sessions_closed, sessions)
def a_session_ended_by_words_that_did_not_count(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.own_words, 1), result='{"end_reason":"agent_close","ended":false}')
    return s(w.own_words)


@tampers(laws.children_come_from_reservations, executions)
def a_child_of_a_refused_reservation(c: Connection, w: Lawful) -> Key:
    refused = '{"depth":1,"execution_id":"%s","refused":"x","session_id":"%s"}'
    return put_result(c, w, refused % (w.live.execution_id, w.live.session_id))


@tampers(laws.children_come_from_reservations, executions)
def a_child_of_another_operation(c: Connection, w: Lawful) -> Key:
    put(c, receipts, op(w.agent, 11), operation="test.fail")
    return x(w.live)


@tampers(laws.children_come_from_reservations, executions)
def a_reservation_that_names_another_session(c: Connection, w: Lawful) -> Key:
    named = '{"depth":1,"execution_id":"%s","session_id":"%s"}'
    return put_result(c, w, named % (w.live.execution_id, w.agent.session_id))


@tampers(laws.children_come_from_reservations, executions)
def a_reservation_that_names_another_child(c: Connection, w: Lawful) -> Key:
    named = '{"depth":1,"execution_id":"%s","session_id":"%s"}'
    return put_result(c, w, named % (w.closed.execution_id, w.live.session_id))


@tampers(laws.children_come_from_reservations, executions, laws.canonical_json)
def a_reservation_nobody_can_read(c: Connection, w: Lawful) -> Key:
    return put_result(c, w, "{")


def put_result(c: Connection, w: Lawful, result: str) -> Key:
    """Change the result of the reservation of the live child; returns the child's key."""
    put(c, receipts, op(w.agent, 11), result=result)
    return x(w.live)


@tampers(laws.children_come_from_reservations, receipts)
def a_reservation_without_its_child(c: Connection, w: Lawful) -> Key:
    drop(c, history, move(c, w.live, 0))
    drop(c, executions, x(w.live))
    return op(w.agent, 11)


@tampers(laws.children_come_from_reservations, executions)
def two_children_of_one_reservation(c: Connection, w: Lawful) -> Key:
    copy(c, executions, x(w.closed), execution_id="second", last_sequence=0)
    line = {"execution_id": "second", "from_status": None, "epoch": 2}
    for before, after in ((None, "running"), ("running", "terminal")):
        at = newest(c, history)["id"] + 1
        copy(c, history, move(c, w.closed, -1), **line | {"from_status": before, "to_status": after, "id": at})
    return {"execution_id": "second"}


def a_child_session_differs(name: str, value: Any) -> None:
    @tampers(laws.delegation_marker, sessions)
    def from_what_its_reservation_made_it(c: Connection, w: Lawful) -> Key:
        return put(c, sessions, s(w.live), **{name: value(w)})


a_child_session_differs("source", lambda _: "worker")
a_child_session_differs("profile", lambda _: "another")
a_child_session_differs("parent_session_id", lambda w: w.closed.session_id)
a_child_session_differs("model_config", lambda w: canonical({"_delegate_from": w.closed.session_id}))
a_child_session_differs("model_config", lambda _: None)


@tampers(laws.canonical_json, receipts)
def a_result_with_white_space(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 1), result='{"session_id": 1}')


@tampers(laws.canonical_json, receipts)
def a_result_that_is_no_object(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 1), result="[]")


@tampers(laws.canonical_json, messages)
def a_body_with_a_number_that_is_none(c: Connection, w: Lawful) -> Key:
    return put(c, messages, message(w.agent, 1), body='{"content":NaN}')


@tampers(laws.canonical_json, sessions)
def a_configuration_out_of_order(c: Connection, w: Lawful) -> Key:
    return put(c, sessions, s(w.agent), model_config='{"b":1,"a":2}')


@tampers(laws.canonical_json, passes)
def a_report_that_was_cut(c: Connection, w: Lawful) -> Key:
    return put(c, passes, newest(c, passes), report='{"unknown":')


@tampers(laws.canonical_json, steps)
def a_step_with_escapes(c: Connection, w: Lawful) -> Key:
    return put(c, steps, op(w.agent, 4), result='"\\u00e4"')


@tampers(laws.canonical_json, executions)
def an_outcome_nobody_can_read(c: Connection, w: Lawful) -> Key:
    return put(c, executions, x(w.closed), result="found")


def test_each_tampering_is_found_at_its_row(lawful: Lawful, unguarded: Engine, subtests: pytest.Subtests) -> None:
    for case in TAMPERINGS:
        with subtests.test(case.tamper.__qualname__), unguarded.connect() as connection:
            expected = case.tamper(connection, lawful)
            found = list(laws.audit(connection, case.limits))
            connection.rollback()
            at = [v for v in found if v.law == case.law.name]
            assert [v.key for v in at] == (expected if isinstance(expected, list) else [expected]), found
            assert {v.table for v in at} == {case.table.name}
            assert {v.law for v in found} == {case.law.name} | case.implied, found
    with unguarded.connect() as connection:
        assert list(laws.audit(connection, LIMITS)) == []


def test_each_law_has_its_tampering() -> None:
    assert {case.law.name for case in TAMPERINGS} == {law.name for law in laws.LAWS}


def test_without_limits_only_the_caps_are_left_out(lawful: Lawful) -> None:
    with lawful.ledger.read() as connection:
        assert {v.law for v in laws.audit(connection, Limits(0, 0))} == {"child_cap", "depth_cap"}
        assert list(laws.audit(connection)) == []


# --- secrets ---------------------------------------------------------------------------------------------------


def test_the_ledger_holds_no_secret(lawful: Lawful) -> None:
    held = [worker.secret for worker in vars(lawful).values() if isinstance(worker, Worker)]
    with lawful.ledger.read() as connection:
        assert list(laws.no_secret(held)(connection)) == []


@pytest.mark.parametrize("form", [SECRET, canonical({"x": SECRET}), 'the "secret\' %s is not one' % SECRET.upper()])
def test_a_secret_is_found_in_every_form_and_never_told(lawful: Lawful, unguarded: Engine, form: str) -> None:
    law = laws.no_secret(["another secret", SECRET])
    with unguarded.connect() as connection:
        put(connection, messages, message(lawful.agent, 2), body=form)
        found = list(law(connection))
        connection.rollback()
    if SECRET.upper() in form:
        assert found == []
    else:
        assert [(v.law, v.table, v.key) for v in found] == [("no_secret", "messages", message(lawful.agent, 2))]
        assert found[0].detail == "body holds a secret"


def test_a_secret_is_found_in_any_text_of_any_table(lawful: Lawful, unguarded: Engine) -> None:
    notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("note", Text))
    law = laws.no_secret([SECRET])
    for table in (*t.metadata.sorted_tables, notes):
        for column in table.columns:
            with unguarded.connect() as connection:
                notes.create(connection)
                connection.execute(insert(notes).values(id=1, note=""))
                if isinstance(column.type, Text) and not column.primary_key:
                    connection.execute(update(table).values({column: SECRET}))
                    rows = connection.execute(select(table)).all()
                    found = [(v.table, v.detail) for v in law(connection)]
                    assert found == [(table.name, f"{column.name} holds a secret")] * len(rows)
                    assert rows or table is t.owner_lease
                connection.rollback()


def test_more_secrets_than_one_statement_can_take(lawful: Lawful, unguarded: Engine) -> None:
    needles = [f"secret number {number}" for number in range(2 * laws.MAX_TERMS)]
    with unguarded.connect() as connection:
        put(connection, messages, message(lawful.agent, 2), body=needles[-1])
        put(connection, messages, message(lawful.agent, 3), body=needles[0])
        found = [v.key["position"] for v in laws.no_secret(needles)(connection)]
        connection.rollback()
    assert sorted(found) == [2, 3]


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(InvalidParams):
        laws.no_secret(["a secret", ""])


# --- how it reads ----------------------------------------------------------------------------------------------


def test_a_statement_that_fails_is_not_a_law_that_holds(lawful: Lawful, unguarded: Engine) -> None:
    with unguarded.begin() as connection:
        connection.execute(text("DROP TABLE steps"))
    with lawful.ledger.read() as connection, pytest.raises(Exception, match="steps"):
        list(laws.audit(connection, LIMITS))


def test_it_only_reads(lawful: Lawful, unguarded: Engine) -> None:
    with unguarded.connect() as connection:
        sqlite = connection.dialect.name == "sqlite"
        connection.execute(text("PRAGMA query_only = ON" if sqlite else "SET TRANSACTION READ ONLY"))
        assert list(laws.audit(connection, LIMITS, (*laws.LAWS, laws.no_secret([SECRET])))) == []


def test_every_statement_streams_its_rows(lawful: Lawful) -> None:
    options: list[dict[str, Any]] = []
    with lawful.ledger.read() as connection:
        event.listen(connection, "before_cursor_execute", lambda *call: options.append(call[4].execution_options))
        list(laws.audit(connection, LIMITS))
    assert len(options) >= len(laws.LAWS)
    assert all(0 < given["yield_per"] <= 1000 for given in options)


def test_a_reader_that_stops_early_leaves_the_connection_usable(lawful: Lawful, unguarded: Engine) -> None:
    with unguarded.connect() as connection:
        connection.execute(update(messages).values(body="{"))
        found = laws.audit(connection, LIMITS)
        assert next(found).law == "canonical_json"
        found.close()
        assert connection.execute(select(runtime.c.epoch)).scalar_one() == 2
        connection.rollback()


def test_20_000_receipts_are_audited_in_seconds(
    ledger_url: str, clock: SettableClock, record_property: Callable[[str, object], None]
) -> None:
    with Ledger.open(ledger_url, clock=clock) as ledger:
        epoch = ledger.begin_epoch("an owner")
        ledger.recover(epoch)
        for _ in range(20):
            append_many(ledger, Worker(ledger, epoch).register(), 1000)
        begun = time.perf_counter()
        with ledger.read() as connection:
            assert list(laws.audit(connection, ledger.limits)) == []
        seconds = time.perf_counter() - begun
    record_property("seconds", seconds)
    assert seconds < 10


def append_many(ledger: Ledger, worker: Worker, count: int) -> None:
    """Apply that many appends in one transaction, as an owner applies a run."""
    with ledger.transaction(worker.epoch) as tx:
        for sequence in range(1, count + 1):
            payload = {"messages": [{"role": "user", "content": f"message {sequence}"}]}
            request = worker.request("transcript.append", payload, sequence=sequence)
            engine.apply(tx, engine.read(request, ledger.registry))
