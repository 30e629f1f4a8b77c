"""Ways in which a check can end besides returning."""

from __future__ import annotations


class ContractViolation(AssertionError):
    """The contract does not hold; the last piece of evidence says how."""


class Unsupported(Exception):
    """The target declares that it lacks the capability that the check is about."""


class Untestable(Exception):
    """Something that the check needs is missing: a package, a second device, memory."""


class Inconclusive(Exception):
    """The measurement is invalid or too noisy to decide."""


class SuiteError(Exception):
    """The suite itself is at fault, so the run says nothing about torch."""
