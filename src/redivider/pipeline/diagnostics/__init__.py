"""Diagnostics of a pipeline: gradient quality, memory, timelines."""
