"""What the workers of the takeover measurement run: many short steps, each seen in a side file the moment it runs."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from tenure import Run, workflow

STEP_SECONDS = 0.01  # the work of a step


def mark(side: str, number: int) -> dict[str, int]:
    """Write one line about this step to the side file, then do its work."""
    line = json.dumps({"step": number, "pid": os.getpid(), "at": time.time()}) + "\n"
    file = os.open(side, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())  # at once, so that no end of this process tears it
    finally:
        os.close(file)
    time.sleep(STEP_SECONDS)
    return {"step": number, "pid": os.getpid()}


@workflow(name="bench.count")
def count(run: Run, side: str, steps: int) -> dict[str, Any]:
    """Run so many steps, with a message after each."""
    for number in range(1, steps + 1):
        done = run.step(mark, side, number)
        run.append([{"role": "assistant", "content": f"{done['step']} by {done['pid']}"}])
    return {"steps": steps}
