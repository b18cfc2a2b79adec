"""Sandboxes created by another process, behind a socket."""
