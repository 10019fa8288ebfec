"""The papers' claims, and what shows whether they hold: one command for each."""
