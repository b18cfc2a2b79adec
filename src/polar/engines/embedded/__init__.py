"""The embedded engine: a small vLLM-compatible server over transformers."""
