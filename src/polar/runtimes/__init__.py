"""Sandboxes, one file per runtime."""
