"""The chapter clip."""
