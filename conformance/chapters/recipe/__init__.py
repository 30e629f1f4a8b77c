"""The chapter recipe."""
