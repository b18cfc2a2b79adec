"""One file a way of scoring."""
