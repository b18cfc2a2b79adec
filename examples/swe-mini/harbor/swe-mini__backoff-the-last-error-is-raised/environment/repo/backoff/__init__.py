"""Trying again, after pauses that grow."""

from backoff.delays import delays
from backoff.retry import retry

__all__ = ["delays", "retry"]
