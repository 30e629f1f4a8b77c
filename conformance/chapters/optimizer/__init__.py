"""The chapter optimizer."""
