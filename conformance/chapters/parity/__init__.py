"""Parity chapter."""
