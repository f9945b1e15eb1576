"""What can be wrong with a ledger: each law has one or more ways of tampering with rows that it alone should find.

Each is done by plain SQL on a database whose own constraints are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select, update

from tenure.ledger import Limits, laws
from tenure.ledger import schema as t
from tenure.ledger.canonical import canonical
from tests.ledger.kit import SettableClock, Worker
from tests.ledger.lawful import LIMITS, Lawful

runtime, epochs, sessions, messages = t.runtime_epoch, t.epochs, t.sessions, t.messages
executions, receipts, history = t.worker_executions, t.worker_receipts, t.execution_transitions
usage, models, steps, passes = t.usage_records, t.session_models, t.steps, t.recovery_passes

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
def a_step_of_nobody(c: Connection, w: Lawful) -> list[Key]:
    copy(c, steps, op(w.agent, 4), execution_id="nobody")
    return [{"execution_id": "nobody", "sequence": 4}] * 2  # of no session, by no receipt


@tampers(laws.acknowledged_is_stored, receipts)
def an_acknowledged_message_is_gone(c: Connection, w: Lawful) -> Key:
    drop(c, messages, message(w.agent, 3))
    put(c, sessions, s(w.agent), message_count=2)
    return op(w.agent, 10)


@tampers(laws.acknowledged_is_stored, receipts)
def another_position_was_acknowledged(c: Connection, w: Lawful) -> Key:
    return put(c, receipts, op(w.agent, 10), result='{"positions":[4]}')


@tampers(laws.acknowledged_is_stored, receipts, laws.no_write_after_fence)
def the_messages_of_two_appends_are_mixed(c: Connection, w: Lawful) -> Key:
    put(c, messages, message(w.agent, 2), sequence=10)
    put(c, messages, message(w.agent, 3), sequence=2)
    put(c, receipts, op(w.agent, 10), result='{"positions":[2]}')
    return put(c, receipts, op(w.agent, 2), result='{"positions":[1,2,3]}')


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


@tampers(laws.depth_cap, executions, limits=Limits(2, 0))
def live_executions_too_deep(c: Connection, w: Lawful) -> list[Key]:
    return [x(w.live), x(w.idle), x(w.orphan)]  # those that have ended may have lived under other limits


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
