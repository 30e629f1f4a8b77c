"""Recorders of dispatched ops and casts."""
