"""Plans: the fastest choice of a backward for every unit that stays within a limit in bytes."""
