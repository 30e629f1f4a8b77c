"""The chapter api."""
