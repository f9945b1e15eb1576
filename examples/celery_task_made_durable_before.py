"""A plain Celery task: if its process dies after the third mail, nobody knows which mails are still to be sent.

    python examples/celery_task_made_durable_before.py

`celery_task_made_durable_after.py` is the same with five changed lines: 15 lines of code before, 15 after.
"""

import os
import time
from pathlib import Path

from celery import shared_task


def remind(number: int) -> str:
    """Send one mail: here a line in a file, and the time that a mail server takes."""
    with Path(os.environ["MAILS"]).open("a", encoding="utf-8") as mails:
        mails.write(f"{os.getpid()} reminds of invoice {number}\n")
    time.sleep(0.1)
    return f"invoice {number} is due"


@shared_task(name="shop.remind_all")
def remind_all(numbers: list[int]) -> list[str]:
    """Remind of each invoice."""
    return [remind(number) for number in numbers]


def end_of_month(month: str, numbers: list[int]) -> object:
    """Remind of what is due at the end of a month."""
    print(f"{month}: {len(numbers)} invoices are due")
    return remind_all.delay(numbers)


# What follows runs the example and is not part of it; nor are its imports, hence they stand there.
# ruff: noqa: PLC0415


def main() -> None:
    """Run it in this process, as Celery does in its users' tests."""
    import tempfile

    from celery import Celery

    app = Celery("shop", broker="memory://", set_as_current=True)
    app.conf.task_always_eager = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MAILS"] = str(Path(folder) / "mails")
        end_of_month("2026-11", list(range(1, 11)))
        print(f"{len(Path(os.environ['MAILS']).read_text(encoding='utf-8').splitlines())} mails were sent")


if __name__ == "__main__":
    main()
