"""The HTTP data plane between harness and engine, and the capture of what passes through."""
