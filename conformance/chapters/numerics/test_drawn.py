"""Check ops of drawn sizes and options in 16 bits and in regions against float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.attention import sdpa_kernel

from ...harness.check import Case, contract, per_target
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS
from ...oracles.relations.values import ALL_LAYOUTS, departures
from .attention_kernels import KERNELS
from .drawn_ops import FAMILIES, Draws
from .support import Findings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
# In roundings. Of 37,500 draws on torch 2.13 one was above 16, and seven above 10.
LIMIT = 32.0
# Of several ops in a row, as the steps of a Fourier transform are: an element to which they cancel has their error.
TOGETHER = ("attention", "recurrent", "loss", "spectrum")
# On CUDA, whose kernels of attention need aligned operands (a waiver says so): aligned ones as well, without a gradient
# of the mask; and these without cuDNN's kernel, which torch prefers on some cards.
ALIGNED = "attention of aligned operands"
ALIGNED_WITHOUT_CUDNN = f"{ALIGNED} without cuDNN"
OTHER_KERNELS = [backend for name, backend in KERNELS.items() if name != "cudnn"]
IN_REGIONS = ("recurrent", "spectrum")
# AMP-NUMERICS-063 has gradients of normalizations for each pair of layouts.
DENSE = ("as given", "shifted", "channels last")
# Times as many draws, of what has the most options.
MORE = {"normalization": 3, "softmax": 2, "reduction": 3, "pooling": 2, "product": 2, "padding": 2}
# Of thousands of numbers each, always in 16 bits and with all gradients.
LARGE = ("adaptive_avg_pool3d", "embedding_bag of long bags", "index_reduce by means")
# How devices other than CPUs add up thousands of numbers is written nowhere: CUDA adds to 16 bits in memory by index.
ON_CPUS = (*LARGE, "scatter_reduce of thousands")
GRADIENTS_ON_CPUS = ("cummax of thousands",)


def _families(target: Target) -> Iterator[str]:
    yield from (family for family in FAMILIES if family not in ON_CPUS or target.device_type == "cpu")
    if target.device_type == "cuda":
        yield from (ALIGNED, ALIGNED_WITHOUT_CUDNN)


def _some(draws: Draws, name: str, layout: str, device: str, positions: Collection[int]) -> Collection[int]:
    """Draw the operands that gradients are taken of, at least one."""
    if (name == "batch_norm" and layout == "channels last") or (name in GRADIENTS_ON_CPUS and device != "cpu"):
        return ()
    # Before 2.14 torch ends the process for group_norm without a gradient of its input: AMP-NUMERICS-131 has these.
    return tuple(i for i in positions if name == "group_norm" or draws.yes()) or tuple(positions)


def _some_but_masks(draws: Draws, positions: Collection[int]) -> Collection[int]:
    """Draw the operands of attention that gradients are taken of: of query, key and value at least one."""
    operands = tuple(positions)[:3]
    return tuple(i for i in operands if draws.yes()) or operands


def _wanted(
    family: str, draws: Draws, name: str, layout: str, device: str
) -> Callable[[Collection[int]], Collection[int]]:
    if family in LARGE:
        return tuple
    if family.startswith(ALIGNED):
        return partial(_some_but_masks, draws)
    return partial(_some, draws, name, layout, device)


@contract("AMP-NUMERICS-120")
@per_target("family", _families)
def test_drawn_ops(case: Case, target: Target, amp_dtype: torch.dtype, family: str) -> None:
    findings = Findings()
    aligned = family.startswith(ALIGNED)
    kind = "attention" if aligned else family
    layouts = [layout for layout in ALL_LAYOUTS if not (aligned and "shifted" in layout)]
    kernels = partial(sdpa_kernel, OTHER_KERNELS) if family == ALIGNED_WITHOUT_CUDNN else nullcontext
    count = case.samples(quick=40, standard=250, full=1500)
    region = partial(target.autocast, amp_dtype)
    for number in range(count // 20 if family in LARGE else count * MORE.get(family, 1)):
        draws = Draws(f"{family} {case.seed} {number}")
        one = FAMILIES[kind](draws)
        if one.name in ON_CPUS and target.device_type != "cpu":
            continue
        in_region = family in IN_REGIONS or (family not in LARGE and draws.yes())
        layout = draws.one(DENSE if family == "normalization" else layouts)
        with full_precision(target.device_type), kernels():
            errors = departures(
                one,
                FORMATS[amp_dtype],
                LIMIT,
                layout=layout,
                device=target.device,
                region=region if in_region else None,
                together=kind in TOGETHER,
                wanted=_wanted(family, draws, one.name, layout, target.device_type),
                by_layout=False,
            )
        if errors is None:
            findings.leave_out(one, target.device)
            continue
        findings.judged += 1
        for what, error in errors.items():
            place = "in a region" if in_region else "outside of one"
            about = f"{one.name}, operands {layout}: {what.split()[0]}"
            findings.add(about, f"{what} {place}: {one.described()}", f"{error:.4g} roundings")
    findings.hold(case, target, "programs judged", "{} that are far from exact")
