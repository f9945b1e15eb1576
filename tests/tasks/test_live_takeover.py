"""One owner follows another: killed, ended, frozen, or while both believe that they own."""

from __future__ import annotations

import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest

from tenure.ledger import ownership
from tenure.ledger.store import Store
from tenure.tasks.liveness import own_identity
from tenure.tasks.ownership import EX_SUPERSEDED
from tenure.workflows import Execution
from tests.services import wait_until
from tests.tasks.live import Fleet, kill, numbered, says, submit

logger = logging.getLogger(__name__)

LONG = 3600.0  # seconds of a lease that no test waits out
WORK = "Task tenure."  # how a worker's log begins to tell of a message that it consumed


@dataclass(frozen=True)
class Place:
    """Where a deployment runs: fixtures, and whether its standby is on the owner's host."""

    database: str
    broker: str
    lease: float
    host: str | None

    def __str__(self) -> str:
        return f"{self.database}-{self.broker}-{self.host or 'same_host'}"


# A standby on the same host sees that the process is dead; elsewhere the lease has to run out.
PLACES = (
    Place("sqlite_url", "redis_url", LONG, None),
    Place("postgres_url", "redis_url", 1, "elsewhere"),
    Place("postgres_url", "rabbitmq_url", LONG, None),
)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_standby_takes_over_from_an_owner_that_was_killed(request, spawn, tmp_path, place):
    fleet = Fleet(
        spawn,
        tmp_path,
        ledger=request.getfixturevalue(place.database),
        broker=request.getfixturevalue(place.broker),
        owner_queue=request.getfixturevalue("unique_name"),
        lease_seconds=place.lease,
    )
    first = fleet.owner()
    standby = fleet.standby(env={"TENURE_HOST_ID": place.host} if place.host else None)
    with fleet.run() as run:
        receipts = submit(run, numbered(200))
        receipts[20].result(30)
        assert WORK not in standby.output
        killed = time.monotonic()
        kill(first)
        unanswered = [receipt for receipt in receipts if not receipt.done()]
        assert unanswered
        unanswered[0].result(30)
        took = time.monotonic() - killed
        run.flush()
        assert run.epoch == 2
        run.finish()
    logger.info("from kill to first receipt: %.2f s on %s", took, place)
    assert took < 10
    assert WORK in standby.output
    assert not fleet.released(1)
    assert fleet.transcript() == numbered(200)
    fleet.assert_lawful()


def test_an_owner_that_is_told_to_end_finishes_and_is_followed_at_once(spawn, tmp_path, postgres_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url, lease_seconds=LONG)
    first = fleet.owner()
    standby = fleet.standby(env={"TENURE_HOST_ID": "elsewhere"})  # from there nobody can see that it has ended
    with fleet.run() as run:
        receipts = submit(run, numbered(200))
        receipts[20].result(30)
        first.signal(signal.SIGTERM)
        assert first.wait(within=15) == 0
        assert fleet.released(1)
        standby.says("owner of epoch 2", within=2)
        run.flush()
        run.finish()
    assert fleet.transcript() == numbered(200)
    assert "Traceback" not in first.output
    fleet.assert_lawful()


def test_a_standby_consumes_nothing_and_ends_when_it_is_told_to(spawn, tmp_path, sqlite_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    with closing(Store(sqlite_url)) as store:
        assert ownership.take(store, "owner", "this test", own_identity(), seconds=LONG) is None
        standby = fleet.standby()
        with fleet.client() as client, ThreadPoolExecutor(1) as caller:
            starting = caller.submit(Execution.start, client, "s", within=30)
            wait_until(lambda: fleet.waiting() >= 4, within=20, what="the registration is sent again and again")
            assert WORK not in standby.output
            standby.signal(signal.SIGTERM)
            assert standby.wait(within=2) == 0
            assert fleet.waiting() >= 4
            assert fleet.epoch == 0
            later = fleet.standby()
            ownership.give_up(store, "owner", "this test")
            with starting.result(30) as run:
                says(run, "hello")
            assert WORK in later.output
    assert "Traceback" not in standby.output + later.output
    assert fleet.transcript() == ["hello"]
    assert fleet.epoch == 1


def test_an_owner_that_was_frozen_leaves_and_changes_nothing(spawn, tmp_path, ledger_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=ledger_url, broker=redis_url, lease_seconds=1)
    first = fleet.owner()
    with fleet.run() as run:
        says(run, "before")
        fleet.freeze(first)
        second = fleet.worker()
        late = submit(run, ["while it is frozen"])  # Redis hands this to the frozen one, which will read it
        second.says("owner of epoch 2", within=20)
        late[0].result(30)
        before = fleet.snapshot()
        first.signal(signal.SIGCONT)
        assert first.wait(within=10) == EX_SUPERSEDED
        assert fleet.snapshot() == before
        says(run, "after")
        run.finish()
    assert "leaving: " in first.output
    assert "Traceback" not in first.output
    assert fleet.transcript() == ["before", "while it is frozen", "after"]
    fleet.assert_lawful()


def test_of_two_that_believe_they_own_the_older_leaves_at_its_next_message(spawn, tmp_path, postgres_url, redis_url):
    # The older one looks at its lease again in twenty minutes: only the epoch stops it.
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url, lease_seconds=LONG)
    first = fleet.owner()
    standby = fleet.standby()
    with fleet.run() as run:
        receipts = submit(run, numbered(100))
        receipts[5].result(30)
        with closing(Store(postgres_url)) as store:
            lease = ownership.current(store, "owner")
            assert lease is not None
            ownership.give_up(store, "owner", lease.holder)
        standby.says("owner of epoch 2", within=10)
        sent = 100

        def left() -> bool:
            nonlocal sent
            receipts.extend(submit(run, numbered(10, sent)))
            sent += 10
            receipts[-1].result(30)
            return not first.running

        wait_until(left, within=30, what="the older one has left")
        run.finish()
    assert first.wait(within=1) == EX_SUPERSEDED
    assert "leaving: " in first.output
    assert fleet.transcript() == numbered(sent)
    assert fleet.epoch == 2
    fleet.assert_lawful()
