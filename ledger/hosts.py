"""Hosts: which have a probe, and until when it vouches for them, by the database's own clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

from . import schema
from .store import Store, database_seconds

_h = schema.hosts


@dataclass(frozen=True, slots=True)
class Host:
    """A host with a probe. `silent` is for how many seconds its lease has run out; negative while it holds."""

    host: str
    boot: str
    silent: float


def renew(store: Store, host: str, boot: str, *, seconds: float) -> None:
    """Note that the host's probe is alive, for so many seconds.

    Raises:
        Unavailable: the database cannot serve this now.
    """
    with store.write() as connection:
        row = {"host": host, "boot": boot, "expires": database_seconds(connection) + seconds}
        if connection.execute(update(_h).where(_h.c.host == host).values(row)).rowcount == 0:
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            connection.execute(dialect.insert(_h).values(row).on_conflict_do_nothing())


def known(connection: Connection) -> Iterator[Host]:
    """Return every host that ever had a probe."""
    now = database_seconds(connection)
    for row in connection.execute(select(_h)):
        yield Host(row.host, row.boot, now - row.expires)
