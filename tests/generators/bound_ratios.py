"""How near correct arithmetic comes to each bound: every bounded check over many seeds, as a page.

`python -m tests.generators.bound_ratios --seeds 1000 -o docs/evidence/bounds.md` measures on the CPU.
A worst ratio above 1 is a false alarm. One just below 1 is what rounding to nearest gives where a result is a single
rounding of a sum that is as good
as exact; one far below is what a bound over any order of summation leaves of sums in a good order.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from conformance.chapters.numerics import op_error
from conformance.chapters.numerics.attention_kernels import KERNELS
from conformance.chapters.numerics.bounds_attention import MASKS, LowLogits, Problem, attempt, measured
from conformance.chapters.numerics.bounds_convolution import (
    ATTENTIONS,
    CONVOLUTIONS,
    Attention,
    Convolution,
    measure_attention,
    measure_convolution,
)
from conformance.chapters.numerics.bounds_loss import LOSSES
from conformance.chapters.numerics.bounds_matmul import KINDS, PRODUCTS, SHAPES, Product, measure_product
from conformance.chapters.numerics.bounds_normalization import NORMALIZATIONS
from conformance.chapters.numerics.bounds_reduction import REDUCTIONS
from conformance.chapters.numerics.op_error import Measured, Op
from conformance.oracles.numbers.formats import BF16, FP16, FP32, Format

CPU = torch.device("cpu")
Run = Callable[[torch.Generator], list[Measured]]

# Of each op the bound on the result; u is 2^-24, v the roundoff of the 16-bit type, n the length of a sum.
BOUNDS = {
    "sum": "(n - 1) u sum\\|x\\|; 0 where no partial sum rounds",
    "mean": "that of the sum, and one division",
    "cumsum": "(k - 1) u sum\\|x\\| over the first k",
    "prod": "n u \\|y\\|",
    "norm": "relative: n u / 2 + u; of order 1 that of the sum, of order inf 0",
    "vector_norm": "relative: n u / 2 + u",
    "var": "relative n u (1 + kappa): two passes or updates",
    "std": "half of var's, relative",
    "logsumexp": "that of the sum of exponentials, relative, and a rounding of the maximum",
    "softplus": "4 u for each of exp and log1p, and an addition",
    "cosine_similarity": "two norms, two divisions, a sum",
    "softmax": "(n + 2 (max - x) + 12) u p",
    "log_softmax": "relative error of the sum, a logarithm, roundings of the size of the logits",
    "layer_norm": "kappa n u: running error through mean, variance and quotient",
    "group_norm": "kappa n u, and 4 roundings of (\\|x\\| + \\|mean\\|) rstd w",
    "instance_norm": "as batch norm, with the statistics of each sample",
    "batch_norm": "kappa n u, and 4 roundings of (\\|x\\| + \\|mean\\|) rstd w",
    "rms_norm": "relative: n u / 2 and three operations",
    "products": "K 2^-22 (\\|A\\|\\|B\\|), 0 where no partial sum rounds; fp32: the same",
    "convolution": "norm of a slice: half a spacing, two more roundings of each of taps or samples, v / 64",
    "attention": "4 v sum p\\|v\\| and fp32's exponentials and sums",
    "low": "that of attention, and four roundings of the size of the logit",
    "loss": "running error through torch.nn's formula; gradients 64 u of the largest",
}
SOURCES = {
    "reductions": "Higham 2002, 3.3 and 4.2; Chan, Golub, LeVeque 1983; Blanchard, Higham, Higham 2021",
    "normalisations": "Blanchard, Higham, Higham 2021; Chan, Golub, LeVeque 1983; Higham 2002, 3.3",
    "losses": "Higham 2002, 3.3",
    "products": "Blanchard, Higham, Lopez, Mary, Pranesh 2020; Fasi, Higham, Mikaitis, Pranesh 2021",
    "convolutions": "float64 by taps; Lavin, Gray 2016 for Winograd's transform",
    "attention": "Dao, Fu, Ermon, Rudra, Re 2022; Blanchard et al. 2021",
}


@dataclass(frozen=True)
class Check:
    """What is measured of one op in one amp dtype: runs that take turns, one a seed."""

    family: str
    name: str
    form: Format
    bound: str
    runs: tuple[Run, ...]
    op: Op | None = None


def _ops(family: str, table: dict[str, Op], form: Format) -> Iterator[Check]:
    region = functools.partial(torch.autocast, "cpu", form.dtype)
    for name, op in table.items():
        runs = tuple(
            functools.partial(_measured, op, kind, of, region)
            for kind in op.kinds
            for of in ((FP32, form) if op.policy != "rms_norm" else (FP32,))
        )
        base = "loss" if family == "losses" else name.split(" ")[0]
        yield Check(family, name, form, BOUNDS[base], runs, op)


def _measured(op: Op, kind: str, form: Format, region: op_error.Region, rng: torch.Generator) -> list[Measured]:
    found = op_error.measure(op, kind, form, rng, CPU, region)
    # What AMP-NUMERICS-066 says of the CPU's layer norm.
    broken = op.name == "layer_norm" and form is not FP32
    return [one for one in found if not (broken and one.operand in (1, 2))]


def checks(form: Format) -> Iterator[Check]:
    """Every bounded check of the suite in regions of one amp dtype."""
    region = functools.partial(torch.autocast, "cpu", form.dtype)
    yield from _ops("reductions", REDUCTIONS, form)
    yield from _ops("normalisations", NORMALIZATIONS, form)
    yield from _ops("losses", LOSSES, form)
    for product in PRODUCTS.values():
        kinds = KINDS + (("bias",) if product.name in ("linear", "addmm", "baddbmm") else ())
        runs = tuple(
            functools.partial(_product, product, kind, shape, form, region)
            for shape in SHAPES.values()
            for kind in kinds
            if kind != "subnormal" or form is FP16
        )
        yield Check("products", product.name, form, BOUNDS["products"], runs)
    for convolution in CONVOLUTIONS.values():
        runs = tuple(
            functools.partial(_convolution, convolution, kind, form, region) for kind in ("plain", "wide", "same_sign")
        )
        yield Check("convolutions", convolution.name, form, BOUNDS["convolution"], runs)
    for attention in ATTENTIONS.values():
        runs = (functools.partial(_attention, attention, form, region),)
        yield Check("attention", attention.name, form, BOUNDS["attention"], runs)
    for mask in MASKS:
        lows = (LowLogits(mask, 64, 64), LowLogits(mask, 64, 64, 2), LowLogits(mask, 192, 16))
        runs = tuple(functools.partial(_far_below_zero, low, form, region) for low in lows)
        yield Check("attention", f"far below zero, mask: {mask}", form, BOUNDS["low"], runs)


def _product(
    product: Product,
    kind: str,
    shape: tuple[int, int, int],
    form: Format,
    region: op_error.Region,
    rng: torch.Generator,
) -> list[Measured]:
    return measure_product(product, kind, shape, form, rng, CPU, region)


def _convolution(
    convolution: Convolution, kind: str, form: Format, region: op_error.Region, rng: torch.Generator
) -> list[Measured]:
    return measure_convolution(convolution, kind, form, rng, CPU, region)


def _attention(attention: Attention, form: Format, region: op_error.Region, rng: torch.Generator) -> list[Measured]:
    return measure_attention(attention, form, rng, CPU, region)


def _far_below_zero(low: LowLogits, form: Format, region: op_error.Region, rng: torch.Generator) -> list[Measured]:
    problem = Problem.draw(low, form, rng)
    references = problem.references(form, form.smallest)
    ran = {name: attempt(problem, name, form, CPU, region) for name in KERNELS}
    return [one for name, seen in ran.items() if seen is not None for one in measured(seen, references, name, form)]


@dataclass
class Worst:
    """The worst ratios of one check: fp32 results, 16-bit ones, their gradients, and the other figures."""

    wide: float | None = None
    narrow: float | None = None
    wide_gradient: float | None = None
    narrow_gradient: float | None = None
    gain: float = 0.0
    share: float | None = None
    size: float | None = None
    lowered: float | None = None

    def add(self, one: Measured, *, in_16_bits: bool) -> None:
        """`in_16_bits`: rounded to 16 bits, though it may have been widened afterwards."""
        narrow = in_16_bits or one.dtype is not torch.float32
        name = ("narrow" if narrow else "wide") + ("" if one.operand is None else "_gradient")
        setattr(self, name, max(getattr(self, name) or 0.0, one.error))
        self.gain = max(self.gain, one.gain)
        if one.share is not None:
            self.share = max(self.share or 0.0, one.share)
        if one.size is not None:
            self.size = min(self.size or one.size, one.size)

    @property
    def ratios(self) -> list[float]:
        """All that holds up to 1."""
        figures = (self.wide, self.narrow, self.wide_gradient, self.narrow_gradient, self.gain, self.share)
        return [figure for figure in figures if figure is not None]

    @property
    def alarms(self) -> int:
        return sum(ratio > 1 for ratio in self.ratios) + (self.size is not None and self.size < 1)


def worst_over(check: Check, seeds: int) -> Worst:
    """Measure a check over as many seeds, each on the next kind of data."""
    worst = Worst()
    for seed in range(seeds):
        for one in check.runs[seed % len(check.runs)](torch.Generator().manual_seed(seed)):
            worst.add(one, in_16_bits=check.op is None)
    if check.op is not None:
        worst.lowered = min(_lowered(check.op, check.form, seed) for seed in range(min(seeds, 20)))
    return worst


def _lowered(op: Op, form: Format, seed: int) -> float:
    """What the op would measure had it rounded fp32 operands to 16 bits, on the most telling kind of data."""
    return max(op_error.lowered(op, kind, form, torch.Generator().manual_seed(seed)) for kind in op.kinds)


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "inf" if value > 1e9 else f"{value:.3f}" if 0.1 <= value < 2 else f"{value:.2g}"


HEADERS = (
    "op",
    "region",
    "bound on the fp32 error",
    "fp32",
    "16 bit",
    "gradient fp32",
    "gradient 16 bit",
    "gain",
    "share",
    "size",
    "lowered",
)
PREFACE = """# How near correct arithmetic comes to each bound

Generated by `python -m tests.generators.bound_ratios`. Each op was run over the seeds below in
regions of each amp dtype, forward and backward, each seed on the next kind of data (and shape, and type of operands).
A ratio is the worst error over its
bound: twice what one formula loses, since another order is as good, plus half a spacing of the result where that has 16
bits. Above 1 is a false alarm. Just below 1 is a single rounding of a sum that is as good as exact, which no bound can
be nearer to. The ratios of fp32 results are small because their bounds hold for any order of summation; what they still
see is in the last column and in `tests/faults/chapters/numerics_bounds.py`.

- fp32, 16 bit: results, the worst element over its bound, by the type that they were rounded to; gradients likewise.
- gain: the systematic scale error over its bound.
- share: the distance of the share of an operand's rounding from 1, over its bound (run in fp32: above 2).
- size: the least normwise error, over 0.3 u of the type: at least 1 where the op ran in 16 bits.
- lowered: the least error, over the bound, of an op that rounds its fp32 operands to 16 bits, on the kind of data that
  tells most. Below 1 nothing is seen in that op; the losses are then seen by their neighbours without a reduction.
"""


def page(rows: list[tuple[Check, Worst]], seeds: int, seconds: float) -> str:
    """Write the ratios down as Markdown."""
    top = max(ratio for _, worst in rows for ratio in worst.ratios)
    parts = [
        PREFACE,
        f"- one run, ended on {datetime.date.today()}: {seeds} seeds per op and dtype (`--seeds {seeds}`)",
        f"- wall time {seconds:.0f} s on one thread",
        f"- torch {torch.__version__} on {_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        f"- worst ratio of all: {top:.6f}; false alarms: {sum(worst.alarms for _, worst in rows)}",
    ]
    for family, source in SOURCES.items():
        table = [_row(check, worst) for check, worst in rows if check.family == family]
        grid = tabulate(table, HEADERS, "github", disable_numparse=True)
        parts += ["", f"## {family.capitalize()}", "", f"Sources: {source}.", "", grid]
    return "\n".join(parts) + "\n"


def _row(check: Check, worst: Worst) -> list[str]:
    figures = (
        worst.wide,
        worst.narrow,
        worst.wide_gradient,
        worst.narrow_gradient,
        worst.gain,
        worst.share,
        worst.size,
        worst.lowered,
    )
    return [check.name, check.form.name, check.bound, *map(_figure, figures)]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generators.bound_ratios", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path, help="where to write the page; without it, to stdout")
    parser.add_argument("--only", help="ops whose name holds this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, rows = time.perf_counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in (FP16, BF16):
            for check in checks(form):
                if options.only is None or options.only in check.name:
                    rows.append((check, worst_over(check, options.seeds)))
                    print(f"{check.family}, {check.name}, {form.name}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: (row[0].name, row[0].form.name))
    text = page(rows, options.seeds, time.perf_counter() - began)
    if options.output:
        options.output.write_text(text)
    else:
        print(text)
    return int(any(worst.alarms for _, worst in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
