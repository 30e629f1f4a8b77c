"""Health counters of NVIDIA devices before and after a run: memory errors and clock throttling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from .nvml import Nvml, nvml

Counters = Mapping[str, int]

UNCORRECTED = "uncorrected ECC errors"
REMAPPED = "rows remapped after uncorrected errors"
FAILED = "row remappings that failed"
RETIRED = "pages retired after double-bit errors"
RISING = (UNCORRECTED, REMAPPED, FAILED, RETIRED)
"""What may not rise during a run: results that were computed meanwhile may be wrong."""

# NVIDIA's Xid errors, by number, that the hardware makes and no program; 13, 31, 43 and 45 are made by programs.
XIDS = {
    48: "double-bit ECC error",
    63: "row remapping or page retirement",
    64: "row remapping or page retirement failed",
    74: "NVLink error",
    79: "the device has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
}


def counters(known: Nvml) -> dict[str, int]:
    """Return what the device counts since its driver was loaded; what it does not tell is left out."""
    remapped = known.ask("RemappedRows")  # after corrected and uncorrected errors, whether one is pending, one failed
    reasons = known.ask("CurrentClocksEventReasons")
    told = {
        "corrected ECC errors": _errors(known, "CORRECTED"),
        UNCORRECTED: _errors(known, "UNCORRECTED"),
        "rows remapped after corrected errors": None if remapped is None else remapped[0],
        REMAPPED: None if remapped is None else remapped[1],
        "row remappings that wait for a reset": None if remapped is None else int(remapped[2]),
        FAILED: None if remapped is None else int(remapped[3]),
        RETIRED: _retired(known),
        "reasons of the clock (bits of nvmlClocksEventReasons)": (
            known.ask("CurrentClocksThrottleReasons") if reasons is None else reasons
        ),
    }
    return {name: int(count) for name, count in told.items() if count is not None}


def _errors(known: Nvml, kind: str) -> int | None:
    counted: int | None = known.ask(
        "TotalEccErrors", known.constant(f"MEMORY_ERROR_TYPE_{kind}"), known.constant("VOLATILE_ECC")
    )
    return counted


def _retired(known: Nvml) -> int | None:
    """Return the retired pages, of cards before Ampere; later ones remap rows."""
    pages = known.ask("RetiredPages", known.constant("PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR"))
    return None if pages is None else len(pages)


@dataclass
class Watch:
    """Watches a device from when it is made; `finish` says what became of it. None where the driver tells nothing."""

    name: str
    known: Nvml
    before: Counters
    after: Counters = field(default_factory=dict)
    xids: tuple[int, ...] = ()

    @classmethod
    def begin(cls, name: str, device: torch.device) -> Watch | None:
        """Watch a device by the name that problems give it."""
        known = nvml(device)
        before = {} if known is None else counters(known)
        if known is None or not before:
            return None
        known.listen()
        return cls(name, known, before)

    def finish(self) -> None:
        """Read the counters again, and the critical errors that were reported meanwhile."""
        self.after = counters(self.known)
        self.xids = self.known.heard()

    def problems(self) -> Iterator[str]:
        """Say what went wrong with the hardware meanwhile, a line each."""
        for name in RISING:
            before, after = self.before.get(name), self.after.get(name)
            if before is not None and after is not None and after > before:
                rise = f"rose from {before} to {after} during the run"
                yield f"{self.name}: {name} {rise}: its results are not to be trusted"
        for number in sorted(set(self.xids) & set(XIDS)):
            yield f"{self.name}: the driver reported Xid {number} during the run ({XIDS[number]})"
