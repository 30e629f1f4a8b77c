"""Judge each GPU of this machine with pytest-xdist: `pytest -n 8 docs/fleet/test_every_gpu.py`, a worker a GPU.

AMP_FLEET_GPUS is how many GPUs there are (default: as many as torch sees), AMP_FLEET_REPORTS the folder of the reports,
AMP_FLEET_OPTIONS what each run gets (default `--gpu`).
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPORTS = Path(os.environ.get("AMP_FLEET_REPORTS", "reports"))
OPTIONS = shlex.split(os.environ.get("AMP_FLEET_OPTIONS", "--gpu"))


def gpus() -> int:
    """Return the number of GPUs, from the variable or from torch."""
    if "AMP_FLEET_GPUS" in os.environ:
        return int(os.environ["AMP_FLEET_GPUS"])
    import torch

    return torch.cuda.device_count()


@pytest.mark.parametrize("gpu", range(gpus()))
def test_gpu(gpu: int) -> None:
    """Run the suite in a process of its own that sees this GPU alone."""
    host = socket.gethostname().split(".")[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = visible.split(",")[gpu] if visible else str(gpu)
    # The worker's own variables would make the run take itself for a worker of another one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    report = [
        "--report",
        str(REPORTS / f"{host}-gpu{gpu}"),
        "--label",
        f"host={host}-gpu{gpu}",
        "--label",
        f"node={host}",
    ]

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "conformance", "-p", "no:cacheprovider", "-q", *OPTIONS, *report],
        env={**kept, "CUDA_VISIBLE_DEVICES": own},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
