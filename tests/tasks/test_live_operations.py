"""Nothing that an application's operation does ends the owner's work."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import wait_until
from tests.tasks.live import Fleet, says, submit

OPERATIONS = """
import os
from typing import TypedDict
from tenure.ledger import Work, operation

class How(TypedDict):
    how: str

@operation("live.end")
def end(work: Work, payload: How) -> dict[str, str]:
    match payload["how"]:
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "die":
            os._exit(1)
    return payload
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed distribution with an operation of its own; returns where it lies."""
    folder = tmp_path / "site"
    facts = folder / "live_operations-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / "live_operations.py").write_text(OPERATIONS)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: live-operations\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[tenure.operations]\nend = live_operations:end\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("live_operations", None)


def test_an_operation_that_asks_the_process_to_end_fails_alone(spawn, tmp_path, sqlite_url, redis_url, distribution):
    fleet = Fleet(spawn, tmp_path, ledger=sqlite_url, broker=redis_url)
    fleet.add_to_path(distribution)
    owner = fleet.owner()
    with fleet.run() as run:
        assert run.apply("live.end", {"how": "well"}).result == {"how": "well"}
        for how, error in (("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")):
            assert run.apply("live.end", {"how": how}).result == {"refused": "operation_failed", "error": error}
            says(run, f"after {how}")
        run.finish()
    assert owner.running
    assert fleet.transcript() == ["after exit", "after interrupt"]
    owner.signal(signal.SIGTERM)
    assert owner.wait(within=15) == 0
    assert fleet.released(1)
    fleet.assert_lawful()


def test_an_operation_that_kills_its_owner_is_given_up_after_five_counted_attempts(
    spawn, tmp_path, postgres_url, redis_url, distribution
):
    fleet = Fleet(spawn, tmp_path, ledger=postgres_url, broker=redis_url)
    fleet.add_to_path(distribution)
    owner = fleet.owner()
    with fleet.run() as run:
        says(run, "before")
        poison = run.submit("live.end", {"how": "die"})
        (behind,) = submit(run, ["behind it"])
        deaths = 0
        while not poison.done():
            wait_until(lambda owner=owner: poison.done() or not owner.running, within=30, what="it ends one way")
            if not owner.running:
                assert owner.wait(within=1) == 1
                deaths += 1
                owner = fleet.worker()
        assert poison.result().result == {"refused": "poisoned", "attempts": 5}
        assert behind.result(30).result == {"positions": [2]}
        run.finish()
    assert deaths == 6  # the first was not expected, and so not counted
    assert fleet.transcript() == ["before", "behind it"]
    fleet.assert_lawful()
