"""Check integer products exactly, for every way to call them, memory layout and size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers.formats import FORMATS, Format, rounded
from ...oracles.policy import overloads
from .bit_patterns import unsigned_zeros
from .matmul_spellings import BIASED, PLACES, PLAIN, STORED, Product, through
from .sparse_matmul import Sparse, sparse

# Memory layouts of one matrix.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "every second column": lambda matrix: torch.stack([matrix, -matrix], 2).flatten(1)[:, ::2],
    "every second row": lambda matrix: torch.stack([matrix, -matrix], 1).flatten(0, 1)[::2],
    "inside a wider one": lambda matrix: F.pad(matrix, (3, 2, 1, 1), value=5.0)[1:-1, 3:-2],
}

# Tails of every tile; a long inner dimension; tall and thin; results of more than 65,536 elements, which threads share.
SHAPES = {
    "tails": (37, 67, 29),
    "aligned": (64, 128, 96),
    "one row": (1, 1031, 65),
    "one column": (131, 515, 1),
    "threads": (331, 37, 241),
    "inner 4099": (5, 4099, 7),
}


def _stored(exact: Tensor, form: Format) -> Tensor:
    """Return integers as the 16-bit type stores them: rounded once, nearest and ties to even."""
    return rounded(exact.double(), form).to(form.dtype)


def _integers(rng: torch.Generator, size: int, *shape: int) -> Tensor:
    return torch.randint(-size, size + 1, shape, generator=rng, dtype=torch.int32)


@dataclass(frozen=True)
class IntegerProblem:
    """Integer operands of one shape, and their exact product in `form`, by selecting and adding columns."""

    form: Format
    left: Tensor
    right: Sparse
    bias: Tensor
    seeds: Sparse

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes m, k and n."""
        return self.left.shape[0], self.left.shape[1], len(self.bias)

    @functools.cached_property
    def product(self) -> Tensor:
        """The exact product."""
        return self.right.picked_by(self.left)

    @functools.cached_property
    def plain(self) -> Tensor:
        return unsigned_zeros(_stored(self.product, self.form))

    @functools.cached_property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of left, right and bias."""
        seed = self.seeds.dense().int()
        exact = self.right.spread(seed), self.seeds.picked_by(self.left.t()), seed.sum(0)
        left, right, bias = (unsigned_zeros(_stored(gradient, self.form)) for gradient in exact)
        return left, right, bias


def _problems(
    rng: torch.Generator, form: Format, shapes: Iterable[tuple[int, int, int]], *, of: str = ""
) -> list[IntegerProblem]:
    """Return random operands, exact in `form`, for all calls (of one family) that use them."""
    # A convolution's kernels may add up in 16 bits outside of its inner products (AMP-NUMERICS-033): small integers.
    size, entries = (4, 3) if "conv" in of else (60, 8)
    return [
        IntegerProblem(
            form,
            _integers(rng, size, m, k),
            sparse(rng, k, n, entries, size // 2),
            _integers(rng, 200, n),
            sparse(rng, m, n, entries, min(size // 2, 9)),
        )
        for m, k, n in shapes
    ]


def _check_exactly(
    case: Case,
    target: Target,
    problem: IntegerProblem,
    name: str,
    product: Product,
    layouts: tuple[str, str] = ("as it is", "as it is"),
    *,
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check one product of integers and all its gradients against selecting and adding columns.

    Operands, of `dtype`, are exact in both types; results are rounded once where they exceed what 16 bits hold.
    """
    form, (m, _, n) = problem.form, problem.shape
    sources = problem.left, problem.right.dense(), problem.bias
    leaves = [source.to(dtype).to(target.device).requires_grad_() for source in sources]
    placed = [LAYOUTS[layout](leaf) for layout, leaf in zip(layouts, leaves, strict=False)]
    with full_precision(target.device_type):
        with target.autocast(form.dtype):
            seen = product(placed[0], placed[1], leaves[2])
        # Some calls return a part of the result only.
        rows, columns = seen.shape
        seed = problem.seeds.dense()[:rows, :columns]
        seen.backward(seed.to(target.device, seen.dtype))
    name += "" if dtype is torch.float32 else f" of {form.name}"
    where = f"{name}, m k n {problem.shape}" + (
        f", {' times '.join(layouts)}" if layouts != ("as it is", "as it is") else ""
    )
    if biased:
        before = _check_sum(case, target, where, seen, problem.product, problem.bias, form)
        case.equal(f"{where}: elements rounded before the bias was added", before, 0)
    else:
        case.identical(where, unsigned_zeros(seen), problem.plain[:rows, :columns])
    if (rows, columns) != (m, n):
        return
    operands = ("left", "right", "the added tensor") if biased else ("left", "right")
    for operand, leaf, gradient in zip(operands, leaves, problem.gradients, strict=False):
        case.identical(f"{where}: gradient of {operand}", unsigned_zeros(leaf.grad), gradient.to(dtype))


def _check_sum(
    case: Case, target: Target, where: str, seen: Tensor, product: Tensor, bias: Tensor, form: Format
) -> int:
    """Check an integer product with a bias; return how many elements are the sum of the bias and a rounded product.

    These are right on an accelerator alone, whose kernels AMP-NUMERICS-068 asks for a single rounding.
    """
    seen, once = unsigned_zeros(seen).cpu(), unsigned_zeros(_stored(product + bias, form))
    if target.device_type == "cpu":
        case.identical(where, seen, once)
        return 0
    twice = unsigned_zeros(_stored(_stored(product, form).double() + bias, form))
    before = (seen == twice) & (seen != once)
    case.identical(where, seen, torch.where(before, twice, once))
    return int(before.sum())


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("family", PLAIN)
def test_spellings(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, family: str) -> None:
    shapes = list(SHAPES.values())[: case.samples(quick=1, standard=5, full=len(SHAPES))]
    # Where tensordot is listed for the widest type, which a CPU does not, fp32 operands stay fp32 in it and in inner,
    # which calls it (aten/src/ATen/native/Linear.cpp).
    wide = ("tensordot", "inner") if _widens("tensordot", target) else ()
    for problem in _problems(rng, FORMATS[amp_dtype], shapes, of=family):
        for name, product in PLAIN[family].items():
            _check_exactly(case, target, problem, name, product, dtype=amp_dtype if name in wide else torch.float32)


def _widens(op: str, target: Target) -> bool:
    return overloads.known(target.device_type).get(op) == "widest"


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.replace(" ", "_"))
def test_layouts(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, layout: str) -> None:
    shapes = list(SHAPES.values())[: case.samples(quick=1, standard=3, full=len(SHAPES))]
    others = ("as it is", layout) if case.level == "quick" else tuple(LAYOUTS)
    problems = _problems(rng, FORMATS[amp_dtype], shapes)
    # fp32 operands are packed by the cast; 16-bit ones arrive as they lie.
    for name, dtype in (("torch.matmul", amp_dtype), ("F.linear", amp_dtype), ("torch.matmul", torch.float32)):
        for other, problem in itertools.product(others, problems):
            _check_exactly(case, target, problem, name, PLAIN["functions"][name], (layout, other), dtype=dtype)


@contract("AMP-NUMERICS-040")
def test_stored_products(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    form = FORMATS[amp_dtype]
    for m, k, n in list(SHAPES.values())[: case.samples(quick=1, standard=5, full=len(SHAPES))]:
        left, right, bias = _integers(rng, 60, m, k), sparse(rng, k, n, 8, 30), _integers(rng, 200, n)
        operands = [source.to(target.device, amp_dtype) for source in (left, right.dense(), bias)]
        product = right.picked_by(left)
        for name, (call, biased) in STORED.items():
            with full_precision(target.device_type), target.autocast(amp_dtype):
                seen = call(operands[0], operands[1], operands[2])
            _check_sum(case, target, f"{name}, m k n {(m, k, n)}", seen, product, bias * biased, form)


@contract("AMP-NUMERICS-068", on=("cpu", "cuda", "xpu"))
def test_bias_in_every_spelling(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    form = FORMATS[amp_dtype]
    shapes = list(SHAPES.values())[: case.samples(quick=1, standard=5, full=len(SHAPES))]
    for (name, product), problem in itertools.product(BIASED.items(), _problems(rng, form, shapes)):
        _check_exactly(case, target, problem, name, product, biased=True)
    # 2^p + 1, half way to the next 16-bit number, goes to 2^p alone and exactly to 2^p + 2 with 1 added.
    odd = 2.0 ** (form.fraction_bits + 1)
    left = torch.tensor([[odd, 1.0]]).expand(33, 2).to(target.device)
    right, bias = torch.ones(2, 17, device=target.device), torch.ones(17, device=target.device)
    for name, product in BIASED.items():
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = product(left, right, bias)
        case.equal(f"{name}: {odd:g} + 1, plus 1", seen.cpu().double().unique().tolist(), [odd + 2])
    control = form.nearest(form.nearest(odd + 1) + 1)
    case.equal("control: the same, rounded before the 1 is added", control, odd)


# More rows, or more columns, than a tile or a block of tiles, with a sum of many blocks.
FAR: dict[str, tuple[int, int, int]] = {"rows": (1061, 515, 3), "columns": (3, 515, 1061)}
FAR_OPS = {
    **{name: PLAIN["functions"][name] for name in ("torch.mm", "torch.matmul")},
    "bmm": PLAIN["batched"]["Tensor.bmm"],
    **{name: BIASED[name] for name in ("F.linear", "torch.addmm", "baddbmm")},
}


@contract("AMP-NUMERICS-040")
@pytest.mark.parametrize("side", FAR)
def test_far_rows_and_columns(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, side: str
) -> None:
    form, (m, k, n) = FORMATS[amp_dtype], FAR[side]
    m, n = (size * case.samples(quick=1, standard=2, full=17) if size > 1024 else size for size in (m, n))
    left, right, bias = _integers(rng, 60, m, k), sparse(rng, k, n, 64, 30), _integers(rng, 200, n)
    product = right.picked_by(left)
    operands = [source.to(target.device, amp_dtype) for source in (left, right.dense(), bias)]
    for name, op in FAR_OPS.items():
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = op(*operands)
        _check_sum(case, target, f"{name}, m k n {(m, k, n)}", seen, product, bias * (name in BIASED), form)


# --- large results ----------------------------------------------------------------------------------------------


def _through(target: Target, dtype: torch.dtype, product: Product, place: str, left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in 16 bits: a product's result, or the gradient of one of its operands."""
    with full_precision(target.device_type):
        seen = through(product, place, left.to(target.device), right.to(target.device), lambda: target.autocast(dtype))
    return seen.to(dtype)


def _codes(rng: torch.Generator, form: Format, *shape: int) -> Tensor:
    """Return random normal numbers of `form` as fp32, as good as all different among neighbours."""
    smallest = 1 << form.fraction_bits
    patterns = torch.randint(smallest, form.infinity - smallest, shape, generator=rng)
    signs = torch.randint(0, 2, shape, generator=rng) << 15
    return (patterns | signs).to(torch.int32).sub(2**16 * signs.sign()).to(torch.int16).view(form.dtype).float()


LARGE: dict[str, Product] = {
    "torch.mm": PLAIN["functions"]["torch.mm"],
    "F.linear": BIASED["F.linear"],
    "torch.bmm": PLAIN["batched"]["Tensor.bmm"],
    "baddbmm": BIASED["baddbmm"],
    "conv2d over places": PLAIN["convolutions"]["conv2d over places"],
}


@contract("AMP-NUMERICS-041")
@pytest.mark.parametrize("op", LARGE, ids=lambda op: op.replace(" ", "_"))
def test_large_products_pick_elements(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str
) -> None:
    form = FORMATS[amp_dtype]
    m, k, n = case.samples(quick=1021, standard=2053, full=4099), 24, 1031
    # Results of more than 10^6 elements: forward, and as the gradient of either operand.
    # The gradients of the others are products like these.
    places = PLACES if op == "torch.mm" or case.level != "quick" else PLACES[:1]
    for name in places:
        rows, columns = (n, m) if name == "gradient of right" else (m, n)
        codes, picks = _codes(rng, form, rows, k), sparse(rng, k, columns, 1, 1)
        seen = _through(target, amp_dtype, LARGE[op], name, codes, picks.dense())
        case.identical(f"{op}: {name}, {rows} x {columns}", seen, picks.picked_by(codes).to(amp_dtype))
