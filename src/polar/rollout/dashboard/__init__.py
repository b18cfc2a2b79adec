"""The web page, and what it shows of recordings, artifacts and training runs."""
