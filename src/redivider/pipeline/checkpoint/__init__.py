"""Saved states of a pipeline: a snapshot in memory, and its files on disk."""
