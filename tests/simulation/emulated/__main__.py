"""Run pytest on the emulated card: python -m tests.simulation.emulated conformance --gpu [pytest options]."""

from __future__ import annotations

import sys

from tests.simulation.emulated.build import lacking


def main() -> int:
    if reason := lacking():
        print(f"no emulated card: {reason}", file=sys.stderr)
        return 4
    import pytest

    return int(pytest.main(["-p", "tests.simulation.emulated.plugin", *sys.argv[1:]]))


if __name__ == "__main__":
    sys.exit(main())
