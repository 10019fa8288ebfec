"""Tests that mechanisms give the numbers of an oracle, or of each other."""
