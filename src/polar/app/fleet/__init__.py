"""Nodes on a Ray cluster: placed one a machine, watched, replaced, scaled with the queue (extra `ray`)."""
