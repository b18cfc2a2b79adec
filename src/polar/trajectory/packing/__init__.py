"""Traces to trainer batches: rows packed to a token budget, apart or as trees that share their prefixes."""
