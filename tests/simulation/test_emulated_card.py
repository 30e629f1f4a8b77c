"""The checks on tensors of a CUDA card that is made of a CPU: what only CUDA's dispatch keys and threads show.

The whole suite runs on it too, in CI (tox -e emulated).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Outcome, run_of
from tests.simulation.emulated.build import lacking

pytestmark = pytest.mark.skipif(lacking() is not None, reason=f"no emulated card: {lacking()}")

Start = Callable[..., Outcome]

# Graphs, streams, gradient scaling, fused kernels, waits; times and peaks of memory, which the simulated card has.
OF_A_CARD = ("AMP-SCALE-047", "AMP-SCALE-14*", "AMP-SCALE-16*", "AMP-OPTIMIZER-027", "AMP-OPTIMIZER-046")
MORE = ("AMP-OPTIMIZER-09*", "AMP-SPEED-001", "AMP-SPEED-009", "AMP-MEMORY-019")
OF_TWO = ("AMP-SCALE-166", "AMP-OPTIMIZER-069", "AMP-OPTIMIZER-125", "AMP-REGION-096", "AMP-CLIP-047")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Start:
    """Run contracts on one card or several, in a process of its own."""

    def run(contracts: tuple[str, ...], *options: str, cards: int = 1, gpu: bool = True) -> Outcome:
        folder = tmp_path_factory.mktemp("emulated")
        chosen = [argument for contract in contracts for argument in ("--contract", contract)]
        command = ["tests.simulation.emulated", "conformance", *["--gpu"] * gpu, *chosen, *options]
        return run_of(root, folder, command, {"EMULATED_CARDS": str(cards)})

    return run


@pytest.fixture(scope="module")
def clean(start: Start) -> Outcome:
    return start((*OF_A_CARD, *MORE))


def cases_of(outcome: Outcome, *verdicts: str) -> set[str]:
    """The contracts that have a case of those verdicts."""
    return {case["contract"] for case in outcome.report["cases"] if case["verdict"] in verdicts}


def test_a_clean_card_conforms(clean: Outcome) -> None:
    assert clean.status == 0, clean.output
    assert clean.report["footer"]["overall"] == "CONFORMANT"
    assert {"AMP-SCALE-162", "AMP-SCALE-163", "AMP-SCALE-165", "AMP-OPTIMIZER-091", "AMP-SPEED-009"} <= cases_of(
        clean, "PASS"
    )


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (False, "emulated card (cuda:0) is here and NOT judged: add --gpu"),
        (True, "emulated card (cuda:1) is here and NOT judged: add --device cuda:1"),
    ],
)
def test_cards_that_are_not_judged_are_said_before_and_after(start: Start, gpu: bool, said: str) -> None:
    outcome = start(("AMP-SCALE-014",), cards=1 + gpu, gpu=gpu)

    assert outcome.status == 0
    assert outcome.output.count(f"\n{said}\n") == 2


def test_two_devices_are_not_applicable_to_one_card(clean: Outcome) -> None:
    assert {id.split("[")[0] for id in clean.report["footer"]["not_applicable"]} == {"AMP-SCALE-166"}


def test_waivers_for_cuda_name_what_they_excuse(clean: Outcome) -> None:
    # bf16 gradients, which CUDA's unscaling kernel has no code for, fp64 ones, and an interval of more than 32 bits.
    waived = {case["id"] for case in clean.report["cases"] if case["verdict"] == "WAIVED"}

    assert {"AMP-SCALE-148[intervals_beyond_32_bits:device]", "AMP-SCALE-141[flag:device-clear-fp64]"} <= waived
    assert {"AMP-SCALE-047", "AMP-OPTIMIZER-027"} <= {id.split("[")[0] for id in waived}


def test_two_cards_conform_in_workers_as_in_one_process(start: Start) -> None:
    spread, alone = (start(OF_TWO, "-n", processes, cards=2) for processes in ("2", "0"))

    assert spread.status == alone.status == 0, spread.output
    assert spread.verdicts() == alone.verdicts()
    assert set(OF_TWO) <= {id.split("[")[0] for id in alone.verdicts() if "two_devices" in id}


@pytest.mark.parametrize(
    ("fault", "contract", "cards"),
    [
        ("captured_steps_read_the_flag", "AMP-SCALE-163", 1),
        ("captured_steps_read_the_flag", "AMP-OPTIMIZER-091", 1),
        ("unscaling_waits", "AMP-SPEED-009", 1),
        ("attention_runs_fused_in_a_region", "AMP-CAST-066", 1),
        ("encoders_run_fused_in_a_region", "AMP-CAST-066", 1),
        ("factor_stays_on_the_scales_device", "AMP-SCALE-166", 2),
        ("fused_optimizers_see_one_device", "AMP-OPTIMIZER-069", 2),
        ("rates_of_the_cpu_are_moved", "AMP-OPTIMIZER-125", 2),
        ("rates_in_tensors_are_halved", "AMP-OPTIMIZER-125", 2),
        ("rates_in_tensors_are_halved", "AMP-COMPILE-061", 2),
        ("replicas_run_without_the_region", "AMP-REGION-096", 2),
        ("coefficient_stays_where_the_norm_is", "AMP-CLIP-047", 2),
    ],
)
def test_a_fault_fails_on_the_card(start: Start, fault: str, contract: str, cards: int) -> None:
    outcome = start((contract,), "--fault", fault, "--level", "standard", cards=cards)

    assert outcome.status == 1, outcome.output
    assert cases_of(outcome, "FAIL") == {contract}
