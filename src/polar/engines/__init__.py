"""One file per inference backend."""
