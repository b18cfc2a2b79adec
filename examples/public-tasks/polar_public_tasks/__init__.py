"""Public tasks as tasksets; their data comes from the package index, pinned by hash."""
