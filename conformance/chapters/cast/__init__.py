"""The chapter cast."""
