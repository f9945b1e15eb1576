"""The same Celery task, made durable: whatever process dies, each mail that was sent is known to have been sent.

    python examples/celery_task_made_durable_after.py

Five lines of `celery_task_made_durable_before.py` were changed: the import, the decorator, the first parameter, the
step, and the call, which now names the request. It runs on real processes here: an owner and a worker of two processes,
of which the one that sends the mails is killed in the middle.
"""

import os
import time
from pathlib import Path

from tenure import Run, workflow


def remind(number: int) -> str:
    """Send one mail: here a line in a file, and the time that a mail server takes."""
    with Path(os.environ["MAILS"]).open("a", encoding="utf-8") as mails:
        mails.write(f"{os.getpid()} reminds of invoice {number}\n")
    time.sleep(0.1)
    return f"invoice {number} is due"


@workflow("shop.remind_all")
def remind_all(run: Run, numbers: list[int]) -> list[str]:
    """Remind of each invoice."""
    return [run.step(remind, number) for number in numbers]


def end_of_month(month: str, numbers: list[int]) -> object:
    """Remind of what is due at the end of a month."""
    print(f"{month}: {len(numbers)} invoices are due")
    return remind_all.submit(month, numbers)


# What follows runs the example and is not part of it; nor are its imports, hence they stand there.
# ruff: noqa: PLC0415


def main() -> None:
    """Run it on an owner and a worker of this machine, as `tenure up` starts them, and kill what sends the mails."""
    import signal
    import tempfile

    from tenure import Settings
    from tenure.ledger.migrate import upgrade
    from tenure.supervisor import Role, Supervisor, environment, owner_command, worker_command
    from tenure.tasks import keys
    from tenure.tasks.broker import EmbeddedBroker

    with tempfile.TemporaryDirectory() as folder:
        mails = Path(folder) / "mails"
        mails.touch()
        here = Path(__file__).resolve()
        os.environ["TENURE_STATE_DIR"] = folder
        settings = Settings.from_environ(os.environ)
        keys.create(settings.keys, settings.principal)
        upgrade(settings.ledger_url)
        environ = environment({"TENURE_STATE_DIR": folder, "TENURE_IMPORTS": here.stem})
        environ |= {"PYTHONPATH": str(here.parent), "MAILS": str(mails)}
        with EmbeddedBroker(settings.state_dir), Supervisor(Path(folder) / "logs", environ, print) as supervisor:
            supervisor.start(Role("owner", owner_command(settings)))
            supervisor.start(Role("worker", worker_command(settings)))
            submitted = end_of_month("2026-11", list(range(1, 11)))
            while len(sent := mails.read_text(encoding="utf-8").splitlines()) < 3:
                supervisor.watch()
                time.sleep(0.02)
            os.kill(int(sent[-1].split()[0]), signal.SIGKILL)
            print(f"killed the process that has sent {len(sent)} mails")
            state = submitted.wait(60)  # type: ignore[attr-defined]
        lines = [line.partition(" ")[2] for line in mails.read_text(encoding="utf-8").splitlines()]
        again = len(lines) - len(set(lines))  # at most the one whose sender was killed
        print(f"{state.outcome}: {len(state.result)} reminders, {again} sent twice")


if __name__ == "__main__":
    main()
