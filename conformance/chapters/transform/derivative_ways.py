"""Ways to take derivatives of a function of tensors: torch.func, torch.autograd.functional and forward-mode AD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

Function = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Direction:
    """What a derivative is multiplied by: a cotangent of the output and tangents of the inputs, of integers."""

    cotangent: Tensor
    tangents: Inputs


@dataclass(frozen=True)
class Way:
    """A way to take a derivative of `f` at inputs.

    `gives` is what `take` returns: "gradient" (one tensor for each input), "tangent" (of the output), "jacobian" (for
    each input a tensor with the shape of the output before its own), "hvp" (for each input) or "hessian" (for each
    pair of inputs). `forward` means that the result has the dtype of the output, not of an input. Ways that are not
    `traced` take a forward derivative of another derivative: torch (2.6 to 2.15, in a region) crashes
    there where a TorchDispatchMode is entered. `slow` ways trace the function or call backward for each element.
    """

    name: str
    gives: str
    take: Callable[[Function, Inputs, Direction], Any]
    forward: bool = False
    traced: bool = True
    slow: bool = False

    @property
    def id(self) -> str:
        return self.name


def numbers(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Return all argument numbers."""
    return tuple(range(len(inputs)))


def weighted(f: Function, direction: Direction) -> Function:
    """Return the scalar function <cotangent, f>, summed in float32."""
    return lambda *inputs: (f(*inputs).float() * direction.cotangent).sum()


def narrow(f: Function, direction: Direction) -> Function:
    """Return the scalar function <cotangent, f> in the dtype of f, as of a loss that a region leaves in 16 bits."""

    def loss(*inputs: Tensor) -> Tensor:
        output = f(*inputs)
        return (output * direction.cotangent.to(output.dtype)).sum().to(output.dtype)

    return loss


def squared(f: Function) -> Function:
    """Return the scalar function <f, f>, summed in float32."""
    return lambda *inputs: f(*inputs).float().pow(2).sum()


def _leaves(inputs: Inputs) -> Inputs:
    return tuple(one.detach().requires_grad_() for one in inputs)


def _eager(f: Function, inputs: Inputs, direction: Direction) -> Any:
    leaves = _leaves(inputs)
    return torch.autograd.grad(weighted(f, direction)(*leaves), leaves)


def _vjp(f: Function, inputs: Inputs, direction: Direction) -> Any:
    output, pull = torch.func.vjp(f, *inputs)
    return pull(direction.cotangent.to(output.dtype))


def _grad_and_value(f: Function, inputs: Inputs, direction: Direction) -> Any:
    return torch.func.grad_and_value(weighted(f, direction), numbers(inputs))(*inputs)[0]


def _grad_without_grad_mode(f: Function, inputs: Inputs, direction: Direction) -> Any:
    with torch.no_grad():
        return torch.func.grad(weighted(f, direction), numbers(inputs))(*inputs)


def _dual(f: Function, inputs: Inputs, direction: Direction) -> Any:
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, direction.tangents)
        return forward_ad.unpack_dual(f(*duals)).tangent


def _linearize(f: Function, inputs: Inputs, direction: Direction) -> Any:
    return torch.func.linearize(f, *inputs)[1](*direction.tangents)


def _batched_backward(f: Function, inputs: Inputs, direction: Direction) -> Any:
    leaves = _leaves(inputs)
    output = f(*leaves)
    return torch.autograd.grad(output, leaves, basis(output), is_grads_batched=True)


def _vmap_of_vjp(f: Function, inputs: Inputs, direction: Direction) -> Any:
    output, pull = torch.func.vjp(f, *inputs)
    return torch.func.vmap(pull)(basis(output))


def _with_aux(f: Function) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function with something beside its result, of which no derivative is taken."""

    def both(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        result = f(*inputs)
        return result, -result.detach()

    return both


def _vjp_with_aux(f: Function, inputs: Inputs, direction: Direction) -> Any:
    output, pull, _ = torch.func.vjp(_with_aux(f), *inputs, has_aux=True)
    return pull(direction.cotangent.to(output.dtype))


def _with_aux_by(name: str, *, scalar: bool = False) -> Callable[[Function, Inputs, Direction], Any]:
    """Return a way to call that transform of torch.func with has_aux; one of a `scalar` takes the weighted sum."""

    def take(f: Function, inputs: Inputs, direction: Direction) -> Any:
        given = _with_aux(weighted(f, direction) if scalar else f)
        return getattr(torch.func, name)(given, numbers(inputs), has_aux=True)(*inputs)[0]

    return take


def basis(output: Tensor) -> Tensor:
    """Return the unit cotangents of an output, stacked in front."""
    identity = torch.eye(output.numel(), dtype=output.dtype, device=output.device)
    return identity.reshape(output.numel(), *output.shape)


def _old_jacobian(**options: Any) -> Callable[[Function, Inputs, Direction], Any]:
    return lambda f, inputs, direction: torch.autograd.functional.jacobian(f, inputs, **options)


FIRST = (
    Way("backward", "gradient", _eager),
    Way(
        "grad",
        "gradient",
        lambda f, inputs, direction: torch.func.grad(weighted(f, direction), numbers(inputs))(*inputs),
    ),
    Way(
        "grad-low",
        "gradient",
        lambda f, inputs, direction: torch.func.grad(narrow(f, direction), numbers(inputs))(*inputs),
    ),
    Way("grad_and_value", "gradient", _grad_and_value),
    Way(
        "grad_and_value-low",
        "gradient",
        lambda f, inputs, direction: torch.func.grad_and_value(narrow(f, direction), numbers(inputs))(*inputs)[0],
    ),
    Way("grad-no_grad", "gradient", _grad_without_grad_mode),
    Way("vjp", "gradient", _vjp),
    Way(
        "functional.vjp",
        "gradient",
        lambda f, inputs, direction: torch.autograd.functional.vjp(f, inputs, direction.cotangent)[1],
    ),
    Way("vjp-aux", "gradient", _vjp_with_aux),
    Way("grad-aux", "gradient", _with_aux_by("grad", scalar=True)),
    Way("grad_and_value-aux", "gradient", _with_aux_by("grad_and_value", scalar=True)),
    Way("jacrev", "jacobian", lambda f, inputs, direction: torch.func.jacrev(f, numbers(inputs))(*inputs)),
    Way("jacrev-aux", "jacobian", _with_aux_by("jacrev")),
    Way(
        "jacrev-chunks",
        "jacobian",
        lambda f, inputs, direction: torch.func.jacrev(f, numbers(inputs), chunk_size=1)(*inputs),
    ),
    Way("vmap-of-vjp", "jacobian", _vmap_of_vjp),
    Way("is_grads_batched", "jacobian", _batched_backward),
    Way("functional.jacobian", "jacobian", _old_jacobian()),
    Way("functional.jacobian-vectorized", "jacobian", _old_jacobian(vectorize=True)),
    Way("dual-numbers", "tangent", _dual, forward=True),
    Way(
        "jvp",
        "tangent",
        lambda f, inputs, direction: torch.func.jvp(f, inputs, direction.tangents)[1],
        forward=True,
    ),
    Way(
        "jvp-aux",
        "tangent",
        lambda f, inputs, direction: torch.func.jvp(_with_aux(f), inputs, direction.tangents, has_aux=True)[1],
        forward=True,
    ),
    Way("linearize", "tangent", _linearize, forward=True, slow=True),
    Way(
        "functional.jvp",
        "tangent",
        lambda f, inputs, direction: torch.autograd.functional.jvp(f, inputs, direction.tangents)[1],
        forward=True,
    ),
    Way(
        "jacfwd", "jacobian", lambda f, inputs, direction: torch.func.jacfwd(f, numbers(inputs))(*inputs), forward=True
    ),
    Way("jacfwd-aux", "jacobian", _with_aux_by("jacfwd"), forward=True),
    Way(
        "functional.jacobian-forward",
        "jacobian",
        _old_jacobian(vectorize=True, strategy="forward-mode"),
        forward=True,
    ),
)


def _eager_hvp(f: Function, inputs: Inputs, direction: Direction) -> Any:
    leaves = _leaves(inputs)
    first = torch.autograd.grad(squared(f)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(_product(first, direction.tangents), leaves)


def _product(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([(one * other).sum() for one, other in zip(left, right, strict=True)]).sum()


def _grad_of_grad(f: Function, inputs: Inputs, direction: Direction) -> Any:
    def along(*point: Tensor) -> Tensor:
        return _product(torch.func.grad(squared(f), numbers(point))(*point), direction.tangents)

    return torch.func.grad(along, numbers(inputs))(*inputs)


def _jvp_of_grad(f: Function, inputs: Inputs, direction: Direction) -> Any:
    return torch.func.jvp(torch.func.grad(squared(f), numbers(inputs)), inputs, direction.tangents)[1]


def _vjp_of_grad(f: Function, inputs: Inputs, direction: Direction) -> Any:
    return torch.func.vjp(torch.func.grad(squared(f), numbers(inputs)), *inputs)[1](direction.tangents)


def _dual_of_backward(f: Function, inputs: Inputs, direction: Direction) -> Any:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(one, other) for one, other in zip(_leaves(inputs), direction.tangents, strict=True)
        ]
        found = torch.autograd.grad(squared(f)(*duals), duals, create_graph=True)
        return [forward_ad.unpack_dual(one).tangent for one in found]


def _nested(outer: str, inner: str) -> Callable[[Function, Inputs, Direction], Any]:
    def take(f: Function, inputs: Inputs, direction: Direction) -> Any:
        first = getattr(torch.func, inner)(squared(f), numbers(inputs))
        return tree_leaves(getattr(torch.func, outer)(first, numbers(inputs))(*inputs))

    return take


def _old_hessian(**options: Any) -> Callable[[Function, Inputs, Direction], Any]:
    return lambda f, inputs, direction: tree_leaves(torch.autograd.functional.hessian(squared(f), inputs, **options))


SECOND = (
    Way("backward-twice", "hvp", _eager_hvp),
    Way("grad-of-grad", "hvp", _grad_of_grad),
    Way("vjp-of-grad", "hvp", _vjp_of_grad),
    Way(
        "functional.vhp",
        "hvp",
        lambda f, inputs, direction: torch.autograd.functional.vhp(squared(f), inputs, direction.tangents)[1],
    ),
    Way(
        "functional.hvp",
        "hvp",
        lambda f, inputs, direction: torch.autograd.functional.hvp(squared(f), inputs, direction.tangents)[1],
    ),
    Way("jacrev-of-jacrev", "hessian", _nested("jacrev", "jacrev")),
    Way("functional.hessian", "hessian", _old_hessian(), slow=True),
    Way("functional.hessian-vectorized", "hessian", _old_hessian(vectorize=True)),
    Way("dual-of-backward", "hvp", _dual_of_backward, traced=False),
    Way("jvp-of-grad", "hvp", _jvp_of_grad, traced=False),
    Way(
        "hessian",
        "hessian",
        lambda f, inputs, direction: tree_leaves(torch.func.hessian(squared(f), numbers(inputs))(*inputs)),
        traced=False,
    ),
    Way("jacfwd-of-jacfwd", "hessian", _nested("jacfwd", "jacfwd"), traced=False),
    Way("jacrev-of-jacfwd", "hessian", _nested("jacrev", "jacfwd"), traced=False),
    Way(
        "functional.hessian-forward",
        "hessian",
        _old_hessian(vectorize=True, outer_jacobian_strategy="forward-mode"),
        traced=False,
    ),
)
