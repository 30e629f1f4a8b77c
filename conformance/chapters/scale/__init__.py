"""The chapter scale."""
