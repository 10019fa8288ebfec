"""Optimizers that bear late gradients."""
