"""The first schema"""

import sqlalchemy as sa
from alembic import op

from tenure.ledger.schema import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "epochs",
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("began_at", UtcDateTime(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("recovered_at", UtcDateTime(), nullable=True),
        sa.Column("released_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("epoch", name=op.f("pk_epochs")),
    )
    op.create_table(
        "operation_attempts",
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("execution_id", "sequence", name=op.f("pk_operation_attempts")),
    )
    op.create_table(
        "owner_lease",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("host", sa.String(length=128), nullable=False),
        sa.Column("boot", sa.String(length=128), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("birth", sa.String(length=128), nullable=False),
        sa.Column("username", sa.String(length=128), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_owner_lease")),
    )
    op.create_table(
        "recovery_passes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recovery_passes")),
    )
    op.create_table(
        "runtime_epoch",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("began_at", UtcDateTime(), nullable=True),
        sa.Column("drain_reason", sa.Text(), nullable=True),
        sa.Column("drain_since", UtcDateTime(), nullable=True),
        sa.CheckConstraint("epoch >= 0", name=op.f("ck_runtime_epoch_epoch_not_negative")),
        sa.CheckConstraint("id = 1", name=op.f("ck_runtime_epoch_only_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runtime_epoch")),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("profile", sa.String(length=128), nullable=False),
        sa.Column("parent_session_id", sa.String(length=128), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("model_config", sa.Text(), nullable=True),
        sa.Column("system_prompt", sa.Text(), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("message_count", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.CheckConstraint("(ended_at IS NULL) = (end_reason IS NULL)", name=op.f("ck_sessions_end_has_a_reason")),
        sa.CheckConstraint("generation >= 1", name=op.f("ck_sessions_generation_from_one")),
        sa.ForeignKeyConstraint(
            ["parent_session_id"], ["sessions.session_id"], name=op.f("fk_sessions_parent_session_id")
        ),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
    )
    with op.batch_alter_table("sessions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sessions_parent_session_id"), ["parent_session_id"], unique=False)

    op.create_table(
        "messages",
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("position >= 1", name=op.f("ck_messages_position_from_one")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_messages_session_id")),
        sa.PrimaryKeyConstraint("session_id", "position", name=op.f("pk_messages")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "session_models",
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_session_models_session_id")),
        sa.PrimaryKeyConstraint("session_id", "model", name=op.f("pk_session_models")),
    )
    op.create_table(
        "steps",
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("input_digest", sa.String(length=64), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_steps_session_id")),
        sa.PrimaryKeyConstraint("execution_id", "sequence", name=op.f("pk_steps")),
    )
    op.create_table(
        "usage_records",
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("model", sa.String(length=256), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_usage_records_session_id")),
        sa.PrimaryKeyConstraint("execution_id", "sequence", name=op.f("pk_usage_records")),
    )
    with op.batch_alter_table("usage_records", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_usage_records_session_id"), ["session_id"], unique=False)

    op.create_table(
        "worker_executions",
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("parent_execution_id", sa.String(length=128), nullable=True),
        sa.Column("reserved_sequence", sa.BigInteger(), nullable=True),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("profile", sa.String(length=128), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("claim_digest", sa.String(length=64), nullable=False),
        sa.Column("host", sa.String(length=128), nullable=False),
        sa.Column("boot", sa.String(length=128), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("birth", sa.String(length=128), nullable=False),
        sa.Column("username", sa.String(length=128), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("status_at", UtcDateTime(), nullable=False),
        sa.Column("status_reason", sa.Text(), nullable=False),
        sa.Column("status_by", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("attached_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.CheckConstraint("(kind = 'child') = (depth > 0)", name=op.f("ck_worker_executions_root_depth_is_zero")),
        sa.CheckConstraint(
            "(kind = 'child') = (parent_execution_id IS NOT NULL)",
            name=op.f("ck_worker_executions_child_has_a_parent"),
        ),
        sa.CheckConstraint(
            "(status = 'terminal') = (ended_at IS NOT NULL)",
            name=op.f("ck_worker_executions_terminal_has_ended"),
        ),
        sa.CheckConstraint(
            "(status = 'terminal') = (outcome IS NOT NULL)",
            name=op.f("ck_worker_executions_terminal_has_an_outcome"),
        ),
        sa.CheckConstraint(
            "kind <> 'child' OR status IN ('running', 'terminal')",
            name=op.f("ck_worker_executions_child_runs_or_has_ended"),
        ),
        sa.CheckConstraint(
            "kind IN ('compute', 'cron', 'kanban', 'child')",
            name=op.f("ck_worker_executions_known_kind"),
        ),
        sa.CheckConstraint(
            "outcome IN ('completed', 'failed', 'interrupted')",
            name=op.f("ck_worker_executions_known_outcome"),
        ),
        sa.CheckConstraint(
            "status IN ('registered', 'running', 'unknown', 'terminal')",
            name=op.f("ck_worker_executions_known_status"),
        ),
        sa.CheckConstraint("last_sequence >= 0", name=op.f("ck_worker_executions_sequence_not_negative")),
        sa.ForeignKeyConstraint(
            ["parent_execution_id"],
            ["worker_executions.execution_id"],
            name=op.f("fk_worker_executions_parent_execution_id"),
        ),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name=op.f("fk_worker_executions_session_id")),
        sa.PrimaryKeyConstraint("execution_id", name=op.f("pk_worker_executions")),
    )
    with op.batch_alter_table("worker_executions", schema=None) as batch_op:
        batch_op.create_index(
            "ix_worker_executions_live",
            ["status", "epoch"],
            unique=False,
            postgresql_where=sa.text("status <> 'terminal'"),
            sqlite_where=sa.text("status <> 'terminal'"),
        )
        batch_op.create_index(
            batch_op.f("ix_worker_executions_parent_execution_id"), ["parent_execution_id"], unique=False
        )
        batch_op.create_index(
            "uq_worker_executions_live_session",
            ["session_id"],
            unique=True,
            postgresql_where=sa.text("status <> 'terminal'"),
            sqlite_where=sa.text("status <> 'terminal'"),
        )

    op.create_table(
        "execution_transitions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("from_status", sa.String(length=16), nullable=True),
        sa.Column("to_status", sa.String(length=16), nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "coalesce(from_status, '') || '>' || to_status IN ('>registered', '>running', 'registered>running', 'registered>terminal', 'registered>unknown', 'running>terminal', 'running>unknown', 'unknown>running', 'unknown>terminal')",
            name=op.f("ck_execution_transitions_known_transition"),
        ),
        sa.ForeignKeyConstraint(
            ["execution_id"],
            ["worker_executions.execution_id"],
            name=op.f("fk_execution_transitions_execution_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_execution_transitions")),
    )
    with op.batch_alter_table("execution_transitions", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_execution_transitions_execution_id"), ["execution_id"], unique=False)

    op.create_table(
        "worker_receipts",
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("operation", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.CheckConstraint("sequence >= 1", name=op.f("ck_worker_receipts_sequence_from_one")),
        sa.ForeignKeyConstraint(
            ["execution_id"], ["worker_executions.execution_id"], name=op.f("fk_worker_receipts_execution_id")
        ),
        sa.PrimaryKeyConstraint("execution_id", "sequence", name=op.f("pk_worker_receipts")),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO runtime_epoch (id, epoch) VALUES (1, 0)")
