"""Chat requests to prompt ids, sampled ids to messages."""
