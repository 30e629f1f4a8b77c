"""What the report says of the machine and the software, without names of hosts, users or folders."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import data
from ..measure.flags import FLAGS
from ..report.values import Environment, Suite
from ..version import __version__
from . import catalogue

_ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("numpy", "pytest", "pytest-xdist", "pytest-benchmark", "hypothesis", "tabulate", "triton")

_OF_TORCH = ("torch", "torchgen")
# Variables that change what AMP computes or how fast; values that could hold a path are left out by name.
_VARIABLES = re.compile(
    r"^(CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUDA_MODULE_LOADING|CUBLAS_WORKSPACE_CONFIG|CUBLASLT_\w+"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|DISABLE_ADDMM_CUDA_LT"
    r"|TORCH_(CUBLAS|CUBLASLT|CUDNN|BLAS_PREFER|LINALG_PREFER)_\w+|CUDA_DEVICE_MAX_CONNECTIONS|HIPBLASLT_ALLOW_TF32"
    r"|PYTORCH_NO_CUDA_MEMORY_CACHING|PYTORCH_ENABLE_MPS_FALLBACK|HIP_VISIBLE_DEVICES|ROCBLAS_\w+"
    r"|MIOPEN_DEBUG_\w+|OMP_NUM_THREADS|OMP_WAIT_POLICY|KMP_BLOCKTIME|MKL_NUM_THREADS|ONEDNN_MAX_CPU_ISA|ONEDNN_DEFAULT_FPMATH_MODE"
    r"|DNNL_MAX_CPU_ISA|ATEN_CPU_CAPABILITY|MKL_CBWR|TORCH_DISTRIBUTED_DEBUG|PYTHONHASHSEED|PYTEST_XDIST_WORKER_COUNT)$"
)


def suite() -> Suite:
    """Return the suite's version and digests and, in a git checkout, its commit and whether the tree was clean."""
    commit = _git("rev-parse", "HEAD")
    digests = data.digest(), catalogue.digest()
    changes = _git("status", "--porcelain", "--untracked-files=all", "-z") if commit else None
    if not commit or changes is None:
        return Suite(__version__, commit or None, None, *digests)
    clean = all(_of_a_report(change) for change in changes.split("\0") if change)
    return Suite(__version__, commit, clean, *digests)


def _of_a_report(change: str) -> bool:
    """Whether a line of `git status` is of an untracked file in the folder of a report, which changes no judgement."""
    state, path = change[:2], change[3:]
    try:
        with (_ROOT / path).parent.joinpath("report.json").open("rb") as stream:
            return state == "??" and stream.read(64).startswith(b'{"schema":"amp-conformance-report/')
    except OSError:
        return False


def _git(*arguments: str) -> str | None:
    if not (_ROOT / ".git").exists():
        return None
    try:
        run = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def environment() -> Environment:
    """Return the versions and the hardware that a result depends on."""
    return Environment(
        torch=str(torch.__version__),
        torch_git=getattr(torch.version, "git_version", None),
        cuda_build=torch.version.cuda,
        hip_build=torch.version.hip,
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu=cpu(),
        driver=driver(),
        packages={name: version for name in (*_PACKAGES, *_extending()) if (version := _version(name)) is not None},
    )


def _extending() -> list[str]:
    """Name the loaded packages that extend torch, such as torch_xla or intel_extension_for_pytorch."""
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    return sorted(name for name in loaded if "torch" in name and name not in _OF_TORCH)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu() -> str:
    """Return the processor's own name."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or "unknown"


def driver() -> str | None:
    """Return the version of the GPU's driver where the kernel or torch reports it."""
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        try:
            found = re.search(r"\d+\.\d+[.\d]*", path.read_text())
        except OSError:
            continue
        if found:
            return found.group(0)
    if torch.cuda.is_available() and torch.version.hip is None:
        try:
            listed = subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            ).stdout.split()
        except (OSError, subprocess.TimeoutExpired):
            return None
        return listed[0] if listed else None
    return None


def flags() -> dict[str, Any]:
    """Return torch's flags that change AMP's results; one that this torch lacks is left out."""
    found = {}
    for flag in FLAGS:
        if not flag.reported:
            continue
        try:
            value = flag.read()
        except (AttributeError, RuntimeError):
            continue
        found[flag.name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return found


def variables() -> dict[str, str]:
    """Return the environment variables that change AMP's results or speed."""
    return {name: redact(value) for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}


def _private() -> list[tuple[str, str]]:
    """Pair what must not leave the machine with what stands in its place, the longest first."""
    folders = {
        str(_ROOT): "<suite>",
        str(Path(torch.__file__).parent.parent): "<site-packages>",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        os.getcwd(): "<here>",
        tempfile.gettempdir(): "<tmp>",
        os.path.expanduser("~"): "<home>",  # Path.home() raises for a user without a home, as in a container
    }
    pairs = [(path, name) for path, name in folders.items() if len(path) > 1]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _names() -> list[str]:
    names = []
    for ask in (socket.gethostname, getpass.getuser):
        # A user whom the system does not know has no name, and the machine has one all the same.
        with contextlib.suppress(OSError, KeyError, ImportError):
            names.append(ask())
    # A short or common name ("root") inside a message is no secret and must not garble it.
    return [name for name in names if len(name) > 4]


_FOLDERS = _private()
_WORDS = [re.compile(rf"\b{re.escape(name)}\b") for name in _names()]


def redact_folders(text: str) -> str:
    """Replace folders in `text`, which may be a program: a name in it that is also the user's is none of the user."""
    for path, name in _FOLDERS:
        text = text.replace(path, name)
    return text


def redact(text: str) -> str:
    """Replace folders, host names and user names in `text`."""
    text = redact_folders(text)
    for word in _WORDS:
        text = word.sub("<name>", text)
    return text
