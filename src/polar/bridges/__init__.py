"""Bridges to trainers: sessions of a rollout server in the form that each of them learns from."""
