"""Completions to traces: builders, codec."""
