"""The examples run as they stand, and say what their readers are told that they do."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WITHIN = 40.0  # seconds on a busy machine; alone, each takes less than 15
END = "# What follows runs the example"

SAID = {
    "agent_with_subagents": [r"completed, after 1 crash: About 3 findings: good\.", r"  child finished"],
    "nightly_batch": [
        r"completed, after 2 crashes: \{'failed': \[\], 'total': 1600\}",
        r"submitted again: the same result is True, 0 calls",
    ],
    "celery_task_made_durable_before": [r"2026-11: 10 invoices are due", r"10 mails were sent"],
    "celery_task_made_durable_after": [
        r"killed the process that has sent \d+ mails",
        r"completed: 10 reminders, [01] sent twice",
    ],
    "script_session": [r"invoice-17: terminal, completed", r"  assistant: The total is right\."],
}


def test_each_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAID)


@pytest.mark.parametrize("name", SAID)
def test_it_runs_as_it_stands(spawn, tmp_path, name):
    process = spawn(sys.executable, EXAMPLES / f"{name}.py", cwd=tmp_path)
    assert process.wait(within=WITHIN) == 0, process.output
    for text in SAID[name]:
        assert re.search(rf"^{text}$", process.output, re.MULTILINE), process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize("name", SAID)
def test_its_first_lines_tell_how_to_run_it(name):
    told = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert told is not None
    assert f"python examples/{name}.py" in told


def _code(name: str) -> list[str]:
    """Return the lines of code of the example itself: no docstrings, no comments, no empty lines."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").partition(END)[0]
    return ast.unparse(_without_docstrings(ast.parse(text))).replace("\n\n", "\n").splitlines()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    return tree


def _blocks() -> list[str]:
    text = (EXAMPLES.parent / "docs" / "workflows.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_what_the_guide_shows_is_python():
    for block in _blocks():
        ast.parse(block)


def test_the_guides_workflow_passes_the_guides_test(tmp_path):
    blocks = _blocks()
    sent = []
    names = {"__name__": "guide", "fetch_total": lambda number: 3, "send_report": lambda *facts: sent.append(facts)}
    exec(blocks[0], names)
    exec(blocks[-1], names)
    names["test_it_survives"](tmp_path)
    assert sent == [(17, 3)]


def test_five_changed_lines_make_a_task_durable():
    before, after = _code("celery_task_made_durable_before"), _code("celery_task_made_durable_after")
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))]
    assert [line[0] for line in changed].count("-") == [line[0] for line in changed].count("+") == 5
    told = (EXAMPLES / "celery_task_made_durable_before.py").read_text(encoding="utf-8")
    assert f"{len(before)} lines of code before, {len(after)} after" in told
