"""Run pytest on the emulated card: python -m tests.emulated conformance --gpu [other arguments of pytest]."""

from __future__ import annotations

import ctypes
import sys

from tests.emulated.build import lacking, library, torch_folder


def main() -> int:
    if reason := lacking():
        print(f"no emulated card: {reason}", file=sys.stderr)
        return 4
    # Before torch, so that the card's hooks of CUDA are found before torch's own.
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)

    import pytest

    from tests.emulated import cuda

    cuda.install()
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
