"""The command line as a person meets it: what it shows, and one clear line when something is not as it must be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tenure.cli import main
from tenure.ledger import Kind, Ledger, Registration, secret_digest
from tenure.tasks.liveness import own_identity
from tenure.workflows import Client, Execution


def tenure(*arguments: str, **environ: str) -> Result:
    """Run a command in this process; what it does not catch is raised here."""
    return CliRunner().invoke(main, arguments, env=environ, catch_exceptions=False)


def one_line(done: Result | subprocess.CompletedProcess[str], *expected: str) -> None:
    """It ended with status 1 and one line on standard error, without a traceback."""
    assert (done.exit_code if isinstance(done, Result) else done.returncode) == 1, done
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tenure: ")
    for text in expected:
        assert text in lines[0]


@pytest.fixture
def played(ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A ledger with a finished root and its child; the environment names it."""
    with (
        Ledger.open(ledger_url) as ledger,
        Client.direct(ledger, tmp_path) as client,
        Execution.start(client, "s-1") as run,
    ):
        run.append([{"role": "user", "content": "naïve"}, {"role": "assistant", "content": [{"text": "x"}]}])
        child = run.reserve_child()
        assert isinstance(child, Execution)
        child.close()
        run.finish()
    monkeypatch.setenv("TENURE_LEDGER_URL", ledger_url)
    return ledger_url


def commands() -> list[list[str]]:
    found = [[name] for name in main.commands]
    return found + [["db", name] for name in main.commands["db"].commands]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_explains_itself(command: list[str]) -> None:
    done = tenure(*command, "--help")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[2].strip()


def test_executions_shows_a_tree(played: str) -> None:
    done = tenure("executions")
    root, child = done.stdout.splitlines()
    assert "session=s-1" in root
    assert "terminal/completed" in root
    assert child.startswith("  ")
    assert "why=finished" in child
    facts = [json.loads(line) for line in tenure("executions", "--json").stdout.splitlines()]
    assert facts[1]["parent_execution_id"] == facts[0]["execution_id"]
    assert tenure("executions", "--live").stdout == ""


def test_transcript_prints_the_messages(played: str) -> None:
    done = tenure("transcript", "s-1", "--json")
    assert [json.loads(line)["role"] for line in done.stdout.splitlines()] == ["user", "assistant"]
    assert "naïve" in tenure("transcript", "s-1").stdout
    one_line(tenure("transcript", "s-2"), "there is no session 's-2'")


def test_verify_names_what_breaks_a_law(played: str) -> None:
    assert tenure("verify").exit_code == 0
    with Ledger.open(played) as ledger, ledger.store.write() as connection:
        connection.exec_driver_sql("UPDATE sessions SET message_count = 3 WHERE session_id = 's-1'")
    done = tenure("verify")
    assert done.exit_code == 1
    assert "counters_equal_rows: sessions" in done.stdout
    assert '"s-1"' in done.stdout


def test_status_drain_and_discard(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_LEDGER_URL", ledger_url)
    with Ledger.open(ledger_url) as ledger:
        epoch = ledger.begin_epoch("test")
        request = Registration("x-1", "s-1", Kind.CRON, "p", "q", own_identity(), secret_digest("s" * 16))
        ledger.register(epoch, request)
        one_line(tenure("discard", "x-1"), "admission_conflict", "registered")
        ledger.recover(ledger.begin_epoch("next"))
    assert "live        1 executions" in tenure("status").stdout
    assert tenure("drain", "--reason", "deploy").stdout == "draining: 1 executions are live\n"
    assert "draining    deploy" in tenure("status").stdout
    assert tenure("discard", "x-1").stdout == "x-1 is terminal\n"
    assert tenure("drain", "--wait").stdout == "drained\n"
    tenure("drain", "--off")
    assert "draining    no" in tenure("status").stdout
    one_line(tenure("discard", "x-2"), "not_found")


def test_a_ledger_that_is_not_there_or_behind_says_what_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.sqlite3'}"
    one_line(tenure("executions", TENURE_LEDGER_URL=url), "tenure db upgrade")
    assert "this version needs" in tenure("db", "current", TENURE_LEDGER_URL=url).stdout
    assert tenure("db", "upgrade", TENURE_LEDGER_URL=url).exit_code == 0
    assert tenure("executions", TENURE_LEDGER_URL=url).exit_code == 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TENURE_LEASE_SECONDS": "soon"}, ["TENURE_LEASE_SECONDS", "soon", "seconds"]),
        ({"TENURE_LESE_SECONDS": "3"}, ["did you mean TENURE_LEASE_SECONDS"]),
        ({"TENURE_LEDGER_URL": "mysql://root:hidden@x/y"}, ["TENURE_LEDGER_URL", "postgresql"]),
        ({"TENURE_STATE_DIR": "/dev/null/x"}, ["/dev/null"]),
    ],
)
def test_a_wrong_setting_is_one_line(environ: dict[str, str], expected: list[str]) -> None:
    done = tenure("verify", **environ)
    one_line(done, *expected)
    assert "hidden" not in done.stderr


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    command = f"ulimit -f 16; exec {sys.executable} -m tenure db upgrade"
    url = f"sqlite:///{tmp_path / 'l.sqlite3'}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"TENURE_LEDGER_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    one_line(done, "unavailable", "SQLite")


def test_keys_are_made_once(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.json"
    assert "made" in tenure("keys", TENURE_KEYS=str(path)).stdout
    before = path.read_text()
    assert "there already" in tenure("keys", TENURE_KEYS=str(path)).stdout
    assert path.read_text() == before


def test_settings_are_listed_without_passwords() -> None:
    done = tenure("settings", TENURE_BROKER_URL="redis://user:hidden@127.0.0.1:6379/0")
    assert "TENURE_BROKER_URL" in done.stdout
    assert "hidden" not in done.stdout
