"""README's program runs as it stands, on what README's `tenure up` starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Spawner

README = Path(__file__).parent.parent / "README.md"


def programs() -> list[str]:
    """The Python programs in README."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_programs_run_on_what_up_starts(spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("TENURE_STATE_DIR", str(state))
    first, second = programs()
    (tmp_path / "invoices.py").write_text(second, encoding="utf-8")
    monkeypatch.setenv("TENURE_IMPORTS", "invoices")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    up = spawn(sys.executable, "-m", "tenure", "up", "--flower-port", str(free_port()), env=dict(os.environ))
    up.says("worker: process", within=30)
    for source in (first, "from invoices import check\nprint(check.submit('request-17', 17).wait(60).result)\n"):
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr + (state / "logs" / "owner.log").read_text()
    assert done.stdout == "{'pages': ['page 1 is right', 'page 2 is right'], 'total': 34}\n"
    tree = subprocess.run(
        [sys.executable, "-m", "tenure", "executions"], capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    assert "session=invoice-17" in tree[0]
    assert [line.startswith("  ") for line in tree] == [False, True, False, True, True]
    assert all("terminal/completed" in line for line in tree)
    up.signal(signal.SIGTERM)
    assert up.wait(within=30) == 0
    verified = [sys.executable, "-m", "tenure", "verify"]
    assert subprocess.run(verified, capture_output=True, timeout=60, check=False).returncode == 0
