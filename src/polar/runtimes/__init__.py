"""Sandboxes."""
