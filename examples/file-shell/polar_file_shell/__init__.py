"""Small file-and-shell tasks made by rule: as many as one wants, each with its check and its solutions."""
