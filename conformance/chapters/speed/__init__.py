"""Speed chapter."""
