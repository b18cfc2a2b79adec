"""Where migrations begin: a new database is not migrated, it gets the newest tables at once."""

revision = "0004"
down_revision = None


def upgrade() -> None:
    """Nothing comes before these tables."""
