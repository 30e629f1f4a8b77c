"""Determine from results alone how a matrix product sums: order, accumulator width, rounding.

Every probe takes the product as a callable of (64, k) and (k, 64), so that simulated hardware can be probed as well.
Methods: M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, Numerical behavior of NVIDIA tensor cores (PeerJ Comput. Sci.
7:e330, 2021) and B. Hickmann, D. Bradford, Experimental analysis of matrix multiplication functional units (ARITH 2019)
for width, rounding, alignment and subnormals; P. Xie, Y. Gao, Y. Wang, J. Xue, Revealing floating-point accumulation
orders in software/hardware implementations (FPRev, USENIX ATC 2025) for the order, as M and -M swamp what is added
between them; F. A. Khattak, M. Mikaitis, Generalized methodology for determining numerical features of hardware
floating-point matrix multipliers: part I (arXiv 2510.15884, 2025) and B. Valpey et al., An SMT formalization of
mixed-precision matrix multiplication (2025) for cases that tell models apart.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(64, k) times (k, 64), both of the dtype that is probed; the result has 16 bits or fp32."""

SIDE = 64
"""Rows and columns of every product: what tiles of matrix units are made for."""

TERMS, MANY_TERMS = 64, 1024
WIDTHS = {8: "bf16", 11: "fp16", 24: "fp32", 53: "fp64"}

# By dtype, as powers of two: the swamping product and the unit that it swamps; the base of the width probe and the
# places tried below it. fp16 holds 2^-14 to 2^15 as normal numbers: products from 2^-28 to 2^30, results up to 2^15.
_SWAMPING = {torch.float16: (30, -14)}
_WEAK_SWAMPING = (15, -4)  # for sums that overflow beyond 65504: a 16-bit accumulator or 16-bit products
_WIDE_RANGE = (80, -14)
_BASES = {torch.float16: ((10, range(1, 25)), (28, range(14, 43)))}
_WIDE_BASES = ((0, range(1, 61)),)
MOST_EXTRA_BITS = 8


def sums(product: Product, dtype: torch.dtype, products: torch.Tensor) -> list[float]:
    """Return, for each row of `products` (float64, one column for each term), the sum that `product` makes of it.

    A number of few bits is split into two factors that the dtype holds as normal numbers. Each row is an element of
    the diagonal of a (64, terms) by (terms, 64) product.
    """
    # Half the exponent of each, as a power of two; float64 has a bias of 1023.
    exponent = (products.view(torch.int64) >> 52 & 0x7FF) - 1022
    half = ((exponent >> 1) + 1023 << 52).view(torch.float64)
    ours, theirs = (products / half).to(dtype), half.masked_fill_(products == 0, 0.0).to(dtype)
    found: list[float] = []
    for start in range(0, len(products), SIDE):
        left, right = (_padded(factor[start : start + SIDE]) for factor in (ours, theirs))
        result = product(left, right.t().contiguous())
        found += result.detach().cpu().double().diagonal()[: len(products) - start].tolist()
    return found


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(SIDE - len(rows), rows.shape[1])])


def spread(rows: Sequence[Mapping[int, float]], terms: int, fill: float = 0.0) -> torch.Tensor:
    """Return rows of `terms` numbers, float64: those given by place, and `fill` everywhere else."""
    table = torch.full((len(rows), terms), fill, dtype=torch.float64)
    for at, row in enumerate(rows):
        table[at, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
    return table


# --- order ------------------------------------------------------------------------------------------------------

Tree: TypeAlias = "int | tuple[Tree, ...]"
"""A place in the sum, or what is added up of it: two parts, or several that are added at once (fused)."""

UNSWAMPED: Tree = ()
"""What stands for the order of a sum so wide that no term swamps another: it cannot be seen, and does not matter."""


class Irregular(ArithmeticError):
    """What the product gives fits no order of summation: the message says what was seen."""


@dataclass(frozen=True)
class Swamping:
    """The sizes that one product probes with, and which places are counted: every `step`-th."""

    product: Product
    dtype: torch.dtype
    terms: int
    step: int = 1

    def absorbed(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """Return for pairs of counted places how many of the counted are in the sum that first holds both.

        M stands at one and -M at the other; a unit that is added to either before they meet is swamped (FPRev).
        Raises Irregular where what is left is no count of units.
        """
        survivors = self._survivors(pairs)
        # Truncation moves -M + 1 towards zero and leaves M + 1 alone: then M must be added first.
        if any(self._size(number) is None for number in survivors):
            turned = self._survivors([(j, i) for i, j in pairs])
            survivors = [ours if self._size(ours) else theirs for ours, theirs in zip(survivors, turned, strict=True)]
        found = []
        for number in survivors:
            if (size := self._size(number)) is None:
                raise Irregular(f"of {self.terms // self.step} equal terms {number:g} survive M - M")
            found.append(size)
        return found

    def _survivors(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return how many of the units next to M and -M are left in each sum."""
        survivors: list[float] = []
        for large, small in (_SWAMPING.get(self.dtype, _WIDE_RANGE), _WEAK_SWAMPING):
            big, unit = 2.0**large, 2.0**small
            table = torch.zeros(len(pairs), self.terms, dtype=torch.float64)
            table[:, :: self.step] = unit
            row, (i, j) = torch.arange(len(pairs)), torch.tensor(pairs).t() * self.step
            table[row, i], table[row, j] = big, -big
            survivors = [total / unit for total in sums(self.product, self.dtype, table)]
            if all(math.isfinite(number) for number in survivors):
                break
        return survivors

    def _size(self, survivors: float) -> int | None:
        """Return the size of the sum in which M met -M, or None where no order leaves that many units."""
        # More than a 16-bit result can count come out rounded: then the answer is the most that it can be.
        count, unit = self.terms // self.step, torch.finfo(self.dtype).eps / 2
        rounding = unit * survivors if unit * count > 1 else 0.0
        if not (float(survivors).is_integer() and 0 <= survivors - rounding <= count - 2):
            return None
        return min(count, count - math.floor(survivors - rounding))


def tree(swamping: Swamping) -> Tree:
    """Return the order in which `swamping.product` adds, its branches sorted by their first place.

    Raises Irregular where no order explains the results.
    """
    count = swamping.terms // swamping.step
    if set(swamping.absorbed([(0, place) for place in range(1, count)])) == {2}:
        return UNSWAMPED
    return _tree(swamping, list(range(count)))


def _tree(swamping: Swamping, places: list[int]) -> Tree:
    first, rest = places[0], places[1:]
    if not rest:
        return first
    groups: dict[int, list[int]] = {}
    for place, size in zip(rest, swamping.absorbed([(first, place) for place in rest]), strict=True):
        groups.setdefault(size, []).append(place)
    found: Tree = first
    for size, group in sorted(groups.items()):
        found = (found, *_branches(swamping, size, group))
    return found


def _branches(swamping: Swamping, size: int, group: list[int]) -> Iterator[Tree]:
    """The parts that are added to what came before in a sum of `size` places: one, or several where it is fused."""
    while group:
        first, rest = group[0], group[1:]
        sizes = swamping.absorbed([(first, place) for place in rest]) if rest else []
        near = [place for place, own in zip(rest, sizes, strict=True) if own < size]
        yield _tree(swamping, [first, *near])
        group = [place for place in rest if place not in near]


def sorted_tree(node: Tree) -> Tree:
    """Return the tree with its branches in the order of their first places: a + b is b + a."""
    return UNSWAMPED if node == UNSWAMPED else _sorted(node)[1]


def first_place(node: Tree) -> int:
    """Return the smallest place in a tree."""
    return _sorted(node)[0]


def _sorted(node: Tree) -> tuple[int, Tree]:
    """Return the smallest place of a tree, and the tree sorted."""
    if isinstance(node, int):
        return node, node
    parts = sorted(map(_sorted, node))  # no two have the same smallest place, so that trees are not compared
    return parts[0][0], tuple(part for _, part in parts)


def running(parts: Sequence[Tree]) -> Tree:
    """Return the tree of one running sum."""
    total = parts[0]
    for part in parts[1:]:
        total = (total, part)
    return total


def blocks(parts: Sequence[Tree], length: int) -> Tree:
    """The tree of a running sum to which `length` terms are added at once; the first block has nothing before it."""
    total: Tree = tuple(parts[:length])
    for start in range(length, len(parts), length):
        total = (total, *parts[start : start + length])
    return total


def halves(parts: Sequence[Tree]) -> Tree:
    """Return the tree of pairwise summation: neighbours, then neighbouring sums."""
    while len(parts) > 1:
        parts = [tuple(parts[at : at + 2]) if at + 1 < len(parts) else parts[at] for at in range(0, len(parts), 2)]
    return parts[0]


def folded(parts: Sequence[Tree]) -> Tree:
    """Return the tree that adds the upper half to the lower one until one is left, as a vector register is reduced."""
    while len(parts) > 1:
        middle = len(parts) // 2
        parts = [(parts[at], parts[at + middle]) for at in range(middle)] + list(parts[2 * middle :])
    return parts[0]


def _swapped(parts: Sequence[Tree]) -> Tree:
    return running([parts[at ^ 1] if at ^ 1 < len(parts) else parts[at] for at in range(len(parts))])


_INNER: dict[str, Callable[[Sequence[Tree]], Tree]] = {
    "one running sum": running,
    "one running sum, each pair odd before even": _swapped,
    **{f"blocks of {n} added at once": lambda parts, n=n: blocks(parts, n) for n in (2, 4, 8, 16, 32)},  # type: ignore[misc]
    "pairwise": halves,
    "folded halves": folded,
}
_OUTER: dict[str, Callable[[Sequence[Tree]], Tree]] = {
    "one after the other": running,
    "pairwise": halves,
    "by folding": folded,
}


@cache
def _name(found: Tree, count: int, step: int) -> str | None:
    """What a sorted order of `count` places is called, the simplest name where several fit; None where it has none."""
    return next((name for name, made in _named(count, step) if sorted_tree(made) == found), None)


def _named(count: int, step: int) -> Iterator[tuple[str, Tree]]:
    """Yield the common orders of `count` places with their names, the simplest first."""
    places = list(range(count))
    yield from ((name, inner(places)) for name, inner in _INNER.items())
    for parts in (parts for parts in (2, 4, 8, 16, 32) if parts < count):
        members = [places[at::parts] for at in range(parts)]
        yield from _layouts(f"{parts} interleaved partial sums", members, list(_INNER))
    for length in range(2, count // 2 + 1):
        members = [places[at : at + length] for at in range(0, count, length)]
        inners = list(_INNER) if count % length == 0 else ["one running sum"]
        yield from _layouts(f"partial sums of {length * step}", members, inners)


def _layouts(layout: str, members: list[list[int]], inners: list[str]) -> Iterator[tuple[str, Tree]]:
    for inner in inners:
        each = "" if _INNER[inner] is running else f", each {inner}"
        sums_of = [_INNER[inner](part) for part in members]
        for outer, combine in _OUTER.items():
            if combine is not folded or len(members).bit_count() == 1:
                yield f"{layout}{each}, added {outer}", combine(sums_of)


def described(found: Tree, count: int, step: int = 1) -> str:
    """Return the name of an order of summation, or a mark of its own where it has none."""
    if found == UNSWAMPED:
        return "no order: no term swamps another"
    found = sorted_tree(found)
    if isinstance(found, tuple) and len(found) == count:
        return f"all {count * step} at once"
    if (name := _name(found, count, step)) is not None:
        return name
    return f"an order of its own (mark {zlib.crc32(repr(found).encode()) & 0xFFFF:04x})"


def chain(swamping: Swamping) -> list[int]:
    """Return places of which each is added to a sum that holds all those before it, one of every level.

    Where nothing is swamped the sum is as good as exact, and any places will do.
    """
    rest = list(range(1, swamping.terms // swamping.step))
    levels: dict[int, int] = {}
    for place, size in zip(rest, swamping.absorbed([(0, place) for place in rest]), strict=True):
        levels.setdefault(size, place)
    return [place * swamping.step for place in (range(4) if set(levels) == {2} else [0, *sorted_values(levels)])]


def sorted_values(table: Mapping[int, int]) -> list[int]:
    """Return the values in the order of their keys."""
    return [table[key] for key in sorted(table)]


# --- accumulator ------------------------------------------------------------------------------------------------

ROUNDINGS: dict[tuple[float, ...], str] = {
    # what becomes of 1/4, 1/2 and 3/4 of a place beyond an even number, of 1/2 beyond an odd one, of -3/4
    (0, 0, 1, 2, -1): "to nearest even",
    (0, 0, 0, 1, 0): "toward zero",
    (0, 1, 1, 2, -1): "to nearest, ties away",
    (0, 0, 1, 1, -1): "to nearest, ties down",
    (1, 1, 1, 2, 0): "up",
    (0, 0, 0, 1, -1): "down",
    (1, 1, 1, 2, -1): "away from zero",
    (1, 1, 1, 1, -1): "to odd",  # what Arm's BFMMLA does without FEAT_EBF16
}
NEAREST_EVEN, TOWARD_ZERO = "to nearest even", "toward zero"


@dataclass(frozen=True)
class Accumulator:
    """The significand that a running sum is kept in, in bits, and how it is rounded; None where it is not known."""

    bits: int | None
    rounding: str
    at_least: bool = False
    """The probe saw no end: it keeps that many bits or more."""

    def __str__(self) -> str:
        if self.bits is None:
            return self.rounding
        if self.at_least:
            return f"{self.bits} bits or more"
        name = WIDTHS.get(self.bits, f"{self.bits} bits")
        return f"{name}, {self.rounding}"

    def error(self, terms: int) -> float | None:
        """Return a bound on the relative error of adding `terms` exact products; None where none is implied.

        Only for rounding to nearest: gamma_n = n u / (1 - n u), u half a place (Higham, Accuracy and Stability of
        Numerical Algorithms, 2002, sections 3.1 and 4.2), for any order.
        """
        if self.bits is None or self.rounding != NEAREST_EVEN:
            return None
        share = terms * 2.0**-self.bits
        return share / (1 - share)


def accumulator(product: Product, dtype: torch.dtype, terms: int, places: Sequence[int]) -> Accumulator:
    """Probe the sum that `places` (at least three, a chain) are added into, one after the other."""
    if len(set(places)) < 3:
        return Accumulator(None, f"not seen: all {terms} terms are added at once")
    first, second, last = places[0], places[1], places[-1]
    for base, tried in _BASES.get(dtype, _WIDE_BASES):
        big = 2.0**base
        rows = [{first: big, second: big * 2.0**-below, last: -big} for below in tried]
        seen = sums(product, dtype, spread(rows, terms))
        lost = (below for below, rest in zip(tried, seen, strict=True) if rest != big * 2.0**-below)
        if (bits := next(lost, None)) is not None:
            return Accumulator(bits, _rounding(product, dtype, terms, places, base, bits))
    return Accumulator(tried[-1] + 1, "exact as far as it was seen", at_least=True)


def _rounding(product: Product, dtype: torch.dtype, terms: int, places: Sequence[int], base: int, bits: int) -> str:
    first, second, last = places[0], places[1], places[-1]
    middle = places[2] if len(places) > 3 else None
    big, place = 2.0**base, 2.0 ** (base + 1 - bits)
    rows: list[dict[int, float]] = [{first: big, second: share * place, last: -big} for share in (0.25, 0.5, 0.75)]
    rows.append({first: -big, second: -0.75 * place, last: big})
    if middle is not None:
        rows.append({first: big, second: place, middle: 0.5 * place, last: -big})
    quarter, half, three, negative, *odd = (value / place for value in sums(product, dtype, spread(rows, terms)))
    if not odd:
        # Without a fourth place nearest with ties to even and with ties down look alike; the latter is made nowhere.
        odd = [2.0 if three == 1 else quarter + 1]
    return ROUNDINGS.get(
        (quarter, half, three, odd[0], negative),
        f"irregularly ({quarter:g}, {half:g}, {three:g}, {odd[0]:g}, {negative:g} places)",
    )


def fused_block(found: Tree) -> tuple[int, ...]:
    """Return the places of the first terms that are added at once; a single one where the sum is a running one."""
    node = sorted_tree(found)
    if node == UNSWAMPED:
        return (0,)
    while isinstance(node, tuple) and isinstance(node[0], tuple):
        node = node[0]
    if isinstance(node, int) or (len(node) == 2 and not _pairs_are_fused(found)):
        return (first_place(found),)
    return tuple(part for part in node if isinstance(part, int))


def _pairs_are_fused(found: Tree) -> bool:
    """Return whether later pairs are added at once with the sum before them, which the first pair cannot show."""
    node = sorted_tree(found)
    while isinstance(node, tuple):
        if len(node) > 2:
            return True
        node = node[0]
    return False


def extra_bits(
    product: Product, dtype: torch.dtype, terms: int, block: Sequence[int], last: int, found: Accumulator
) -> int | None:
    """Return how many bits below the last place of the largest term of a block are kept while it is added up.

    None where nothing is added at once or the accumulator is not known. `last` is a place added after the block. Two
    terms that make up one place only if both are kept to e bits (toward zero), or half a place and a little (nearest).
    """
    if len(block) < 3 or found.bits is None or found.at_least:
        return None
    base = _BASES.get(dtype, _WIDE_BASES)[0][0]
    big, place = 2.0**base, 2.0 ** (base + 1 - found.bits)
    tried = range(1, MOST_EXTRA_BITS + 1)
    near = found.rounding == NEAREST_EVEN
    rows = [
        {block[0]: big, block[1]: place * (0.5 if near else 1 - 2.0**-bits), block[2]: place * 2.0**-bits, last: -big}
        for bits in tried
    ]
    # With one bit, half a place and half a place are a whole one either way.
    seen = sums(product, dtype, spread(rows, terms))
    return next((bits - 1 for bits, rest in zip(tried, seen, strict=True) if rest != place), MOST_EXTRA_BITS)


# --- operands and results ---------------------------------------------------------------------------------------


def result_rounding(product: Product, dtype: torch.dtype, terms: int, bits: int) -> str:
    """Return how a sum that the accumulator holds is rounded to a result of `bits` bits."""
    place = 2.0 ** (1 - bits)
    rows: list[dict[int, float]] = [{0: 1.0, 1: share * place} for share in (0.25, 0.5, 0.75)]
    rows += [{0: 1.0, 1: place, 2: 0.5 * place}, {0: -1.0, 1: -0.75 * place}]
    quarter, half, three, odd, negative = sums(product, dtype, spread(rows, terms))
    seen = ((quarter - 1) / place, (half - 1) / place, (three - 1) / place, (odd - 1) / place, (negative + 1) / place)
    return ROUNDINGS.get(seen, f"irregularly ({', '.join(f'{value:g}' for value in seen)} places)")


def bits_read(product: Product, dtype: torch.dtype, bits: int, *, terms: int = TERMS) -> tuple[int, int]:
    """Return how many bits of the significand of the left and of the right operand take part in a product.

    1 + 2^-t times 1, for t up to `bits` - 1; the last t that is seen counts, and every one before it must be.
    """
    tried = range(1, bits)
    number = 1 + 2.0 ** -torch.arange(1, bits, dtype=torch.float64)
    found = []
    for right_side in (False, True):
        exact, ones = torch.zeros(SIDE, terms, dtype=torch.float64), torch.zeros(SIDE, terms, dtype=torch.float64)
        exact[: bits - 1, 0], ones[: bits - 1, 0] = number, 1.0
        left, right = (ones, exact) if right_side else (exact, ones)
        result = product(left.to(dtype), right.t().contiguous().to(dtype)).detach().cpu().double().diagonal()
        kept = [t for t in tried if float(result[t - 1]) == float(number[t - 1])]
        found.append(1 + next((t - 1 for t in tried if t not in kept), bits - 1))
    return found[0], found[1]


@dataclass(frozen=True)
class Subnormals:
    """What becomes of subnormal numbers: in the left and in the right operand, as products and as results."""

    left: str
    right: str
    products: str
    results: str


def subnormals(product: Product, dtype: torch.dtype, *, terms: int = TERMS) -> Subnormals:
    """Probe operands, products and results below the dtype's smallest normal number.

    Operands: a subnormal times a large number, a normal product. Products: 64 that are subnormal and add up to a
    normal number. Results: the difference of two normal products.
    """
    tiny = 2.0 ** round(math.log2(torch.finfo(dtype).tiny))
    small, large = tiny * 2.0**-5, 2.0**12
    factors = {
        "left": ((small,), (large,), small * large),
        "right": ((large,), (small,), small * large),
        "products": ((2.0**-8,) * 64, (tiny * 2.0**4,) * 64, tiny * 4),
        "results": ((1.0, -1.0), (tiny * 4, tiny * 4 * (1 - 2.0**-6)), tiny * 2.0**-4),
    }
    found = {}
    for name, (ours, theirs, exact) in factors.items():
        left, right = torch.zeros(SIDE, terms, dtype=torch.float64), torch.zeros(SIDE, terms, dtype=torch.float64)
        left[:, : len(ours)] = torch.tensor(ours, dtype=torch.float64)
        right[:, : len(theirs)] = torch.tensor(theirs, dtype=torch.float64)
        result = product(left.to(dtype), right.t().contiguous().to(dtype)).detach().cpu()
        found[name] = _kept(_exactly(result.diagonal()), exact)
    return Subnormals(**found)


def _exactly(result: torch.Tensor) -> list[float]:
    """The distinct values as float64, from their bits: a processor that flushes subnormals flushes casts as well."""
    return sorted({_number(bits, result.dtype) for bits in set(patterns(result))})


def patterns(result: torch.Tensor) -> list[int]:
    """Return the bits of every element, as signed integers."""
    whole = torch.int32 if result.dtype is torch.float32 else torch.int16
    found: list[int] = result.cpu().contiguous().view(whole).flatten().tolist()
    return found


def _number(bits: int, dtype: torch.dtype) -> float:
    exponent_bits, fraction_bits = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23)}[dtype]
    fraction = bits & (2**fraction_bits - 1)
    exponent = (bits >> fraction_bits) & (2**exponent_bits - 1)
    sign = -1.0 if bits < 0 else 1.0
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 2**exponent_bits - 1:
        return math.nan if fraction else sign * math.inf
    significand = fraction + (2**fraction_bits if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - bias - fraction_bits)


def _kept(seen: list[float], exact: float) -> str:
    if seen == [exact]:
        return "kept"
    return "flushed" if seen in ([0.0], [-0.0]) else f"irregular ({', '.join(f'{value:g}' for value in seen[:3])})"
