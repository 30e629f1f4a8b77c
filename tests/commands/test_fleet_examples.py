"""The examples of docs/fleet.md: what can be tried without a cluster is tried."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness.options import _labels
from tests.paths import ROOT

FOLDER = ROOT / "docs" / "fleet"
NARROW = ["--device", "cpu", "--level", "quick", "--contract", "AMP-CLIP-001"]


def _run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, check=False, timeout=500
    )


def _merged(folder: Path) -> str:
    return _run(sys.executable, "-m", "conformance", "merge", str(folder)).stdout


def test_xdist_judges_each_gpu(tmp_path: Path) -> None:
    run = _run(
        *(sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", str(FOLDER / "test_every_gpu.py")),
        AMP_FLEET_GPUS="2",
        AMP_FLEET_OPTIONS=" ".join(NARROW),
        AMP_FLEET_REPORTS=str(tmp_path),
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert _merged(tmp_path).endswith("2 machines: 2 CONFORMANT\n")


def test_torchrun_judges_each_rank_and_merges(tmp_path: Path) -> None:
    run = _run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(FOLDER / "every_rank.py"), str(tmp_path), *NARROW),
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 machines: 2 CONFORMANT" in run.stdout
    assert (tmp_path / "fleet.html").read_text().startswith("<!doctype html>")


def test_slurm_job_is_a_script_that_the_shell_reads() -> None:
    assert _run("bash", "-n", str(FOLDER / "slurm.sbatch")).returncode == 0


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubernetes_job_is_one_that_kubectl_reads() -> None:
    run = _run("kubectl", "set", "env", "--local", "-f", str(FOLDER / "kubernetes.yaml"), "CHECK=1", "-o", "json")

    assert run.returncode == 0, run.stderr
    assert '"completionMode": "Indexed"' in run.stdout
    assert '"nvidia.com/gpu": "1"' in run.stdout


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes.yaml", "test_every_gpu.py", "every_rank.py"])
def test_examples_give_labels_that_a_run_takes(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    labels = re.findall(r'"(\w+)=[{$]', text)

    assert "host" in labels
    assert _labels(f"{label}=node17-gpu3" for label in labels)
