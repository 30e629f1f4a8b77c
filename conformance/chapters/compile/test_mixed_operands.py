"""Check that compiled ops of operands of two types, and with numbers of Python, give what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep, needs
from ...harness.targets import Target
from .support import compiler, compiling, drawn, inductor, refuses

Binary: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Unary: TypeAlias = Callable[[Tensor], Tensor]
Call: TypeAlias = Callable[[], Tensor]

OF_TWO: dict[str, Binary] = {
    "add": lambda a, b: torch.add(a, b),
    "sub": lambda a, b: torch.sub(a, b),
    "mul": lambda a, b: torch.mul(a, b),
    "div": lambda a, b: torch.div(a, b),
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "atan2": lambda a, b: torch.atan2(a, b),
    "hypot": lambda a, b: torch.hypot(a, b),
    "eq": lambda a, b: torch.eq(a, b),
    "lt": lambda a, b: torch.lt(a, b),
    "ge": lambda a, b: torch.ge(a, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "copysign": lambda a, b: torch.copysign(a, b),
    "ldexp": lambda a, b: torch.ldexp(a, b),
    "logaddexp": lambda a, b: torch.logaddexp(a, b),
    "xlogy": lambda a, b: torch.xlogy(a, b.abs()),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "clamp": lambda a, b: torch.clamp(a, max=b),
    "matmul": lambda a, b: a.view(2, 4, 8) @ b.view(2, 8, 4),
    "linear": lambda a, b: F.linear(a.view(8, 8), b.view(8, 8)),
}


def _written(write: Callable[[Tensor, Tensor], object]) -> Binary:
    """Return a function that writes from the second operand to a copy of the first."""

    def call(a: Tensor, b: Tensor) -> Tensor:
        copy = a.clone()
        write(copy, b)
        return copy

    return call


def _assign(copy: Tensor, b: Tensor) -> None:
    copy[:8] = b[:8]


NORMAL = "normal of no deviation"
OF_THE_FIRST: dict[str, Binary] = {
    NORMAL: lambda a, b: torch.normal(a, b.abs() * 0),
    "add to the first": _written(lambda copy, b: copy.add_(b)),
    "multiply the first": _written(lambda copy, b: copy.mul_(b)),
    "copy to the first": _written(lambda copy, b: copy.copy_(b)),
    "assign to a part": _written(_assign),
    "fill with an element": _written(lambda copy, b: copy.fill_(b[0])),
    "add with out": lambda a, b: torch.add(a, b, out=torch.empty_like(a)),
    "type_as": lambda a, b: b.type_as(a),
    "masked_fill by a tensor": lambda a, b: a.masked_fill(a > 0, b[0]),
    "plus an element": lambda a, b: a + b[0],
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "index_put": lambda a, b: a.index_put((torch.arange(8, device=a.device),), b[:8]),
    "index_copy": lambda a, b: a.index_copy(0, torch.arange(8, device=a.device), b[:8]),
    "masked_scatter": lambda a, b: a.masked_scatter(a > 0, b),
    "nextafter": lambda a, b: torch.nextafter(a, b.abs() * 0),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, torch.full_like(b, 2)),
}
WITH_AN_EMPTY_ONE: dict[str, Binary] = {
    "cat with an empty one": lambda a, b: torch.cat([a, b[:0]]),
    "cat behind an empty one": lambda a, b: torch.cat([b[:0], a]),
    "cat of rows and an empty list": lambda a, b: torch.cat([a.view(8, 8), b[:0]]),
    "cat of columns and no column": lambda a, b: torch.cat([a.view(8, 8), b.view(8, 8)[:, :0]], -1),
    "vstack with no row": lambda a, b: torch.vstack([a.view(8, 8), b.view(8, 8)[:0]]),
    "cat of empty ones": lambda a, b: torch.cat([a[:0], b[:0]]),
}
TWO_AND_AN_EMPTY_ONE: dict[str, Binary] = {
    "cat around an empty one": lambda a, b: torch.cat([a, b[:0], a]),
    "cat of two types around an empty one": lambda a, b: torch.cat([a, a[:0], b]),
    "cat of rows and no row": lambda a, b: torch.cat([b.view(8, 8)[:0], a.view(8, 8), a.view(8, 8)]),
    "hstack with an empty one": lambda a, b: torch.hstack([b[:0], a, a]),
}
INDEX_FILL: dict[str, Binary] = {
    "index_fill by a tensor": lambda a, b: a.index_fill(0, torch.arange(8, device=a.device), b[0]),
    "index_fill_ by a tensor": _written(lambda copy, b: copy.index_fill_(0, torch.arange(8, device=b.device), b[0])),
}
TO_PLACES: dict[str, Binary] = {
    "assign to places": _written(lambda copy, b: copy.__setitem__(torch.arange(8, device=b.device), b[:8])),
    "assign where true": _written(lambda copy, b: copy.__setitem__(copy > 0, b[0])),
    "select_scatter": lambda a, b: a.view(8, 8).select_scatter(b[:8], 0, 1),
    "slice_scatter": lambda a, b: a.slice_scatter(b[:8], 0, 0, 8),
    "diagonal_scatter": lambda a, b: a.view(8, 8).diagonal_scatter(b[:8]),
}
LOSSES: dict[str, Binary] = {  # and the product that adds to a vector
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "l1_loss": lambda a, b: F.l1_loss(a, b, reduction="none"),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a, b),
    "huber_loss": lambda a, b: F.huber_loss(a, b),
    "huber_loss of each": lambda a, b: F.huber_loss(a, b, reduction="none"),
    # Of logits below 11.09, beyond which the exponential of eager is infinite in float16, and a compiler's is not.
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a.clamp(-10, 10), b.sign()),
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "with logits, of each": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction="none"),
    "with logits and weights": lambda a, b: F.binary_cross_entropy_with_logits(a, a.sigmoid(), b.sigmoid()),
    "binary_cross_entropy with weights": lambda a, b: F.binary_cross_entropy(a.sigmoid(), a.sigmoid(), b.sigmoid()),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b.sigmoid(), full=True),
    "cross_entropy of rows": lambda a, b: F.cross_entropy(a.view(8, 8), b.view(8, 8).argmax(-1), reduction="none"),
    "hinge_embedding_loss": lambda a, b: F.hinge_embedding_loss(a, b.sign()),
    "margin_ranking_loss": lambda a, b: F.margin_ranking_loss(a, b, torch.ones_like(b)),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a.view(8, 8), b.view(8, 8)),
    "addmv": lambda a, b: torch.addmv(b[:8], a.view(8, 8), a[:8]),
}
WITH_CONSTANTS: dict[str, Binary] = {  # that change no number, and the type
    "by ones": lambda a, b: a * torch.ones_like(b),
    "ones by": lambda a, b: torch.ones_like(b) * a,
    "by a row of ones": lambda a, b: a.view(8, 8) * torch.ones_like(b[:8]),
    "over ones": lambda a, b: a / torch.ones_like(b),
    "plus zeros": lambda a, b: a + torch.zeros_like(b),
    "zeros plus": lambda a, b: torch.zeros_like(b) + a,
    "minus zeros": lambda a, b: a - torch.zeros_like(b),
    "power of ones": lambda a, b: a.abs() ** torch.ones_like(b),
}
SUMS_OF_PRODUCTS: dict[str, Binary] = {  # that a kernel may take in one, where the types allow it
    "product plus a vector": lambda a, b: a.view(8, 8) @ a.view(8, 8) + b[:8],
    "vector plus a product": lambda a, b: b[:8] + a.view(8, 8) @ a.view(8, 8),
    "product plus a matrix": lambda a, b: a.view(8, 8) @ a.view(8, 8) + b.view(8, 8),
    "products of batches plus a batch": lambda a, b: a.view(4, 4, 4) @ a.view(4, 4, 4) + b.view(4, 4, 4),
    "linear plus a vector": lambda a, b: F.linear(a.view(8, 8), a.view(8, 8)) + b[:8],
}
GROUPS: dict[str, dict[str, Binary]] = {
    "of_two": OF_TWO,
    "of_the_first": {name: op for name, op in OF_THE_FIRST.items() if name != NORMAL},
    "with_an_empty_one": WITH_AN_EMPTY_ONE,
    "two_and_an_empty_one": TWO_AND_AN_EMPTY_ONE,
    "index_fill": INDEX_FILL,
    "to_places": TO_PLACES,
    "losses": LOSSES,
    "with_constants": WITH_CONSTANTS,
    "sums_of_products": SUMS_OF_PRODUCTS,
}
IN_KERNELS = {
    "index_fill": "standard",
    "with_constants": "standard",
    "sums_of_products": "standard",
    "losses": "full",
    "two_and_an_empty_one": "full",
    "with_an_empty_one": "full",
}
# 3.14 is no 16-bit number: rounded to one, or compared in float32, it gives another answer.
WITH_A_NUMBER: dict[str, Unary] = {
    "plus a number": lambda a: a + 3.14,
    "times a number": lambda a: a * 3.14,
    "a number over it": lambda a: 3.14 / a,
    "equals a number": lambda a: a == 3.14,
    "below a number": lambda a: a < 3.14,
    "at least a number": lambda a: a >= 3.14,
    "clamped by numbers": lambda a: a.clamp(-3.14, 3.14),
    "a number elsewhere": lambda a: torch.where(a > 0, a, 3.14),
    "masked_fill": lambda a: a.masked_fill(a > 0, 3.14),
    "threshold": lambda a: F.threshold(a, 3.14, 1.1),
    "hardtanh": lambda a: F.hardtanh(a, -3.14, 3.14),
    "leaky_relu": lambda a: F.leaky_relu(a, 0.314),
    "plus a number of a tensor": lambda a: a + torch.tensor(3.14, device=a.device),
    "sub with alpha": lambda a: torch.sub(a, a.flip(0), alpha=3.14),
    "round to decimals": lambda a: torch.round(a, decimals=1),
}
OTHERS = (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool)
DRAWN = 8  # of the calls on two tensors, where not all are compiled
SOME_OF_THE_FIRST = 4, 1  # calls, and calls that eager refuses, where not all are compiled
ULPS = 4


def _operands(dtype: torch.dtype, target: Target, rng: torch.Generator) -> Tensor:
    x = torch.randn(64, generator=rng) * 3
    x[:3] = torch.tensor([3.14, 3.140625, 0.1])  # what 3.14 is in each type, and a number that none has
    return ((x > 0) if dtype is torch.bool else x.to(dtype)).to(target.device)


def _calls(
    ops: dict[str, Binary],
    target: Target,
    dtype: torch.dtype,
    rng: torch.Generator,
    others: tuple[torch.dtype, ...] = OTHERS,
) -> dict[str, Call]:
    """Return calls of these ops by name, on operands of which one has the 16-bit type."""
    made: dict[str, Call] = {}
    for other in others:
        ours, theirs = (_operands(kind, target, rng) for kind in (dtype, other))
        for name, op in ops.items():
            made[f"{name} of {dtype} and {other}"] = lambda op=op, a=ours, b=theirs: op(a, b)  # type: ignore[misc]
            if other is not dtype:
                made[f"{name} of {other} and {dtype}"] = lambda op=op, a=theirs, b=ours: op(a, b)  # type: ignore[misc]
    return made


def _with_numbers(target: Target, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Call]:
    x = _operands(dtype, target, rng)
    return {f"{dtype} {name}": lambda op=op: op(x) for name, op in WITH_A_NUMBER.items()}  # type: ignore[misc]


def _judge(
    case: Case, calls: dict[str, Call], backend: str, refusals: int, narrowest: torch.dtype | None = None
) -> None:
    """Compile what eager takes as one program, and what it refuses call by call.

    `narrowest` is the type of parts of a sum, which a kernel does not round where eager does.
    """
    expected: dict[str, Tensor] = {}
    refused = []
    for name in calls:
        try:
            expected[name] = calls[name]()
        except Exception:
            refused.append(name)

    def program() -> list[Tensor]:
        return [calls[name]() for name in expected]

    try:
        seen = dict(zip(expected, torch.compile(program, backend=backend, fullgraph=True)(), strict=True))
    except Exception:
        for name in expected:  # which one it is
            torch._dynamo.reset()
            case.equal(f"{name}: compiled code refuses what eager takes", _refusal(calls[name], backend), "")
        raise
    wrong = {name: told for name, right in expected.items() if (told := _difference(seen[name], right, narrowest))}
    for name, told in wrong.items():
        case.equal(f"{name}: what is not as in eager", told, "")
    case.at_least("calls that eager takes", len(expected), 1)
    for name in refused[:refusals]:
        refuses(case, name, calls[name], backend)


def _refusal(call: Call, backend: str) -> str:
    """Compile one call, and say how that is refused, or nothing."""
    try:
        torch.compile(call, backend=backend, fullgraph=True)()
    except Exception as error:
        return str(error).splitlines()[0][:100]
    return ""


def _difference(seen: Tensor, right: Tensor, narrowest: torch.dtype | None = None) -> str:
    """Say how a result differs from that of eager by more than a few places of its type, or of one, or nothing."""
    if seen.dtype != right.dtype:
        return f"{seen.dtype} in place of {right.dtype}"
    if not right.is_floating_point():
        return "" if torch.equal(seen, right) else f"{int((seen != right).sum())} elements differ"
    # A number may be rounded to the type before: differences of near ones are good to its places.
    unit = ULPS * torch.finfo(narrowest or right.dtype).eps
    if torch.allclose(seen, right, rtol=unit, atol=unit, equal_nan=True):
        return ""
    far = (seen.double() - right.double()).abs().nan_to_num(nan=float("inf"))
    at = int(far.argmax())
    return f"{float(seen.flatten()[at])} in place of {float(right.flatten()[at])}"


def _of_two_and_numbers(
    target: Target, dtype: torch.dtype, rng: torch.Generator, *, every: bool
) -> tuple[dict[str, Call], int]:
    """Return ops of two tensors and of numbers, and how many of those that eager refuses are tried."""
    of_two = _calls(OF_TWO, target, dtype, rng)
    number = len(of_two) if every else DRAWN
    return {**drawn(of_two, rng, number), **_with_numbers(target, dtype, rng)}, max(2, number // 4)


@contract("AMP-COMPILE-069")
@pytest.mark.parametrize("part", ["some", deep("full", "all")])
def test_graphs(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, part: str) -> None:
    calls, refusals = _of_two_and_numbers(target, amp_dtype, rng, every=part == "all")
    with compiler(case):
        _judge(case, calls, "aot_eager", refusals)


@contract("AMP-COMPILE-069")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("standard", "some"), deep("full", "all")])
def test_kernels(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    dtypes = list(case.supported(target))
    if part == "some":  # a kernel takes seconds to compile: of one type, that the seed chooses
        dtypes = [dtypes[int(torch.randint(len(dtypes), (), generator=rng))]]
    for dtype in dtypes:
        calls, refusals = _of_two_and_numbers(target, dtype, rng, every=part == "all")
        with compiler(case), inductor(case):
            _judge(case, calls, "inductor", refusals)


def _of_the_first(target: Target, dtype: torch.dtype, rng: torch.Generator, number: int) -> dict[str, Call]:
    """Return ops whose type is that of the first operand, of which `normal` of a narrow mean always."""
    every = _calls(OF_THE_FIRST, target, dtype, rng)
    always = f"{NORMAL} of {dtype} and {torch.float32}"
    return {always: every[always], **drawn(every, rng, number)}


@contract("AMP-COMPILE-069")
@pytest.mark.parametrize("part", ["some", deep("full", "all")])
def test_type_of_the_first(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, part: str) -> None:
    number, refusals = SOME_OF_THE_FIRST if part == "some" else (10**6, 10**6)
    with compiler(case):
        _judge(case, _of_the_first(target, amp_dtype, rng, number), "aot_eager", refusals)


@contract("AMP-COMPILE-069")
@needs("compiled kernels")
@pytest.mark.parametrize("part", [deep("standard", "some"), deep("full", "all")])
def test_type_of_the_first_in_kernels(case: Case, target: Target, rng: torch.Generator, part: str) -> None:
    dtypes = list(case.supported(target))
    number = SOME_OF_THE_FIRST[0] if part == "some" else 10**6
    if part == "some":
        dtypes = [dtypes[int(torch.randint(len(dtypes), (), generator=rng))]]
    for dtype in dtypes:
        with compiler(case), inductor(case):
            _judge(case, _of_the_first(target, dtype, rng, number), "inductor", 0)  # what is refused: in graphs


def _with(
    case: Case, target: Target, rng: torch.Generator, group: str, others: tuple[torch.dtype, ...], backend: str
) -> None:
    """Compile the ops of a group, on tensors of each 16-bit type and of these types."""
    for dtype in case.supported(target):
        torch._dynamo.reset()
        narrowest = dtype if backend == "inductor" and group == "losses" else None
        # What is refused: in graphs.
        _judge(case, _calls(GROUPS[group], target, dtype, rng, others), backend, 0, narrowest)


@contract("AMP-COMPILE-069")
@pytest.mark.parametrize("group", [deep("standard", group) for group in GROUPS])
def test_decompositions(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    others = OTHERS if case.level == "full" else (torch.float32,)
    with compiler(case):
        _with(case, target, rng, group, others, "aot_eager_decomp_partition")


@contract("AMP-COMPILE-069")
@needs("compiled kernels")
@pytest.mark.parametrize("group", [deep(level, group) for group, level in IN_KERNELS.items()])
def test_parts_in_kernels(case: Case, target: Target, rng: torch.Generator, group: str) -> None:
    with compiler(case), inductor(case):
        _with(case, target, rng, group, (torch.float32,), "inductor")


# Of a number halfway between 1 and the next one of the type, to which it may not be rounded before the op. Left out are
# sums, whose number eager rounds in fp16 before 2.14, and quotients of the number, which eager takes as products.
BY_A_NUMBER: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda a, number: a * number,
    "over": lambda a, number: a / number,
    "a number of a tensor": lambda a, number: a * torch.tensor(number, device=a.device),
}


@contract("AMP-COMPILE-069")
@needs("compiled kernels")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "inductor")])
def test_numbers_between_those_of_the_type(case: Case, target: Target, backend: str) -> None:
    """Eager's kernels take a number of Python in float32, so that the result is rounded once; more than a vector."""
    dtypes = case.supported(target)
    operands = {dtype: (torch.arange(64, 135, device=target.device) / 64).to(dtype) for dtype in dtypes}

    def program() -> list[Tensor]:
        return [
            call(x, 1 + torch.finfo(dtype).eps / 2) for dtype, x in operands.items() for call in BY_A_NUMBER.values()
        ]

    names = [f"{name}, {dtype}" for dtype in dtypes for name in BY_A_NUMBER]
    expected = dict(zip(names, program(), strict=True))
    with compiling(case, backend):
        seen = dict(zip(names, torch.compile(program, backend=backend, fullgraph=True)(), strict=True))
    for name in names:
        case.identical(name, seen[name], expected[name])
    plain = [torch.equal(expected[f"times, {dtype}"], x) for dtype, x in operands.items()]
    case.equal("products by the number that are the operand (control)", plain, [False] * len(plain))
