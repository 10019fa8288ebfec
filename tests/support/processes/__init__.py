"""Helpers of tests that run several processes."""
