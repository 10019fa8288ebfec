"""Tests of whole runs: commands, training, processes and their failures, the wheel."""
