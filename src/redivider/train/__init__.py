"""Training: recipes, the training loop, its log and progress, and reports."""
