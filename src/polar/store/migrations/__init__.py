"""The history of the tables, as Alembic runs it."""
