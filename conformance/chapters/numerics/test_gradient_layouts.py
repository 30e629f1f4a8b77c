"""Check ops whose operands, or the gradient that comes back to them, lie in memory in another way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.relations import outcomes
from ...oracles.relations.outcomes import Outcome
from ...oracles.relations.programs import Program, program
from ...oracles.relations.values import ALL_LAYOUTS, weights
from .drawn_ops import ACTIVATIONS, FAMILIES, Draws
from .number_grids import NUMBER_GRIDS
from .option_grids import GRIDS
from .support import Findings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings of a gradient's largest number: kernels of another layout may add up in another order.
LIMIT = 32.0
Tensors = tuple[Tensor | None, ...]
LAYOUTS = tuple(name for name in ALL_LAYOUTS if name != "as given")
# Of these families some draws are of millions of numbers, or of kinds that differ in more than their options.
DRAWN = ("softmax", "product", "convolution", "pooling", "padding", "interpolation", "indexing", "elementwise", "loss")
SAMPLES = 12


def _of_a_sum(output: Tensor) -> Tensor:
    return output.new_ones(()).expand_as(output)


def _programs(seed: int) -> Iterator[Program]:
    """Yield one call of each op that the grids name with each number of tensors, one of each activation, and others.

    Those are some of each family that is drawn.
    """
    for name, grid in {**GRIDS, **NUMBER_GRIDS}.items():
        draws = Draws(f"{name} {seed}")
        calls: dict[tuple[str, int], list[Program]] = {}
        for one in grid(draws):
            op = one.name.split(" to ")[0].split(" by ")[0]
            calls.setdefault((op, len(one.tensors)), []).append(one)
        yield from (draws.one(named) for named in calls.values())
    draws = Draws(f"gradients {seed}")
    for name in ACTIVATIONS:
        yield program(name, getattr(torch.nn.functional, name), (draws.normal(6, 35),), {})
    for family, _ in itertools.product(DRAWN, range(SAMPLES)):
        yield FAMILIES[family](draws)


def _moved(tensor: Tensor) -> Tensor:
    """Return a copy whose first dimension is the innermost one in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() > 1 else tensor.clone()


ORDERS = {name: copy for name, copy in ALL_LAYOUTS.items() if name in LAYOUTS} | {"first innermost": _moved}


def _of_each_number(seed: int) -> Iterator[Program]:
    """Yield functions of each number alone, of two to five dimensions, and losses that are not reduced."""
    draws = Draws(f"operands {seed}")
    for name, rank in itertools.product(ACTIVATIONS, (2, 3, 4, 5)):
        yield program(name, getattr(torch.nn.functional, name), (draws.normal(*(3, 5, 2, 4, 3)[:rank]),), {})
    yield from {one.name: one for one in NUMBER_GRIDS["pairs"](draws) if "none" in one.leaves}.values()


def _largest(numbers: Tensor) -> float:
    """Return the largest finite magnitude, 0 without numbers."""
    finite = numbers.detach().cpu().double().abs()
    return float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0


def _apart(seen: Tensors, dense: Tensors, weighted: Tensors, dtype: torch.dtype) -> dict[int, str]:
    """Return the tensors that are not those of dense memory, with how far they are, by number.

    What rounds to zero with one number for all is held to what it is with `weighted` ones.
    """
    found = {}
    for number, (one, other, large) in enumerate(zip(seen, dense, weighted, strict=True)):
        if one is None or other is None:
            if one is not other:
                found[number] = "there is none in one of both"
            continue
        ours, theirs = one.detach().cpu().double(), other.detach().cpu().double()
        if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
            found[number] = "of another shape, or not finite elsewhere"
            continue
        ours, theirs = ours.nan_to_num(posinf=0, neginf=0), theirs.nan_to_num(posinf=0, neginf=0)
        largest = max(_largest(theirs), 0.0 if large is None else _largest(large))
        apart = _largest(ours - theirs)
        if apart > LIMIT * torch.finfo(dtype).eps / 2 * largest + torch.finfo(dtype).tiny:
            found[number] = f"{apart:.4g} apart, the largest is {largest:.4g}"
    return found


@contract("AMP-NUMERICS-137")
def test_gradients_of_every_layout(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    findings = Findings()
    others = itertools.islice(itertools.cycle(LAYOUTS), case.seed % len(LAYOUTS), None)
    for one in _programs(case.seed):
        low = one.cast(dict.fromkeys(one.tensors, amp_dtype))
        run = partial(outcomes.run, low.changed(lambda tensor: tensor.to(target.device)), gradients=True)
        with full_precision(target.device_type):
            of_ones, weighted = run(weights=torch.ones_like), run(weights=weights)
        if weighted.exception is not None:
            findings.leave_out(one, target.device)
            continue
        chosen = (next(others),) if case.level == "quick" else LAYOUTS
        ways: dict[str, tuple[Callable[[Tensor], Tensor], Outcome]] = {"of a sum": (_of_a_sum, of_ones)}
        ways |= {name: (partial(_laid, ALL_LAYOUTS[name]), weighted) for name in chosen}
        for name, (laid, wanted) in ways.items():
            with full_precision(target.device_type):
                seen = run(weights=laid)
            kind, what = f"{one.name}: {name}", one.described()
            if seen.exception is not None:
                findings.add(kind, what, str(seen.exception).splitlines()[0][:80])
                continue
            findings.judged += bool(wanted.gradients)
            for number, how in _apart(seen.gradients, wanted.gradients, weighted.gradients, amp_dtype).items():
                findings.add(kind, f"gradient {number}, {what}", how)
    findings.hold(case, target, "gradients compared", "gradients that differ from those of dense memory, {}")


@contract("AMP-NUMERICS-143")
def test_operands_of_every_layout(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    findings = Findings()
    others = itertools.islice(itertools.cycle(ORDERS), case.seed % len(ORDERS), None)
    every = case.level != "quick"
    calls = [(one, every) for one in _programs(case.seed)] + [(one, True) for one in _of_each_number(case.seed)]
    for one, all_orders in calls:
        low = one.cast(dict.fromkeys(one.tensors, amp_dtype))
        placed = low.changed(lambda tensor: tensor.to(target.device))
        run = partial(outcomes.run, placed, gradients=True, weights=weights)
        with full_precision(target.device_type):
            dense = run(copy=Tensor.contiguous)
        if dense.exception is not None:
            findings.leave_out(one, target.device)
            continue
        for name in ORDERS if all_orders else (next(others),):
            with full_precision(target.device_type):
                seen = run(copy=ORDERS[name])
            kind, what = f"{one.name}: {name}", one.described()
            if seen.exception is not None:
                findings.add(kind, what, str(seen.exception).splitlines()[0][:80])
                continue
            findings.judged += 1
            right = dense.outputs + dense.gradients
            for number, how in _apart(seen.outputs + seen.gradients, right, right, amp_dtype).items():
                which = number - len(dense.outputs)
                place = f"gradient {which}" if which >= 0 else f"result {number}"
                findings.add(kind, f"{place}, {what}", how)
    findings.hold(case, target, "programs judged", "results and gradients that differ from those of dense operands, {}")


def _laid(copy: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    return copy(weights(output))
