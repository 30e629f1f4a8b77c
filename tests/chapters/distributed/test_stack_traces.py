"""Ranks go on where torch adds stack traces to its errors: forked ones waited for the addr2line of their parent."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import run_of


def test_errors_with_stack_traces_lose_no_rank(root: Path, tmp_path: Path) -> None:
    command = ("pytest", "conformance", "-n", "0", "--contract", "AMP-DISTRIBUTED-026", "--case-timeout", "60")
    chosen = ("-k", "dtensor and fused-SGD")

    outcome = run_of(root, tmp_path, (*command, *chosen), {"TORCH_SHOW_CPP_STACKTRACES": "1"})

    assert outcome.verdicts()
    assert set(outcome.verdicts().values()) <= {"PASS", "WAIVED", "UNSUPPORTED"}, outcome.output
