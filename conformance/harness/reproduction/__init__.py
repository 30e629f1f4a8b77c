"""A failed case as a program of its own, which needs torch alone."""
