"""What each of tenure's own operations does, and that counters equal rows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import func, select

from tenure.ledger import Ledger, Outcome, reads
from tenure.ledger.schema import (
    COUNTERS,
    messages,
    session_models,
    sessions,
    steps,
    usage_records,
    worker_executions,
)
from tests.ledger.kit import Worker, dump, row, rows

pytestmark = pytest.mark.usefixtures("lawful")

DIGEST = "0123456789abcdef" * 4


def session(ledger: Ledger, worker: Worker) -> Any:
    return row(ledger, sessions, session_id=worker.session_id)


def test_session_create_sets_the_facts_of_a_root(ledger, worker):
    config = {"z": 1, "a": {"temperature": 0.5}}
    receipt = worker.apply(
        "session.create", {"source": "telegram", "model": "m", "model_config": config, "system_prompt": "Be brief."}
    )
    assert receipt.result == {"session_id": worker.session_id}
    s = session(ledger, worker)
    assert (s.source, s.model, s.system_prompt, s.revision) == ("telegram", "m", "Be brief.", 1)
    assert s.model_config == '{"a":{"temperature":0.5},"z":1}'
    worker.apply("session.create", {"source": "cli"})
    s = session(ledger, worker)
    assert (s.source, s.model, s.model_config, s.system_prompt, s.revision) == ("cli", None, "{}", None, 2)


def test_transcript_append_keeps_whole_messages_in_order(ledger, worker, clock):
    first = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "h\u00e9llo"}, {"type": "image", "data": None}]},
    ]
    call = {"id": "call-1", "function": {"name": "search", "arguments": '{"q":1}'}}
    second = [
        {"role": "assistant", "tool_calls": [call], "metadata": {"model": "m", "score": 0.25}},
        {"role": "tool", "content": {"found": []}, "tool_call_id": "call-1", "tool_name": "search", "name": "n"},
        {"role": "user", "content": ""},
    ]
    assert worker.apply("transcript.append", {"messages": first}).result == {"positions": [1, 2]}
    clock.advance(minutes=1)
    assert worker.apply("transcript.append", {"messages": second}).result == {"positions": [3, 4, 5]}
    with ledger.read() as connection:
        assert list(reads.transcript(connection, worker.session_id)) == first + second
    stored = rows(ledger, messages, session_id=worker.session_id)
    assert [(m.position, m.sequence, m.role) for m in stored] == [
        (1, 1, "system"),
        (2, 1, "user"),
        (3, 2, "assistant"),
        (4, 2, "tool"),
        (5, 2, "user"),
    ]
    assert {m.execution_id for m in stored} == {worker.execution_id}
    assert stored[4].created_at == clock.now
    s = session(ledger, worker)
    assert (s.message_count, s.revision) == (5, 2)


def test_messages_of_an_ended_session_are_refused(ledger, worker):
    worker.say("before")
    worker.apply("session.end", {"end_reason": "done"})
    refused = worker.say("after")
    assert refused.result == {"refused": "session_ended", "end_reason": "done"}
    assert session(ledger, worker).message_count == len(rows(ledger, messages)) == 1


def test_usage_adds_up_for_the_session_and_for_each_model(ledger, worker):
    records = [
        {"model": "a", "input_tokens": 10, "output_tokens": 3, "cost": 0.000000001},
        {"model": "b", "cache_read_tokens": 7, "cache_write_tokens": 2**53, "reasoning_tokens": 1, "task": "title"},
        {"model": "a", "input_tokens": 5, "cost": 0.1},
        {"model": "a", "cost": 0.2},
    ]
    for record in records:
        assert worker.apply("usage.record", record).result == {"recorded": True}
    s = session(ledger, worker)
    assert {name: getattr(s, name) for name in COUNTERS} == {
        "input_tokens": 15,
        "output_tokens": 3,
        "cache_read_tokens": 7,
        "cache_write_tokens": 2**53,
        "reasoning_tokens": 1,
        "cost_nanos": 300_000_001,
    }
    assert s.revision == 4
    a, b = rows(ledger, session_models, session_id=worker.session_id)
    assert (a.model, a.records, a.input_tokens, a.output_tokens, a.cost_nanos) == ("a", 3, 15, 3, 300_000_001)
    assert (b.model, b.records, b.cache_write_tokens, b.reasoning_tokens) == ("b", 1, 2**53, 1)
    assert [(u.sequence, u.model, u.task) for u in rows(ledger, usage_records)] == [
        (1, "a", None),
        (2, "b", "title"),
        (3, "a", None),
        (4, "a", None),
    ]


def test_usage_counts_after_the_end_of_its_session(ledger, worker):
    worker.apply("session.end", {"end_reason": "done"})
    assert worker.apply("usage.record", {"model": "m", "input_tokens": 1}).refused is None
    assert session(ledger, worker).input_tokens == 1


def test_usage_beyond_what_a_counter_holds_fails_without_a_trace(ledger, worker):
    with ledger.transaction(worker.epoch) as tx:
        tx.session(worker.session_id).input_tokens = 2**63 - 2
    before = session(ledger, worker)
    failed = worker.apply("usage.record", {"model": "m", "input_tokens": 2})
    assert failed.refused == "operation_failed"
    assert session(ledger, worker) == before
    assert rows(ledger, usage_records) == rows(ledger, session_models) == []
    with ledger.transaction(worker.epoch) as tx:  # as no usage record tells
        tx.session(worker.session_id).input_tokens = 0


def test_steps_are_kept_by_sequence(ledger, worker):
    worker.say("hello")
    for result in ({"answer": 42}, None):
        payload = {"name": "fetch", "input_digest": DIGEST, "result": result}
        assert worker.apply("step.record", payload).result == {"recorded": True}
    first, second = rows(ledger, steps)
    assert (first.sequence, first.name, first.input_digest, first.result) == (2, "fetch", DIGEST, '{"answer":42}')
    assert (second.sequence, second.result, second.session_id) == (3, "null", worker.session_id)
    assert session(ledger, worker).revision == 3


def test_the_first_end_of_a_session_wins(ledger, worker, clock):
    at = clock.now
    assert worker.apply("session.end", {"end_reason": "done"}).result == {"ended": True, "end_reason": "done"}
    clock.advance(minutes=1)
    assert worker.apply("session.end", {"end_reason": "late"}).result == {"ended": False, "end_reason": "done"}
    s = session(ledger, worker)
    assert (s.end_reason, s.ended_at, s.revision) == ("done", at, 1)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_finish_keeps_outcome_and_result_and_ends_no_roots_session(ledger, worker, clock, outcome):
    worker.say("hello")
    clock.advance(minutes=1)
    receipt = worker.finish({"outcome": outcome.value, "result": {"why": [1, None]}})
    assert receipt.result == {"outcome": outcome, "retired": []}
    x = row(ledger, worker_executions, execution_id=worker.execution_id)
    assert (x.status, x.outcome, json.loads(x.result), x.ended_at, x.last_sequence) == (
        "terminal",
        outcome,
        {"why": [1, None]},
        clock.now,
        2,
    )
    s = session(ledger, worker)
    assert (s.ended_at, s.end_reason, s.revision) == (None, None, 1)


def test_finish_without_a_word_is_completed(ledger, worker):
    assert worker.finish({}).result == {"outcome": "completed", "retired": []}
    assert row(ledger, worker_executions, execution_id=worker.execution_id).result == "null"


def test_counters_equal_rows_however_often_things_are_sent(ledger, epoch):
    """D9: a flush that runs again must not count again."""
    worker = Worker(ledger, epoch).register()
    for number in range(5):
        for operation, payload in (
            ("transcript.append", {"messages": [{"role": "user", "content": str(number)}] * (number + 1)}),
            ("usage.record", {"model": f"m{number % 2}", "output_tokens": number}),
        ):
            request = worker.request(operation, payload)
            worker.apply(operation, payload)
            before = dump(ledger)
            assert all(worker.send(request).replayed for _ in range(2))
            assert dump(ledger) == before
    s = session(ledger, worker)
    with ledger.read() as connection:
        assert s.message_count == connection.execute(select(func.count()).select_from(messages)).scalar() == 15
        for table in (usage_records, session_models):
            assert s.output_tokens == connection.execute(select(func.sum(table.c.output_tokens))).scalar() == 10
    assert s.revision == worker.sequence == 10
