"""Building the emulated card, which needs a C++ compiler and the headers that come with torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent


def torch_folder() -> Path:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def lacking() -> str | None:
    """Say what the card lacks here, or None."""
    if reason := uncompiled():
        return reason
    if (
        not (torch_folder() / "lib" / "libtorch_cpu.so").exists()
        or (torch_folder() / "lib" / "libc10_cuda.so").exists()
    ):
        return "it takes CUDA's place in a build of torch for the CPU on Linux, and this is another"
    return None


def uncompiled() -> str | None:
    """Say why nothing can be compiled here, or None."""
    return "it is compiled, and there is no C++ compiler (c++, or what CXX names)" if _compiler() is None else None


def library(source: Path = FOLDER / "card.cpp") -> Path:
    """Return the library of `source` (the card) for the torch at hand, compiled where it has not been.

    Raises CalledProcessError where the source does not compile. The device runs the CPU's kernels: it is to be right
    where those of oneDNN for AVX512 and AMX are not (docs/divergences.md), which a process chooses at its first use.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    home = torch_folder()
    files = {source, *FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")}
    sources = b"".join(path.read_bytes() for path in sorted(files))
    key = hashlib.sha256(sources + str(home).encode() + (home / "version.py").read_bytes()).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"emulated-{source.stem}-{key}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            # Another process may be at it too: what is at its place is whole.
            _compile(home, source, Path(folder) / made.name).replace(made)
    return made


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def _compile(home: Path, source: Path, to: Path) -> Path:
    compiler = _compiler()
    assert compiler is not None
    headers = [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    links = [f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", *headers, str(source), "-o", str(to), *links]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return to
