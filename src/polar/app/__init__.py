"""What each command runs: whole systems, started, used and stopped together."""
