"""Architectures as lists of units, one file per family."""
