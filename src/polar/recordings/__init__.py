"""The recording of a session: its token tree, the growing capture, and the final recording."""
