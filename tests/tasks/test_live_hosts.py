"""A workflow's process dies on one host and the workflow goes on, on another, within the lease."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from tenure.workflows import Outcome
from tenure.workflows.process import using
from tenure.workflows.registry import workflow
from tests.services import wait_until
from tests.tasks.live import START_SECONDS, Fleet

LEASE_SECONDS = 5
STEPS = 8
FLOW = """
import os, time
from pathlib import Path
from tenure import workflow

def step(number, log):
    with Path(log).open("a") as file:
        file.write(f"{number} {os.getpid()} {time.time()}\\n")
    while number == 5 and not Path(log + ".go").exists():  # here it is killed
        time.sleep(0.01)
    return number

@workflow("test.count")
def count(run, steps, log):
    return sum(run.step(step, number, log) for number in range(steps))
"""


@workflow("test.count")
def count(run, steps, log):
    """What is submitted here; the workers import it from a module of their own."""


def lines(log):
    return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def test_a_workflow_goes_on_on_another_host_within_the_lease(spawn, tmp_path, postgres_url, redis_url):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url, lease_seconds=LEASE_SECONDS)
    fleet.module("flow", FLOW)
    fleet.owner()
    elsewhere = {"TENURE_HOST_ID": "elsewhere", "TENURE_STATE_DIR": str(tmp_path / "elsewhere")}
    os.link(fleet.settings.keys, tmp_path / "keys.json")
    elsewhere["TENURE_KEYS"] = str(tmp_path / "keys.json")
    first = fleet.runner("first", env=elsewhere)
    fleet.probe("elsewhere")
    log = tmp_path / "steps"
    with fleet.client() as client, using(client):
        submitted = count.submit("request", STEPS, str(log))
        wait_until(lambda: len(lines(log)) == 6, within=START_SECONDS, what="it is under way")
        fleet.runner("second")
        killed = int(lines(log)[-1][1])
        for pid in (killed, first.pid):
            psutil.Process(pid).send_signal(signal.SIGKILL)
        at = time.time()
        Path(f"{log}.go").touch()
        state = submitted.wait(60)
    assert (state.outcome, state.result) == (Outcome.COMPLETED, sum(range(STEPS)))
    after = [line for line in lines(log) if int(line[1]) != killed]
    assert float(after[0][2]) - at < LEASE_SECONDS
    ran = [int(line[0]) for line in lines(log)]
    assert ran == [0, 1, 2, 3, 4, 5, 5, 6, 7]  # the step that was under way is run again, no other
    fleet.assert_lawful()
