"""From chat requests to prompt ids, and from sampled ids to messages."""
