"""Contracts and checks of bfloat16 training."""
