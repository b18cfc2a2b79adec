"""What is recorded of a session: its token tree, the capture it grows in, the recording it becomes."""
