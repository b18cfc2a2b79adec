"""Offline data: a taskset rolled out until it is done, resumable at any point, written as a dataset."""
