"""Evaluations of harnesses and models on tasksets: sessions, statistics, reports."""
