"""Settings that contradict each other are refused in one line, where there is a CUDA device that they are about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.harness import session
from conformance.harness.contradictions import contradictions
from conformance.harness.targets import Target, resolve
from tests.conftest import Toy

CUDA = Target("cuda:0", "cuda", 0, is_fake=False)
NAMES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "takes TF32 away"),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "differ: unset the second",
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync, expandable_segments:True"},
            "knows nothing of expandable_segments",
        ),
    ],
)
def test_contradictions_are_named(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    line = contradictions([CUDA])

    assert line is not None
    assert said in line
    assert "\n" not in line
    assert contradictions([resolve("cpu"), resolve("fake:cuda")]) is None


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NVIDIA_TF32_OVERRIDE": "0"},
        {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
    ],
)
def test_what_agrees_is_left_alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert contradictions([CUDA]) is None


def test_precision_that_the_override_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")

    assert "set_float32_matmul_precision('high')" in (contradictions([CUDA]) or "")


@pytest.mark.usefixtures("_deterministic")
def test_determinism_needs_the_workspace_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUBLAS_WORKSPACE_CONFIG is not set" in (contradictions([CUDA]) or "")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096")
    assert "CUBLAS_WORKSPACE_CONFIG is :4096:" in (contradictions([CUDA]) or "")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert contradictions([CUDA]) is None


def test_a_run_is_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "contradictions", lambda targets: "this and that differ")
    toy.contract("AMP-API-001")

    outcome = toy.run()

    assert outcome.status == 4
    assert "the settings of this process contradict each other: this and that differ" in outcome.output
    assert "Traceback" not in outcome.output
