"""Check custom autograd functions under transforms in a region."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.trace.ops import OpTrace
from .derivatives import PLACES, wide_products
from .exact_programs import TAIL

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
]


class Product(torch.autograd.Function):
    """A matrix product whose vmap torch derives from its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return torch.mm(gradient, b.mT.to(gradient.dtype)), torch.mm(a.mT.to(gradient.dtype), gradient)


class OwnRule(Product):
    """The same with a rule for vmap of its own."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        a, b = (
            one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
            for one, dim in zip((a, b), dims, strict=True)
        )
        return torch.bmm(a, b), 0


_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]] = {
    "grad": lambda f, a, b: torch.func.grad(lambda b: f(a, b).float().sum())(b),
    "vjp": lambda f, a, b: torch.func.vjp(lambda b: f(a, b).float(), b)[1](torch.ones(2, 2, device=a.device))[0],
    "jacrev": lambda f, a, b: torch.func.jacrev(lambda b: f(a, b))(b).sum((0, 1)),
    "vmap": lambda f, a, b: torch.func.vmap(f)(a[None], b[None])[0],
    "vmap-weight": lambda f, a, b: torch.func.vmap(f, in_dims=(0, None))(a[None], b)[0],
}


@contract("AMP-TRANSFORM-015")
@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("function", [Product, OwnRule])
def test_functions(case: Case, target: Target, function: type[torch.autograd.Function], transform: str) -> None:
    a = torch.tensor([[1.0, -1.0], [1.0, 1.0]], device=target.device) * (1.0 + TAIL)
    b = a.flip(0)
    mapped = transform.startswith("vmap")
    for dtype in case.supported(target):
        value = torch.mm(a.sign(), b.sign()).to(dtype)
        gradient = torch.mm(a.sign().mT, torch.ones_like(a))
        for place in ("around", "inside"):
            applied, outer = PLACES[place](function.apply, functools.partial(target.autocast, dtype))
            with outer(), OpTrace() as trace:
                seen = _TRANSFORMS[transform](applied, a, b)
            case.identical(f"{dtype}, region {place}: {transform}", seen, value if mapped else gradient)
            if mapped or place == "around":
                case.equal(f"{dtype}, region {place}: products in another type", wide_products(trace, dtype), None)


# The state that each static method of a function saw: its name, whether the region was on, and its dtype.
States = set[tuple[str, bool, torch.dtype | None]]


def _witness(device_type: str, seen: States) -> Callable[[Tensor], Tensor]:
    """Return a function that doubles, of which every static method notes the state of autocast."""

    def note(name: str) -> None:
        on = torch.is_autocast_enabled(device_type)
        seen.add((name, on, torch.get_autocast_dtype(device_type) if on else None))

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            note("forward")
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            note("setup_context")

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            note("backward")
            return 2 * gradient

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            note("jvp")
            return 2 * tangent

        @staticmethod
        def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
            note("vmap")
            return Witness.apply(x), dims[0]

    return Witness.apply


def _dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, x))


_CALLS: dict[str, tuple[Callable[[Callable[[Tensor], Tensor], Tensor], Any], tuple[str, ...]]] = {
    "backward": (lambda f, x: f(x.clone().requires_grad_()).mean().backward(), ("backward",)),
    "grad": (lambda f, x: torch.func.grad(lambda x: f(x).mean())(x), ("backward",)),
    "vjp": (lambda f, x: torch.func.vjp(f, x)[1](x), ("backward",)),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), ("jvp",)),
    "dual numbers": (_dual, ("jvp",)),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), ("jvp",)),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), ("backward",)),
    "vmap": (lambda f, x: torch.func.vmap(f)(x), ("vmap",)),
    "vmap of grad": (lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).mean()))(x), ("vmap", "backward")),
    "hessian": (lambda f, x: torch.func.hessian(lambda x: f(x).mean())(x), ("jvp", "backward")),
}
"""Calls of a function on a vector, and its static methods that they run beside forward and setup_context."""


@contract("AMP-TRANSFORM-015")
@pytest.mark.parametrize("function", [Product, OwnRule])
def test_gradients_are_summed_over_the_batch(
    case: Case, target: Target, function: type[torch.autograd.Function]
) -> None:
    """Ones, whose sum stops growing at 256 in bfloat16 and at 2048 in float16 if it is rounded on the way."""
    for dtype, size, mapped in itertools.product(case.supported(target), (1, 3, 4096), (0, 1)):
        for region in (True, False):
            kind = torch.float32 if region else dtype
            batch, shared = (torch.ones(shape, dtype=kind, device=target.device) for shape in ((size, 2, 2), (2, 2)))
            shared.requires_grad_()
            dims = (0, None) if mapped == 0 else (None, 0)
            given = (batch, shared) if mapped == 0 else (shared, batch)
            with target.autocast(dtype, enabled=region):
                output = torch.func.vmap(function.apply, in_dims=dims)(*given)
            output.backward(torch.ones_like(output))
            what = f"{dtype}, {'in a region' if region else 'outside'}, a batch of {size} for operand {mapped}"
            case.equal(f"{what}: gradient of the other", set(shared.grad.flatten().tolist()), {2.0 * size})


@contract("AMP-TRANSFORM-015")
@pytest.mark.parametrize("call", _CALLS, ids=lambda name: name.replace(" ", "_"))
def test_static_methods_see_the_region(case: Case, target: Target, call: str) -> None:
    run, methods = _CALLS[call]
    x = torch.ones(3, device=target.device)
    for dtype in case.supported(target):
        for on in (True, False):
            seen: States = set()
            f = _witness(target.device_type, seen)
            with target.autocast(dtype), target.autocast(dtype, enabled=on):
                run(f, x)
            names = ("forward", "setup_context", *methods)
            missing = sorted(set(names) - {name for name, *_ in seen})
            case.equal(f"{dtype}: static methods that {call} does not run (control)", missing, [])
            others = sorted(str(one) for one in seen if one[1:] != (on, dtype if on else None))
            case.equal(f"{dtype}, region {'on' if on else 'off'}: other states seen by {call}", others, [])
