"""Relations between two ways to write one computation: the programs they are tried on, and how results compare."""
