"""Parts of the simulator: the order of actions, and the clock of the devices."""
