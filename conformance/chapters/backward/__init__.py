"""Contracts and checks of backward under autocast."""
