"""From traces to trainer batches: rows packed to a token budget, separately or as trees of shared
prefixes."""
