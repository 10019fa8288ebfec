"""What a pipeline does and holds: gradient quality, memory, timelines."""
