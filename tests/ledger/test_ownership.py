"""The ownership lease: one holder at a time by the database's own clock; renewed, run out, given up, taken over."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import update

from tenure.ledger import ownership
from tenure.ledger.errors import Unavailable
from tenure.ledger.schema import owner_lease
from tenure.ledger.store import Store
from tests.ledger.kit import ELSEWHERE, HERE


@pytest.fixture
def store(emptied_url: str) -> Iterator[Store]:
    found = Store(emptied_url)
    yield found
    found.close()


def run_out(store: Store, name: str) -> None:
    """Let the lease's time have passed."""
    with store.write() as connection:
        passed = update(owner_lease).where(owner_lease.c.name == name).values(expires=owner_lease.c.expires - 1e6)
        connection.execute(passed)


def test_the_first_takes_it_and_the_second_is_told_who_has_it(store):
    assert ownership.current(store, "owner") is None
    assert ownership.take(store, "owner", "a", HERE, seconds=30) is None
    held = ownership.take(store, "owner", "b", ELSEWHERE, seconds=30)
    assert held is not None
    assert (held.holder, held.identity) == ("a", HERE)
    assert 0 < held.expires_in <= 30
    assert ownership.take(store, "another name", "b", ELSEWHERE, seconds=30) is None


def test_its_holder_renews_it(store):
    ownership.take(store, "owner", "a", HERE, seconds=30)
    assert ownership.take(store, "owner", "a", replace(HERE, pid=9), seconds=300) is None
    held = ownership.current(store, "owner")
    assert held is not None
    assert held.identity.pid == 9
    assert 200 < held.expires_in <= 300


def test_one_that_has_run_out_is_taken(store):
    ownership.take(store, "owner", "a", HERE, seconds=30)
    run_out(store, "owner")
    expired = ownership.current(store, "owner")
    assert expired is not None
    assert expired.expires_in < 0
    assert ownership.take(store, "owner", "b", ELSEWHERE, seconds=30) is None
    lost = ownership.take(store, "owner", "a", HERE, seconds=30)
    assert lost is not None
    assert lost.holder == "b"


def test_that_of_a_dead_holder_is_taken_at_once_and_only_his(store):
    ownership.take(store, "owner", "a", HERE, seconds=30)
    held = ownership.take(store, "owner", "b", ELSEWHERE, seconds=30, instead_of="somebody else")
    assert held is not None
    assert ownership.take(store, "owner", "b", ELSEWHERE, seconds=30, instead_of="a") is None
    taken = ownership.current(store, "owner")
    assert taken is not None
    assert taken.holder == "b"


def test_it_is_given_up_by_its_holder_only(store):
    ownership.take(store, "owner", "a", HERE, seconds=30)
    ownership.give_up(store, "owner", "b")
    ownership.give_up(store, "another name", "a")
    assert ownership.current(store, "owner") is not None
    ownership.give_up(store, "owner", "a")
    assert ownership.current(store, "owner") is None
    ownership.give_up(store, "owner", "a")
    assert ownership.take(store, "owner", "b", ELSEWHERE, seconds=30) is None


@pytest.mark.parametrize("expired", [False, True])
def test_of_many_that_start_at_once_one_has_it(store, expired):
    if expired:
        ownership.take(store, "owner", "before", HERE, seconds=30)
        run_out(store, "owner")

    def take(number: int) -> bool:
        return ownership.take(store, "owner", f"holder {number}", HERE, seconds=30) is None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 1


def test_a_database_that_is_not_there():
    away = Store("postgresql://u@127.0.0.1:1/d")
    with pytest.raises(Unavailable):
        ownership.take(away, "owner", "a", HERE, seconds=30)
    away.close()
