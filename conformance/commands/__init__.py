"""The commands of `python -m conformance` that do more than show a report."""
