"""What one command runs: whole systems started, used and ended together."""
