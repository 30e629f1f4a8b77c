"""A backend of a third party under torch's key PrivateUse1: clean, undeclared, and with broken rules and kernels.

The whole suite runs on the clean one at quick in CI (tox -e foreign).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from conformance.harness.targets import one_device_only
from tests.conftest import Outcome, run_of
from tests.simulation.emulated.build import uncompiled
from tests.simulation.foreign.variants import FUSED, LACKING, VARIANTS, VARIED

pytestmark = pytest.mark.skipif(uncompiled() is not None, reason=f"no backend: {uncompiled()}")

_BACKEND = ("--import", "tests.simulation.foreign.toyacc", "--device", "toyacc")
_DECLARED = ("--op-policy", "like:cuda")


def _run(
    root: Path, folder: Path, contracts: tuple[str, ...], *options: str, variant: str = "", rules: str = "cuda"
) -> Outcome:
    chosen = [argument for contract in contracts for argument in ("--contract", contract)]
    command = ["pytest", "conformance", *_BACKEND, *options, *chosen]
    return run_of(root, folder, command, {"TOYACC_VARIANT": variant, "TOYACC_RULES": rules})


@pytest.mark.parametrize("variant", VARIANTS)
def test_broken_rules_and_kernels_are_caught(root: Path, tmp_path: Path, variant: str) -> None:
    patterns = VARIANTS[variant].contracts

    outcome = _run(root, tmp_path, patterns, *_DECLARED, "--maxfail=1", variant=variant)

    failed = {case["contract"] for case in outcome.report["cases"] if case["verdict"] == "FAIL"}
    assert outcome.status == 1, outcome.output[-3000:]
    assert any(fnmatchcase(contract, pattern) for contract in failed for pattern in patterns)
    assert not [case["id"] for case in outcome.report["cases"] if case["verdict"] == "ERROR"]


def test_program_of_a_failed_case_registers_the_backend(root: Path, tmp_path: Path) -> None:
    variant = "exp_is_lowered"
    outcome = _run(root, tmp_path, ("AMP-CAST-03*",), *_DECLARED, "--level", "quick", "--maxfail=1", variant=variant)
    (failed,) = (case for case in outcome.report["cases"] if case["verdict"] == "FAIL")

    environment = {**os.environ, "TOYACC_VARIANT": variant, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", failed["snippet"]], env=environment, cwd=tmp_path, capture_output=True, text=True
    )

    assert failed["snippet"].startswith("import tests.simulation.foreign.toyacc\n")
    assert done.returncode == 1
    assert done.stderr.endswith("the outputs have other dtypes\n")


def test_program_and_command_of_a_failed_case_declare_what_the_run_did(root: Path, tmp_path: Path) -> None:
    contract, variant = "AMP-CAST-074", "bf16_regions_compute_in_fp16"
    outcome = _run(root, tmp_path, (contract,), *_DECLARED, "--level", "quick", "--maxfail=1", variant=variant)
    (failed,) = (case for case in outcome.report["cases"] if case["verdict"] == "FAIL")

    environment = {**os.environ, "TOYACC_VARIANT": variant, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", failed["snippet"]], env=environment, cwd=tmp_path, capture_output=True, text=True
    )

    assert done.returncode == 1
    assert "float16, not torch.bfloat16" in done.stderr, done.stdout + done.stderr
    options = " ".join(("--contract", contract, *_BACKEND, "--op-policy", "toyacc=like:cuda", "--level", "quick"))
    assert options in " ".join(outcome.output.split())


@pytest.mark.parametrize("variant", LACKING)
def test_backend_may_lack_what_it_says(root: Path, tmp_path: Path, variant: str) -> None:
    outcome = _run(root, tmp_path, LACKING[variant].contracts, *_DECLARED, variant=variant)

    verdicts = {case["verdict"] for case in outcome.report["cases"]}
    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT"), outcome.output[-3000:]
    assert {"PASS", "UNSUPPORTED"} <= verdicts


def test_backend_may_lack_any_kernels(root: Path, tmp_path: Path) -> None:
    contracts = ("AMP-CLIP-03*", "AMP-OPTIMIZER-1[02]*", "AMP-NUMERICS-08*", "AMP-TRANSFORM-020")
    arguments = [argument for contract in contracts for argument in ("--contract", contract)]
    command = ["pytest", "conformance", *_BACKEND, *_DECLARED, "--level", "quick", *arguments]

    outcome = run_of(root, tmp_path, command, {"TOYACC_LACKS": "1:120"})

    lacking = [case["reason"] for case in outcome.report["cases"] if case["verdict"] == "UNSUPPORTED"]
    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT"), outcome.output[-3000:]
    assert sum("has no kernel of aten::" in reason for reason in lacking) > 50


@pytest.mark.parametrize("variant", VARIED)
def test_backend_may_do_what_torch_leaves_open(root: Path, tmp_path: Path, variant: str) -> None:
    outcome = _run(root, tmp_path, VARIED[variant].contracts, *_DECLARED, "--level", "quick", variant=variant)

    verdicts = {case["verdict"] for case in outcome.report["cases"]}
    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT"), outcome.output[-3000:]
    assert "PASS" in verdicts


@pytest.mark.parametrize("variant", FUSED)
def test_what_the_cpus_kernels_break_is_excused_kernel_by_kernel(root: Path, tmp_path: Path, variant: str) -> None:
    outcome = _run(root, tmp_path, FUSED[variant].contracts, *_DECLARED, variant=variant)

    broken = ("fused-gaps", "fused-other-gradient")
    verdicts = {
        case["id"].split("device-")[1].split("-")[0]: case["verdict"]
        for case in outcome.report["cases"]
        if case["id"].rstrip("]").endswith(broken)
    }
    assert outcome.status == 0, outcome.output[-3000:]
    assert verdicts.pop("SGD") == "PASS"
    assert set(verdicts.values()) == {"WAIVED"}


def test_clean_backend_holds_what_it_declares(root: Path, tmp_path: Path) -> None:
    outcome = _run(root, tmp_path, ("AMP-CAST-0[0-3]*", "AMP-REGION-00*", "AMP-CACHE-00*"), *_DECLARED)

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT"), outcome.output[-3000:]
    assert outcome.report["header"]["options"]["op_policies"] == {"toyacc": "cuda"}
    assert outcome.report["header"]["options"]["imports"] == ["tests.simulation.foreign.toyacc"]
    assert "bmm" in outcome.report["header"]["op_policy"]["toyacc"]["overloads"]["lower_precision"]
    assert "judged by the op lists of cuda" in " ".join(outcome.output.split())


def test_what_the_device_cannot_do_outside_of_regions_is_unsupported(root: Path, tmp_path: Path) -> None:
    lacking = ("--import", "tests.simulation.foreign.lacking")

    outcome = _run(root, tmp_path, ("AMP-CAST-051", "AMP-CAST-075"), *_DECLARED, *lacking)

    reasons = {(case["verdict"], case["reason"].split(",")[0]) for case in outcome.report["cases"]}
    named = {("UNSUPPORTED", "toyacc:0 cannot name the dimensions of a tensor")}
    jagged = {("UNSUPPORTED", "toyacc:0 cannot make a jagged nested tensor")}
    assert reasons == (jagged | named if hasattr(torch.Tensor, "refine_names") else jagged), outcome.output[-3000:]


def test_inductor_is_not_asked_for_kernels_of_a_device_that_it_does_not_know(root: Path, tmp_path: Path) -> None:
    outcome = _run(root, tmp_path, ("AMP-COMPILE-005",), *_DECLARED, "--level", "standard")

    lacks = "toyacc:0 (toy accelerator) lacks compiled kernels: inductor makes no kernels for toyacc"
    reasons = {(case["verdict"], case["reason"]) for case in outcome.report["cases"]}
    assert reasons == {("UNSUPPORTED", lacks)}, outcome.output[-3000:]


def test_names_that_only_backends_of_torch_have_are_not_judged_on_another(root: Path, tmp_path: Path) -> None:
    """`torch.cpu.amp` has no counterpart on a device that declares the CPU's lists."""
    outcome = _run(root, tmp_path, ("AMP-RECIPE-003", "AMP-RECIPE-014"), "--op-policy", "like:cpu")

    assert {case["contract"] for case in outcome.report["cases"]} == {"AMP-RECIPE-014"}, outcome.output[-3000:]


_OF_LISTS = ("AMP-CAST-012", "AMP-CAST-03*", "AMP-LOSS-00*", "AMP-REGION-00*", "AMP-CACHE-00*")
# What rests on the lists of CUDA, where MPS has no lists of its own but other rules for some ops.
_OF_RULES = (
    "AMP-NUMERICS-018", "AMP-NUMERICS-020", "AMP-NUMERICS-04[07]", "AMP-MEMORY-01[4-7]", "AMP-MEMORY-051",
    "AMP-SPEED-008", "AMP-SPEED-052", "AMP-SCALE-190", "AMP-CAST-110", "AMP-RECIPE-028",
)  # fmt: skip


@pytest.mark.parametrize(("backend", "contracts"), [("cpu", _OF_LISTS), ("mps", (*_OF_LISTS, *_OF_RULES))])
def test_backend_with_the_rules_of_another_holds_them(
    root: Path, tmp_path: Path, backend: str, contracts: tuple[str, ...]
) -> None:
    outcome = _run(root, tmp_path, contracts, "--op-policy", f"like:{backend}", rules=backend)

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT"), outcome.output[-3000:]
    reasons = " ".join(case["reason"] for case in outcome.report["cases"] if case["verdict"] == "UNSUPPORTED")
    for op in ("conv_transpose3d", "batch_norm", "vdot"):
        assert (f"the op policy of mps has another rule for {op}" in reasons) == (backend == "mps")


@pytest.mark.parametrize(("backend", "differs"), [("cpu", "exp"), ("mps", "conv_transpose3d.input")])
def test_rules_of_one_backend_are_not_those_of_another(root: Path, tmp_path: Path, backend: str, differs: str) -> None:
    outcome = _run(root, tmp_path, ("AMP-CAST-03[89]",), *_DECLARED, "--level", "standard", rules=backend)

    failing = {case["id"].rpartition("-")[2] for case in outcome.report["cases"] if case["verdict"] == "FAIL"}
    assert f"{differs}]" in failing, outcome.output[-3000:]


_CASTS = ("AMP-CAST-002", "AMP-CAST-012", "AMP-CAST-03*", "AMP-CAST-044", "AMP-CAST-045", "AMP-CAST-057")


def _surface(root: Path, folder: Path, **rules: str) -> tuple[str, ...]:
    """Write a surface whose rules of CUDA are those of torch 2.13 but for these, and return the declaration of it."""
    document = json.loads((root / "fixtures" / "surfaces" / "2.13.0.json").read_text(encoding="utf-8"))
    document["backends"]["cuda"]["overloads"] |= rules
    (folder / "vendor.json").write_text(json.dumps(document), encoding="utf-8")
    return "--op-policy", f"surface:{folder / 'vendor.json'}:cuda"


@pytest.mark.parametrize(("variant", "status"), [("exp_is_lowered", 0), ("", 1)])
def test_surface_takes_the_place_of_the_lists(root: Path, tmp_path: Path, variant: str, status: int) -> None:
    """The backend that lowers exp holds a surface that says so, the one that does not breaks it."""
    declaration = _surface(root, tmp_path, exp="lower_precision")

    outcome = _run(root, tmp_path / "report", _CASTS, *declaration, variant=variant)

    assert outcome.status == status, outcome.output[-3000:]
    assert outcome.report["header"]["options"]["op_policies"] == {"toyacc": "cuda in the surface vendor.json"}
    failing = [case for case in outcome.report["cases"] if case["verdict"] == "FAIL"]
    assert all("exp" in case["reason"] for case in failing)
    again = "--op-policy toyacc=surface:vendor.json:cuda" in " ".join(outcome.output.split())
    assert again == bool(failing)
    unsupported = {case["reason"] for case in outcome.report["cases"] if case["verdict"] == "UNSUPPORTED"}
    assert "the surface that is declared for toyacc has another rule for exp" in unsupported


@pytest.mark.parametrize(
    ("variant", "rules", "verdicts"),
    [
        ("exp_is_lowered", {"exp": "lower_precision"}, {"PASS", "UNSUPPORTED", "WAIVED"}),
        ("losses_stay_in_16_bits", {"mse_loss": "unlisted", "l1_loss": "unlisted"}, {"PASS", "UNSUPPORTED", "WAIVED"}),
        ("losses_stay_in_16_bits", {"exp": "lower_precision"}, {"FAIL", "PASS", "UNSUPPORTED", "WAIVED"}),
        ("linear_runs_in_fp32", {"exp": "lower_precision"}, {"FAIL", "PASS", "UNSUPPORTED", "WAIVED"}),
        ("linear_runs_in_fp32", {"linear": "fp32"}, {"PASS", "UNSUPPORTED", "WAIVED"}),
    ],
)
def test_losses_models_and_products_follow_a_surface(
    root: Path, tmp_path: Path, variant: str, rules: dict[str, str], verdicts: set[str]
) -> None:
    declaration = _surface(root, tmp_path, **rules)
    contracts = ("AMP-LOSS-0*", "AMP-CAST-06[0-3]", "AMP-NUMERICS-012")

    outcome = _run(root, tmp_path / "report", contracts, *declaration, variant=variant)

    assert {case["verdict"] for case in outcome.report["cases"]} == verdicts
    assert outcome.status == ("FAIL" in verdicts)
    reasons = " ".join(case["reason"] for case in outcome.report["cases"] if case["verdict"] == "UNSUPPORTED")
    assert f"has another rule for {next(iter(rules))}" in reasons


def test_kernel_may_cast_its_inputs_in_an_order_of_its_own(root: Path, tmp_path: Path) -> None:
    """The kernel casts its first input first, torch's macros the last; a weight that is used twice is cast twice."""
    outcome = _run(root, tmp_path, ("AMP-CAST-06[0-3]",), *_DECLARED, variant="weights_are_cast_each_time")

    failed = [case["id"] for case in outcome.report["cases"] if case["verdict"] == "FAIL"]
    assert failed
    assert all("-lstm" in case for case in failed)


@pytest.mark.parametrize("variant", ["", "thirty_rules_are_missing"])
def test_backend_that_declares_nothing_is_partial(root: Path, tmp_path: Path, variant: str) -> None:
    outcome = _run(root, tmp_path, ("AMP-CAST-*", "AMP-API-*"), variant=variant)

    assert (outcome.status, outcome.report["footer"]["overall"]) == (6, "PARTIAL"), outcome.output[-3000:]
    assert "declare it, as with --op-policy like:cuda" in " ".join(outcome.output.split())


def test_missing_kernel_is_unsupported_and_named(root: Path, tmp_path: Path) -> None:
    outcome = _run(root, tmp_path, ("AMP-CAST-065",), *_DECLARED)

    reasons = {case["reason"] for case in outcome.report["cases"] if case["verdict"] == "UNSUPPORTED"}
    assert "toyacc:0 has no kernel of aten::_thnn_fused_lstm_cell" in reasons
    assert outcome.status == 0


@pytest.mark.parametrize("chapter", ["scale", "optimizer", "clip"])
def test_second_devices_of_third_parties_are_judged(chapter: str) -> None:
    """A kernel that leaves out the second device of a backend is found where checks of two devices run on it."""
    modules = {"scale": "test_gpu", "optimizer": "test_gpu", "clip": "test_norms"}
    module = importlib.import_module(f"conformance.chapters.{chapter}.{modules[chapter]}")
    marked = [getattr(check, "pytestmark", []) for check in vars(module).values()]
    of_two = [
        marks for marks in marked if any(one_device_only in mark.args for mark in marks if mark.name == "applies")
    ]

    targets = {mark.kwargs["on"] for marks in of_two for mark in marks if mark.name == "contract"}

    assert targets == {("accelerator",)}
