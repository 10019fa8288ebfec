"""What runs at one place of a pipeline: units, stages, their weights and updates."""
