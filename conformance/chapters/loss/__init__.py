"""The chapter loss."""
