"""Who executes the schedule, and how messages travel."""
