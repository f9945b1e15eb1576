"""The watcher on real processes: ended, stopped, continued, of another host."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tenure.ledger import Identity
from tenure.tasks import watch
from tenure.tasks.liveness import identity_of, own_identity
from tenure.tasks.watch import Watcher
from tests.processes import Spawned, Spawner
from tests.services import wait_until

HERE = own_identity()
OPEN = Path("/proc/self/fd")
SLEEPER = "import sys, time; print('here', flush=True); time.sleep(300)"


class Told:
    """What a watcher has told, and how to wait for it."""

    def __init__(self) -> None:
        self.said: list[tuple[Identity, str]] = []
        self.event = threading.Event()

    def __call__(self, identity: Identity, evidence: str) -> None:
        self.said.append((identity, evidence))
        self.event.set()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watcher(told: Told) -> Iterator[Watcher]:
    made = Watcher(HERE, lease_seconds=1.0, told=told)
    yield made
    made.stop()


@pytest.fixture
def sleeper(spawn: Spawner) -> Spawned:
    process = spawn(sys.executable, "-c", SLEEPER)
    process.says("here", within=20)
    return process


def looks(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Count the watcher's looks at the process table."""
    done, look = threading.Semaphore(0), watcher._look

    def counted(now: float) -> None:
        look(now)
        done.release()

    monkeypatch.setattr(watcher, "_look", counted)
    return done


@pytest.mark.parametrize("descriptors", [True, False], ids=["by the kernel", "by the process table"])
def test_a_killed_process_is_told_at_once_with_its_evidence(told, sleeper, monkeypatch, descriptors):
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    watcher = Watcher(HERE, lease_seconds=60, told=told)
    try:
        identity = identity_of(sleeper.pid)
        watcher.watch([identity])
        sleeper.signal(signal.SIGKILL)
        assert told.event.wait(10)
        assert told.said in ([(identity, "zombie")], [(identity, "no_such_process")])
        assert watcher._watched == {}
    finally:
        watcher.stop()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel tells of no process' end")
def test_the_kernel_tells_without_a_look(told, sleeper, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 60.0)
    watcher = Watcher(HERE, lease_seconds=60, told=told)
    try:
        watcher.watch([identity_of(sleeper.pid)])
        sleeper.signal(signal.SIGKILL)
        assert told.event.wait(10)
    finally:
        watcher.stop()


def test_a_process_that_was_gone_before_is_told(told, watcher, sleeper):
    identity = identity_of(sleeper.pid)
    sleeper.signal(signal.SIGKILL)
    sleeper.wait(within=10)
    watcher.watch([identity])
    assert told.event.wait(10)
    assert told.said == [(identity, "no_such_process")]


def test_another_process_under_the_number_is_told(told, watcher, sleeper):
    watcher.watch([replace(identity_of(sleeper.pid), birth="ticks:1")])
    assert told.event.wait(10)
    assert [evidence for _identity, evidence in told.said] == ["other_birth"]


def test_a_process_that_stands_still_for_a_lease_is_told_as_stopped(told, watcher, sleeper):
    identity = identity_of(sleeper.pid)
    watcher.watch([identity])
    sleeper.signal(signal.SIGSTOP)
    wait_until(lambda: watcher._still_since, within=10, what="the watcher sees it stand still")
    assert told.said == []
    assert told.event.wait(10)
    assert told.said == [(identity, "stopped")]
    assert watcher._watched == {}
    assert watcher._still_since == {}


def test_a_process_that_goes_on_in_time_is_not_told_and_its_lease_begins_anew(told, sleeper, monkeypatch):
    watcher = Watcher(HERE, lease_seconds=60, told=told)
    try:
        watcher.watch([identity_of(sleeper.pid)])
        sleeper.signal(signal.SIGSTOP)
        wait_until(lambda: watcher._still_since, within=10, what="the watcher sees it stand still")
        sleeper.signal(signal.SIGCONT)
        wait_until(lambda: not watcher._still_since, within=10, what="the watcher sees it go on")
        assert told.said == []
        assert len(watcher._watched) == 1
    finally:
        watcher.stop()


def test_a_process_of_another_host_and_a_living_one_are_left_alone(told, watcher, sleeper, monkeypatch):
    done = looks(watcher, monkeypatch)
    watcher.watch([replace(identity_of(sleeper.pid), host="another", birth="ticks:1"), identity_of(sleeper.pid), HERE])
    for _ in range(3):
        assert done.acquire(timeout=10)
    assert told.said == []
    assert set(watcher._watched) == {identity_of(sleeper.pid), HERE}


def test_one_that_is_watched_already_takes_no_second_descriptor(watcher):
    watcher.watch([HERE])
    before = dict(watcher._watched)
    watcher.watch([HERE, HERE])
    assert watcher._watched == before


def test_what_is_forgotten_is_not_told(told, watcher, sleeper, monkeypatch):
    identity = identity_of(sleeper.pid)
    watcher.watch([identity, HERE])
    watcher.forget_others([HERE])
    done = looks(watcher, monkeypatch)
    sleeper.signal(signal.SIGKILL)
    sleeper.wait(within=10)
    for _ in range(2):
        assert done.acquire(timeout=10)
    assert told.said == []
    assert set(watcher._watched) == {HERE}


@pytest.mark.skipif(not OPEN.is_dir(), reason="reads /proc")
def test_a_watcher_that_was_stopped_keeps_nothing_open_and_watches_nothing_more(told):
    before = len(list(OPEN.iterdir()))
    watcher = Watcher(HERE, lease_seconds=1, told=told)
    watcher.watch([HERE])
    watcher.stop()
    watcher.stop()
    watcher.watch([HERE])
    assert watcher._watched == {}
    assert len(list(OPEN.iterdir())) == before


def test_more_calls_than_a_pipe_holds_block_nobody(watcher, monkeypatch):
    with watcher._lock:  # the thread cannot look meanwhile
        for _ in range(70_000):
            watcher._wake()
