"""A session that a script writes: no Celery task, no workflow, no broker.

    python examples/script_session.py

The script is its own owner, on a ledger in a file. What `append` has returned is committed. With
`Client.connect(Settings.from_environ(os.environ))` in place of `Client.direct` the same lines write through a fleet's
broker into the fleet's ledger.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tenure import Client, Execution, Ledger
from tenure.ledger import reads
from tenure.ledger.migrate import upgrade


def check_invoice(client: Client, number: int) -> None:
    """Hold the session while it is written to; nobody else can meanwhile."""
    with Execution.start(client, f"invoice-{number}") as run:
        run.create_session(source="script", model="none")
        run.append([{"role": "user", "content": f"Check invoice {number}."}])
        positions = run.append([{"role": "assistant", "content": "The total is right."}])
        run.finish(result={"checked": number, "messages": positions[-1]})


def main() -> None:
    """Write two sessions and read them back."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/ledger.sqlite3"
        upgrade(url)
        with Ledger.open(url) as ledger:
            with Client.direct(ledger, Path(folder)) as client:
                for number in (17, 18):
                    check_invoice(client, number)
            with ledger.read() as connection:
                for execution in reads.executions(connection):
                    print(f"{execution.session_id}: {execution.status}, {execution.outcome}")
                    for message in reads.transcript(connection, execution.session_id):
                        print(f"  {message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
