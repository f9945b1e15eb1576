"""The ownership lease: which started owner consumes and which stands by.

A hint that keeps two owners from duelling, judged by the database's own clock. Correctness never rests on
it: the epoch row does that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from . import schema
from .claims import Identity
from .store import Store, database_seconds

_l = schema.owner_lease


@dataclass(frozen=True, slots=True)
class Lease:
    """Who has the lease; `expires_in` is in seconds and negative once it has run out."""

    holder: str
    identity: Identity
    expires_in: float


def take(
    store: Store, name: str, holder: str, identity: Identity, *, seconds: float, instead_of: str | None = None
) -> Lease | None:
    """Take or renew the lease for `seconds`; returns None on success, else who has it.

    A holder whose lease has run out is replaced. `instead_of` names a holder that the caller has proved
    dead, whose lease need not run out first.

    Raises:
        Unavailable: the database cannot serve this now.
    """
    with store.write() as connection:
        now = database_seconds(connection)
        row = {
            "holder": holder,
            "host": identity.host,
            "boot": identity.boot,
            "pid": identity.pid,
            "birth": identity.birth,
            "username": identity.user,
            "expires": now + seconds,
        }
        mine = _l.c.holder.in_([holder, instead_of] if instead_of else [holder])
        free = (_l.c.name == name) & (mine | (_l.c.expires <= now))
        if connection.execute(update(_l).where(free).values(row)).rowcount:
            return None
        if _insert(connection, row | {"name": name}):
            return None
    # Where it was given up in between, it is there to be taken.
    return current(store, name) or take(store, name, holder, identity, seconds=seconds, instead_of=instead_of)


def _insert(connection: Connection, row: dict[str, object]) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(insert(_l).values(row))
    except IntegrityError:  # somebody has it
        return False
    return True


def current(store: Store, name: str) -> Lease | None:
    """Return who has the lease, expired or not."""
    with store.read() as connection:
        row = connection.execute(select(_l).where(_l.c.name == name)).first()
        if row is None:
            return None
        identity = Identity(row.host, row.boot, row.pid, row.birth, row.username)
        return Lease(row.holder, identity, row.expires - database_seconds(connection))


def give_up(store: Store, name: str, holder: str) -> None:
    """Let the next owner have it at once, if `holder` still has it."""
    with store.write() as connection:
        connection.execute(delete(_l).where(_l.c.name == name, _l.c.holder == holder))
