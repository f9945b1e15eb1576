"""Recorded runs: a JSON file with a `history` of messages, or a JSON list of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenure.ledger.canonical import canonical
from tenure.ledger.errors import ConfigurationError, InvalidParams

HERE = Path(__file__).parent
PARENT = HERE / "parent.traj"  # recorded by SWE-agent; see trajectories.LICENSE
CHILD = HERE / "child.traj"

_OWN_FIELDS = ("content", "name", "tool_call_id", "tool_name", "tool_calls")
_ROLES = ("user", "assistant", "system", "tool")


def load(path: Path) -> list[dict[str, Any]]:
    """Return the messages of a recorded run in the form that a transcript takes.

    Raises:
        ConfigurationError: the file cannot be read, or is not such a recording.
    """
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"trajectory {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"trajectory {path}: not JSON ({error})") from None
    history = recorded.get("history") if isinstance(recorded, dict) else recorded
    if not isinstance(history, list) or len(history) < 4:
        raise ConfigurationError(f"trajectory {path}: a `history` of at least 4 messages is needed")
    return [_message(path, index, entry) for index, entry in enumerate(history)]


def _message(path: Path, index: int, entry: object) -> dict[str, Any]:
    where = f"trajectory {path}: message {index}"
    if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
        raise ConfigurationError(f"{where}: an object with a role of {', '.join(_ROLES)} is needed")
    own = {name: entry[name] for name in _OWN_FIELDS if entry.get(name) is not None}
    rest = {name: value for name, value in entry.items() if name not in {"role", *_OWN_FIELDS}}
    message = {"role": entry["role"], **own} | ({"metadata": rest} if rest else {})
    try:
        canonical(message)
    except InvalidParams as error:
        raise ConfigurationError(f"{where}: {error.detail}") from None
    return message
