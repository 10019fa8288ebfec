"""Tests of one module each, in folders as in `src/redivider`."""
