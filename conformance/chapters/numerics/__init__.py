"""Numerics chapter."""
