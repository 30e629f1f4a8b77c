"""Faults that `--self-check` plants in the torch that is installed, and removes without a trace."""
