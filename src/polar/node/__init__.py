"""One machine's worker: pools, lifecycle, leases."""
