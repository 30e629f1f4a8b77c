"""The suite judges a scaler of another maker by what it does, and asks for none of the private names of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.scaler import drive
from tests.conftest import run_of
from tests.scaler.vendor_scaler import GradScaler

_VENDORS = ("pytest", "conformance", "-n", "0", "--import", "tests.scaler.vendor_in_place", "--device", "cpu")
_SCALES = ("--chapter", "scale")
_STEPS = tuple(option for number in ("022", "052", "067") for option in ("--contract", f"AMP-OPTIMIZER-{number}"))
_FLAGS = ("--contract", "AMP-OPTIMIZER-069", "--level", "standard")


@pytest.mark.parametrize(
    ("chosen", "shortcomings"),
    [(_SCALES, {"AMP-SCALE-151"}), (_STEPS, set()), (_FLAGS, set())],
    ids=["scale", "optimizer", "flags of several devices"],
)
def test_clean_scaler_of_another_maker_is_not_blamed(
    root: Path, tmp_path: Path, chosen: tuple[str, ...], shortcomings: set[str]
) -> None:
    """It has divided gradients before it refuses one in fp16: AMP-SCALE-151, a `should`, is what judges that."""
    outcome = run_of(root, tmp_path, (*_VENDORS, *chosen), {})

    cases = outcome.report["cases"]
    assert {case["contract"] for case in cases if case["verdict"] in ("FAIL", "ERROR")} == shortcomings
    assert not [case["id"] for case in cases if case["verdict"] == "UNTESTABLE"]
    assert "torch.amp.GradScaler" in str(outcome.report["header"]["replaced_functions"])


def test_it_agrees_with_the_documentation() -> None:
    driven = drive(lambda **settings: GradScaler("cpu", **settings), without=["intact_gradients"], histories=20)

    driven.check()
