"""What a worker's author imports.

    from tenure.workflows import Client, Execution

    with Client.connect(Settings.from_environ(os.environ)) as client:
        with Execution.start(client, "invoice-17") as run:
            run.append([{"role": "user", "content": "Check invoice 17."}])
            run.finish()

An execution holds a session. All it writes goes through its outbox, over the owner queue, into the ledger, and comes
back as a receipt. `reserve_child` has the owner mint a bounded child with a session of its own.

    celery -A tenure.workflows worker -Q work

is a worker of the work queue; TENURE_IMPORTS names the modules with its tasks.
"""

from typing import TYPE_CHECKING, Any

from ..ledger import Kind, Outcome, Refusal, Status
from ..tasks.client import Client
from .execution import Child, Execution

if TYPE_CHECKING:
    from celery import Celery

    app: Celery

__all__ = ["Child", "Client", "Execution", "Kind", "Outcome", "Refusal", "Status"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..tasks import app  # noqa: PLC0415 (made from the environment, when it is first asked for)

    return app
