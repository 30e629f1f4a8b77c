"""Faults in how products are summed and rounded: those that a fingerprint shows, and the contracts beside it see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.simulation.matrix_units import add, cut, quantum_of

LOW = (torch.float16, torch.bfloat16)
_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The unbroken product: its out= variant has a kernel of its own."""
    return torch.ops.aten.mm.out(left, right, out=torch.empty(0, dtype=left.dtype))


def summed(bits: int, mode: str, step: int = 1, partial: int | None = None) -> Product:
    """A product that rounds its sum to `bits` bits after every `step` terms, or sums these to `partial` bits alone."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ours, theirs = left.double(), right.double()
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64)
        for start in range(0, left.shape[1], step):
            places = slice(start, start + step)
            if not ours[:, places].any():
                continue
            part = ours[:, places] @ theirs[places]
            if partial is not None:
                part = cut(part, quantum_of(part, partial), "nearest")
            total = add(total, part, bits, mode)
        return total.to(left.dtype)

    return run


def rounded(mode: str) -> Product:
    """A product whose result is rounded in another way."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        wide = plain(left.float(), right.float()).double()
        # float64 holds what is cut, so that the last cast rounds nothing.
        return cut(wide, quantum_of(wide, _BITS[left.dtype]), mode).to(left.dtype)

    return run


def read_in(bits: int, right_too: bool = True) -> Product:
    """A product that reads so many bits of its operands."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ours, theirs = (cut(side.double(), quantum_of(side.double(), bits), "nearest") for side in (left, right))
        return plain(ours.to(left.dtype), (theirs if right_too else right.double()).to(left.dtype))

    return run


def flushing(operands: bool, results: bool) -> Product:
    """A product that takes subnormal operands, or gives subnormal results, as zero."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        tiny = torch.finfo(left.dtype).tiny
        sides = [side.masked_fill(side.abs() < tiny, 0.0) if operands else side for side in (left, right)]
        found = plain(*sides)
        return found.masked_fill(found.abs() < tiny, 0.0) if results else found

    return run


@contextlib.contextmanager
def products(
    broken: Product, *ops: str, dtypes: tuple[torch.dtype, ...] = LOW, where: Callable[..., bool] | None = None
) -> Iterator[None]:
    """Break the products of some dtypes in the ops named: mm, addmm (linear), bmm and convolution of 1 x 1."""

    def choose(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        wrong = left.dtype in dtypes and (where is None or where(left, right))
        return broken(left, right) if wrong else plain(left, right)

    def addmm(extra: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        return (choose(left, right) * alpha + extra * beta).to(left.dtype)

    def bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.stack([choose(ours, theirs) for ours, theirs in zip(left, right, strict=True)])

    kernels: dict[str, Any] = {"mm": choose, "addmm": addmm, "bmm": bmm}
    with contextlib.ExitStack() as stack:
        for op in ops:
            if op == "conv2d":
                stack.enter_context(replaced(torch.nn.functional, "conv2d", _pointwise(choose)))
            else:
                stack.enter_context(kernel(op, kernels[op], "CPU"))
        yield


def _pointwise(product: Product) -> Callable[..., torch.Tensor]:
    right_way = torch.nn.functional.conv2d

    def conv2d(image: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if image.shape[2:] != (1, 1) or args or options:
            return right_way(image, weight, *args, **options)
        return product(image.flatten(1), weight.flatten(1).t())[..., None, None]

    return conv2d


def _alternating(*ways: Product) -> Product:
    calls = [0]

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return ways[calls[0] % len(ways)](left, right)

    return run


def _odd(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape[1] % 2 == 1


@fault("AMP-NUMERICS-092")
def batched_products_truncate_their_sums() -> Iterator[None]:
    """bmm of 16-bit tensors rounds its fp32 sums towards zero, as mm does not."""
    with products(summed(24, "zero"), "bmm"):
        yield


@fault("AMP-NUMERICS-092")
def linear_layers_truncate_their_sums() -> Iterator[None]:
    """addmm, which Linear uses, rounds its fp32 sums towards zero."""
    with products(summed(24, "zero"), "addmm"):
        yield


@fault("AMP-NUMERICS-092")
def sums_of_odd_length_truncate() -> Iterator[None]:
    """Only where the number of terms is odd, which takes another kernel, are sums rounded towards zero."""
    with products(summed(24, "zero"), "mm", where=_odd):
        yield


@fault("AMP-NUMERICS-092", level="standard")
def long_sums_truncate() -> Iterator[None]:
    """Sums of 1000 terms and more are rounded towards zero."""
    with products(summed(24, "zero"), "mm", where=lambda left, right: left.shape[1] > 1000):
        yield


@fault("AMP-NUMERICS-092")
def batched_sums_keep_nineteen_bits() -> Iterator[None]:
    """bmm sums 16-bit products in 19 bits, which no 16-bit result shows."""
    with products(summed(19, "nearest"), "bmm"):
        yield


@fault("AMP-NUMERICS-092")
def convolutions_sum_in_sixteen_bits() -> Iterator[None]:
    """A 1 x 1 convolution sums in the bits of its result."""

    def run(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return summed(_BITS[left.dtype], "nearest", step=4)(left, right)

    with products(run, "conv2d"):
        yield


@fault("AMP-NUMERICS-092")
def split_sums_keep_sixteen_bits() -> Iterator[None]:
    """bmm sums 16 terms at a time and keeps these sums in 16 bits."""
    with products(summed(24, "nearest", step=16, partial=11), "bmm"):
        yield


@fault("AMP-NUMERICS-092")
def fp32_sums_truncate_in_linear_layers() -> Iterator[None]:
    """fp32 addmm rounds its sums towards zero."""
    with products(summed(24, "zero"), "addmm", dtypes=(torch.float32,)):
        yield


@fault("AMP-NUMERICS-091")
def every_fifth_product_sums_in_sixteen_bits() -> Iterator[None]:
    """Now and then a 16-bit product is summed in 16 bits."""
    ways = [plain] * 4
    with products(_alternating(*ways, summed(11, "nearest", step=4)), "mm"):
        yield


@fault("AMP-NUMERICS-091")
def every_seventh_product_flushes() -> Iterator[None]:
    """Now and then subnormal operands of a product are taken as zero."""
    with products(_alternating(*[plain] * 6, flushing(True, True)), "mm", dtypes=(torch.float16,)):
        yield


@fault("AMP-NUMERICS-091")
def the_order_of_sums_changes() -> Iterator[None]:
    """Every other product is summed from the end."""

    def reversed_sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return summed(24, "nearest", step=4)(left.flip(1), right.flip(0))

    with products(_alternating(plain, reversed_sum), "mm"):
        yield


@fault("AMP-NUMERICS-093")
def results_are_truncated() -> Iterator[None]:
    """mm cuts its fp32 sum to 16 bits."""
    with products(rounded("zero"), "mm"):
        yield


@fault("AMP-NUMERICS-093")
def results_round_ties_away() -> Iterator[None]:
    """mm rounds a sum half way between two 16-bit numbers away from zero, within every bound on its error."""
    with products(rounded("away"), "mm"):
        yield


@fault("AMP-NUMERICS-093")
def batched_results_round_up() -> Iterator[None]:
    """bmm rounds its results up."""
    with products(rounded("up"), "bmm"):
        yield


@fault("AMP-NUMERICS-022")
def fp32_products_read_tf32() -> Iterator[None]:
    """fp32 mm reads 11 bits of its operands."""
    with products(read_in(11), "mm", dtypes=(torch.float32,)):
        yield


@fault("AMP-NUMERICS-022")
def fp32_products_read_two_bf16() -> Iterator[None]:
    """fp32 addmm reads its left operand as the sum of two bf16 numbers, 16 bits."""
    with products(read_in(16, right_too=False), "addmm", dtypes=(torch.float32,)):
        yield


@fault("AMP-NUMERICS-022")
def fp32_products_lose_their_last_bit() -> Iterator[None]:
    """fp32 bmm reads 23 bits of its operands, an error that any bound on a sum allows."""
    with products(read_in(23), "bmm", dtypes=(torch.float32,)):
        yield
