"""Contracts and checks of compiled, exported and traced programs."""
