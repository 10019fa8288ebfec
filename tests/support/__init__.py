"""Helpers of the tests: oracles, small networks, runs and processes. No test is in here."""
