"""Hosts: how long each one's probe vouches for it, by the database's own clock."""

from __future__ import annotations

from typing import Any

import pytest

from tenure.ledger import hosts
from tenure.ledger.schema import hosts as table
from tests.ledger.kit import rows


def known(ledger: Any) -> dict[str, hosts.Host]:
    with ledger.read() as connection:
        return {host.host: host for host in hosts.known(connection)}


def test_a_host_that_never_had_a_probe_is_not_known(ledger):
    assert known(ledger) == {}


def test_a_lease_holds_for_so_many_seconds_and_has_run_out_then(ledger):
    hosts.renew(ledger.store, "a", "boot-1", seconds=100)
    hosts.renew(ledger.store, "b", "boot-2", seconds=-50)
    found = known(ledger)
    assert found["a"].silent == pytest.approx(-100, abs=30)
    assert found["b"].silent == pytest.approx(50, abs=30)
    assert (found["a"].boot, found["b"].boot) == ("boot-1", "boot-2")


def test_a_renewal_replaces_the_lease_and_the_boot(ledger):
    hosts.renew(ledger.store, "a", "boot-1", seconds=-500)
    hosts.renew(ledger.store, "a", "boot-2", seconds=100)
    assert len(rows(ledger, table)) == 1
    found = known(ledger)["a"]
    assert (found.boot, found.silent < 0) == ("boot-2", True)


def test_the_time_is_the_databases_and_not_the_owners(ledger, clock):
    clock.advance(days=1000)
    hosts.renew(ledger.store, "a", "boot-1", seconds=100)
    assert known(ledger)["a"].silent == pytest.approx(-100, abs=30)
