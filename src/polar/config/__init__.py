"""Settings of every Polar process."""
