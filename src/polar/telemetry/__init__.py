"""Metrics, logs and traces, and the readings of engines."""
