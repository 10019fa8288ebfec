"""Pipelines of stages that do not wait for each other."""
