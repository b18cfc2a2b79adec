"""One file an inference backend."""
