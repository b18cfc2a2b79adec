"""One file per agent harness."""
