"""Bridges to trainers: a rollout server's sessions in the types that each trainer learns from."""
