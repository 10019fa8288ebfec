"""Training: recipes, the loop, what is seen while it runs, and reports."""
