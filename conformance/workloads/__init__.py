"""Models and data that are trained, timed and weighed."""
