"""The chapter memory."""
