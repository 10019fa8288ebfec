"""Units and stages of a pipeline, with their weights and updates."""
