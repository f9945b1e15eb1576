"""A worker on another host: its probe says when it died, a silent host is given up, without a probe nobody knows."""

from __future__ import annotations

import signal

import pytest

from tests.services import wait_until
from tests.tasks.live import Fleet

ELSEWHERE = {"TENURE_HOST_ID": "elsewhere"}  # two hosts on one machine, as far as anybody can tell


@pytest.fixture
def fleet(spawn, tmp_path, sqlite_url, redis_url) -> Fleet:
    return Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url, lease_seconds=1)


def evidence(fleet: Fleet, execution: str) -> str:
    statement = "SELECT status_by FROM worker_executions WHERE execution_id = :execution"
    return str(fleet.value(statement, execution=execution))


def test_a_probe_tells_of_a_death_on_its_host_and_silence_of_a_host_is_death(fleet):
    fleet.owner()
    probe = fleet.probe("elsewhere")
    killed, left = fleet.holder("killed", env=ELSEWHERE), fleet.holder("left", env=ELSEWHERE)
    killed.kill()
    wait_until(lambda: fleet.status(killed.execution)[0] == "unknown", within=10, what="the probe tells")
    assert fleet.status(killed.execution) == ("unknown", "process_dead")
    assert fleet.status(killed.child) == ("terminal", "process_dead")
    assert evidence(fleet, killed.execution) in {"no_such_process", "zombie"}
    assert fleet.status(left.execution)[0] == "running"
    for process in (probe, left.process):  # the host is gone with all that ran there
        process.signal(signal.SIGKILL)
    wait_until(lambda: fleet.status(left.execution)[0] == "unknown", within=10, what="the host is given up")
    assert evidence(fleet, left.execution) == "host_silent"
    fleet.assert_lawful()


def test_a_death_where_there_is_no_probe_is_known_to_nobody(fleet):
    fleet.owner()
    killed, seen = fleet.holder("killed", env=ELSEWHERE), fleet.holder("seen")
    killed.kill()
    seen.kill()  # on the owner's host: when this one is noticed, the other one could have been
    wait_until(lambda: fleet.status(seen.execution)[0] == "unknown", within=10, what="its death is noticed")
    assert fleet.status(killed.execution)[0] == "running"
    assert fleet.status(killed.child)[0] == "running"
