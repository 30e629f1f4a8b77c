"""Contracts and checks of cast policies of ops."""
