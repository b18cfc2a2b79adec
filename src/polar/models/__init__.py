"""The nouns of Polar; no I/O."""
