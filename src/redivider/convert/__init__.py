"""Networks that exist already, trained reversibly."""
