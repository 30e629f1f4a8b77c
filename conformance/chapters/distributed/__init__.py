"""Training on several processes, against the same program in one."""
