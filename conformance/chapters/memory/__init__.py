"""Memory chapter."""
