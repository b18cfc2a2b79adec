"""Half-open intervals `(start, end)`: the start belongs to them, the end does not."""

from spans.sets import covered, merge, subtract

__all__ = ["covered", "merge", "subtract"]
