"""One file per way of scoring."""
