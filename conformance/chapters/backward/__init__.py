"""The chapter backward."""
