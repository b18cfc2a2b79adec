"""Sandboxes that another process makes, behind a socket."""
