"""A process that reads, adds one and writes, in one transaction each: `python -m tests.ledger.increment URL TIMES`."""

from __future__ import annotations

import sys

from sqlalchemy import select, update

from tenure.ledger.schema import runtime_epoch
from tenure.ledger.store import Store


def main(url: str, times: str) -> None:
    store = Store(url)
    for _ in range(int(times)):
        with store.write() as connection:
            value = connection.execute(select(runtime_epoch.c.epoch).with_for_update()).scalar_one()
            connection.execute(update(runtime_epoch).values(epoch=value + 1))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
