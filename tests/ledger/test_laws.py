"""A lawful ledger breaks no law; a ledger with one row tampered with breaks the law that guards it, at that row.

Each tampering is done by plain SQL on a database whose own constraints are gone, in a transaction that is undone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
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
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError

from tenure.ledger import Ledger, Limits, Status, laws
from tenure.ledger import schema as t
from tenure.ledger.canonical import canonical
from tenure.ledger.errors import InvalidParams
from tests.ledger.kit import SettableClock, Worker
from tests.ledger.lawful import LIMITS, SECRET, Lawful, fail
from tests.ledger.tampering import TAMPERINGS, message, op, put

messages, receipts = t.messages, t.worker_receipts


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


def test_each_tampering_is_found_at_its_row(lawful: Lawful, unguarded: Engine, subtests: pytest.Subtests) -> None:
    for case in TAMPERINGS:
        with subtests.test(case.tamper.__qualname__), unguarded.connect() as connection:
            expected = case.tamper(connection, lawful)
            found = list(laws.audit(connection, case.limits))
            connection.rollback()
            at = [v for v in found if v.law == case.law.name]
            keys = expected if isinstance(expected, list) else [expected]
            assert sorted((v.key for v in at), key=repr) == sorted(keys, key=repr), found
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


@pytest.mark.parametrize("form", [f"so {SECRET} is", canonical({"x": SECRET}), json.dumps({"x": SECRET})])
def test_a_secret_is_found_in_every_form_and_never_told(lawful: Lawful, unguarded: Engine, form: str) -> None:
    found = secrets_found(lawful, unguarded, form)
    assert found == [laws.Violation("no_secret", "messages", message(lawful.agent, 2), "body holds a secret")]


def test_what_only_resembles_a_secret_is_none(lawful: Lawful, unguarded: Engine) -> None:
    assert (
        secrets_found(lawful, unguarded, f"{SECRET.upper()} {SECRET[1:]} {SECRET[:-1]} {SECRET.replace(' ', '_')}")
        == []
    )


def secrets_found(lawful: Lawful, unguarded: Engine, body: str) -> list[laws.Violation]:
    with unguarded.connect() as connection:
        put(connection, messages, message(lawful.agent, 2), body=body)
        found = list(laws.no_secret(["another secret", SECRET])(connection))
        connection.rollback()
    return found


def test_a_secret_is_found_in_any_text_of_any_table(lawful: Lawful, unguarded: Engine) -> None:
    notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("note", Text))
    with unguarded.begin() as connection:
        notes.create(connection)
        connection.execute(insert(notes).values(id=1, note=""))
    law = laws.no_secret([SECRET])
    texts = [c for table in (*t.metadata.sorted_tables, notes) for c in table.columns if isinstance(c.type, Text)]
    for column in texts:
        with unguarded.connect() as connection:
            rows = connection.execute(update(column.table).values({column: SECRET})).rowcount
            assert rows > 0
            expected = [(column.table.name, f"{column.name} holds a secret")] * rows
            assert [(v.table, v.detail) for v in law(connection)] == expected
            connection.rollback()


def test_more_secrets_than_one_statement_can_take(lawful: Lawful, unguarded: Engine) -> None:
    needles = [f"secret number {number:04}" for number in range(laws.MAX_TERMS + 1)]
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
    with lawful.ledger.read() as connection, pytest.raises(DBAPIError, match="steps"):
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
        assert next(laws.audit(connection, LIMITS)).law == "canonical_json"
        assert connection.execute(select(t.runtime_epoch.c.epoch)).scalar_one() == 2
        connection.rollback()


def test_20_000_receipts_are_audited_in_seconds(lawful: Lawful, record_property: Callable[[str, object], None]) -> None:
    for _ in range(20):
        append_many(lawful.ledger, lawful.agent.epoch, 1000)
    begun = time.perf_counter()
    with lawful.ledger.read() as connection:
        assert list(laws.audit(connection, LIMITS)) == []
    seconds = time.perf_counter() - begun
    record_property("seconds", seconds)
    assert seconds < 10


def append_many(ledger: Ledger, epoch: int, count: int) -> None:
    """Write what that many appends of a new root would leave, faster than they could be applied."""
    worker = Worker(ledger, epoch).register()
    with ledger.transaction(epoch) as tx:
        for n in range(1, count + 1):
            key = op(worker, n)
            body = canonical({"content": f"message {n}", "role": "user"})
            tx.insert(messages, **key, **message(worker, n), role="user", body=body, created_at=tx.now)
            facts = {"operation": "transcript.append", "digest": "0" * 64, "result": canonical({"positions": [n]})}
            tx.insert(receipts, **key, **facts, epoch=epoch, generation=1, created_at=tx.now)
        execution, session = tx.execution(worker.execution_id), tx.session(worker.session_id)
        assert execution is not None
        assert session is not None
        tx.move(execution, Status.RUNNING, reason="first_receipt", by=worker.execution_id)
        execution.last_sequence = session.message_count = count
