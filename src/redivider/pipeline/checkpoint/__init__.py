"""Everything in flight as plain data, and on disk."""
