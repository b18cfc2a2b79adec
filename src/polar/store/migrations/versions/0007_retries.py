"""When a session that is run again may be leased, the digest of its lease's secret, nodes in trouble."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("not_before", sa.Double))
    op.add_column("sessions", sa.Column("lease_digest", sa.String(64)))
    op.add_column("nodes", sa.Column("trouble", sa.Text))


def downgrade() -> None:
    op.drop_column("nodes", "trouble")
    op.drop_column("sessions", "lease_digest")
    op.drop_column("sessions", "not_before")
