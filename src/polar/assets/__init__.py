"""Pinned downloads (Node.js, harnesses, weights) in the user's cache, safe for several processes."""
