"""The demonstration: that it tells the story, that its audit sees what is wrong, and that it takes other recordings."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.demo.audit import audit
from tenure.demo.stage import Plan
from tenure.demo.trajectory import CHILD, PARENT, load
from tenure.ledger import Ledger, Limits
from tenure.ledger.errors import ConfigurationError

STORY = (
    "a third child is refused: delegation_capacity",
    "is lost on its way",
    "was sent again and answered by its receipt",
    "is killed with SIGKILL",
    "the standby has taken over: epoch 2 has begun",
    "went on by itself under epoch 2",
    "was retired: owner_restarted",
    "2 children have completed",
    "the audit is clean",
)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tenure", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_the_story_is_told_within_forty_seconds_and_the_audit_is_not_blind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    began = time.monotonic()
    done = demo("--seed", "11", "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 40
    for line in STORY:
        assert line in done.stdout
    (folder,) = tmp_path.glob("tenure-demo-*")
    tamper(folder, Plan.make(11, PARENT, CHILD, (len(load(PARENT)), len(load(CHILD)))))


def tamper(folder: Path, plan: Plan) -> None:
    """The audit of the kept ledger is clean, and names each thing that is then done to it."""
    with Ledger.open(f"sqlite:///{folder}/ledger.sqlite3", limits=Limits(2, 1)) as ledger:
        assert list(audit(ledger, "demo", plan)) == []
        for statement, expected in (
            (
                "UPDATE messages SET body = '{\"role\":\"user\"}' WHERE session_id = 'demo' AND position = 3",
                "message 3",
            ),
            ("DELETE FROM messages WHERE session_id <> 'demo' AND position = 1", "transcript"),
            ("UPDATE worker_executions SET status_reason = 'finished'", "0 were retired"),
            ("UPDATE worker_executions SET last_sequence = 99 WHERE depth = 0", "law dense_sequences"),
        ):
            with ledger.store.write() as connection:
                connection.exec_driver_sql(statement)
            assert any(expected in problem for problem in audit(ledger, "demo", plan)), statement


def test_a_failed_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    done = demo("--trajectory", str(tmp_path / "none.traj"))
    assert done.returncode == 1
    assert done.stderr.startswith("tenure: trajectory ")
    assert list(tmp_path.iterdir()) == []


def recordings() -> Iterator[tuple[object, str]]:
    message = {"role": "user", "content": "x"}
    yield {"history": [message] * 3}, "at least 4 messages"
    yield {"messages": []}, "at least 4 messages"
    yield [message, message, message, {"role": "robot"}], "message 3"
    yield [message, message, message, "text"], "message 3"
    yield [message, message, message, message | {"content": "a\0b"}], "NUL"


@pytest.mark.parametrize(("recorded", "expected"), list(recordings()))
def test_what_is_not_a_recording_is_refused(recorded: object, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "some.traj"
    file.write_text(json.dumps(recorded))
    with pytest.raises(ConfigurationError) as refused:
        load(file)
    assert expected in refused.value.detail


def test_a_recording_keeps_every_field(tmp_path: Path) -> None:
    recorded = json.loads(PARENT.read_text())["history"]
    for entry, message in zip(recorded, load(PARENT), strict=True):
        flat = {"role": message["role"]} | {k: v for k, v in message.items() if k != "metadata"}
        assert flat | message.get("metadata", {}) == {k: v for k, v in entry.items() if v is not None or k in flat}


def test_a_seed_draws_the_same_plan() -> None:
    one, other = (Plan.make(seed, PARENT, CHILD, (12, 9)) for seed in (4, 4))
    assert one == other
    assert one != Plan.make(5, PARENT, CHILD, (12, 9))
