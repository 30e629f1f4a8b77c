"""Check the kernel of unscale_() bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target, is_foreign
from ...measure.storages import memory
from ...oracles.numbers import unscaling as exact
from ...oracles.numbers.bits import equal_elements
from ...scaler import model as oracle
from ...workloads.gradients import NON_FINITE
from .support import FORMS, as_gradient, as_tensor, raises_error

KERNEL_GRADIENTS = {
    "ordinary": [1.0, -2.5, 1024.0, 3.0],
    "finite-extremes": [0.0, -0.0, 2.0**-20, 60000.0],
    "inf": [1.0, math.inf, 2.0],
    "minus-inf": [-math.inf],
    "nan": [4.0] * 40 + [math.nan],
    "long": [float(k % 251) - 125.0 for k in range(1023)],
}

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=["fp32", "bf16", "fp16", "fp64"]
)


@contract("AMP-SCALE-140")
@DTYPES
@pytest.mark.parametrize(
    "factor",
    [2.0**-16, 1.0, 1 / 3, deep("standard", 3.0), deep("standard", 2.0**-30)],
    ids="{:g}".format,
)
def test_check_and_unscale(case: Case, target: Target, dtype: torch.dtype, factor: float) -> None:
    case.require_arithmetic(target, dtype)
    factor = oracle.rounded(factor, oracle.FP32)
    for name, values in KERNEL_GRADIENTS.items():
        numbers = torch.tensor(values, dtype=dtype)
        gradients = [numbers.to(target.device, copy=True), torch.ones(3, dtype=dtype, device=target.device)]
        flag = torch.zeros((), device=target.device)
        inverse = torch.tensor(factor, device=target.device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
        after, found = oracle.check_and_unscale([as_gradient(numbers)], 0.0, factor)
        case.identical(f"{name}: gradients", gradients[0], as_tensor(after[0], numbers))
        case.equal(f"{name}: flag", flag.item(), found)
        case.identical(f"{name}: the factor", inverse, torch.tensor(factor))


@contract("AMP-SCALE-141")
@DTYPES
@pytest.mark.parametrize("before", [0.0, 1.0], ids=["clear", "set"])
def test_flag(case: Case, target: Target, dtype: torch.dtype, before: float) -> None:
    case.require_arithmetic(target, dtype)
    inverse = torch.tensor(0.5, device=target.device)
    largest = FORMS[dtype].largest
    for value, found in ((largest, before), (-largest, before), (math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0)):
        for place in (0, 20, 40):
            gradient = torch.ones(41, dtype=dtype, device=target.device)
            gradient[place] = value
            flag = torch.tensor(before, device=target.device)
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
            case.equal(f"flag for {value} at {place}", flag.item(), found)
    if not is_foreign(target.device_type):  # GradScaler never asks it of no gradient, and torch_xla's ends the process
        flag = torch.tensor(before, device=target.device)
        torch._amp_foreach_non_finite_check_and_unscale_([], flag, inverse)
        case.equal("flag for no gradient", flag.item(), before)


THIRD = oracle.rounded(1 / 3, oracle.FP32)

BAD = tuple(NON_FINITE.values())

DEEP_DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        *(deep("standard", dtype, id=FORMS[dtype].name) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)

SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def finite_numbers(count: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Return numbers with full significands over the range of fp16, its subnormals and both zeros included."""
    exponents = torch.randint(-24, 14, (count,), generator=rng)
    numbers = torch.ldexp(torch.randn(count, generator=rng).clamp(-3, 3), exponents).to(dtype)
    numbers[5::97] = 0.0
    numbers[7::97] = -0.0
    return numbers


def unscale(gradients: list[torch.Tensor], factor: float, before: float = 0.0) -> float:
    """Run the kernel on the gradients and return the flag, which is `before` at first."""
    device = gradients[0].device
    flag, inverse = torch.tensor(before, device=device), torch.tensor(factor, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
    return flag.item()


def mismatch(seen: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Describe the first element at which two tensors differ in bits (NaNs are equal); None if there is none."""
    seen = seen.cpu()
    if (seen.dtype, seen.shape) != (expected.dtype, expected.shape):
        return f"{seen.dtype}{tuple(seen.shape)} in place of {expected.dtype}{tuple(expected.shape)}"
    actual, wanted = seen.flatten(), expected.flatten()
    equal = equal_elements(actual, wanted)
    if equal is None:
        return None
    place = int(equal.int().argmin())
    return f"element {place}: {actual[place].item()!r} in place of {wanted[place].item()!r}"


def around(*sizes: int) -> list[int]:
    return sorted({near for size in sizes for near in (size - 1, size, size + 1)})


# Vectors of 4 to 64 elements, warps and blocks of threads; a chunk of multi_tensor_apply; the grain of CPU threads.
LENGTHS = [*range(1, 10), *around(16, 32, 64, 128, 1024), *around(65536)]

MORE_LENGTHS = [*LENGTHS, *around(256, 512, 2048, 4096, 32768, 131072)]


@contract("AMP-SCALE-143")
@DEEP_DTYPES
def test_any_length(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    lengths = LENGTHS if case.level == "quick" else MORE_LENGTHS
    numbers = finite_numbers(max(lengths) + 8, dtype, rng)
    store = numbers.to(target.device, copy=True)
    wrong, tried = [], 0
    for factor in (THIRD, 1.0):
        product = exact.unscaled(numbers, factor)
        for length, offset in itertools.product(lengths, (0, 1, 4)):
            # Views into a longer store, misaligned ones too; the numbers around them must not change.
            expected = torch.cat([numbers[:offset], product[offset : offset + length], numbers[offset + length :]])
            flag = unscale([store[offset : offset + length]], factor)
            found = mismatch(store, expected)
            store.copy_(numbers)
            tried += 1
            if flag or found:
                wrong.append(f"{length} finite elements at {offset}, times {factor}: flag {flag}; {found}")
            for place, bad in zip((0, length // 2, length - 1), BAD, strict=True):
                store[offset + place] = bad
                flag = unscale([store[offset : offset + length]], factor)
                store[offset : offset + length].copy_(numbers[offset : offset + length])
                tried += 1
                if flag != 1.0:
                    wrong.append(f"{bad} at {place} of {length} elements at {offset}, times {factor}: flag {flag}")
    case.note("calls of the kernel", tried)
    case.equal("calls that differ from exact arithmetic", wrong[:3], [])


@contract("AMP-SCALE-143")
@DEEP_DTYPES
def test_every_place(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    wrong, length = [], case.samples(quick=67, standard=515, full=4099)
    numbers = finite_numbers(length, dtype, rng)
    places = range(length)
    gradients = numbers.to(target.device).repeat(length, 1)
    for place in places:
        gradients[place, place] = BAD[place % 3]
    flags = torch.zeros(length, device=target.device)
    for factor in (THIRD, 1.0):
        inverse = torch.tensor(factor, device=target.device)
        for gradient, flag in zip(gradients.unbind(), flags.unbind(), strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
        missed = [place for place in places if flags[place].item() != 1.0]
        wrong += [f"{BAD[place % 3]} at {place} of {length}, times {factor}" for place in missed]
        # Each gradient has its own non-finite element; all others equal the product.
        expected = exact.unscaled(numbers, factor).repeat(length, 1)
        expected.fill_diagonal_(0.0)
        found = mismatch(gradients.clone().fill_diagonal_(0.0), expected)
        if found:
            wrong.append(f"an element next to the non-finite one, times {factor}: {found}")
        numbers = exact.unscaled(numbers, factor)
        flags.zero_()
    case.note("places tried", length)
    case.equal("non-finite elements that were missed or changed other elements", wrong[:3], [])


FACTORS = (2.0**-16, THIRD, 1.0)

MORE_FACTORS = (
    *FACTORS, 65536.0, 3.0, -0.5, 1 + 2**-23, 1 - 2**-24, 2.0**-126, 2.0**-149, oracle.FP32.largest, 0.0, -0.0,
    math.inf, -math.inf, math.nan,
)  # fmt: skip


@contract("AMP-SCALE-144")
@SIXTEEN_BIT
def test_every_16_bit_number(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_subnormals(target, dtype)
    case.require_arithmetic(target, dtype)
    numbers = exact.every_number(dtype)
    finite = numbers[numbers.float().isfinite()]
    wrong = []
    factors = FACTORS if case.level == "quick" else MORE_FACTORS
    for factor in factors:
        for what, all_of_them, found in (("number", numbers, 1.0), ("finite number", finite, 0.0)):
            gradient = all_of_them.to(target.device, copy=True)
            flag = unscale([gradient], factor)
            if flag != found:
                wrong.append(f"the flag for every {what}, times {factor}: {flag} in place of {found}")
            if what == "number" and (place := mismatch(gradient, exact.unscaled(numbers, factor))):
                wrong.append(f"times {factor}: {place}")
    case.note("products compared", len(factors) * len(numbers))
    case.equal("products and flags that differ from exact arithmetic", wrong[:3], [])


@contract("AMP-SCALE-144")
@SIXTEEN_BIT
def test_every_16_bit_inf_and_nan(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    numbers = exact.every_number(dtype)
    bad = numbers[~numbers.float().isfinite()]
    wrong = []
    lanes = (1,) if case.level == "quick" else (1, 37)  # alone, and inside a vector
    for factor, lane in itertools.product((THIRD, 1.0), lanes):
        gradients = torch.zeros(len(bad), lane, dtype=dtype, device=target.device)
        gradients[torch.arange(len(bad)), torch.arange(len(bad)) % lane] = bad.to(target.device)
        flags, inverse = torch.zeros(len(bad), device=target.device), torch.tensor(factor, device=target.device)
        for gradient, flag in zip(gradients.unbind(), flags.unbind(), strict=True):
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
        patterns = bad.view(torch.int16).tolist()
        missed = [pattern for pattern, flag in zip(patterns, flags.tolist(), strict=True) if flag != 1.0]
        wrong += [f"pattern {pattern & 0xFFFF:#06x} among {lane}, times {factor}" for pattern in missed]
    case.note("infinities and NaNs, each alone", len(bad))
    case.equal("bit patterns that do not set the flag", wrong[:3], [])


# Tensors that one launch of multi_tensor_apply takes, with small and large kernel arguments, by number of lists.
LAUNCHES = (30, 36, 48, 64, 110, 320)

COUNTS = [1, 2, 3, *around(*LAUNCHES)]

MORE_COUNTS = [*COUNTS, *around(210, 252, 336, 448, 770, 2240)]


def lists(count: int) -> list[tuple[str, list[int]]]:
    """Return lengths of the tensors of lists of `count`, with empty tensors at positions that could count as an end."""
    return [
        ("no empty", [1 + index % 5 for index in range(count)]),
        ("every third empty", [index % 3 * 2 for index in range(count)]),
        ("the ends empty", [0, *[3] * (count - 2), 0][-count:]),
    ]


@contract("AMP-SCALE-145")
@DEEP_DTYPES
def test_lists(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    wrong, tried = [], 0
    deep_counts = case.level == "full" or (case.level == "standard" and dtype == torch.float32)
    for number, count in enumerate(MORE_COUNTS if deep_counts else COUNTS):
        # One of the three lists per count, in turn: the next count is mostly one larger.
        for what, lengths in lists(count) if case.level == "full" else [lists(count)[number % 3]]:
            gaps = [
                part for length in lengths for part in (length, 1)
            ]  # one number between any two, which must not change
            numbers = finite_numbers(sum(gaps), dtype, rng)
            store = numbers.to(target.device, copy=True)
            mine = torch.cat([torch.full((length,), part % 2 == 0) for part, length in enumerate(gaps)])
            product = torch.where(mine, exact.unscaled(numbers, THIRD), numbers)
            gradients = list(store.split(gaps))[::2]
            flag, found = unscale(gradients, THIRD), mismatch(store, product)
            if flag or found:
                wrong.append(f"{count} gradients, {what}: flag {flag}; {found}")
            filled = [index for index, length in enumerate(lengths) if length]
            for index in sorted({filled[0], filled[len(filled) // 2], filled[-1]}) if filled else ():
                kept = gradients[index][-1].clone()
                gradients[index][-1] = BAD[tried % 3]
                flag = unscale(gradients, THIRD)
                gradients[index][-1] = kept
                tried += 1
                if flag != 1.0:
                    wrong.append(f"{BAD[tried % 3]} in gradient {index} of {count}, {what}: flag {flag}")
    case.note("lists with a bad gradient", tried)
    case.equal("lists that differ from exact arithmetic", wrong[:3], [])


@contract("AMP-SCALE-145")
def test_every_gradient_of_a_list(case: Case, target: Target) -> None:
    count = case.samples(quick=112, standard=322, full=2242)
    store = torch.ones(count * 2, device=target.device)
    gradients = list(store.split(2))
    missed = []
    for index in range(count):
        store.fill_(1.0)
        gradients[index][index % 2] = BAD[index % 3]
        if unscale(gradients, THIRD) != 1.0:
            missed.append(index)
    case.note("gradients that were bad in turn", count)
    case.equal("gradients whose bad element was missed", missed[:3], [])


@contract("AMP-SCALE-145")
@DTYPES
def test_empty_gradients(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    wrong = []
    for shapes in ([(0,)], [(0,)] * 500, [(0, 3), (3, 0), (2, 0, 2)], [(0,), (), (0,)], [(), (0,)]):
        gradients = [torch.full(shape, 6.0, dtype=dtype, device=target.device) for shape in shapes]
        for before in (0.0, 1.0):
            if (flag := unscale(gradients, 0.5, before)) != before:
                wrong.append(f"{shapes[:3]}: flag {flag}, {before} before")
        for shape, gradient in zip(shapes, gradients, strict=True):
            if found := mismatch(gradient, torch.full(shape, 1.5, dtype=dtype)):
                wrong.append(f"{shapes[:3]}: {found}")
    case.equal("lists with empty gradients that are not as before", wrong[:3], [])


@contract("AMP-SCALE-145", on="accelerator")
@pytest.mark.parametrize("chunks", [321, deep("full", 2241)])
def test_more_chunks_than_a_launch_takes(case: Case, target: Target, chunks: int) -> None:
    # One gradient that a launch cannot finish, and a short one after it.
    long = torch.full((chunks * 65536 + 1,), 6.0, device=target.device)
    short = torch.full((3,), 6.0, device=target.device)
    case.equal("flag for finite gradients", unscale([long, short], 0.5), 0.0)
    case.equal("elements that were not halved", int((long != 3.0).sum() + (short != 3.0).sum()), 0)
    for what, gradient, place in (
        ("the last element of the long one", long, -1),
        ("the first element of its last whole chunk", long, -1 - 65536),
        ("the short one after it", short, 2),
    ):
        gradient[place] = math.nan
        case.equal(f"flag for NaN in {what}", unscale([long, short], 1.0), 1.0)
        gradient[place] = 3.0


STRIDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    # sizes, strides, offset: places of a store of 240 that no other element of the gradient shares
    "scalar": ((), (), 3),
    "one": ((1, 1), (7, 200), 5),
    "vector": ((13,), (1,), 1),
    "every-other": ((13,), (2,), 0),
    "every-seventh": ((13,), (7,), 2),
    "transposed": ((5, 7), (1, 5), 3),
    "rows-with-gaps": ((3, 5), (8, 1), 1),
    "columns-with-gaps": ((3, 5), (1, 8), 1),
    "permuted": ((2, 3, 4), (1, 8, 2), 4),
    "channels-last": ((2, 3, 2, 4), (24, 1, 12, 3), 2),
    "channels-last-3d": ((2, 3, 2, 2, 2), (24, 1, 12, 6, 3), 1),
    "every-row-reversed-in-memory": ((4, 3), (3, 1), 200),
    "wide-steps": ((4, 4), (44, 11), 6),
    "empty": ((0, 4), (4, 1), 9),
}


def strided(store: torch.Tensor, name: str) -> torch.Tensor:
    sizes, strides, offset = STRIDED[name]
    return store.as_strided(sizes, strides, offset)


@contract("AMP-SCALE-146")
@DTYPES
def test_strides(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    numbers = finite_numbers(240, dtype, rng)
    product = exact.unscaled(numbers, THIRD)
    wrong = []
    for name in STRIDED:
        store = numbers.to(target.device, copy=True)
        mine = torch.zeros(240, dtype=torch.bool)
        strided(mine, name).fill_(True)
        # Infinities in the gaps are nobody's gradient.
        store[~mine.to(target.device)] = math.inf
        gradient = strided(store, name)
        places = gradient.stride(), memory(gradient)
        flag = unscale([gradient], THIRD)
        found = mismatch(store, torch.where(mine, product, torch.full_like(product, math.inf)))
        if flag or found or (gradient.stride(), memory(gradient)) != places:
            wrong.append(f"{name}: flag {flag}; {found}; strides {gradient.stride()}")
        for place in mine.nonzero().flatten().tolist():
            store[place] = BAD[place % 3]
            if (flag := unscale([gradient], THIRD)) != 1.0:
                wrong.append(f"{name}, {BAD[place % 3]} at {place} of the store: flag {flag}")
            store[place] = 1.0
    case.equal("layouts that differ from exact arithmetic", wrong[:3], [])


@contract("AMP-SCALE-146")
@DTYPES
def test_strides_in_one_list(case: Case, target: Target, rng: torch.Generator, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    names = list(STRIDED)
    draw = random.Random(case.seed)
    wrong = []
    for _ in range(case.samples(quick=2, standard=8, full=300)):
        draw.shuffle(names)
        numbers = {name: finite_numbers(240, dtype, rng) for name in names}
        stores = {name: numbers[name].to(target.device, copy=True) for name in names}
        gradients = [strided(stores[name], name) for name in names]
        flag = unscale(gradients, THIRD)
        for name in names:
            mine = torch.zeros(240, dtype=torch.bool)
            strided(mine, name).fill_(True)
            expected = torch.where(mine, exact.unscaled(numbers[name], THIRD), numbers[name])
            if flag or (found := mismatch(stores[name], expected)):
                wrong.append(f"{name} in {names}: flag {flag}; {found}")
        bad = draw.choice([index for index, gradient in enumerate(gradients) if gradient.numel()])
        gradients[bad][tuple(size - 1 for size in gradients[bad].shape)] = draw.choice(BAD)
        if (flag := unscale(gradients, THIRD)) != 1.0:
            wrong.append(f"the last element of {names[bad]} in {names}: flag {flag}")
    case.equal("lists of several layouts that differ from exact arithmetic", wrong[:3], [])


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Numbers at which a multiplication turns: zeros, subnormals and their ties, ones, the largest; both signs."""
    form = FORMS[dtype]
    tiny = [form.smallest * k for k in (1, 2, 3, 5, 7, 1023)]
    usual = [1.0, 3.0, 1 + 2.0 ** (1 - form.precision), 60000.0, min(form.largest, oracle.FP32.largest)]
    numbers = [0.0, *tiny, *(oracle.rounded(value, form) for value in (2.0**-126, 2.0**-127, 2.0**-14, 1e-7)), *usual]
    return torch.tensor([*numbers, *(-value for value in numbers)], dtype=dtype)


@contract("AMP-SCALE-147")
@DTYPES
def test_any_factor(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_subnormals(target)
    case.require_arithmetic(target, dtype)
    numbers, wrong = edges(dtype), []
    draw = random.Random(case.seed)
    random_factors = [
        oracle.rounded(draw.uniform(-2, 2) * 2.0 ** draw.randint(-150, 126), oracle.FP32) for _ in range(8)
    ]
    for factor in (*MORE_FACTORS, *random_factors):
        product = exact.unscaled(numbers, factor)
        for before in (0.0, 0.25, 3.0):
            gradient, bad = (numbers.to(target.device, copy=True) for _ in range(2))
            bad[-1] = math.nan
            inverse = torch.tensor(factor, device=target.device)
            flag, raised = (torch.tensor(before, device=target.device) for _ in range(2))
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, inverse)
            torch._amp_foreach_non_finite_check_and_unscale_([bad], raised, inverse)
            found = mismatch(gradient, product) or mismatch(inverse, torch.tensor(factor))
            # AMP-SCALE-030 asks that a product that overflows reaches no parameter; the flag is one way to it.
            allowed = (before,) if bool(product.isfinite().all()) else (before, 1.0)
            if found or flag.item() not in allowed or raised.item() != 1.0:
                flags = f"flags {flag.item()} for finite and {raised.item()} for NaN, {before} before"
                wrong.append(f"times {factor!r}: {flags}; {found}")
    case.equal("factors whose products or flags differ from exact arithmetic", wrong[:3], [])


@contract("AMP-SCALE-147")
@DTYPES
def test_products_that_overflow(case: Case, target: Target, dtype: torch.dtype) -> None:
    case.require_arithmetic(target, dtype)
    largest = torch.tensor([FORMS[dtype].largest, 1.0, -FORMS[dtype].largest], dtype=dtype)
    if dtype == torch.float64:
        largest = torch.tensor([1e38, 1.0, -1e38], dtype=dtype)  # fp64 numbers beyond fp32 are outside this contract
    for factor in (3.0, 2.0**100, oracle.FP32.largest):
        gradient = largest.to(target.device, copy=True)
        case.note(f"flag for finite gradients whose product with {factor:g} is not", unscale([gradient], factor))
        case.identical(f"the largest numbers times {factor:g}", gradient, exact.unscaled(largest, factor))


@contract("AMP-SCALE-149")
def test_refused_gradients(case: Case, target: Target) -> None:
    device = target.device
    ones = torch.ones(4, device=device)
    flag, factor = torch.zeros((), device=device), torch.tensor(0.5, device=device)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "bool": ones.bool,
        "sparse": lambda: torch.eye(2, device=device).to_sparse(),
        "overlapping": lambda: torch.ones(1, device=device).expand(3),
    }
    gradients = {name: makers[name]() for name in case.with_kernels(target, makers)}
    flags = {"two flags": ones[:2], "int32 flag": flag.int()}
    factors = {"two factors": ones[:2], "16-bit factor": factor.to(case.supported(target)[0])}
    kernel = torch._amp_foreach_non_finite_check_and_unscale_
    taken = [name for name, bad in gradients.items() if not raises_error(kernel, [bad], flag, factor)]
    taken += [name for name, bad in flags.items() if not raises_error(kernel, [ones], bad, factor)]
    taken += [name for name, bad in factors.items() if not raises_error(kernel, [ones], flag, bad)]
    case.equal("gradients, flags and factors that raise no error", taken, [])
    case.equal("gradients after the errors", ones.tolist(), [1.0] * 4)
    case.equal("flag after the errors", flag.item(), 0.0)
    kernel([ones], flag.reshape(1), factor.reshape(1))
    case.equal("control: tensors of shape (1,) are accepted", ones.tolist(), [0.5] * 4)


@contract("AMP-SCALE-140")
def test_functional_form(case: Case, target: Target, rng: torch.Generator) -> None:
    numbers = [finite_numbers(length, torch.float32, rng) for length in (1, 33, 0, 5)]
    for bad in (None, *BAD):
        if bad is not None:
            numbers[3][4] = bad
        gradients = [each.to(target.device, copy=True) for each in numbers]
        flag, factor = torch.zeros((), device=target.device), torch.tensor(THIRD, device=target.device)
        seen, found = torch.ops.aten._amp_foreach_non_finite_check_and_unscale(gradients, flag, factor)
        case.equal(f"flag for {bad}", (found.item(), flag.item()), (float(bad is not None), 0.0))
        for ours, before, number in zip(seen, gradients, numbers, strict=True):
            case.identical("gradients that it returns", ours, exact.unscaled(number, THIRD))
            case.identical("gradients that it received", before, number)
