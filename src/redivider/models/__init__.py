"""Architectures as rows of units, one family a file."""
