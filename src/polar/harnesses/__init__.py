"""One file an agent harness."""
