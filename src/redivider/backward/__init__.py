"""Inputs of the backward pass: stored, kept and run again, or rebuilt from the output."""
