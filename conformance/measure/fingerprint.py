"""The numerics fingerprint of a device: its arithmetic as rows of comparable text.

The methods and their sources stand in `summation`; docs/fingerprint.md says what each row means.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F

from .flags import FLAGS, flag, kept
from .precision import computes_in, full_precision
from .summation import (
    MANY_TERMS,
    MOST_EXTRA_BITS,
    NEAREST_EVEN,
    SIDE,
    TERMS,
    TOWARD_ZERO,
    UNSWAMPED,
    WIDTHS,
    Accumulator,
    Irregular,
    Product,
    Swamping,
    Tree,
    accumulator,
    bits_read,
    chain,
    described,
    extra_bits,
    fused_block,
    patterns,
    result_rounding,
    subnormals,
    tree,
)
from .threads import one_thread

Section: TypeAlias = dict[str, str]
Fingerprint: TypeAlias = dict[str, Section]
"""By section, `fp16`, `bf16`, `fp32` and `machine`, the rows."""

NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
_STEP = MANY_TERMS // SIDE
_PLAIN = "as matrix products"


def fingerprint(device: torch.device, dtypes: tuple[torch.dtype, ...] = tuple(NAMES.values())) -> Fingerprint:
    """Measure the device in `dtypes`; on one thread on a CPU, so that it does not depend on how busy the machine is.

    TF32 and reduced precision reductions are off, apart from the rows that say otherwise; every flag is restored.
    """
    with one_thread():
        found = {
            name: _section(device, dtype) for name, dtype in NAMES.items() if dtype in dtypes or dtype is torch.float32
        }
        return found | {"machine": _machine(device)}


def matrix_product(device: torch.device) -> Product:
    """torch.mm on the device."""
    return lambda left, right: torch.mm(left.to(device), right.to(device))


def convolution(device: torch.device) -> Product:
    """Return a 1 x 1 convolution on the device, as a matrix product."""
    return lambda left, right: F.conv2d(
        left.to(device)[:, :, None, None], right.t().contiguous().to(device)[:, :, None, None]
    ).flatten(1)


# --- sums -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summation:
    """How one product sums: the order over 64 and over 1024 terms, the accumulator, and what blocks keep."""

    order: str
    long_order: str
    accumulator: Accumulator
    partial: str
    block: int
    extra: int | None

    def error(self, terms: int) -> float:
        """Return a bound on the error of summing `terms` exact products, relative to the sum of their sizes.

        Rounding to nearest: gamma_n (`Accumulator.error`). Toward zero, n = terms: blocks of b aligned with e extra
        bits make (b + 1) truncations of 2^(1-p-e) and one of 2^(1-p) each, (n / b) ((b + 1) 2^-e + 1) 2^(1-p); one
        after the other, n 2^(1-p). Never more than n 2^-22, which holds on every known machine that sums in fp32: a
        fingerprint may tighten a bound, and never loosen it.
        """
        known = terms * 2.0**-22
        found = self.accumulator
        if found.bits is None or found.at_least or self.partial not in ("none", str(found)):
            return known
        place = 2.0 ** (1 - found.bits)
        if found.rounding == NEAREST_EVEN and self.block == 1:
            return min(known, found.error(terms) or known)
        if found.rounding == TOWARD_ZERO and self.block == 1:
            return min(known, terms * place)
        if found.rounding == TOWARD_ZERO and self.extra is not None:
            blocks = -(-terms // self.block)
            return min(known, blocks * ((self.block + 1) * 2.0**-self.extra + 1) * place)
        return known

    def rows(self) -> Section:
        """Return the rows of a fingerprint."""
        return {
            "accumulator": str(self.accumulator),
            "partial sums": self.partial,
            f"order of {TERMS} terms": self.order,
            f"order of {MANY_TERMS} terms": self.long_order,
            "added at once": f"{self.block} products" if self.block > 1 else "1 product",
            "extra alignment bits": _extra(self.extra),
        }


def _extra(bits: int | None) -> str:
    if bits is None:
        return "none to see"
    return f"{bits} or more" if bits == MOST_EXTRA_BITS else str(bits)


def summation(product: Product, dtype: torch.dtype) -> Summation:
    """Probe how `product` sums."""
    short = _ordered(Swamping(product, dtype, TERMS))
    long = _ordered(Swamping(product, dtype, MANY_TERMS, _STEP))
    inner = accumulator(product, dtype, TERMS, short.places[:4])
    block = fused_block(short.tree)
    seen = short.places[-1] not in block
    return Summation(
        short.name,
        long.name,
        inner,
        _partial(product, dtype, short, long),
        len(block),
        extra_bits(product, dtype, TERMS, block, short.places[-1], inner) if seen else None,
    )


@dataclass(frozen=True)
class _Order:
    """An order of summation, what it is called, and a chain of places in it."""

    tree: Tree
    name: str
    places: list[int]


def _ordered(swamping: Swamping) -> _Order:
    """Return the order found; one that cannot be explained is called irregular and treated as a running sum."""
    try:
        found = tree(swamping)
        return _Order(found, described(found, swamping.terms // swamping.step, swamping.step), chain(swamping))
    except Irregular as error:
        return _Order(UNSWAMPED, f"irregular: {error}", [place * swamping.step for place in range(4)])


def _partial(product: Product, dtype: torch.dtype, short: _Order, long: _Order) -> str:
    """Return the precision of partial sums: over 1024 terms if there are any, else over 64."""
    for terms, order in ((MANY_TERMS, long), (TERMS, short)):
        if len(order.places) > 2 and _is_split(order.tree):
            return str(accumulator(product, dtype, terms, [*order.places[:2], order.places[-1]]))
    return "none"


def _is_split(found: Tree) -> bool:
    """Return whether sums are added to sums: a part that is added later is itself a sum."""
    node = found
    while isinstance(node, tuple) and node != UNSWAMPED:
        if any(isinstance(part, tuple) for part in node[1:]):
            return True
        node = node[0]
    return False


def _section(device: torch.device, dtype: torch.dtype) -> Section:
    product = matrix_product(device)
    with full_precision(device.type):
        section = product_rows(product, dtype)
        section["convolution"] = _difference(section, _attempt(lambda: product_rows(convolution(device), dtype)))
        section |= repeats(product, dtype)
        section["NaN times 1"] = _nan_product(product, dtype)
    if dtype is not torch.float32 and device.type == "cuda":
        section["reductions allowed in 16 bits"] = _reduced(device, dtype, section)
    return section


def product_rows(product: Product, dtype: torch.dtype) -> Section:
    """Return what a product of `dtype` does to its operands, sums and results, as rows of a fingerprint."""
    section = summation(product, dtype).rows()
    bits = BITS[dtype]
    if dtype is not torch.float32:
        section["result"] = result_rounding(product, dtype, TERMS, bits)
    section["operands"] = _read(bits_read(product, dtype, bits))
    found = subnormals(product, dtype)
    operands = found.left if found.left == found.right else f"left {found.left}, right {found.right}"
    return section | {
        "subnormal operands": operands,
        "subnormal products": found.products,
        "subnormal results": found.results,
    }


def _read(bits: tuple[int, int]) -> str:
    names = [WIDTHS.get(count, "") for count in bits]
    words = [f"{count} bits" + (f" ({name})" if name else "") for count, name in zip(bits, names, strict=True)]
    return words[0] if bits[0] == bits[1] else f"left {words[0]}, right {words[1]}"


def _attempt(measure: Callable[[], Section]) -> Section:
    """Return the row, or why it cannot be measured, which is a fact as well."""
    try:
        return measure()
    except (RuntimeError, NotImplementedError) as error:
        return {"not run": str(error).splitlines()[0][:80]}


def _difference(plain: Section, other: Section) -> str:
    different = [f"{name}: {value}" for name, value in other.items() if plain.get(name) != value]
    return "; ".join(different) or _PLAIN


# --- flags ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Set the precision of fp32 products; restore the newer settings too, which setting the flag changes."""
    precision = flag("torch.get_float32_matmul_precision")
    newer = (flag(f"torch.backends.{backend}.matmul.fp32_precision") for backend in ("cuda", "mkldnn"))
    with kept(precision, *newer):
        precision.write(name)
        yield


def _relaxed(device: torch.device) -> Section:
    """Return how many bits of fp32 operands are read with the flags as they are, and with less precision allowed."""

    def read(product: Product) -> str:
        seen = _attempt(lambda: {"read": _read(bits_read(product, torch.float32, 24))})
        return seen.get("read", seen.get("not run", ""))

    def allowed(name: str) -> Section:
        with _precision(name):
            return {f"fp32 operands, precision {name}": read(matrix_product(device))}

    plain, convolved = read(matrix_product(device)), read(convolution(device))
    found = {"fp32 operands, flags as set": f"product {plain}, convolution {convolved}"}
    # torch refuses the flag where its newer settings are in use.
    return found | _attempt(lambda: allowed("high") | allowed("medium"))


def _reduced(device: torch.device, dtype: torch.dtype, plain: Section) -> str:
    """Return what changes where torch's flags allow 16-bit sums."""
    with full_precision("cuda"):
        for each in FLAGS:
            if dtype in each.reduces and each.present:
                each.write(True)
        changed = _difference(plain, _attempt(lambda: product_rows(matrix_product(device), dtype)))
    return "no change" if changed == _PLAIN else changed


# --- the same again ---------------------------------------------------------------------------------------------


def _cancelling(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(64, 272) and (272, 64) whose products nearly cancel, so that a 16-bit result shows the last bits of its sum."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(SIDE, 128, generator=generator), torch.randn(128, SIDE, generator=generator)
    rest, factor = torch.randn(SIDE, 16, generator=generator), torch.randn(16, SIDE, generator=generator)
    operands = torch.cat([left, -left, rest / 256], 1), torch.cat([right, right, factor / 256], 0)
    return operands[0].to(dtype), operands[1].to(dtype)


_ROWS = (1, 3, 16, 32)


def repeats(product: Product, dtype: torch.dtype) -> Section:
    """Return whether the same product gives the same bits again, and with fewer rows beside each."""
    left, right = _cancelling(dtype)
    whole = patterns(product(left, right))
    again = all(patterns(product(left, right)) == whole for _ in range(3))
    differing = [rows for rows in _ROWS if patterns(product(left[:rows], right)) != whole[: rows * SIDE]]
    alone = f"other bits with {', '.join(map(str, differing))} of {SIDE} rows" if differing else "the same bits"
    return {"repeated": "the same bits" if again else "OTHER BITS", "fewer rows": alone}


# --- NaN, FMA, libraries ----------------------------------------------------------------------------------------

_NANS = {"quiet": 0x7FC1_2345, "signalling": 0x7FA1_2345, "negative": 0xFFC1_2345}


def _nan_product(product: Product, dtype: torch.dtype) -> str:
    """Return the patterns of a quiet NaN with a payload, and of one with the sign, after a product with 1."""
    found = []
    for pattern in (0x7FC1_2345, 0xFFC1_2345) if dtype is torch.float32 else (_quiet(dtype), _quiet(dtype) | 0x8000):
        left, right = torch.zeros(SIDE, TERMS, dtype=dtype), torch.zeros(TERMS, SIDE, dtype=dtype)
        left[:, 0], right[0] = _of(pattern, dtype), 1.0
        found.append(_hexadecimal(product(left, right)))
    return ", ".join(found)


def _quiet(dtype: torch.dtype) -> int:
    return 0x7E55 if dtype is torch.float16 else 0x7FD5


def _of(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    width, whole = (32, torch.int32) if dtype is torch.float32 else (16, torch.int16)
    signed = pattern - 2**width if pattern >= 2 ** (width - 1) else pattern
    return torch.tensor(signed, dtype=torch.int64).to(whole).view(dtype)


def _hexadecimal(result: torch.Tensor) -> str:
    digits = 2 * result.element_size()
    found = sorted({bits & (16**digits - 1) for bits in patterns(result)})
    return " or ".join(f"0x{bits:0{digits}X}" for bits in found[:3])


def _cast_nans(device: torch.device, dtype: torch.dtype) -> str:
    """Return the patterns of three NaNs after a cast from fp32: in vectors of numbers and alone."""
    words = []
    for name, pattern in _NANS.items():
        source = _of(pattern, torch.float32).repeat(67).to(device)
        words.append(f"{name} {_hexadecimal(torch.cat([source.to(dtype), source[:1].to(dtype)]))}")
    return ", ".join(words)


def _contraction(device: torch.device) -> str:
    """Return whether a * b + c rounds once: (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24 if so, and 0 if a * b is rounded."""
    factor = torch.full((67,), 1 + 2.0**-12, device=device)
    rest = torch.full((67,), -(1 + 2.0**-11), device=device)
    left, right = torch.zeros(SIDE, TERMS), torch.zeros(TERMS, SIDE)
    left[:, :2], right[:2] = torch.tensor([-(1 + 2.0**-11), 1 + 2.0**-12]), torch.tensor([[1.0], [1 + 2.0**-12]])
    with full_precision(device.type):
        seen = {
            "addcmul": torch.addcmul(rest, factor, factor),
            "add with alpha": torch.add(rest, factor, alpha=1 + 2.0**-12),
            "a * b + c": factor * factor + rest,
            "mm": matrix_product(device)(left, right),
        }
    return ", ".join(f"{name} {_rounds(result)}" for name, result in seen.items())


def _rounds(result: torch.Tensor) -> str:
    found = set(result.flatten().tolist())
    if found == {2.0**-24, 0.0}:
        return "fuses some elements"
    return {2.0**-24: "fuses", 0.0: "rounds twice"}.get(found.pop(), "irregular") if len(found) == 1 else "irregular"


def _machine(device: torch.device) -> Section:
    narrow = {name: dtype for name, dtype in NAMES.items() if name != "fp32" and computes_in(device, dtype)}
    found = {"NaN cast to " + name: _cast_nans(device, dtype) for name, dtype in narrow.items()}
    found["multiply and add"] = _contraction(device)
    return _relaxed(device) | found | _libraries(device)


def _libraries(device: torch.device) -> Section:
    """Return which instructions and libraries torch says that it uses."""
    if device.type == "cpu":
        config = torch.__config__.show()
        versions = [
            re.search(pattern, config) for pattern in (r"oneAPI Math Kernel.*? Version ([\d.]+)", r"DNN v([\d.]+)")
        ]
        named = [f"{name} {found[1]}" for name, found in zip(("MKL", "oneDNN"), versions, strict=True) if found]
        return {"instructions": torch.backends.cpu.get_cpu_capability(), "libraries": ", ".join(named) or "none named"}
    if device.type == "cuda":
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        properties = torch.cuda.get_device_properties(device)
        return {
            "instructions": str(getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")),
            "libraries": runtime + (f", cuDNN {cudnn}" if cudnn else ""),
        }
    return {"instructions": device.type, "libraries": "torch does not say"}


def accumulator_of(
    product: Product, device_type: str, dtype: torch.dtype, terms: int = TERMS
) -> tuple[Accumulator, int]:
    """The accumulator of `product` over so many terms with the flags off, and how many products are added at once.

    The latter is seen in sums of 64 terms at most.
    """
    with full_precision(device_type), one_thread():
        order = _ordered(Swamping(product, dtype, terms, max(1, terms // TERMS)))
        short = order if terms <= TERMS else _ordered(Swamping(product, dtype, TERMS))
        return accumulator(product, dtype, terms, order.places[:4]), len(fused_block(short.tree))
