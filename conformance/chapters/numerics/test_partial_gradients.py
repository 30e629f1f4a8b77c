"""Check gradients of some of the operands of normalizations and convolutions."""

from __future__ import annotations

from functools import partial

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.children import told
from ...oracles.numbers.formats import FORMATS
from .partial_gradients import END, OPS, send

# Seconds of silence after which a process is considered dead.
PATIENCE = 60.0
# How gradients of one operand may differ by the kernel that the others choose, as AMP-NUMERICS-120 bounds them.
ROUNDINGS = 32


@contract("AMP-NUMERICS-131", on="cpu")
def test_partial_gradients(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    answers: dict[str, float | str] = {}
    ended: dict[str, int | None] = {}
    last = ""
    while last != END:
        said, code = told(partial(send, amp_dtype, {*answers, *ended}), PATIENCE)
        answers |= {call: answer for call, answer in said if answer is not None}
        last = said[-1][0] if said else "the start"
        if last in ended or last in answers:
            break
        if last != END:
            ended[last] = code
    errors = {call: answer for call, answer in answers.items() if isinstance(answer, float)}
    for op in OPS:
        its = {call: code for call, code in ended.items() if call.startswith(f"{op},")}
        case.equal(f"{op}: calls that end the process, with its exit code", its, {})
        raised = {call: answer for call, answer in answers.items() if call not in errors and call.startswith(f"{op},")}
        case.equal(f"{op}: what its calls raise", raised, {})
    case.equal("what the process said last (control)", last, END)
    case.at_least("calls judged", len(errors), 1)
    bound = ROUNDINGS * FORMATS[amp_dtype].unit_roundoff
    for call, error in errors.items():
        case.at_most(f"{call}: error of the gradients", error, bound)
