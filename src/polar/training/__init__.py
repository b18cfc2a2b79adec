"""The reference trainer: GRPO on recorded sessions and SFT on generated datasets, small enough to read."""
