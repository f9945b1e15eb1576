"""Epochs: each start of an owner is a new one, and fences every earlier one."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from . import schema
from .transaction import Transaction


def begin(tx: Transaction, *, owner: str) -> int:
    """Begin the next epoch and return it. Waits for every transaction of the current one to end."""
    tx.epoch += 1
    tx.execute(update(schema.runtime_epoch).values(epoch=tx.epoch, began_at=tx.now))
    tx.execute(insert(schema.epochs).values(epoch=tx.epoch, began_at=tx.now, owner=owner))
    return tx.epoch


def release(tx: Transaction) -> None:
    """Record that the owner of the current epoch leaves in good order."""
    tx.execute(update(schema.epochs).where(schema.epochs.c.epoch == tx.epoch).values(released_at=tx.now))


def predecessor_crashed(tx: Transaction) -> bool:
    """Return whether the epoch before the current one ended without a release."""
    t = schema.epochs
    row = tx.execute(select(t.c.released_at).where(t.c.epoch < tx.epoch).order_by(t.c.epoch.desc()).limit(1)).first()
    return row is not None and row.released_at is None


def drain(tx: Transaction, reason: str | None) -> None:
    """Refuse registers and reservations from now on, in later epochs too; None takes them again."""
    tx.drain_reason = reason
    since = tx.now if reason is not None else None
    tx.execute(update(schema.runtime_epoch).values(drain_reason=reason, drain_since=since))
