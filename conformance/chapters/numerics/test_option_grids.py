"""Check ops over all combinations of their options in 16 bits against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.judge import lacks_kernel_of_dtype
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.programs import Program
from ...oracles.relations.values import departures
from .drawn_ops import Draws
from .number_grids import NUMBER_GRIDS
from .option_grids import GRIDS
from .support import Findings, raised

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings, as for AMP-NUMERICS-120.
LIMIT = 32.0
TOGETHER = ("attention", "losses", "pairs", "recurrences")
LAYOUTS = ("as given", "turned")
QUICK = 5  # quick takes one combination of so many: a step in which options of two, three or four values alternate


@contract("AMP-NUMERICS-135")
@pytest.mark.parametrize("layout", ["as given", "channels last"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_combination(case: Case, target: Target, amp_dtype: torch.dtype, grid: str, layout: str) -> None:
    programs = GRIDS[grid](Draws(f"{grid} {case.seed}"))
    _judge(case, target, amp_dtype, ((one, layout) for one in programs), together=grid in TOGETHER)


@contract("AMP-NUMERICS-136")
@pytest.mark.parametrize("grid", NUMBER_GRIDS)
def test_every_combination_of_numbers(case: Case, target: Target, amp_dtype: torch.dtype, grid: str) -> None:
    programs = NUMBER_GRIDS[grid](Draws(f"{grid} {case.seed}"))
    if case.level == "quick":
        programs = itertools.islice(programs, case.seed % QUICK, None, QUICK)
    judged: Iterable[tuple[Program, str]]
    if case.level == "full":
        judged = itertools.product(programs, LAYOUTS)
    else:
        layouts = itertools.islice(itertools.cycle(LAYOUTS), case.seed % len(LAYOUTS), None)
        judged = zip(programs, layouts)  # noqa: B905 (the layouts have no end)
    _judge(case, target, amp_dtype, judged, together=grid in TOGETHER)


def _judge(
    case: Case, target: Target, amp_dtype: torch.dtype, programs: Iterable[tuple[Program, str]], *, together: bool
) -> None:
    findings, refused, ran = Findings(), [], set()
    for one, layout in programs:
        with full_precision(target.device_type):
            errors = departures(one, FORMATS[amp_dtype], LIMIT, layout=layout, device=target.device, together=together)
        if errors is None:
            findings.leave_out(one, target.device)
            refused.append(one)
            continue
        findings.judged += 1
        ran.add(one.name)
        for what, error in errors.items():
            kind = f"{one.name.split()[0]}: {what.split()[0]}"
            findings.add(kind, f"{what}, {layout}: {one.described()}", f"{error:.4g} roundings")
    findings.hold(case, target, "programs judged", "{} that are far from exact")
    alone = {}
    for one in refused:
        in_float32, in_16_bits = (
            raised(one.cast(dict.fromkeys(one.tensors, dtype)), target.device) for dtype in (torch.float32, amp_dtype)
        )
        if one.name not in ran or in_float32 is not None or in_16_bits is None:
            continue
        # That a kernel has no such type is another thing; before 2.8 it is a RuntimeError.
        if not (isinstance(in_16_bits, NotImplementedError) or lacks_kernel_of_dtype(in_16_bits)):
            alone[one.described()] = str(in_16_bits).splitlines()[0][:80]
    case.equal("calls that raise in 16 bits alone, with some options and not with others", alone, {})


# Bags have one, two or four rows that count, so that means are exact; row 1 may be padding.
BAGS = torch.tensor([[1, 3, 1, 0], [2, 5, 4, 3], [1, 1, 0, 0]])
REDUCED = {"sum": partial(torch.sum, dim=0), "mean": partial(torch.mean, dim=0), "max": partial(torch.amax, dim=0)}


def _bagged(
    given: list[torch.Tensor], kind: str, incoming: torch.Tensor, mode: str, **options: object
) -> list[torch.Tensor]:
    """Return the bags of a table, with weights or without, and the gradients."""
    leaves = [each.detach().clone().requires_grad_() for each in given]
    device = given[0].device
    numbers = BAGS.to(device)
    module = torch.nn.EmbeddingBag.from_pretrained(leaves[0], freeze=False, mode=mode, **options)
    leaves[0] = module.weight
    if kind == "rows":
        result = module(numbers, None, *leaves[1:])
    else:
        starts = torch.arange(0, numbers.numel() + 1, numbers.shape[1], device=device)
        starts = starts if options["include_last_offset"] else starts[:-1]
        result = module(numbers.flatten(), starts, *(each.flatten() for each in leaves[1:]))
    return [result.detach(), *torch.autograd.grad(result, leaves, incoming[: len(result)])]


def _bagged_apart(
    given: list[torch.Tensor], incoming: torch.Tensor, mode: str, padding_idx: int | None
) -> list[torch.Tensor]:
    """Return what `_bagged` promises, from single rows."""
    table, *weights = leaves = [each.detach().double().cpu().requires_grad_() for each in given]
    bags = []
    for n, numbers in enumerate(BAGS):
        kept = (numbers != (-1 if padding_idx is None else padding_idx)).nonzero().flatten()
        rows = table[numbers[kept]] * (weights[0][n][kept, None] if weights else 1.0)
        bags.append(REDUCED[mode](rows))
    result = torch.stack(bags)
    return [result.detach(), *torch.autograd.grad(result, leaves, incoming.double().cpu())]


@contract("AMP-NUMERICS-135")
@pytest.mark.parametrize("kind", ["rows", "parts"])
def test_bags_of_rows(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str) -> None:
    """Indices of two dimensions are bags of one length, whatever the offsets of those of one would have to hold."""
    wrong, judged = {}, 0
    for dtype in (torch.float32, amp_dtype):
        # Distinct, so that a maximum is in one row; their sums, weighted by powers of two, are exact.
        table = torch.randperm(24, generator=rng).view(6, 4).to(target.device, dtype)
        weights = (2.0 ** torch.randint(-1, 2, BAGS.shape, generator=rng)).to(target.device, dtype)
        incoming = (2.0 ** torch.randint(-1, 2, (len(BAGS), 4), generator=rng)).to(target.device, dtype)
        calls, promised = {}, {}
        for mode, padding, ends, weighted in itertools.product(REDUCED, (None, 1), (False, True), (False, True)):
            if weighted and mode != "sum":
                continue
            given = [table, *([weights] if weighted else [])]
            name = f"{dtype}, {mode}, padding {padding}, all ends {ends}, weights {weighted}"
            options = {"mode": mode, "padding_idx": padding, "include_last_offset": ends}
            calls[name] = partial(_bagged, given, kind, incoming, **options)
            promised[name] = partial(_bagged_apart, given, incoming, mode, padding)
        for name in case.with_kernels(target, calls):
            judged += 1
            seen, expected = ([each.double().cpu().tolist() for each in made[name]()] for made in (calls, promised))
            unlike = [what for what, one, other in zip(("bags", "table", "weights"), seen, expected) if one != other]  # noqa: B905 (as many gradients as leaves)
            if unlike:
                wrong[name] = f"{len(seen[0])} bags, unlike in {', '.join(unlike)}"
    case.enough(target, "calls judged", judged)
    case.equal("bags and gradients of the table and of weights that are not those of single rows", wrong, {})
