"""Check transforms in a region whose inputs and outputs are containers of tensors."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...harness.check import Case, contract
from ...harness.targets import Target
from .exact_programs import TAIL

pytestmark = pytest.mark.usefixtures("one_thread")


class Named(NamedTuple):
    """A named tuple of two tensors."""

    left: Tensor
    right: Tensor


@dataclass
class Registered:
    """A class of the user's that torch's pytrees know."""

    left: Tensor
    right: Tensor


pytree.register_pytree_node(
    Registered, lambda one: ([one.left, one.right], None), lambda leaves, _: Registered(*leaves)
)
_CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: collections.OrderedDict(b=a, a=b),
    "named": Named,
    "nested": lambda a, b: {"a": [a], "b": {"c": (b,)}},
    "registered": Registered,
}


def _transforms(f: Callable[[Any], Any], total: Callable[[Any], Tensor], given: Any) -> dict[str, tuple[Any, str]]:
    """Return what each transform gives, and what that is: "gradient" or "output"."""
    batch = pytree.tree_map(lambda x: x[None], given)
    value, pull = torch.func.vjp(f, given)
    ones = pytree.tree_map(torch.ones_like, value)
    gradient, aux = torch.func.grad(lambda one: (total(one), f(one)), has_aux=True)(given)
    return {
        "grad": (torch.func.grad(total)(given), "gradient"),
        "grad with aux": (gradient, "gradient"),
        "aux of grad": (aux, "output"),
        "value of vjp": (value, "output"),
        "vjp": (pull(ones)[0], "gradient"),
        "vmap": (pytree.tree_map(lambda x: x[0], torch.func.vmap(f)(batch)), "output"),
        "vmap to the last dimension": (
            pytree.tree_map(lambda x: x.movedim(-1, 0)[0], torch.func.vmap(f, out_dims=-1)(batch)),
            "output",
        ),
        "vmap of grad": (pytree.tree_map(lambda x: x[0], torch.func.vmap(torch.func.grad(total))(batch)), "gradient"),
        "functionalize": (torch.func.functionalize(f)(given), "output"),
    }


@contract("AMP-TRANSFORM-014")
@pytest.mark.parametrize("container", _CONTAINERS)
def test_containers(case: Case, target: Target, container: str) -> None:
    pack = _CONTAINERS[container]
    a = torch.tensor([[1.0, -1.0], [1.0, 1.0]], device=target.device) * (1.0 + TAIL)
    b = a.flip(0)

    def parts(given: Any) -> Any:
        left, right = pytree.tree_leaves(given)
        return pack(torch.mm(left, right), torch.mm(right, left))

    def total(given: Any) -> Tensor:
        return torch.stack([one.float().sum() for one in pytree.tree_leaves(parts(given))]).sum()

    for dtype in case.supported(target):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        with target.autocast(dtype):
            outputs = pytree.tree_leaves(parts(pack(*leaves)))
            gradients = torch.autograd.grad(total(pack(*leaves)), leaves)
            found = _transforms(parts, total, pack(a, b))
        promised = {"output": [one.detach() for one in outputs], "gradient": gradients}
        for name, (tree, gives) in found.items():
            case.true(f"{dtype}: {name} keeps the container", type(tree) is type(pack(a, b)), type(tree).__name__)
            for number, (one, other) in enumerate(zip(pytree.tree_leaves(tree), promised[gives], strict=True)):
                case.identical(f"{dtype}: {gives} {number} of {name}", one, other)


# The derivative of a result has the type of the result in forward mode, and of the input in backward.
_DERIVATIVES: dict[str, tuple[Callable[[Callable[[Tensor], Any], Tensor], Any], bool]] = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,))[1], True),
    "vmap of jvp": (lambda f, x: torch.func.vmap(lambda one: torch.func.jvp(f, (one,), (one,))[1])(x[None]), True),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), True),
    "linearize": (lambda f, x: torch.func.linearize(f, x)[1](x), True),
    "functional.jvp": (lambda f, x: torch.autograd.functional.jvp(f, (x,), (x,))[1], True),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), False),
    "functional.jacobian": (lambda f, x: torch.autograd.functional.jacobian(f, x), False),
}


@contract("AMP-TRANSFORM-014")
@pytest.mark.parametrize("way", _DERIVATIVES, ids=lambda name: name.replace(" ", "_"))
def test_results_without_derivative(case: Case, target: Target, way: str) -> None:
    """A result that does not depend on the input has a derivative of zeros, beside one that does."""
    take, forward = _DERIVATIVES[way]
    x = torch.ones(2, 2, device=target.device)
    for dtype in case.supported(target):
        for kind in (torch.float16, torch.bfloat16, torch.float32):
            constant = torch.ones(3, 2, device=target.device, dtype=kind)
            with target.autocast(dtype):
                seen = take(lambda x, constant=constant: (torch.mm(x, x), constant), x)  # type: ignore[misc]
            expected = [dtype, kind] if forward else [torch.float32] * 2
            what = f"{dtype}, derivatives by {way} of a product and of a constant of {kind}"
            case.equal(f"{what}: types", [one.dtype for one in seen], expected)
            case.equal(f"{what}: not zero", [bool(one.count_nonzero()) for one in seen], [True, False])
