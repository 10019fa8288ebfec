"""Training by stages that do not wait for each other."""
