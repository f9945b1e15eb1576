"""A request starts its workflow once, however often it is submitted, whatever is lost on the way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tenure.ledger import Outcome, Status
from tenure.ledger.errors import AdmissionConflict, ConfigurationError, InvalidParams, NotFound, PermissionDenied
from tenure.tasks.keys import Capability, Keyring, Principal
from tenure.tasks.orders import Order
from tenure.workflows import Run, Submission, workflow
from tenure.workflows.process import current_client, using
from tests.workflows.bench import all_of, user

ran: list[Any] = []


@workflow(name="submission.keep")
def keep(run: Run, value: Any, *, more: int = 0) -> Any:
    ran.append(value)
    run.append(user("ran"))
    return [value, more]


@workflow(name="submission.other")
def other(run: Run, value: Any) -> None: ...


@pytest.fixture(autouse=True)
def _none_ran() -> None:
    ran.clear()


def test_a_request_is_run_once_however_often_it_is_submitted(bench):
    with ThreadPoolExecutor(8) as pool:
        submissions = list(pool.map(lambda _n: keep.submit("r1", {"b": 1, "a": [2]}, more=3), range(16)))
    assert len({(s.execution_id, s.session_id) for s in submissions}) == 1
    state = submissions[0].wait(20)
    assert state.result == [{"a": [2], "b": 1}, 3]
    assert keep.submit("r1", {"a": [2], "b": 1}, more=3).wait(20) == state
    assert len(ran) == len(all_of(bench)) == 1


def test_before_a_worker_has_begun_it_there_is_no_status(bench):
    bench.client.owner.send = lambda orders: []
    submission = keep.submit("r1", 1)
    state = submission.state()
    assert (state.status, state.outcome, state.reason, state.result) == (None, None, "submitted", None)
    with pytest.raises(TimeoutError) as told:
        submission.wait(0.03)
    assert "r1" in str(told.value)


def test_while_it_runs_it_has_its_status(bench):
    reached, let_go = threading.Event(), threading.Event()

    @workflow(name="submission.slow")
    def slow(run: Run) -> int:
        run.append(user("begun"))
        reached.set()
        let_go.wait(20)
        return 1

    submission = slow.submit("r1")
    assert reached.wait(20)
    assert submission.state().status is Status.RUNNING
    let_go.set()
    assert submission.wait(20).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("again", [lambda: keep.submit("r1", 2), lambda: other.submit("r1", 1)], ids=["args", "name"])
def test_a_request_reused_with_something_else_is_refused_and_the_first_stands(bench, again):
    first = keep.submit("r1", 1)
    with pytest.raises(AdmissionConflict) as refused:
        again()
    assert (refused.value.detail, refused.value.data) == ("request_reused", {"workflow": "submission.keep"})
    assert first.wait(20).result == [1, 0]
    assert ran == [1]


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "ä"])
def test_a_request_id_that_is_none_is_refused(bench, request_id):
    with pytest.raises(InvalidParams) as refused:
        keep.submit(request_id, 1)
    assert "request_id" in refused.value.detail


@pytest.mark.parametrize("value", [{1}, (1,), object(), float("nan"), "x" * (4 * 2**20)], ids=lambda v: f"{v!r:.10}")
def test_arguments_that_are_not_json_or_too_big_are_refused_by_the_workflows_name(bench, value):
    with pytest.raises(InvalidParams) as refused:
        keep.submit("r1", value)
    assert "submission.keep" in refused.value.detail
    assert all_of(bench) == []


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"less": 1})])
def test_arguments_that_do_not_fit_the_function_are_refused(bench, args, kwargs):
    with pytest.raises(ConfigurationError) as refused:
        keep.submit("r1", *args, **kwargs)
    assert "submission.keep" in refused.value.detail


@pytest.mark.parametrize("attempts", [0, 1001])
def test_a_limit_of_attempts_out_of_range_is_refused(bench, attempts):
    limited = workflow(name="submission.limited", max_attempts=attempts)(keep.function)
    with pytest.raises(InvalidParams) as refused:
        limited.submit("r1", 1)
    assert "max_attempts" in refused.value.detail


# What is lost.


def orders_of(bench: Any) -> list[Order]:
    """Keep what the owner sends instead of having it worked on."""
    orders: list[Order] = []
    bench.client.owner.send = lambda sent: orders.extend(sent) or []
    return orders


def test_a_lost_order_is_sent_again_after_a_patience_that_doubles(bench):
    orders = orders_of(bench)
    keep.submit("r1", 1)
    sent_at = [0]
    for second in range(1, 600):
        bench.clock.advance(seconds=1)
        bench.client.owner.send_due()
        if len(orders) > len(sent_at):
            sent_at.append(second)
    assert sent_at == [0, 60, 180, 420]
    assert len(set(orders)) == 1


def test_what_the_broker_does_not_take_is_due_again_at_once(bench):
    orders = orders_of(bench)
    keeps = bench.client.owner.send
    bench.client.owner.send = lambda sent: [order.request for order in sent]
    keep.submit("r1", 1)
    bench.client.owner.send = keeps
    assert orders == []
    bench.client.owner.send_due()
    assert [order.request for order in orders] == ["r1"]
    bench.client.owner.send_due()
    assert len(orders) == 1


# Another principal's.


def test_another_principal_neither_gets_nor_sees_a_request(bench):
    orders_of(bench)
    keep.submit("r1", 1)
    client = bench.client
    stranger = Principal.of("stranger", b"s" * 32)
    client.owner.keyring = Keyring({"local": client.principal, "stranger": stranger})
    theirs = client.beside(replace(client.identity, host="elsewhere"))
    client._transport.principal = theirs.principal = stranger
    with using(theirs):
        assert current_client() is theirs
        with pytest.raises(PermissionDenied) as refused:
            keep.submit("r1", 1)
        assert refused.value.detail == "other_principal"
        with pytest.raises(NotFound):
            Submission(theirs, "r1", "", "").state()
        mine = keep.submit("r2", 1)
        assert mine.state().reason == "submitted"


def test_a_principal_without_the_capability_may_not_submit(bench):
    client = bench.client
    weak = Principal.of("weak", b"w" * 32, frozenset(Capability) - {Capability.SUBMIT})
    client.owner.keyring = Keyring({"weak": weak})
    client._transport.principal = weak
    with pytest.raises(PermissionDenied) as refused:
        keep.submit("r1", 1)
    assert refused.value.detail == "capability_submit"
