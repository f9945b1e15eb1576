"""A worker is ready for its next order: it fetches none that it cannot begin, is connected before one comes, and takes
up again what it was declared gone from while it only stood still."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import signals
from celery.concurrency import get_implementation

from tenure import Run, Settings, workflow
from tenure.ledger import reads
from tenure.ledger.errors import ConfigurationError
from tenure.ledger.recovery import STOPPED
from tenure.tasks.attendance import Attendance
from tenure.tasks.main import complete_app
from tenure.testing import Workbench
from tenure.workflows import process
from tenure.workflows.worker import run_order


class _Worker:
    """What Celery's signal names as its sender, with what is read of it."""

    def __init__(self, app) -> None:
        self.app, self.pool_cls = app, get_implementation("prefork")


def _app(broker: str):
    settings = {"TENURE_STATE_DIR": "/nowhere", "TENURE_BROKER_URL": broker}
    return complete_app(Settings.from_environ(settings))


def _started(app, queue: str):
    """Have the application believe that a worker of this queue starts."""
    app.select_queues([queue])
    worker = _Worker(app)
    signals.worker_init.send(sender=worker)
    return worker


def test_a_worker_fetches_no_order_behind_a_workflow_where_the_broker_allows():
    redis = _app("redis://127.0.0.1:1/0")
    _started(redis, "work")
    assert redis.conf.worker_disable_prefetch is True
    # On others Celery warns at each start that it cannot.
    assert _app("amqp://127.0.0.1:1//").conf.worker_disable_prefetch is False


def test_an_owner_has_its_next_message_at_hand():
    app = _app("redis://127.0.0.1:1/0")
    worker = _started(app, "owner")
    assert app.conf.worker_disable_prefetch is False
    assert worker.pool_cls is get_implementation("threads")


def test_a_dead_process_of_the_pool_is_not_taken_for_busy_for_long():
    """With Celery's own five seconds, every second takeover in the measurement waits for another worker to start."""
    app = _app("redis://127.0.0.1:1/0")
    assert Attendance in app.steps["worker"]
    looked = []

    class Hub:
        def call_repeatedly(self, seconds: float, look) -> None:
            assert seconds <= 0.25
            look()

    worker = _started(app, "work")
    worker.pool = SimpleNamespace(maintain_pool=lambda: looked.append("pool"))
    step = object.__new__(Attendance)
    step.register_with_event_loop(worker, Hub())
    worker.pool_cls = get_implementation("threads")
    step.register_with_event_loop(worker, Hub())
    assert looked == ["pool"]


def test_a_worker_process_connects_as_it_begins(monkeypatch):
    made = []
    monkeypatch.setattr(process, "current_client", lambda: made.append("client"))
    signals.worker_process_init.send(sender=None)
    assert made == ["client"]


def test_one_that_cannot_connect_begins_all_the_same(monkeypatch, caplog):
    def refuse() -> None:
        raise ConfigurationError("no key file")

    monkeypatch.setattr(process, "current_client", refuse)
    with caplog.at_level(logging.INFO, process.__name__):
        results = signals.worker_process_init.send(sender=None)
    assert not [result for _, result in results if isinstance(result, Exception)]
    assert "no key file" in caplog.text


@pytest.fixture
def bench(tmp_path):
    with Workbench(tmp_path) as bench:
        yield bench


stands_still = []  # what the workflow below does in its second step


def _twice(number: int) -> int:
    if number == 2 and stands_still:
        stands_still.pop()()
    return 2 * number


@workflow("test.readiness")
def doubled(run: Run) -> list[int]:
    return [run.step(_twice, number) for number in (1, 2, 3)]


def test_a_process_that_stood_still_goes_on_where_nobody_else_has(bench):
    orders = []
    bench.client.owner.send = lambda sent: orders.extend(sent) or []
    submitted = doubled.submit("request")
    identity = replace(bench.client.identity, host="elsewhere")
    stands_still.append(lambda: bench.client.owner.bury(identity, STOPPED))
    assert run_order(bench.client.beside(identity), orders[0]) == "stale_generation"
    assert len(orders) == 2
    assert run_order(bench.client.beside(identity), orders[1]) == "completed"
    assert submitted.state().result == [2, 4, 6]
    with bench.ledger.read() as connection:
        assert reads.execution(connection, submitted.execution_id).generation == 1  # nobody else has held it
