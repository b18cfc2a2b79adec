"""Tasks from files, and datasets out of results."""
