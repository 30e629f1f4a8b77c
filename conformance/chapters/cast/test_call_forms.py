"""Check ops by the form of the call: module, function, method and operator, losses, composites and optional inputs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ...harness.check import Case, by_rules, contract
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.policy.lists import (
    run_dtype,
)
from ...oracles.policy.overloads import mode_of, type_names
from ...oracles.policy.samples import COMPOSITES, SAMPLES
from .support import CUDA, CUDA_OR_CPU, listed_rule, make_inputs, policy_of, run_sample


def _module(made: nn.Module, **parameters: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return `made`, on the meta device, as a function of its input with these parameters."""
    return lambda *inputs: torch.func.functional_call(made, parameters, inputs)


def _bare(kind: Callable[..., nn.Module], *sizes: int) -> nn.Module:
    return kind(*sizes, device="meta")


# The forms of a call of one op: the first is the one that the op reference lists, the others must give its result.
CALL_FORMS: dict[str, Callable[..., dict[str, Callable[[], torch.Tensor]]]] = {
    "linear": lambda x, w, b: {
        "function": partial(F.linear, x, w, b),
        "module": partial(_module(_bare(nn.Linear, 4, 5), weight=w, bias=b), x),
    },
    "conv2d": lambda x, w, b: {
        "function": partial(F.conv2d, x, w, b, padding=1),
        "torch": partial(torch.conv2d, x, w, b, padding=1),
        "module": partial(_module(nn.Conv2d(3, 4, 3, padding=1, device="meta"), weight=w, bias=b), x),
    },
    "mm": lambda a, b: {
        "function": partial(torch.mm, a, b),
        "method": lambda: a.mm(b),
        "operator": partial(operator.matmul, a, b),
        "matmul": partial(torch.matmul, a, b),
        "linalg": partial(torch.linalg.matmul, a, b),
    },
    "bmm": lambda a, b: {"function": partial(torch.bmm, a, b), "method": lambda: a.bmm(b), "operator": lambda: a @ b},
    "addmm": lambda c, a, b: {
        "function": partial(torch.addmm, c, a, b, beta=0.5, alpha=2.0),
        "method": lambda: c.addmm(a, b, beta=0.5, alpha=2.0),
    },
    "prelu": lambda x, w: {
        "function": partial(F.prelu, x, w),
        "torch": partial(torch.prelu, x, w),
        "method": lambda: x.prelu(w),
        "module": partial(_module(_bare(nn.PReLU, 3), weight=w), x),
    },
    "softmax": lambda x: {
        "function": partial(F.softmax, x, 1),
        "torch": partial(torch.softmax, x, 1),
        "special": partial(torch.special.softmax, x, 1),
        "method": lambda: x.softmax(1),
        "module": partial(nn.Softmax(1), x),
    },
    "layer_norm": lambda x, w, b: {
        "function": partial(F.layer_norm, x, (8,), w, b),
        "torch": partial(torch.layer_norm, x, (8,), w, b),
        "module": partial(_module(_bare(nn.LayerNorm, 8), weight=w, bias=b), x),
    },
    "sum": lambda x: {"function": partial(torch.sum, x, 1), "method": lambda: x.sum(1)},
    "prod": lambda x: {"function": partial(torch.prod, x, 1), "method": lambda: x.prod(1)},
    "exp": lambda x: {"function": partial(torch.exp, x), "method": lambda: x.exp()},
    "expm1": lambda x: {
        "function": partial(torch.expm1, x),
        "special": partial(torch.special.expm1, x),
        "method": lambda: x.expm1(),
    },
    "acos": lambda x: {
        "function": partial(torch.acos, x),
        "alias": partial(torch.arccos, x),
        "method": lambda: x.acos(),
    },
    "pow.scalar": lambda x: {
        "function": partial(torch.pow, x, 2.5),
        "operator": partial(operator.pow, x, 2.5),
        "method": lambda: x.pow(2.5),
    },
    "mse_loss": lambda x, y: {"function": partial(F.mse_loss, x, y), "module": partial(nn.MSELoss(), x, y)},
    "l1_loss": lambda x, y: {"function": partial(F.l1_loss, x, y), "module": partial(nn.L1Loss(), x, y)},
    "cdist": lambda x, y: {"function": partial(torch.cdist, x, y)},
    "binary_cross_entropy_with_logits": lambda x, y: {
        "function": partial(F.binary_cross_entropy_with_logits, x, y),
        "torch": lambda: torch.binary_cross_entropy_with_logits(x, y).mean(),
        "module": partial(nn.BCEWithLogitsLoss(), x, y),
    },
}


@by_rules
@contract("AMP-CAST-023", on=CUDA_OR_CPU)
@pytest.mark.parametrize("op", list(CALL_FORMS))
def test_ways_to_call(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    policy = policy_of(case, target, op)
    given = torch.float32 if policy == "lower_precision" else amp_dtype
    with mode_of(target):
        tensors = [
            value for value in SAMPLES[op](make_inputs(target, [given], rng)).args if isinstance(value, torch.Tensor)
        ]
        expected = run_dtype(policy, [given], amp_dtype)
        results = {
            way: run_sample(target, partial(call), amp_dtype).outputs[0]
            for way, call in CALL_FORMS[op](*tensors).items()
        }
        for way, result in results.items():
            case.equal(f"type of {op} as {way}", result.dtype, expected)
            if not target.is_fake:
                case.identical(f"{op} as {way}", result, results["function"])


_PROBABILITIES = SAMPLES["binary_cross_entropy"]
_REPLACEMENT = ("binary_cross_entropy_with_logits|BCEWithLogits|BCEWithLogitsLoss",)


@contract("AMP-CAST-024", on=CUDA)
@pytest.mark.parametrize("way", ["function", "module"])
def test_binary_cross_entropy_is_refused(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": lambda x, y: F.binary_cross_entropy(x, y), "module": nn.BCELoss()}[way]
    with mode_of(target):
        for dtype in (torch.float32, amp_dtype):
            x, y = _PROBABILITIES(make_inputs(target, [dtype], rng)).args
            with target.autocast(amp_dtype):
                case.raises(f"{way} of {dtype} in a region", RuntimeError, partial(loss, x, y), names=_REPLACEMENT)
        x, y = _PROBABILITIES(make_inputs(target, [torch.float32], rng)).args
        with target.autocast(amp_dtype), target.autocast(amp_dtype, enabled=False):
            case.equal("type in a disabled subregion", loss(x, y).dtype, torch.float32)
        case.equal("type outside", loss(x, y).dtype, torch.float32)


@contract("AMP-CAST-025", on=CUDA_OR_CPU)
@pytest.mark.parametrize("way", ["function", "module"])
def test_logits_are_accepted(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": F.binary_cross_entropy_with_logits, "module": nn.BCEWithLogitsLoss()}[way]
    make = SAMPLES["binary_cross_entropy_with_logits"]
    with mode_of(target):
        for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
            x, y = make(make_inputs(target, dtypes, rng)).args
            with target.autocast(amp_dtype):
                result = loss(x, y)
            case.equal(f"type for {type_names(dtypes)}", result.dtype, torch.float32)
            if not target.is_fake:
                case.identical(f"loss for {type_names(dtypes)}", result, loss(x.float(), y.float()))


@contract("AMP-CAST-026", on="cpu")
@pytest.mark.parametrize("way", ["function", "module"])
def test_cpu_binary_cross_entropy(
    case: Case, target: Target, amp_dtype: torch.dtype, way: str, rng: torch.Generator
) -> None:
    loss = {"function": F.binary_cross_entropy, "module": nn.BCELoss()}[way]
    for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
        x, y = _PROBABILITIES(make_inputs(target, dtypes, rng)).args
        with target.autocast(amp_dtype):
            result = loss(x, y)
        case.identical(f"loss for {type_names(dtypes)}", result, loss(x.float(), y.float()))


@contract("AMP-CAST-027", on="cpu")
@pytest.mark.parametrize("op", list(COMPOSITES))
def test_composites(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    (seen,) = run_sample(target, COMPOSITES[op](make_inputs(target, [torch.float32], rng)), amp_dtype).outputs
    (wanted,) = run_sample(
        target, COMPOSITES[op](make_inputs(target, [torch.float32], rng, cast_to=amp_dtype)), None
    ).outputs
    case.equal(f"type of {op} of float32 inputs", seen.dtype, amp_dtype)
    case.identical("result", seen, wanted)


@contract("AMP-CAST-028", on=CUDA)
@pytest.mark.parametrize("order", [0, 1, 2, 3, float("inf"), "fro", "nuc"], ids=str)
def test_norm_of_any_order(
    case: Case, target: Target, amp_dtype: torch.dtype, order: Any, rng: torch.Generator
) -> None:
    with mode_of(target):
        tensor = make_inputs(target, [amp_dtype], rng).f(3, 4)
        with target.autocast(amp_dtype):
            case.equal(f"type of the norm of order {order}", torch.norm(tensor, order).dtype, torch.float32)


@contract("AMP-CAST-029", on=CUDA)
@pytest.mark.parametrize("op", ["bilinear"])
def test_optional_input_widens(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    with mode_of(target):
        for bias_dtype, expected in ((amp_dtype, amp_dtype), (torch.float32, torch.float32)):
            bias = make_inputs(target, [bias_dtype], rng).f(2)
            call = SAMPLES[op](make_inputs(target, [amp_dtype], rng))
            (seen,) = run_sample(target, partial(call, bias=bias), amp_dtype).outputs
            case.equal(
                f"type of {op} of {type_names([amp_dtype])} with a bias of {type_names([bias_dtype])}",
                seen.dtype,
                expected,
            )


@by_rules
@contract("AMP-CAST-046", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", ["linear", "mm", "conv2d", "addmm", "mse_loss", "prod"])
def test_gradient_passes_the_cast(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    row = listed_rule(case, target, op)
    given = torch.float32 if row.policy == "lower_precision" else amp_dtype
    to = run_dtype(row.policy, [given], amp_dtype)

    def gradients(amp: bool) -> list[torch.Tensor]:
        call = SAMPLES[op](make_inputs(target, [given], rng))
        leaves = [value.requires_grad_() for value in call.args if isinstance(value, torch.Tensor)]
        if amp:
            with target.autocast(amp_dtype):
                result = call()
        else:
            cast = [value.to(to) if isinstance(value, torch.Tensor) else value for value in call.args]
            result = call.func(*cast, **call.keywords)
        # The gradient differs by element, and is exact in 16 bits.
        weights = torch.arange(1, result.numel() + 1, device=target.device).reshape(result.shape) % 7 - 2
        return list(torch.autograd.grad(result, leaves, weights.to(result.dtype)))

    with repeatable_convolutions():
        both = gradients(True), gradients(False)
    for index, (seen, wanted) in enumerate(zip(*both, strict=True)):
        case.equal(f"type of the gradient of input {index}", seen.dtype, given)
        case.identical(f"gradient of input {index}", seen, wanted)
        case.at_least(f"elements of the gradient of input {index} other than zero", int(seen.count_nonzero()), 1)


# The spellings of the matrix product; `@=` makes a new tensor.
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "function": torch.matmul,
    "linalg": torch.linalg.matmul,
    "aten": torch.ops.aten.matmul,
    "method": lambda a, b: a.matmul(b),
    "operator": lambda a, b: a @ b,
    "reflected": lambda a, b: b.__rmatmul__(a),
    "assignment": operator.imatmul,
}
_SIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tensor": lambda x: x,
    "leaf": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: nn.Parameter(x.clone()),
    "frozen parameter": partial(nn.Parameter, requires_grad=False),
}
# Every product of matrices and vectors with sizes up to 3, and batches of one and two.
_SHAPES = [
    *(((m, k), (k, n)) for m, k, n in itertools.product((1, 2, 3), repeat=3)),
    *(((k,), (k, n)) for k, n in itertools.product((1, 2, 3), repeat=2)),
    *(((m, k), (k,)) for m, k in itertools.product((1, 2, 3), repeat=2)),
    *(((k,), (k,)) for k in (1, 2, 3)),
    *(((b, 2, 3), right) for b in (1, 2) for right in ((3,), (3, 1), (3, 2), (1, 3, 2), (2, 3, 2))),
    *((left, (b, 3, 2)) for b in (1, 2) for left in ((3,), (1, 3), (2, 3))),
]


@by_rules
@contract("AMP-CAST-023", on=("cpu", "cuda"))
@pytest.mark.parametrize("right", list(_SIDES), ids=lambda name: name.replace(" ", "_"))
def test_spellings_of_the_product(
    case: Case, target: Target, amp_dtype: torch.dtype, right: str, rng: torch.Generator
) -> None:
    if policy_of(case, target, "matmul") != "lower_precision":
        case.unsupported("matmul is on another list")
    wrong, judged = {}, 0
    for shapes in _SHAPES:
        # Products and sums of small integers are exact in 16 bits, whatever the kernel.
        a, b = (torch.randint(-3, 4, shape, generator=rng).float().to(target.device) for shape in shapes)
        expected = torch.matmul(a.cpu().double(), b.cpu().double()).to(amp_dtype)
        for left, (spelling, product) in itertools.product(_SIDES, PRODUCTS.items()):
            with target.autocast(amp_dtype):
                seen = product(_SIDES[left](a), _SIDES[right](b))
            judged += 1
            if seen.dtype != amp_dtype or not torch.equal(seen.cpu() + 0, expected + 0):
                wrong[f"{spelling} of a {left} {shapes[0]} and a {right} {shapes[1]}"] = seen.dtype
    case.equal("products that are not as promised", dict(list(wrong.items())[:5]), {})
    case.at_least("products judged", judged, 100)


# An op by its spellings: the function, the methods, the operators, and in place.
BINARY: dict[str, tuple[Callable[..., torch.Tensor], ...]] = {
    "add": (torch.add, torch.Tensor.add, operator.add, lambda a, b: b.__radd__(a)),
    "sub": (torch.sub, torch.Tensor.sub, operator.sub, lambda a, b: b.__rsub__(a)),
    "mul": (torch.mul, torch.Tensor.mul, operator.mul, lambda a, b: b.__rmul__(a)),
    "div": (torch.div, torch.Tensor.div, operator.truediv),  # __rtruediv__ multiplies by a reciprocal
    "pow": (torch.pow, torch.Tensor.pow, operator.pow, lambda a, b: b.__rpow__(a)),
    "floor_divide": (torch.floor_divide, torch.Tensor.floor_divide, operator.floordiv),
    "remainder": (torch.remainder, torch.Tensor.remainder, operator.mod),
    "less": (torch.lt, torch.Tensor.lt, operator.lt),
    "equal": (torch.eq, torch.Tensor.eq, operator.eq),
    "maximum": (torch.maximum, torch.Tensor.maximum),
    "atan2": (torch.atan2, torch.Tensor.atan2),
    "add in place": (torch.Tensor.add_, operator.iadd),
    "sub in place": (torch.Tensor.sub_, operator.isub),
    "mul in place": (torch.Tensor.mul_, operator.imul),
    "div in place": (torch.Tensor.div_, operator.itruediv),
    "pow in place": (torch.Tensor.pow_, operator.ipow),
}


@contract("AMP-CAST-023", on=("cpu", "cuda", "xpu", "mps"))
@pytest.mark.parametrize("op", list(BINARY), ids=lambda name: name.replace(" ", "_"))
def test_spellings_of_binary_ops(
    case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator
) -> None:
    first, *_ = BINARY[op]
    wrong, judged = {}, 0
    values = torch.rand(2, 2, 3, generator=rng) + 0.5
    for dtypes in itertools.product((torch.float32, amp_dtype), repeat=2):
        a, b = (value.to(target.device, dtype) for value, dtype in zip(values, dtypes, strict=True))
        with target.autocast(amp_dtype):
            expected = first(a.clone(), b)
        for left, right, (number, spelling) in itertools.product(_SIDES, _SIDES, enumerate(BINARY[op])):
            with target.autocast(amp_dtype), torch.set_grad_enabled("in place" not in op):
                seen = spelling(_SIDES[left](a.clone()), _SIDES[right](b))
            judged += 1
            if seen.dtype != expected.dtype or not torch.equal(seen.detach(), expected):
                wrong[f"spelling {number} of a {left} of {dtypes[0]} and a {right} of {dtypes[1]}"] = seen.dtype
    case.equal("spellings that differ from the function of tensors", dict(list(wrong.items())[:5]), {})
    case.at_least("spellings judged", judged, 64)


# Contractions, by the shapes of their operands: every index that two operands share and the result lacks is summed by a
# product. Where no index is (outer products), or its size is 1, einsum multiplies, and keeps the type.
CONTRACTIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "ij,jk->ki": ((3, 4), (4, 5)),
    "ij,jk": ((3, 4), (4, 5)),
    "ij,kj->ik": ((3, 4), (5, 4)),
    "ij,j->i": ((3, 4), (4,)),
    "i,i->": ((4,), (4,)),
    "i,i": ((4,), (4,)),
    "ij,ij->": ((3, 4), (3, 4)),
    "ij,ij->i": ((3, 4), (3, 4)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
    "bij,jk->bik": ((2, 3, 4), (4, 5)),
    "bhid,bhjd->bhij": ((2, 2, 3, 4), (2, 2, 3, 4)),
    "bid,bjd->ijb": ((2, 3, 4), (2, 5, 4)),
    "ii,ij->j": ((4, 4), (4, 5)),
    "iij,jk->ik": ((3, 3, 4), (4, 5)),
    "bi,oij,bj->bo": ((2, 3), (5, 3, 4), (2, 4)),
    "ij,jk,kl->il": ((3, 4), (4, 5), (5, 2)),
    "ij,jk,kl,lm->im": ((3, 4), (4, 5), (5, 2), (2, 3)),
    "...ij,...jk->...ik": ((2, 3, 4), (2, 4, 5)),
    "...ij,...jk": ((2, 3, 4), (2, 4, 5)),
    "...ij,jk->...ik": ((2, 3, 4), (4, 5)),
    "i...,ij->j...": ((3, 2, 2), (3, 5)),
    "b...i,ij->b...j": ((2, 3, 2, 4), (4, 5)),
    "...i,...i->...": ((3, 4), (3, 4)),
    "...i,...i->": ((3, 4), (3, 4)),
    "a...b,b->a...": ((2, 4), (4,)),
    "...ij,...jk,k...->...i": ((2, 3, 4), (2, 4, 5), (5, 2)),
    "...ij,...jk->...ki": ((1, 3, 4), (2, 4, 5)),
}


def _by_numbers(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """Call einsum with lists of numbers and Ellipsis in the place of the equation."""

    def numbers(letters: str) -> list[Any]:
        marked = letters.replace("...", ".")
        return [Ellipsis if letter == "." else ord(letter) - ord("a") for letter in marked]

    sources, _, result = equation.partition("->")
    given = [part for pair in zip(operands, map(numbers, sources.split(",")), strict=True) for part in pair]
    made: torch.Tensor = torch.einsum(*given, *([numbers(result)] if "->" in equation else []))
    return made


EINSUMS: dict[str, Callable[[str, list[torch.Tensor]], torch.Tensor]] = {
    "operands": lambda equation, operands: torch.einsum(equation, *operands),
    "a list": lambda equation, operands: torch.einsum(equation, operands),
    "torch.functional": lambda equation, operands: torch.functional.einsum(equation, *operands),
    "aten": lambda equation, operands: torch.ops.aten.einsum(equation, operands),
    "capitals": lambda equation, operands: torch.einsum(equation.upper(), *operands),
    "spaces": lambda equation, operands: torch.einsum(f" {equation} ".replace(",", " , "), *operands),
    "numbers": _by_numbers,
    "of leaves": lambda equation, operands: torch.einsum(equation, *(x.clone().requires_grad_() for x in operands)),
}
# Other contractions, by their operands' shapes.
SUMS_OF_PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), ((3, 4), (4, 5))),
    "tensordot of two": (lambda a, b: torch.tensordot(a, b, dims=2), ((2, 3, 4), (3, 4, 5))),
    "tensordot of lists": (lambda a, b: torch.tensordot(a, b, ([0, 1], [1, 0])), ((3, 4, 2), (4, 3))),
    "inner": (torch.inner, ((3, 4), (5, 4))),
    "inner of batches": (torch.inner, ((2, 3, 4), (5, 4))),
    "inner, a method": (lambda a, b: a.inner(b), ((3, 4), (5, 4))),
    "chain_matmul": (torch.chain_matmul, ((3, 4), (4, 5), (5, 2))),
    "multi_dot": (lambda *operands: torch.linalg.multi_dot(operands), ((3, 4), (4, 5), (5, 2))),
    "multi_dot of two": (lambda *operands: torch.linalg.multi_dot(operands), ((3, 4), (4, 5))),
    "multi_dot from a vector": (lambda *operands: torch.linalg.multi_dot(operands), ((4,), (4, 5), (5, 2))),
    "multi_dot to a vector": (lambda *operands: torch.linalg.multi_dot(operands), ((3, 4), (4, 5), (5,))),
}


@contract("AMP-CAST-027", on="cpu")
def test_spellings_of_a_contraction(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    calls = {
        f"einsum {equation!r}, {name}": (partial(spelling, equation), shapes)
        for equation, shapes in CONTRACTIONS.items()
        for name, spelling in EINSUMS.items()
    } | {
        name: (lambda operands, call=call: call(*operands), shapes) for name, (call, shapes) in SUMS_OF_PRODUCTS.items()
    }
    wrong = {}
    for name, (call, shapes) in calls.items():
        # Sums of at most 120 products of -1, 0 and 1 are exact in 16 bits.
        exact = [torch.randint(-1, 2, shape, generator=rng).double() for shape in shapes]
        operands = [one.float().to(target.device) for one in exact]
        expected = call(exact).detach().to(amp_dtype)
        with target.autocast(amp_dtype):
            seen = call(operands).detach()
        if seen.dtype != amp_dtype or not torch.equal(seen.cpu() + 0, expected + 0):
            wrong[name] = seen.dtype if seen.dtype != amp_dtype else "other values"
    case.equal("contractions that are not as promised", wrong, {})
    case.at_least("contractions judged", len(calls), 200)
