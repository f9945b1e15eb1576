"""What a worker's author imports.

    from tenure.workflows import Client, Execution

    with Client.connect(Settings.from_environ(os.environ)) as client:
        with Execution.start(client, "invoice-17") as run:
            run.append([{"role": "user", "content": "Check invoice 17."}])
            run.finish()

An execution holds a session. All it writes goes through its outbox, over the owner queue, into the ledger, and comes
back as a receipt. `reserve_child` has the owner mint a bounded child with a session of its own.

A workflow is a function that survives the death of its process: each step it finished is remembered, and another
process goes on from there.

    @workflow
    def check(run: Run, number: int) -> dict[str, object]:
        total = run.step(fetch_total, number)
        pages = [run.delegate(check_page, number, page) for page in range(3)]
        return {"total": total, "pages": [page.value for page in run.gather(pages)]}

    check.submit("request-17", 17).wait(60)

    celery -A tenure.workflows worker -Q work

is a worker of the work queue; TENURE_IMPORTS names the modules with its workflows and tasks.
"""

from typing import TYPE_CHECKING, Any

from ..ledger import Kind, Outcome, Refusal, Status
from ..tasks.client import Client
from .aio import AsyncRun
from .delegation import ChildResult, Delegated
from .execution import Child, Execution
from .registry import Workflow, workflow
from .run import Run
from .submission import Submission, WorkflowState

if TYPE_CHECKING:
    from celery import Celery

    app: Celery

__all__ = [
    "AsyncRun",
    "Child",
    "ChildResult",
    "Client",
    "Delegated",
    "Execution",
    "Kind",
    "Outcome",
    "Refusal",
    "Run",
    "Status",
    "Submission",
    "Workflow",
    "WorkflowState",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..tasks import app  # noqa: PLC0415 (made from the environment, when it is first asked for)

    return app
