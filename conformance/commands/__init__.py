"""The commands over reports and the torch at hand, a module each: `python -m conformance COMMAND`."""
