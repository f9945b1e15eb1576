"""Settings: the TENURE_* variables of the environment, each checked before anything starts.

A field of `Settings` is named like its variable: TENURE_LEASE_SECONDS is `lease_seconds`. Nothing is
guessed: 0 stays 0, an unknown variable is refused, and so is an empty value, which is not taken for the
default (an unset address in a deployment file must not turn into an embedded broker of its own).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import platformdirs

from . import _values as v
from ._values import Kind, NotAllowedError, mask_url, seconds, token, whole
from .ledger.errors import ConfigurationError

__all__ = ["VARIABLES", "Described", "Settings", "Variable", "mask_url"]

_PREFIX = "TENURE_"
_SHOWN_CHARS = 120  # of a value that is refused
# Variables with our prefix that are not ours to judge: the test suite's, and those that Kubernetes adds to
# every pod of a namespace that has a service named tenure or tenure-something.
_FOREIGN = re.compile(
    r"TENURE_(TEST_\w+|(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?))"
)


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the environment."""

    name: str
    default: str | None  # as it would stand in the environment; {state} is the state folder
    kind: Kind
    meaning: str

    @property
    def field(self) -> str:
        """The attribute of `Settings`."""
        return self.name.removeprefix(_PREFIX).lower()

    @property
    def is_url(self) -> bool:
        """Whether the value can hold a password."""
        return self.name.endswith("_URL")


VARIABLES = (
    Variable("TENURE_STATE_DIR", None, v.PATH, "folder of the ledger, keys, outboxes and broker"),
    Variable("TENURE_LEDGER_URL", "sqlite:///{state}/ledger.sqlite3", v.LEDGER, "the ledger's database"),
    Variable("TENURE_BROKER_URL", None, v.BROKER, "Celery's broker; unset: tenure starts its own"),
    Variable("TENURE_KEYS", "{state}/keys.json", v.PATH, "file of the principals' keys"),
    Variable("TENURE_PRINCIPAL", "default", token("a-z0-9"), "the principal this process signs as"),
    Variable("TENURE_MAX_CONCURRENT_CHILDREN", "3", whole(0, 1000), "live children of an execution; 0: none"),
    Variable("TENURE_MAX_SPAWN_DEPTH", "1", whole(0, 16), "levels of children below a root; 0: none"),
    Variable("TENURE_OWNER_QUEUE", "owner", v.QUEUE, "queue that the owner consumes"),
    Variable("TENURE_WORK_QUEUE", "work", v.QUEUE, "queue that the workers consume"),
    Variable("TENURE_LEASE_SECONDS", "10", seconds(1, 3600), "life of a lease that is not renewed"),
    Variable("TENURE_RECOVERY_SECONDS", "30", seconds(1, 86400), "time between two recovery passes"),
    Variable(
        "TENURE_UNKNOWN_GRACE_SECONDS",
        "86400",
        seconds(0, 31536000),
        "how long unknown work is left as it is",
    ),
    Variable("TENURE_RETENTION_DAYS", "0", whole(0, 36500), "age at which ended work is pruned; 0: never"),
    Variable("TENURE_OUTBOX_BYTES", "67108864", whole(65536, 2**34), "cap on the outbox of one execution"),
    Variable("TENURE_RESEND_SECONDS", "2", seconds(0.05, 60), "first wait for a receipt; doubled up to 30 s"),
    Variable(
        "TENURE_VISIBILITY_SECONDS",
        "60",
        whole(1, 86400),
        "Redis' visibility timeout, the same everywhere",
    ),
    Variable("TENURE_HOST_ID", None, token("A-Za-z0-9"), "identity of this host; unset: detected"),
    Variable("TENURE_IMPORTS", "", v.MODULES, "modules that a worker imports at its start"),
    Variable("TENURE_LOG_LEVEL", "INFO", v.LEVEL, "the least severe level that is logged"),
)


@dataclass(frozen=True, slots=True)
class Described:
    """One setting for a person to read: its value with a password masked, and where it came from."""

    name: str
    value: str
    source: str  # "environment" or "default"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a process of tenure can be told from outside; made by `from_environ`."""

    state_dir: Path
    ledger_url: str = field(repr=False)
    broker_url: str | None = field(repr=False)  # None: the embedded broker
    keys: Path
    principal: str
    max_concurrent_children: int
    max_spawn_depth: int
    owner_queue: str
    work_queue: str
    lease_seconds: float
    recovery_seconds: float
    unknown_grace_seconds: float
    retention_days: int  # 0: keep for ever
    outbox_bytes: int
    resend_seconds: float
    visibility_seconds: int
    host_id: str | None  # None: detected
    imports: tuple[str, ...]
    log_level: str
    given: frozenset[str] = field(repr=False, compare=False)  # names of the variables that were set

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and check every setting.

        Raises:
            ConfigurationError: variables are unknown or wrong. `detail` says of each what was given (never a
                URL's password) and what is allowed; `data["variables"]` holds their names.
        """
        problems = _unknown(environ)
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            text = environ.get(variable.name, _default(variable, values.get("state_dir", "/")))
            try:
                values[variable.field] = None if text is None else variable.kind.read(text)
            except NotAllowedError as error:
                problems[variable.name] = _refusal(variable, text or "", str(error))
        if "owner_queue" in values and values["owner_queue"] == values.get("work_queue"):
            name = values["work_queue"]
            problems["TENURE_WORK_QUEUE"] = f"TENURE_WORK_QUEUE={name!r}: it must differ from TENURE_OWNER_QUEUE"
        if problems:
            raise ConfigurationError("; ".join(problems.values()), {"variables": list(problems)})
        return cls(**values, given=frozenset(known.name for known in VARIABLES if known.name in environ))

    def describe(self) -> tuple[Described, ...]:
        """Return every setting in the order of `VARIABLES`."""
        return tuple(
            Described(
                variable.name,
                _shown(getattr(self, variable.field)),
                "environment" if variable.name in self.given else "default",
            )
            for variable in VARIABLES
        )


def _default(variable: Variable, state: Path | str) -> str | None:
    if variable.name == "TENURE_STATE_DIR":
        return str(platformdirs.user_state_path("tenure"))
    if variable.default is None:
        return None
    folder = str(state).rstrip("/")
    return variable.default.replace("{state}", quote(folder) if variable.is_url else folder)


def _unknown(environ: Mapping[str, str]) -> dict[str, str]:
    known = [variable.name for variable in VARIABLES]
    fields = [variable.field for variable in VARIABLES]
    problems = {}
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in known or _FOREIGN.fullmatch(name):
            continue
        # Without the prefix, which would make everything look near.
        near = difflib.get_close_matches(name.removeprefix(_PREFIX).lower(), fields, n=1)
        hint = f" (did you mean {_PREFIX}{near[0].upper()}?)" if near else ""
        problems[name] = f"{name}: there is no such setting{hint}"
    return problems


def _refusal(variable: Variable, text: str, hint: str) -> str:
    shown = mask_url(text) if variable.is_url or "://" in text else text
    if len(shown) > _SHOWN_CHARS:
        shown = shown[:_SHOWN_CHARS] + "..."
    return f"{variable.name}={shown!r}: allowed is {variable.kind.allowed}" + (f" ({hint})" if hint else "")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else mask_url(str(value)) if "://" in str(value) else str(value)
