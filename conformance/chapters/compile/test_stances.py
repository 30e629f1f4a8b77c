"""Check programs that are called under a stance of the compiler, in regions that they were not compiled in."""

from __future__ import annotations

import functools

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.children import told
from .observation import observed
from .programs import AMBIENT
from .support import COMPILED_IN, called_under, changes, compiler, dtypes_of, made_anew, same, under_stance
from .ways import WAYS

# What torch.compile does from then on where no compiled code fits. The last stance uses none, fitting or not.
STANCES = ("eager_on_recompile", "eager_then_compile", "aot_eager_then_compile", "force_eager")
# Stances under which the interpreter may end: they are tried in a process of their own first.
ENDING, PATIENCE = ("eager_then_compile", "aot_eager_then_compile"), 120.0


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("stance", [STANCES[0], *(deep("standard", one) for one in STANCES[1:])])
def test_changes_under_a_stance(case: Case, target: Target, rng: torch.Generator, stance: str) -> None:
    if stance not in (torch.compiler.set_stance.__doc__ or ""):
        case.unsupported("this torch documents no such stance")
    with compiler(case):
        if stance in ENDING:
            _, code = told(functools.partial(called_under, stance, case.seed), PATIENCE, method="spawn")
            case.equal("code with which a process ends that calls the program on a CPU", code, 0)
            if code != 0:
                return
        for name, dtype, seen, expected in under_stance(stance, target, dtypes_of(case, target), rng):
            same(case, f"{dtype}, {name}", seen, expected)


@contract("AMP-COMPILE-020")
@pytest.mark.parametrize("name", ["no region", deep("standard", "a region of the other type")], ids=["none", "other"])
def test_refused_changes(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    """Under fail_on_recompile the region in which a program was compiled is served, and another one refused."""
    case.require(target, torch.float16, torch.bfloat16)
    with compiler(case):
        for dtype in dtypes_of(case, target):
            leaves, _, compiled = made_anew(WAYS["aot_eager"], AMBIENT["plain_inside"], target, dtype, rng)
            opened = changes(target, dtype)
            expected = observed(compiled, leaves, around=opened[COMPILED_IN])
            with torch.compiler.set_stance("fail_on_recompile"):
                same(case, f"{dtype}, {COMPILED_IN}", observed(compiled, leaves, around=opened[COMPILED_IN]), expected)
                elsewhere = functools.partial(observed, compiled, leaves, around=opened[name])
                case.raises(f"{dtype}, {name}: the call", RuntimeError, elsewhere)
