"""A cache of limited size and age."""

from lrukit.cache import Cache

__all__ = ["Cache"]
