"""Commands as they are typed here: in a checkout `pytest conformance`, installed `amp-conformance`."""

from __future__ import annotations

INSTALLED = __package__ == "amp_conformance"

RUN = "amp-conformance" if INSTALLED else "pytest conformance"
"""Judges a machine; options follow."""

COMMAND = "amp-conformance" if INSTALLED else "python -m conformance"
"""Reads reports and the catalogue; the name of a command follows."""
