"""Contracts and checks of autocast regions."""
