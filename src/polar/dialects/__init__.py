"""One file per wire format: provider JSON in, provider JSON out, as pure functions."""
