"""Contracts and checks of the weight cache."""
