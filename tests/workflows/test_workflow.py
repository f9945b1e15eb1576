"""What the decorator makes, how a worker runs it, and what its handle refuses."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from tenure.ledger import Outcome, Status
from tenure.ledger.errors import AdmissionConflict, ConfigurationError, InvalidParams, PermissionDenied
from tenure.tasks.orders import Order
from tenure.workflows import Run, registry, worker, workflow
from tenure.workflows.errors import HandleClosed, UnknownWorkflow
from tenure.workflows.worker import run_order
from tests.workflows.bench import all_of, operations, reasons, said, stands, user


@workflow(name="wf.greet", queue="slow", profile="shop", max_attempts=2)
def greet(run: Run, name: str, *, often: int = 1) -> str:
    """Greet."""
    for _ in range(often):
        run.append(user(f"Hello {name}"))
    return run.session_id


# The decorator.


def test_a_workflow_is_known_by_its_name_with_its_options():
    assert registry.find("wf.greet") is greet
    assert (greet.queue, greet.profile, greet.max_attempts, greet.is_async) == ("slow", "shop", 2, False)


def bare(run: Run) -> int:
    return 1


def test_without_a_name_it_has_its_functions():
    made = workflow(bare)
    assert made.name == f"{__name__}.bare"
    assert made.queue is None


def test_called_it_is_the_function_itself():
    class Recorder:
        session_id = "s"

        def append(self, messages: Any) -> None:
            self.said = messages

    run = Recorder()
    assert greet(run, "Ann") == "s"
    assert run.said == user("Hello Ann")


def test_a_name_that_is_no_id_is_refused():
    def local(run: Run) -> None: ...

    with pytest.raises(InvalidParams) as refused:
        workflow(local)  # its qualified name has <locals>
    assert "workflow" in refused.value.detail


def test_a_taken_name_is_refused_and_the_first_stays():
    with pytest.raises(ConfigurationError) as refused:
        workflow(name="wf.greet")(bare)
    assert "wf.greet" in refused.value.detail
    assert "test_workflow.greet" in refused.value.detail
    assert registry.find("wf.greet") is greet


def test_a_module_that_is_loaded_again_defines_its_workflows_anew():
    def define(number: int) -> Any:
        def flow(run: Run) -> int:
            return number

        return workflow(name="wf.again")(functools.wraps(flow)(functools.partial(flow)))

    define(1)
    second = define(2)
    assert registry.find("wf.again") is second


def test_an_unknown_workflow_is_its_own_error(bench):
    with pytest.raises(UnknownWorkflow) as unknown:
        registry.find("wf.nowhere")
    assert "wf.nowhere" in unknown.value.detail
    assert "TENURE_IMPORTS" in unknown.value.detail


def test_an_order_of_an_unknown_workflow_takes_hold_of_nothing(bench):
    with pytest.raises(UnknownWorkflow):
        run_order(bench.client, Order("r", "wf.nowhere", "", "{}", "x1", "s1", "k", "default", 1, ""))
    assert all_of(bench) == []


def test_it_is_a_task_of_every_celery_application():
    apps = [Celery(f"app{number}", set_as_current=False) for number in range(2)]
    workflow(name="wf.greet", queue="slow", profile="shop", max_attempts=2)(greet.function)
    for app in apps:
        app.finalize()
        task = app.tasks["wf.greet"]
        assert (task.acks_late, task.ignore_result) == (False, True)
        assert task.app is app


def test_the_task_runs_the_order_with_this_process_client(bench, monkeypatch):
    app = Celery("app", set_as_current=False)
    app.finalize()
    orders = []
    bench.client.owner.send = lambda sent: orders.extend(sent) or []
    submission = greet.submit("r1", "Ann")
    (order,) = orders
    assert (order.workflow, order.queue, order.profile, order.parent) == ("wf.greet", "slow", "shop", "")
    # The workbench is the owner's process as well; a worker there has an identity that it can be told apart by.
    told = app.tasks["wf.greet"](order=order.to_json())
    assert told == "completed"
    assert submission.state().result == submission.session_id
    assert app.tasks["wf.greet"](order=order.to_json()) == "ended before"
    assert said(bench, submission.session_id) == ["Hello Ann"]


# How it ends.


def test_its_result_and_its_session_stay(bench):
    state = bench.run(greet, "Ann", often=2)
    (execution,) = all_of(bench)
    assert (state.status, state.outcome, state.reason) == (Status.TERMINAL, Outcome.COMPLETED, "finished")
    assert state.result == execution.session_id
    assert said(bench, execution.session_id) == ["Hello Ann", "Hello Ann"]
    assert execution.profile == "shop"
    with bench.ledger.read() as connection:
        from tenure.ledger.reads import session

        assert session(connection, execution.session_id).source == "workflow"


def test_what_it_raises_is_its_failure(bench):
    @workflow(name="wf.raises")
    def raises(run: Run) -> None:
        run.append(user("before"))
        raise LookupError("nothing there")

    state = bench.run(raises)
    assert (state.outcome, state.reason) == (Outcome.FAILED, "finished")
    assert state.result == {"error": {"type": "LookupError", "message": "nothing there"}}


@pytest.mark.parametrize("value", [{1}, (1,), float("nan"), "x" * (4 * 2**20)], ids=["set", "tuple", "nan", "big"])
def test_a_result_that_cannot_be_kept_is_its_failure_and_not_its_silence(bench, value):
    @workflow(name="wf.unfit")
    def unfit(run: Run) -> Any:
        return value

    state = bench.run(unfit)
    assert state.outcome is Outcome.FAILED
    assert state.result["error"]["type"] == "InvalidParams"
    assert "payload" in state.result["error"]["message"]


def test_it_may_finish_itself_and_what_it_returns_then_is_left_aside(bench):
    @workflow(name="wf.finishes")
    def finishes(run: Run) -> str:
        run.finish(outcome=Outcome.INTERRUPTED, result="mine")
        assert run.finished
        return "left aside"

    state = bench.run(finishes)
    assert (state.outcome, state.result) == (Outcome.INTERRUPTED, "mine")


def test_what_it_raises_after_its_end_changes_nothing(bench):
    @workflow(name="wf.raises_late")
    def raises_late(run: Run) -> None:
        run.finish(result="mine")
        raise LookupError

    state = bench.run(raises_late)
    assert (state.outcome, state.result) == (Outcome.COMPLETED, "mine")


@pytest.mark.parametrize("error", [PermissionDenied("other_principal"), AdmissionConflict("request_reused")], ids=repr)
def test_a_refusal_that_is_not_of_its_own_hold_is_a_failure_like_any_other(bench, error):
    @workflow(name="wf.refused")
    def refused(run: Run) -> None:
        raise error

    state = bench.run(refused)
    assert state.outcome is Outcome.FAILED
    assert state.result["error"] == {"type": type(error).__name__, "message": error.explain()}


def test_it_waits_for_an_owner_that_is_away_as_long_as_it_takes(bench, monkeypatch):
    waited = []

    @workflow(name="wf.patient")
    def patient(run: Run) -> None:
        waited.append(run.within)

    asked = type(bench.client).ask

    def ask(self: Any, kind: Any, body: Any, *, within: float = 60.0) -> Any:
        if kind.value == "hold":
            waited.append(within)
        return asked(self, kind, body, within=within)

    monkeypatch.setattr(type(bench.client), "ask", ask)
    bench.run(patient)
    assert waited == [worker.PATIENT_SECONDS] * 2


def test_limits_of_attempts_end_it_with_that_reason(bench):
    for nth in (1, 2):
        bench.crash_at("before_journal", nth=nth)
    state = bench.run(greet, "Ann")
    assert (state.outcome, state.reason) == (Outcome.INTERRUPTED, "attempts_exhausted")
    assert bench.crashes == 2
    (execution,) = all_of(bench)
    assert said(bench, execution.session_id) == []


def test_during_a_drain_what_was_not_begun_waits_and_what_was_begun_goes_on(bench):
    @workflow(name="wf.drained")
    def drained(run: Run) -> str:
        run.append(user("a"))
        bench.ledger.drain("an upgrade")
        run.append(user("b"))
        return "done"

    bench.crash_at("before_journal", nth=3)  # of its end: it is taken over while the runtime drains
    assert bench.run(drained).result == "done"
    assert bench.crashes == 1
    order = Order("r2", "wf.drained", "", '{"args":[],"kwargs":{}}', "x2", "s2", "x2", "default", 1, "")
    assert run_order(bench.client, order) == "an upgrade"
    assert len(all_of(bench)) == 1


# Taken over from a process that was only stopped.


@pytest.mark.parametrize("disks", [1, 2], ids=["on one machine", "on two"])
def test_a_process_that_was_only_stopped_cannot_write_a_byte_when_it_goes_on(tmp_path, migrated, disks):
    from tests.workflows.bench import assert_lawful, workbench

    reached, let_go, lives = threading.Event(), threading.Event(), []
    refused: list[Any] = []

    @workflow(name="wf.stopped")
    def stopped(run: Run) -> int:
        lives.append(run)
        mine = len(lives)
        run.append(user("once"))
        if mine == 1:
            reached.set()
            let_go.wait(20)
            try:
                run.append(user("a byte"))
            except Exception as error:
                refused.append(error)
                raise
        run.append(user("twice"))
        return mine

    with workbench(tmp_path / "bench", migrated, disks=disks) as bench:
        try:
            submission = stopped.submit("r1")
            assert reached.wait(20)
            bench.client.owner.bury(stands(bench, submission.execution_id).identity, "stopped")
            state = submission.wait(20)
        finally:
            let_go.set()
        first, second = bench._orders
        assert first.result(20) == "stale_generation"
        assert second.result(20) == "completed"
        assert state.result == 2
        assert [error.reason for error in refused] == ["stale_generation"]
        assert said(bench, submission.session_id) == ["once", "twice"]
        assert "process_stopped" in reasons(bench, submission.execution_id)
        assert stands(bench, submission.execution_id).generation == 2
        assert_lawful(bench)


def test_the_same_order_twice_in_one_process_runs_once(bench):
    reached, let_go = threading.Event(), threading.Event()

    @workflow(name="wf.twice")
    def twice(run: Run) -> None:
        reached.set()
        let_go.wait(20)

    orders: list[Order] = []
    bench.client.owner.send = lambda sent: orders.extend(sent) or []
    twice.submit("r1")
    first = bench._pool.submit(run_order, bench.client, orders[0])
    assert reached.wait(20)
    assert run_order(bench.client, orders[0]) == "running here already"
    other = bench.client.beside(replace(bench.client.identity, host="elsewhere"))
    assert run_order(other, orders[0]) == "held"
    let_go.set()
    assert first.result(20) == "completed"


# A handle that may not be used.


def writes(run: Run) -> list[Any]:
    return [
        lambda: run.append(user("x")),
        lambda: run.step(len, "x"),
        lambda: run.delegate(greet, "Ann"),
        lambda: run.gather([]),
        run.finish,
        lambda: run.record_usage("m"),
    ]


def test_after_its_end_every_use_of_the_handle_is_its_own_error(bench):
    kept: list[Run] = []

    @workflow(name="wf.finished")
    def finished(run: Run) -> None:
        kept.append(run)
        run.finish()
        for write in writes(run):
            with pytest.raises(HandleClosed) as closed:
                write()
            assert "was finished" in closed.value.detail

    bench.run(finished)
    (execution,) = all_of(bench)
    assert operations(bench, execution.execution_id) == ["execution.finish"]
    with pytest.raises(HandleClosed):
        kept[0].append(user("x"))


def test_a_handle_that_was_closed_is_its_own_error(bench):
    @workflow(name="wf.closed")
    def closed(run: Run) -> None:
        run.close()
        for write in writes(run):
            with pytest.raises(HandleClosed) as told:
                write()
            assert "was closed" in told.value.detail

    order: list[Order] = []
    bench.client.owner.send = lambda sent: order.extend(sent) or []
    closed.submit("r1")
    with pytest.raises(HandleClosed):  # nor can it be finished any more
        run_order(bench.client, order[0])


def test_a_forked_child_may_not_use_the_handle(bench, monkeypatch):
    @workflow(name="wf.forked")
    def forked(run: Run) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: -1)
            for write in writes(run):
                with pytest.raises(HandleClosed) as told:
                    write()
                assert "forked" in told.value.detail

    assert bench.run(forked).outcome is Outcome.COMPLETED


def test_children_left_behind_are_an_explicit_choice_of_three(bench):
    @workflow(name="wf.choice")
    def choice(run: Run) -> None:
        with pytest.raises(InvalidParams) as refused:
            run.finish(children="leave")
        assert "retire, wait or refuse" in refused.value.detail

    assert bench.run(choice).outcome is Outcome.COMPLETED
