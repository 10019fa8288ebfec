"""Execution of the schedule, eager or captured, and transport of messages between processes."""
