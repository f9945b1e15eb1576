"""tenure: durable, owned and bounded work on a Celery fleet.

`tenure.workflows` is what a worker's author imports, `tenure.tasks` the Celery side, `tenure.ledger` the SQL
ledger. Their most used names can be imported from here too.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Settings
    from .ledger import Ledger, Limits, Refusal, operation
    from .workflows import Client, Execution, Run, workflow

__version__ = version("tenure")
# Loaded when first asked for: who wants the ledger alone must not pay for Celery.
_HOMES = {
    "Client": "workflows",
    "Execution": "workflows",
    "Ledger": "ledger",
    "Limits": "ledger",
    "Refusal": "ledger",
    "Run": "workflows",
    "Settings": "config",
    "operation": "ledger",
    "workflow": "workflows",
}

__all__ = [
    "Client",
    "Execution",
    "Ledger",
    "Limits",
    "Refusal",
    "Run",
    "Settings",
    "__version__",
    "operation",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
