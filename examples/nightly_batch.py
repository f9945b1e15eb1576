"""A nightly batch: a statement for each account, two accounts at a time, on a bank's server that fails now and then.

    python examples/nightly_batch.py

The owner counts the live children: at the cap of two, `on_full="wait"` waits for one to end. A step that fails is
tried again; a child whose process dies is delegated again. Submitted once more for the same night, nothing runs twice.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tenure import Limits, Refusal, Run, workflow
from tenure.testing import Workbench

ACCOUNTS = ["ada", "ben", "cleo", "dan", "eve"]
calls: Counter[str] = Counter()


def fetch_balance(account: str) -> int:
    """Stand in for a bank's server, which fails at the first call for every second account."""
    calls[account] += 1
    if calls[account] == 1 and ACCOUNTS.index(account) % 2:
        raise ConnectionError("the bank does not answer")
    return 100 * len(account)


@workflow("example.statement")
def statement(run: Run, account: str) -> dict[str, Any]:
    """Make one account's statement."""
    balance = run.step(fetch_balance, account, retries=3, backoff=0.05)
    return {"account": account, "balance": balance}


@workflow("example.nightly")
def nightly(run: Run, accounts: list[str]) -> dict[str, Any]:
    """Make all of them, never more at a time than the cap allows."""
    handles = []
    for account in accounts:
        asked = run.delegate(statement, account, on_full="wait", retries=2)
        if isinstance(asked, Refusal):  # the runtime drains, or no child is allowed at this depth
            raise TypeError(f"no statement for {account}: {asked.reason}")
        handles.append(asked)
    results = run.gather(handles)
    return {
        "total": sum(result.value["balance"] for result in results if result.completed),
        "failed": [account for account, result in zip(accounts, results, strict=True) if not result.completed],
    }


def main() -> None:
    """Run one night, with two crashes in it, and submit it a second time."""
    limits = Limits(max_concurrent_children=2)
    with tempfile.TemporaryDirectory() as folder, Workbench(Path(folder), limits=limits) as bench:
        bench.crash_at("after_send", nth=4)
        bench.crash_at("before_journal", nth=9)
        state = bench.run(nightly, ACCOUNTS, request_id="night-2026-11-30")
        print(f"{state.outcome}, after {bench.crashes} crashes: {state.result}")
        before = calls.total()
        again = bench.run(nightly, ACCOUNTS, request_id="night-2026-11-30")
        print(f"submitted again: the same result is {again.result == state.result}, {calls.total() - before} calls")


if __name__ == "__main__":
    main()
