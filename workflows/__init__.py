"""What a worker's author imports.

    from tenure.workflows import Client, Execution

    with Client.connect(Settings.from_environ(os.environ)) as client:
        with Execution.start(client, "invoice-17") as run:
            run.append([{"role": "user", "content": "Check invoice 17."}])
            run.finish()

An execution holds a session. All it writes goes through its outbox, over the owner queue, into the ledger, and comes
back as a receipt. `reserve_child` has the owner mint a bounded child with a session of its own.
"""

from ..ledger import Kind, Outcome, Refusal, Status
from ..tasks.client import Client
from .execution import Child, Execution

__all__ = ["Child", "Client", "Execution", "Kind", "Outcome", "Refusal", "Status"]
