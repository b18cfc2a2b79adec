"""Sessions to train on, the ways to train on them, and what is measured of each."""
