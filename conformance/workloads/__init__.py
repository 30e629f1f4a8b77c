"""Models and data that several chapters use."""
