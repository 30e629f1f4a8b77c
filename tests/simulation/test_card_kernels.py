"""Checks on the emulated card with a real card's own kernels: the right ones pass, the faulty ones fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import reports
from tests.simulation.card_kernels import BROKEN, CLEAN
from tests.simulation.emulated.build import lacking

pytestmark = pytest.mark.skipif(lacking() is not None, reason=f"no emulated card: {lacking()}")

# The contracts whose checks meet each of these kernels.
MEET = {
    "tanh_backward": ("AMP-NUMERICS-100",),
    "cudnn_rnn_in_float16": ("AMP-PARITY-018",),
    "cudnn_weights_in_one_buffer": ("AMP-MEMORY-052",),
    "matrix_units_for_some_sizes": ("AMP-NUMERICS-092",),
    "log_softmax_in_float32": ("AMP-PARITY-018", "AMP-NUMERICS-063", "AMP-LOSS-003", "AMP-LOSS-007"),
}
CATCH = {
    "tanh_backward_of_fewer_bits": "AMP-NUMERICS-100",
    "sums_of_few_bits_for_some_sizes": "AMP-NUMERICS-092",
    "gates_of_cudnn_rnn_miss_a_bias": "AMP-PARITY-018",
}


def failures(folder: Path, root: Path, kernels: list[str], contracts: list[str]) -> set[str]:
    """The contracts that fail at quick on a card with those kernels, or whose waivers are not needed there."""
    chosen = [argument for contract in contracts for argument in ("--contract", contract)]
    command = [sys.executable, "-m", "tests.simulation.emulated", "conformance", "--gpu", "--level", "quick", "-q"]
    plugins = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-p",
        "tests.simulation.card_kernels",
        "--card-kernels",
        *kernels,
    ]
    command += ["--report", str(folder), *chosen, *plugins]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    written = folder / "report.json"
    assert written.exists(), (done.stdout + done.stderr)[-3000:]
    read = reports.written(written)
    cases = read["cases"]
    assert {case["contract"] for case in cases} == set(contracts)
    rotten = {waiver["contract"] for waiver in read["footer"]["waivers"] if waiver["state"] not in ("used", "idle")}
    return rotten | {case["contract"] for case in cases if case["verdict"] in ("FAIL", "ERROR")}


def test_a_faultless_card_is_not_blamed(tmp_path: Path, root: Path) -> None:
    assert failures(tmp_path, root, list(CLEAN), sorted({one for some in MEET.values() for one in some})) == set()


@pytest.mark.parametrize("kernel", CATCH)
def test_a_faulty_kernel_is_caught(tmp_path: Path, root: Path, kernel: str) -> None:
    assert failures(tmp_path, root, [kernel], [CATCH[kernel]]) == {CATCH[kernel]}


def test_every_kernel_is_tried() -> None:
    assert (set(MEET), set(CATCH)) == (set(CLEAN), set(BROKEN))
