"""The tables. Migrations make them; a test holds the two together on both databases.

Every write to any of them happens in a transaction that has locked the one row of `runtime_epoch`
and found its own epoch there. That lock is the fence: nothing else is needed for correctness.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)

from .states import TRANSITIONS, Kind, Outcome, Status


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time on every database; SQLite keeps no zone of its own."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Store UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 (the base's signature)
        """Return UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

_ID = String(128)
_COUNTER = BigInteger


def _one_of(column: str, values: list[str]) -> str:
    return f"{column} IN ({', '.join(repr(str(v)) for v in values)})"


def _counters() -> list[Column[int]]:
    names = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")
    return [Column(n, _COUNTER, nullable=False, server_default="0") for n in (*names, "cost_nanos")]


runtime_epoch = Table(
    "runtime_epoch",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
    Column("began_at", UtcDateTime),
    Column("drain_reason", Text),
    Column("drain_since", UtcDateTime),
    CheckConstraint("id = 1", name="only_one_row"),
    CheckConstraint("epoch >= 0", name="epoch_not_negative"),
)

epochs = Table(
    "epochs",
    metadata,
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("began_at", UtcDateTime, nullable=False),
    Column("owner", Text, nullable=False),
    Column("recovered_at", UtcDateTime),
    Column("released_at", UtcDateTime),  # empty: this owner did not leave in good order
)

owner_lease = Table(
    "owner_lease",
    metadata,
    Column("name", _ID, primary_key=True),
    Column("holder", _ID, nullable=False),
    Column("host", _ID, nullable=False),
    Column("boot", _ID, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("birth", _ID, nullable=False),
    Column("username", _ID, nullable=False),
    Column("expires", Double, nullable=False),  # seconds since 1970 by the database's own clock
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", _ID, primary_key=True),
    Column("source", String(64), nullable=False),
    Column("profile", String(128), nullable=False),
    Column("parent_session_id", _ID, ForeignKey("sessions.session_id")),
    Column("model", Text),
    Column("model_config", Text),  # canonical JSON object
    Column("system_prompt", Text),
    Column("generation", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("message_count", BigInteger, nullable=False),
    *_counters(),
    Column("created_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime),
    Column("end_reason", Text),
    CheckConstraint("generation >= 1", name="generation_from_one"),
    CheckConstraint("(ended_at IS NULL) = (end_reason IS NULL)", name="end_has_a_reason"),
    Index(None, "parent_session_id"),
)

messages = Table(
    "messages",
    metadata,
    Column("session_id", _ID, ForeignKey("sessions.session_id"), nullable=False),
    Column("position", BigInteger, nullable=False, autoincrement=False),
    Column("execution_id", _ID, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("role", String(16), nullable=False),
    Column("body", Text, nullable=False),  # the whole message, canonical JSON
    Column("created_at", UtcDateTime, nullable=False),
    PrimaryKeyConstraint("session_id", "position"),
    CheckConstraint("position >= 1", name="position_from_one"),
    sqlite_with_rowid=False,
)

worker_executions = Table(
    "worker_executions",
    metadata,
    Column("execution_id", _ID, primary_key=True),
    Column("session_id", _ID, ForeignKey("sessions.session_id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("parent_execution_id", _ID, ForeignKey("worker_executions.execution_id")),
    Column("reserved_sequence", BigInteger),  # the parent's sequence that minted this child
    Column("depth", Integer, nullable=False),
    Column("profile", String(128), nullable=False),
    Column("principal", String(64), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("last_sequence", BigInteger, nullable=False),
    Column("claim_digest", String(64), nullable=False),
    Column("host", _ID, nullable=False),
    Column("boot", _ID, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("birth", _ID, nullable=False),
    Column("username", _ID, nullable=False),
    Column("outcome", String(16)),
    Column("result", Text),  # canonical JSON
    Column("status_at", UtcDateTime, nullable=False),
    Column("status_reason", Text, nullable=False),
    Column("status_by", Text, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("attached_at", UtcDateTime),  # when a child's own process took the reservation
    Column("ended_at", UtcDateTime),
    Column("max_concurrent_children", Integer),  # where an ancestor has narrowed the configured cap for it
    Column("max_spawn_depth", Integer),
    CheckConstraint(_one_of("status", list(Status)), name="known_status"),
    CheckConstraint(_one_of("kind", list(Kind)), name="known_kind"),
    CheckConstraint(_one_of("outcome", list(Outcome)), name="known_outcome"),
    CheckConstraint("(status = 'terminal') = (ended_at IS NOT NULL)", name="terminal_has_ended"),
    CheckConstraint("(status = 'terminal') = (outcome IS NOT NULL)", name="terminal_has_an_outcome"),
    CheckConstraint("(kind = 'child') = (parent_execution_id IS NOT NULL)", name="child_has_a_parent"),
    CheckConstraint("(kind = 'child') = (depth > 0)", name="root_depth_is_zero"),
    CheckConstraint("kind <> 'child' OR status IN ('running', 'terminal')", name="child_runs_or_has_ended"),
    CheckConstraint("last_sequence >= 0", name="sequence_not_negative"),
    Index(None, "parent_execution_id"),
    Index(
        "uq_worker_executions_live_session",
        "session_id",
        unique=True,
        postgresql_where=text("status <> 'terminal'"),
        sqlite_where=text("status <> 'terminal'"),
    ),
    Index(
        "ix_worker_executions_live",
        "status",
        "epoch",
        postgresql_where=text("status <> 'terminal'"),
        sqlite_where=text("status <> 'terminal'"),
    ),
)

worker_receipts = Table(
    "worker_receipts",
    metadata,
    Column("execution_id", _ID, ForeignKey("worker_executions.execution_id"), nullable=False),
    Column("sequence", BigInteger, nullable=False, autoincrement=False),
    Column("operation", String(128), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("result", Text, nullable=False),  # canonical JSON object
    Column("epoch", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    PrimaryKeyConstraint("execution_id", "sequence"),
    CheckConstraint("sequence >= 1", name="sequence_from_one"),
    sqlite_with_rowid=False,
)

execution_transitions = Table(
    "execution_transitions",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("execution_id", _ID, ForeignKey("worker_executions.execution_id"), nullable=False),
    Column("from_status", String(16)),
    Column("to_status", String(16), nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("reason", Text, nullable=False),
    Column("by", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    CheckConstraint(
        _one_of("coalesce(from_status, '') || '>' || to_status", sorted(f"{a or ''}>{b}" for a, b in TRANSITIONS)),
        name="known_transition",
    ),
    Index(None, "execution_id"),
)

usage_records = Table(
    "usage_records",
    metadata,
    Column("execution_id", _ID, nullable=False),
    Column("sequence", BigInteger, nullable=False, autoincrement=False),
    Column("session_id", _ID, ForeignKey("sessions.session_id"), nullable=False),
    Column("model", String(256), nullable=False),
    Column("task", Text),
    *_counters(),
    Column("created_at", UtcDateTime, nullable=False),
    PrimaryKeyConstraint("execution_id", "sequence"),
    Index(None, "session_id"),
)

session_models = Table(
    "session_models",
    metadata,
    Column("session_id", _ID, ForeignKey("sessions.session_id"), nullable=False),
    Column("model", String(256), nullable=False),
    Column("records", _COUNTER, nullable=False),
    *_counters(),
    PrimaryKeyConstraint("session_id", "model"),
)

steps = Table(
    "steps",
    metadata,
    Column("execution_id", _ID, nullable=False),
    Column("sequence", BigInteger, nullable=False, autoincrement=False),
    Column("session_id", _ID, ForeignKey("sessions.session_id"), nullable=False),
    Column("name", String(256), nullable=False),
    Column("input_digest", String(64), nullable=False),
    Column("result", Text, nullable=False),  # canonical JSON
    Column("created_at", UtcDateTime, nullable=False),
    PrimaryKeyConstraint("execution_id", "sequence"),
)

submissions = Table(
    "submissions",
    metadata,
    Column("request_id", _ID, primary_key=True),
    Column("workflow", _ID, nullable=False),
    Column("arguments", Text, nullable=False),  # canonical JSON
    Column("digest", String(64), nullable=False),
    Column("queue", _ID, nullable=False),
    Column("profile", String(128), nullable=False),
    Column("principal", String(64), nullable=False),
    Column("key", _ID, nullable=False),  # what a worker derives the execution's secret from; no secret itself
    Column("execution_id", _ID, nullable=False, unique=True),
    Column("session_id", _ID, nullable=False),
    Column("parent_execution_id", _ID, ForeignKey("worker_executions.execution_id")),
    Column("max_attempts", Integer, nullable=False),
    Column("submitted_at", UtcDateTime, nullable=False),
    Column("sent_at", UtcDateTime),
    Column("sent_count", Integer, nullable=False),
    Column("sent_for", BigInteger, nullable=False),  # the generation whose end it was sent for; 0 for the beginning
    Column("closed_at", UtcDateTime),
    Index(
        "ix_submissions_open",
        "submitted_at",
        postgresql_where=text("closed_at IS NULL"),
        sqlite_where=text("closed_at IS NULL"),
    ),
)

hosts = Table(
    "hosts",
    metadata,
    Column("host", _ID, primary_key=True),
    Column("boot", _ID, nullable=False),
    Column("expires", Double, nullable=False),  # seconds since 1970 by the database's own clock
)

operation_attempts = Table(
    "operation_attempts",
    metadata,
    Column("execution_id", _ID, nullable=False),
    Column("sequence", BigInteger, nullable=False, autoincrement=False),
    Column("attempts", Integer, nullable=False),
    PrimaryKeyConstraint("execution_id", "sequence"),
)

recovery_passes = Table(
    "recovery_passes",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("epoch", BigInteger, nullable=False),
    Column("at", UtcDateTime, nullable=False),
    Column("report", Text, nullable=False),  # canonical JSON: what was found, what was done
)

COUNTERS = tuple(c.name for c in _counters())
