"""What others can watch: pages of metrics, spans, and what engines say of themselves."""
