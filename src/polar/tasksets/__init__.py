"""Tasks from files, and datasets from results."""
