"""A device that dies in the middle of a run: the run ends with the case that did it, and blames none of the others."""

from __future__ import annotations

from collections.abc import Iterable

from . import environment, targets
from .targets import Target


def watched(run_targets: Iterable[Target]) -> tuple[Target, ...]:
    """Return the targets that can die: the real accelerators."""
    return tuple(target for target in run_targets if not target.is_fake and target.device_type != "cpu")


def settle(accelerators: Iterable[Target]) -> None:
    """Wait for each device, so that an asynchronous error is raised in the case that launched the kernel."""
    for target in accelerators:
        target.synchronize()


def lost(accelerators: Iterable[Target]) -> str | None:
    """Try a small known sum on each device; say which one no longer computes it, or None.

    CUDA keeps an illegal access or a failed device-side assertion for as long as the context lives, so that all that is
    called afterwards fails (CUDA C++ Programming Guide, error checking).
    """
    for target in accelerators:
        try:
            targets.known_sum(target)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            return environment.redact(f"{target.name} no longer works: {type(error).__name__}: {first}")
    return None
