"""Sample calls of ops under vmap, vjp and forward-mode AD in a region, compared with the calls alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...oracles.manual_cast import ManualCast
from ...oracles.numbers.bits import same
from ...oracles.policy.overloads import LACKING, Target, mode_of, quiet
from ...oracles.policy.samples import SAMPLES, Inputs
from ...oracles.trace.ops import OpTrace

Region = Callable[[], AbstractContextManager[object]]
Results = tuple[Tensor, ...]
# The dtype of the inputs: float32, or the amp dtype of the region.
KINDS = ("float32", "16-bit")
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError, ArithmeticError)


@dataclass(frozen=True)
class OpCall:
    """A call of an op as a function of its floating-point tensors, and two sets of these."""

    name: str
    function: Callable[..., Results]
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor, ...]


@dataclass(frozen=True)
class Ran:
    """The results of a run, the floating types of the operands of its arithmetic, and the exception if any."""

    results: Results
    types: frozenset[torch.dtype]
    error: str | None


def op_call(name: str, dtype: torch.dtype, target: Target) -> OpCall | None:
    """Return the sample call of an op with inputs of `dtype`; None where it has none, or cannot be made."""
    made = []
    for seed in (0, 1):
        try:
            call = SAMPLES[name](Inputs((dtype,), target.device, seed, target.is_fake))
        except _ERRORS:
            return None
        made.append(tree_flatten((call.args, call.keywords)))
    (leaves, spec), (others, _) = made
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not places:
        return None

    def function(*tensors: Tensor) -> Results:
        given = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            given[at] = tensor
        args, keywords = tree_unflatten(given, spec)
        return tuple(leaf for leaf in tree_leaves(call.func(*args, **keywords)) if isinstance(leaf, Tensor))

    return OpCall(name, function, tuple(leaves[at] for at in places), tuple(others[at] for at in places))


def ran(call: Callable[[], Results], region: Region = contextlib.nullcontext) -> Ran:
    """Run a call from seed 0; what torch raises is recorded."""
    torch.default_generator.manual_seed(0)
    try:
        with region(), OpTrace() as trace:
            results = tuple(tree_leaves(call()))
    except _ERRORS as error:
        return Ran((), frozenset(), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return Ran(results, frozenset(dtype for op in trace.computing for dtype in op.inputs), None)


def vmap_ways(call: OpCall) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """Yield the ways to batch the inputs of a call: all of them and, of float32 ones, the first or the last alone."""
    count = len(call.inputs)
    yield "all", (0,) * count
    if count > 1 and call.inputs[0].dtype is torch.float32:
        yield "first", (0, *(None,) * (count - 1))
        yield "last", (*(None,) * (count - 1), 0)


def vmap_faults(call: OpCall, region: Region) -> Iterator[tuple[str, str]]:
    """Yield each way to batch a call whose vmap in a region is not a loop over the call there, and how it differs."""
    if ran(lambda: call.function(*call.inputs), region).error is not None:
        return
    for way, dims in vmap_ways(call):
        pairs = list(zip(call.inputs, call.others, dims, strict=True))
        batched = [one if dim is None else torch.stack([one, other]) for one, other, dim in pairs]
        second = [one if dim is None else other for one, other, dim in pairs]
        mapped = partial(torch.func.vmap(call.function, in_dims=dims, randomness="same"), *batched)
        seen = ran(mapped, region)
        if seen.error is not None and ran(mapped).error is not None:
            continue  # vmap does not support the call
        wanted = [ran(partial(call.function, *inputs), region) for inputs in (call.inputs, second)]
        stacked = Ran(
            tuple(torch.stack(pair) for pair in zip(*(one.results for one in wanted), strict=True)),
            wanted[0].types,
            None,
        )
        text = difference(seen, stacked)
        if text is not None:
            yield way, text


def vjp_faults(call: OpCall, region: Region) -> Iterator[tuple[str, str]]:
    """Yield "vjp" and how it differs where torch.func.vjp of a call in a region is not backward of that call."""

    def inside(*inputs: Tensor) -> Results:
        with region():
            return tuple(one for one in call.function(*inputs) if one.is_floating_point())

    def backward() -> Results:
        leaves = [one.detach().requires_grad_() for one in call.inputs]
        outputs = inside(*leaves)
        live = [one for one in outputs if one.requires_grad]
        weights = [torch.ones_like(one) for one in live]
        found = torch.autograd.grad(live, leaves, weights, allow_unused=True, materialize_grads=True)
        return (*(one.detach() for one in outputs), *found)

    def pulled(function: Callable[..., Results]) -> Results:
        outputs, pull = torch.func.vjp(function, *call.inputs)
        return (*outputs, *pull(tuple(torch.ones_like(one) for one in outputs)))

    wanted = ran(backward)
    plain = partial(pulled, lambda *inputs: tuple(x for x in call.function(*inputs) if x.is_floating_point()))
    if wanted.error is None and ran(plain).error is None:
        text = difference(ran(partial(pulled, inside)), wanted)
        if text is not None:
            yield "vjp", text


def forward_faults(call: OpCall, region: Region, manual: Region | None) -> Iterator[tuple[str, str]]:
    """Yield the forward-mode derivatives of a call in a region that are wrong, and how.

    "dual": dual numbers give other outputs than the call, a tangent of another dtype than its output, or not the
    tangents that they give with manual casts (`manual`, None on fake tensors). "jvp": torch.func.jvp gives not what
    dual numbers give.
    """
    tangents = tuple(torch.ones_like(one) for one in call.inputs)

    def floating(*inputs: Tensor) -> Results:
        return tuple(one for one in call.function(*inputs) if one.is_floating_point())

    def jvp() -> Results:
        outputs, derived = torch.func.jvp(floating, call.inputs, tangents)
        return (*outputs, *derived)

    def dual() -> Results:
        with forward_ad.dual_level():
            pairs = [forward_ad.unpack_dual(one) for one in floating(*map(forward_ad.make_dual, call.inputs, tangents))]
            zeros = (torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent for pair in pairs)
            return (*(pair.primal for pair in pairs), *zeros)

    plain = ran(lambda: floating(*call.inputs), region)
    seen = ran(dual, region)
    if not plain.results or (seen.error is not None and ran(dual).error is not None):
        return  # the call has no forward derivative
    text = seen.error or _tangent_fault(seen.results, plain.results)
    if text is None and manual is not None:
        promised = ran(dual, manual)
        if _agree(promised.results[: len(plain.results)], plain.results):
            text = difference(seen, promised, types=False)
    if text is not None:
        yield "dual", text
    text = difference(ran(jvp, region), seen, types=False)
    if text is not None:
        yield "jvp", text


def _tangent_fault(pairs: Results, outputs: Results) -> str | None:
    """Return how primals and tangents of a call differ from its outputs: in dtype both, the primals in values too."""
    primals, tangents = pairs[: len(outputs)], pairs[len(outputs) :]
    if [one.dtype for one in tangents] != [one.dtype for one in outputs]:
        return f"tangents {_dtypes(tangents)} of {_dtypes(outputs)}"
    return difference(Ran(primals, frozenset(), None), Ran(outputs, frozenset(), None))


def _agree(manual: Results, outputs: Results) -> bool:
    """Return whether manual casts give the outputs: not of an op that C++ makes of listed ones."""
    return difference(Ran(manual, frozenset(), None), Ran(outputs, frozenset(), None)) is None


def sweep(
    target: Target, amp_dtype: torch.dtype, names: Iterable[str], relation: str
) -> Iterator[tuple[str, str, str]]:
    """Yield name, "<way>, <kind>" and text of each difference of a relation: "vmap", "vjp" or "forward"."""
    region = partial(target.autocast, amp_dtype)
    manual = None if target.is_fake else partial(ManualCast, target.device_type, amp_dtype)
    check: dict[str, Callable[[OpCall], Iterator[tuple[str, str]]]] = {
        "vmap": partial(vmap_faults, region=region),
        "vjp": partial(vjp_faults, region=region),
        "forward": partial(forward_faults, region=region, manual=manual),
    }
    for name in names:
        for kind, dtype in zip(KINDS, (torch.float32, amp_dtype), strict=True):
            with mode_of(target), quiet():
                call = op_call(name, dtype, target)
                for way, text in check[relation](call) if call is not None else ():
                    if LACKING.search(text) is None:
                        yield name, f"{way}, {kind}", text


def difference(seen: Ran, wanted: Ran, *, types: bool = True) -> str | None:
    """Return how results differ from those wanted, or None: dtypes, shapes, types of the operands, and values.

    Values may differ by the order in which a kernel sums in float32: by 64 units in the last place of the norm, and
    where they are 16-bit by the rounding of that.
    """
    if seen.error is not None:
        return seen.error
    if [(one.dtype, one.shape) for one in seen.results] != [(one.dtype, one.shape) for one in wanted.results]:
        return f"{_dtypes(seen.results)}; expected {_dtypes(wanted.results)}"
    if types and seen.types != wanted.types:
        return f"operands of {_names(seen.types)}; expected {_names(wanted.types)}"
    for number, (one, other) in enumerate(zip(seen.results, wanted.results, strict=True)):
        if isinstance(one, FakeTensor) or one.numel() == 0 or same(one, other):
            continue
        if not (one.is_floating_point() or one.is_complex()):
            return f"result {number} differs"
        steps = 2 if one.dtype in (torch.float16, torch.bfloat16) else 64
        bound = steps * torch.finfo(one.dtype).eps * float(_wide(other).norm())
        distance = float((_wide(one) - _wide(other)).abs().max())
        if not (distance <= bound and bool((one.isfinite() == other.isfinite()).all())):
            return f"result {number} differs by {distance:.3g}, more than {bound:.3g}"
    return None


def _wide(tensor: Tensor) -> Tensor:
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0.0)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no floating type"
