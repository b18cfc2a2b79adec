# No tests.
tests -prune -exec rm -rf {} +
