"""One file a wire format: provider JSON in, provider JSON out; pure functions."""
