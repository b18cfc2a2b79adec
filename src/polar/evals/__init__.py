"""Harnesses, tasksets and models against each other: sessions run, numbers with their doubt, reports."""
