"""The chapter cache."""
