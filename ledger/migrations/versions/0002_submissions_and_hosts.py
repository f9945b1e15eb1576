"""Submissions and hosts"""

import sqlalchemy as sa
from alembic import op

from tenure.ledger.schema import UtcDateTime

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("worker_executions", sa.Column("max_concurrent_children", sa.Integer()))
    op.add_column("worker_executions", sa.Column("max_spawn_depth", sa.Integer()))
    op.create_table(
        "hosts",
        sa.Column("host", sa.String(length=128), nullable=False),
        sa.Column("boot", sa.String(length=128), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("host", name=op.f("pk_hosts")),
    )
    op.create_table(
        "submissions",
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("workflow", sa.String(length=128), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("queue", sa.String(length=128), nullable=False),
        sa.Column("profile", sa.String(length=128), nullable=False),
        sa.Column("principal", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("execution_id", sa.String(length=128), nullable=False),
        sa.Column("session_id", sa.String(length=128), nullable=False),
        sa.Column("parent_execution_id", sa.String(length=128), nullable=True),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("submitted_at", UtcDateTime(), nullable=False),
        sa.Column("sent_at", UtcDateTime(), nullable=True),
        sa.Column("sent_count", sa.Integer(), nullable=False),
        sa.Column("sent_for", sa.BigInteger(), nullable=False),
        sa.Column("closed_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["parent_execution_id"], ["worker_executions.execution_id"], name=op.f("fk_submissions_parent_execution_id")
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_submissions")),
        sa.UniqueConstraint("execution_id", name=op.f("uq_submissions_execution_id")),
    )
    op.create_index(
        "ix_submissions_open",
        "submissions",
        ["submitted_at"],
        postgresql_where=sa.text("closed_at IS NULL"),
        sqlite_where=sa.text("closed_at IS NULL"),
    )
