"""URLs in one form."""

from urlnorm.normal import normalise

__all__ = ["normalise"]
