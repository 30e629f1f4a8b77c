"""Predicted shapes, dtypes and saved tensors of a model, without data."""
