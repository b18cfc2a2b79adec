"""Nodes on a Ray cluster: one per machine, monitored, replaced, and scaled with the queue (extra `ray`)."""
