"""The commands beside a run, a module each: `python -m conformance COMMAND`."""
