"""Who owns: the lease, the epoch, the recovery, on both databases and without a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import update

from tenure.config import Settings
from tenure.ledger import Identity, Ledger
from tenure.ledger.errors import OwnerSuperseded, Unavailable
from tenure.ledger.ownership import current
from tenure.ledger.schema import epochs, owner_lease, recovery_passes, worker_executions
from tenure.tasks import endpoints, ownership, wire
from tenure.tasks.application import APPLY, CANARY, CONTROL, RECOVER, make_app
from tenure.tasks.endpoints import add_endpoints
from tenure.tasks.owner import Owner, Reply
from tenure.tasks.ownership import EX_SUPERSEDED, Tenancy, unfit
from tests.ledger.kit import Failing, Worker, row, rows
from tests.tasks.kit import ALICE, ELSEWHERE, HERE, KEYRING, open_ledger, say

QUEUE = "owner"


@pytest.fixture
def settings(emptied_url: str, tmp_path: Path) -> Settings:
    environ = {
        "TENURE_STATE_DIR": str(tmp_path),
        "TENURE_LEDGER_URL": emptied_url,
        "TENURE_BROKER_URL": "redis://nobody.invalid",
        "TENURE_OWNER_QUEUE": QUEUE,
        "TENURE_LEASE_SECONDS": "100",
        "TENURE_UNKNOWN_GRACE_SECONDS": "3600",
    }
    return Settings.from_environ(environ)


@pytest.fixture
def ledger(emptied_url: str) -> Iterator[Ledger]:
    with open_ledger(emptied_url) as opened:
        yield opened


@pytest.fixture
def tenancy(settings: Settings) -> Callable[[], Tenancy]:
    """Makes started owners, each as if in a process of its own."""
    return lambda: Tenancy(settings)


class Left(BaseException):
    """The process has been left, with this code."""


@pytest.fixture(autouse=True)
def _leaving_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise Left(code)

    monkeypatch.setattr(ownership.os, "_exit", leave)


def own(tenancy: Tenancy, ledger: Ledger, here: Identity = HERE) -> Owner:
    owner = tenancy.try_to_own(ledger, here, KEYRING)
    assert owner is not None
    return owner


def epoch_of(ledger: Ledger) -> int:
    return max((found.epoch for found in rows(ledger, epochs)), default=0)


def run_out(ledger: Ledger) -> None:
    """Have the lease run out, by the database's own clock."""
    with ledger.store.write() as connection:
        connection.execute(update(owner_lease).values(expires=owner_lease.c.expires - 1000))


@pytest.fixture
def gone(spawn) -> Identity:
    """A process of this host that is proven dead."""
    process = spawn("true")
    process.wait(within=10)
    return replace(HERE, pid=process.pid, birth="ticks:1")


# Becoming the owner.


def test_the_first_owns_and_a_second_stands_by_and_begins_nothing(tenancy, ledger):
    first, second = tenancy(), tenancy()
    owner = own(first, ledger)
    assert (owner.epoch, first.owner, first.owns) == (1, owner, True)
    assert second.try_to_own(ledger, HERE, KEYRING) is None
    assert (second.owns, epoch_of(ledger)) == (False, 1)
    lease = current(ledger.store, QUEUE)
    assert lease is not None
    assert (lease.holder, lease.identity) == (first.holder, HERE)
    assert 90 < lease.expires_in <= 100


def test_who_stands_by_has_no_owner(tenancy):
    with pytest.raises(RuntimeError):
        _ = tenancy().owner


def test_of_many_started_at_once_one_owns(tenancy, ledger):
    start, owners, idle = threading.Barrier(6), [], []

    def attempt() -> None:
        one = tenancy()
        start.wait()
        (owners if one.try_to_own(ledger, HERE, KEYRING) else idle).append(one)

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(owners), len(idle), epoch_of(ledger)) == (1, 5, 1)


def test_who_becomes_the_owner_recovers_before_it_does_anything_else(tenancy, ledger):
    worker = Worker(ledger, ledger.begin_epoch("an earlier one")).register()
    worker.say("hello")
    child = worker.reserve()
    owner = own(tenancy(), ledger)
    stands = {x.execution_id: (x.status, x.status_reason) for x in rows(ledger, worker_executions)}
    assert stands[worker.execution_id] == ("unknown", "owner_restarted")
    assert stands[child.execution_id] == ("terminal", "owner_restarted")
    assert row(ledger, epochs, epoch=owner.epoch).recovered_at is not None


def test_an_epoch_tells_who_began_it(tenancy, ledger):
    one = tenancy()
    own(one, ledger)
    assert row(ledger, epochs).owner.endswith(f":{HERE.pid}:{one.holder[:8]}")


def test_a_lease_that_ran_out_is_taken_and_the_older_owner_is_fenced(tenancy, ledger):
    first, second = tenancy(), tenancy()
    old = own(first, ledger, ELSEWHERE)
    worker = Worker(ledger, old.epoch, principal="alice").register()
    run_out(ledger)
    new = own(second, ledger)
    assert new.epoch == old.epoch + 1
    assert new.careful  # the older one has not left in good order
    with pytest.raises(OwnerSuperseded):
        ledger.apply(old.epoch, worker.request("transcript.append", say("late")))


def test_the_lease_of_a_process_that_is_proven_dead_need_not_run_out(tenancy, ledger, gone):
    own(tenancy(), ledger, gone)
    assert own(tenancy(), ledger).epoch == 2


@pytest.mark.parametrize("other", [HERE, ELSEWHERE, replace(HERE, birth="unreadable")], ids=["alive", "far", "unknown"])
def test_the_lease_of_a_process_that_may_live_is_left_alone(tenancy, ledger, other):
    own(tenancy(), ledger, other)
    assert tenancy().try_to_own(ledger, HERE, KEYRING) is None
    assert epoch_of(ledger) == 1


def test_owners_of_other_queues_hold_other_leases(tenancy, ledger, settings):
    own(tenancy(), ledger)
    other = Tenancy(replace(settings, owner_queue="another"))
    assert other.try_to_own(ledger, HERE, KEYRING) is not None


def test_a_database_that_fails_before_the_recovery_is_tried_again_under_a_new_epoch(tenancy, ledger):
    one = tenancy()
    with Failing(ledger, "commit", number=3) as failing, pytest.raises(Unavailable):
        one.try_to_own(ledger, HERE, KEYRING)
    assert failing.failed
    owner = own(one, ledger)
    assert owner.epoch == epoch_of(ledger)
    assert row(ledger, epochs, epoch=owner.epoch).recovered_at is not None


def test_a_database_that_fails_at_once_leaves_nothing(tenancy, ledger):
    one = tenancy()
    with Failing(ledger, "commit"), pytest.raises(Unavailable):
        one.try_to_own(ledger, HERE, KEYRING)
    assert (one.owns, epoch_of(ledger), current(ledger.store, QUEUE)) == (False, 0, None)


# Staying it.


def test_renewing_keeps_the_lease(tenancy, ledger):
    one = tenancy()
    own(one, ledger)
    run_out(ledger)
    one.renew()
    lease = current(ledger.store, QUEUE)
    assert lease is not None
    assert lease.holder == one.holder
    assert lease.expires_in > 90


def test_an_owner_that_has_lost_its_lease_leaves(tenancy, ledger, caplog):
    first, second = tenancy(), tenancy()
    own(first, ledger)
    run_out(ledger)
    own(second, ledger)
    with pytest.raises(Left) as left:
        first.renew()
    assert left.value.args == (EX_SUPERSEDED,)
    assert "another owner holds the lease" in caplog.text
    second.renew()


def test_an_owner_whose_epoch_has_ended_leaves(tenancy, ledger, caplog):
    one = tenancy()
    own(one, ledger)
    ledger.begin_epoch("somebody who took no lease")
    with pytest.raises(Left):
        one.renew()
    assert "epoch 1 has ended, 2 is current" in caplog.text


def test_an_owner_does_not_leave_because_the_database_is_away(tenancy, ledger):
    one = tenancy()
    own(one, ledger)
    with Failing(ledger, "before_cursor_execute"), pytest.raises(Unavailable):
        one.renew()
    one.renew()


# Leaving in good order.


def test_after_a_release_the_next_owns_at_once_and_need_not_be_careful(tenancy, ledger, emptied_url):
    first = tenancy()
    with open_ledger(emptied_url) as its_own:
        own(first, its_own)
        first.release()
    assert not first.owns
    assert row(ledger, epochs).released_at is not None
    assert current(ledger.store, QUEUE) is None
    owner = own(tenancy(), ledger)
    assert (owner.epoch, owner.careful) == (2, False)


def test_a_release_happens_once_and_only_for_an_owner(tenancy, ledger):
    first, standby = tenancy(), tenancy()
    own(first, ledger)
    standby.release()
    assert current(ledger.store, QUEUE) is not None
    first.release()
    second = tenancy()
    own(second, ledger)
    first.release()
    lease = current(ledger.store, QUEUE)
    assert lease is not None
    assert lease.holder == second.holder


def test_who_was_replaced_releases_nothing_of_its_successor(tenancy, ledger, caplog):
    first, second = tenancy(), tenancy()
    own(first, ledger)
    run_out(ledger)
    own(second, ledger)
    first.release()
    assert "not released" in caplog.text
    assert row(ledger, epochs, epoch=2).released_at is None
    second.renew()


def test_a_database_that_is_away_does_not_keep_an_owner_from_leaving(tenancy, ledger, caplog):
    one = tenancy()
    own(one, ledger)
    with Failing(ledger, "commit"):
        one.release()
    assert not one.owns
    assert "not released" in caplog.text


# Which worker can be an owner.


THREADS, SOLO = "celery.concurrency.thread", "celery.concurrency.solo"


@pytest.mark.parametrize("pool", [THREADS, SOLO])
def test_a_worker_of_the_owner_queue_alone_one_at_a_time_in_its_own_process_is_fit(pool):
    assert unfit([QUEUE], 1, pool, QUEUE) is None


@pytest.mark.parametrize(
    ("queues", "concurrency", "pool", "told"),
    [
        ([QUEUE, "work"], 1, THREADS, "alone, not work too"),
        (["work", QUEUE, "mail"], 1, THREADS, "alone, not mail, work too"),
        ([QUEUE], 2, THREADS, "use -c 1"),
        ([QUEUE], 0, THREADS, "use -c 1"),
        ([QUEUE], 1, "celery.concurrency.prefork", "use -P threads"),
        ([QUEUE], 1, "celery.concurrency.gevent", "pool gevent"),
    ],
)
def test_any_other_worker_is_not_and_is_told_what_to_change(queues, concurrency, pool, told):
    problem = unfit(queues, concurrency, pool, QUEUE)
    assert problem is not None
    assert told in problem


# The tasks of an owner.


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Reply]:
    sent: list[Reply] = []
    monkeypatch.setattr(endpoints, "publish", lambda _app, reply: sent.append(reply))
    return sent


@pytest.fixture
def owning(tenancy, ledger, settings, published) -> tuple[Callable[..., Any], Tenancy, Ledger]:
    """An owner's tasks, to be called by name as a worker does."""
    app = make_app(settings)
    one = tenancy()
    own(one, ledger)
    add_endpoints(app, settings, one)
    app.finalize()
    return lambda name, *args, **kwargs: app.tasks[name](*args, **kwargs), one, ledger


def test_an_answer_is_published_and_the_task_says_so_only(owning, published):
    call, tenancy, ledger = owning
    worker = Worker(ledger, tenancy.owner.epoch, principal="alice", identity=HERE).register()
    message = wire.apply(
        epoch=worker.epoch,
        execution=worker.execution_id,
        session=worker.session_id,
        generation=1,
        first=1,
        operations=[("session.end", '{"end_reason":"what nobody may read"}')],
        claim=worker.claim,
        principal=ALICE,
        request="tag",
        reply_to=f"tenure.reply.{'a' * 32}",
    )
    assert call(APPLY, message) == "answered"
    (reply,) = published
    (answer,) = wire.read_reply(reply.message, ALICE)[1]
    assert (reply.reply_to, answer.value["ended"]) == (message["reply_to"], True)


def test_whatever_arrives_is_not_answered_and_does_no_harm(owning, published, subtests):
    call, _tenancy, _ledger = owning
    for name in (APPLY, CONTROL):
        for args in ((), (None,), ({"a": 1},), ("text", 1, 2)):
            with subtests.test(f"{name} {args}"):
                assert call(name, *args, more=1) == "done"
    assert published == []


def test_a_canary_is_heard(owning):
    call, tenancy, _ledger = owning
    before = tenancy.last_consumed
    assert call(CANARY) == "done"
    assert tenancy.last_consumed > before


def test_recovery_runs_and_its_report_stays_in_the_ledger(owning):
    call, _tenancy, ledger = owning
    before = len(rows(ledger, recovery_passes))
    assert call(RECOVER) == "done"
    assert len(rows(ledger, recovery_passes)) == before + 1


def test_a_recovery_that_the_database_cannot_serve_now_is_left_to_the_next(owning):
    call, _tenancy, ledger = owning
    with Failing(ledger, "commit"):
        assert call(RECOVER) == "unavailable"
    assert call(RECOVER) == "done"


def test_applications_of_one_process_keep_their_tasks_apart(owning, settings, tenancy):
    call, first, _ledger = owning
    app = make_app(settings)
    second = tenancy()
    add_endpoints(app, settings, second)
    app.finalize()
    before = (first.last_consumed, second.last_consumed)
    with pytest.raises(RuntimeError):
        app.tasks[CANARY]()
    assert first.last_consumed == before[0]
    assert second.last_consumed > before[1]
    assert call(CANARY) == "done"


def test_an_owner_that_finds_itself_superseded_leaves(owning):
    call, _tenancy, ledger = owning
    ledger.begin_epoch("a newer one")
    with pytest.raises(Left) as left:
        call(RECOVER)
    assert left.value.args == (EX_SUPERSEDED,)
