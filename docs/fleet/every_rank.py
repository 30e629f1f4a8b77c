"""Judge a GPU on each rank of torchrun, and merge the reports on rank 0.

    torchrun --nnodes=4 --nproc-per-node=8 ... docs/fleet/every_rank.py FOLDER [OPTION OF THE SUITE]...

FOLDER is shared by all nodes. Without an option each rank runs `--gpu`. The exit status is that of the worst run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# What torchrun sets; the suite has process groups of its own.
_OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")


def judge(folder: Path, options: list[str]) -> int:
    """Run the suite on the GPU of this rank; returns its exit status."""
    host, rank = socket.gethostname().split(".")[0], int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    own = visible.split(",")[rank] if visible else str(rank)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
    labels = ["--label", f"host={host}-gpu{rank}", "--label", f"node={host}"]
    command = [sys.executable, "-m", "pytest", "conformance", "-q", "--report", str(folder / f"{host}-gpu{rank}")]
    run = subprocess.run([*command, *labels, *options], env={**kept, "CUDA_VISIBLE_DEVICES": own}, check=False)
    return run.returncode


def main() -> int:
    """Judge, wait for all ranks, and on rank 0 show the table of all."""
    folder, options = Path(sys.argv[1]), sys.argv[2:] or ["--gpu"]
    # gloo needs no GPU, so that a GPU that is broken does not keep the others from reporting.
    dist.init_process_group("gloo", timeout=timedelta(hours=4))
    status = torch.tensor([judge(folder, options)])
    dist.all_reduce(status, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        table = folder / "fleet.html"
        subprocess.run([sys.executable, "-m", "conformance", "merge", str(folder), "-o", str(table)], check=False)
        subprocess.run([sys.executable, "-m", "conformance", "merge", str(folder)], check=False)
    dist.destroy_process_group()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
