"""The version of the suite, read by the packaging and written into every report."""

__version__ = "0.1.0"
