"""Uses of torch.func and torch.autograd on functions without a listed op, which a region leaves as they are.

Each program returns tensors, whose types, bits and requires_grad count, and what was raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ...workloads.once_differentiable import DoubledOnce

Program: TypeAlias = Callable[[Tensor, Tensor], Any]
_func = torch.func


def _f(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin() + x * x


def _scalar(x: Tensor, y: Tensor) -> Tensor:
    return _f(x, y).mean()


def _aux(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _f(x, y), x + y


def _scalar_aux(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _scalar(x, y), x + y


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [one.detach().clone().requires_grad_() for one in tensors]


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _vjp(x: Tensor, y: Tensor) -> Any:
    output, pull = _func.vjp(_f, x, y)
    again, pull_again, aux = _func.vjp(_aux, x, y, has_aux=True)
    return output, pull(output), pull(2 * output), again, aux, pull_again(output)


def _linearize(x: Tensor, y: Tensor) -> Any:
    output, push = _func.linearize(_f, x, y)
    return output, push(y, x), push(x, x)


def _again(found: Any, leaves: Sequence[Tensor]) -> Any:
    """Return a result with create_graph, and the gradients by these leaves of the mean of what has a graph in it."""
    tensors = [one for one in tree_leaves(found) if isinstance(one, Tensor) and one.requires_grad]
    if not tensors:
        return found, None
    total = torch.stack([one.float().mean() for one in tensors]).mean()
    return found, total, torch.autograd.grad(total, leaves, allow_unused=True)


def _functional(x: Tensor, y: Tensor) -> Any:
    a, b = _leaves(x, y)
    found: list[Any] = []
    for options in ({}, {"vectorize": True}, {"vectorize": True, "strategy": "forward-mode"}, {"strict": True}):
        found.append(functional.jacobian(_f, (x, y), **options))
    for vectorized in (False, True):
        found.append(_again(functional.jacobian(_f, (a, b), create_graph=True, vectorize=vectorized), (a, b)))
        found.append(_again(functional.hessian(_scalar, (a, b), create_graph=True, vectorize=vectorized), (a, b)))
    found += [functional.hessian(_scalar, (x, y), vectorize=True, outer_jacobian_strategy="forward-mode")]
    found += [functional.vjp(_f, (x, y), v=y), functional.jvp(_f, (x, y), v=(y, x))]
    found += [functional.vhp(_scalar, (x, y), v=(y, x)), functional.hvp(_scalar, (x, y), v=(y, x))]
    one = lambda x: _scalar(x, y)  # noqa: E731
    found += [functional.hvp(one, x, v=y), functional.vhp(one, x, v=y), functional.hessian(one, x)]
    found += [functional.jacobian(lambda x: _f(x, y), x), functional.vjp(lambda x: _f(x, y), x, v=y)]
    for name, given in (("vjp", y), ("jvp", (y, x))):
        found.append(_again(getattr(functional, name)(_f, (a, b), v=given, create_graph=True)[1], (a, b)))
    for name in ("vhp", "hvp"):
        found.append(_again(getattr(functional, name)(_scalar, (a, b), v=(y, x), create_graph=True)[1], (a, b)))
    return found


def _grad(x: Tensor, y: Tensor) -> Any:
    found: list[Any] = []
    unused = x.detach().clone().requires_grad_()
    for options in (
        {},
        {"grad_outputs": y},
        {"grad_outputs": [y]},
        {"create_graph": True},
        {"retain_graph": True},
        {"allow_unused": True},
        {"materialize_grads": True},
    ):
        a, b = _leaves(x, y)
        output = _f(a, b) if "grad_outputs" in options else _scalar(a, b)
        wanted = (a, b, unused) if {"allow_unused", "materialize_grads"} & options.keys() else (a, b)
        found.append(torch.autograd.grad(output, wanted, **options))
    for container in (list, tuple, iter):  # also what can be read but once
        a, b = _leaves(x, y)
        first = torch.autograd.grad(_scalar(a, b), container([a, b]), create_graph=True)
        penalty = torch.stack([(one * one).mean() for one in first]).mean()
        found += [first, torch.autograd.grad(penalty, (a, b))]
    a, b = _leaves(x, y)
    rows = torch.stack([y, 3 * x])
    found.append(torch.autograd.grad(_f(a, b), (a, b), rows, is_grads_batched=True))
    found.append(_raised(lambda: torch.autograd.grad(_scalar(a, b), (a, unused))))
    return found


def _backward(x: Tensor, y: Tensor) -> Any:
    found: list[Any] = []
    ways: tuple[Callable[[Tensor, list[Tensor]], Any], ...] = (
        lambda output, leaves: output.backward(y),
        lambda output, leaves: output.backward(gradient=y, inputs=leaves[:1]),
        lambda output, leaves: torch.autograd.backward([output, output], [y, x]),
        lambda output, leaves: torch.autograd.backward(output.mean(), inputs=leaves[1]),
        lambda output, leaves: torch.autograd.backward(output, y, retain_graph=True),
    )
    for way in ways:
        leaves = _leaves(x, y)
        middle = leaves[0] * 3
        middle.retain_grad()
        seen: list[Tensor] = []
        middle.register_hook(seen.append)
        way(_f(middle, leaves[1]), leaves)
        found += [middle.grad, [one.grad for one in leaves], seen]
    a, b = _leaves(x, y)
    kept: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook((a, b), lambda slopes: kept.append(list(slopes)))
    _scalar(a, b).backward()
    handle.remove()
    return found, kept


def _saved(x: Tensor, y: Tensor) -> Any:
    found: list[Any] = []
    hooks = torch.autograd.graph
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach().clone())
        return tensor.detach().clone()

    for around in (
        hooks.save_on_cpu(device_type=x.device.type if x.device.type != "cpu" else "cuda"),
        hooks.saved_tensors_hooks(pack, lambda tensor: tensor),
        hooks.allow_mutation_on_saved_tensors(),
        contextlib.nullcontext(),
    ):
        a, b = _leaves(x, y)
        with around:
            output = _f(a, b)
            output.mean().backward()
        found.append([a.grad, b.grad])
    a, b = _leaves(x, y)
    output = checkpoint(_f, a, b, use_reentrant=False)
    reentrant = checkpoint(_f, a, b, use_reentrant=True)
    found += [output, reentrant, torch.autograd.grad(output.mean(), (a, b))]
    reentrant.mean().backward()
    chain: Any = checkpoint_sequential([nn.Tanh(), nn.Sigmoid(), nn.Tanh()], 2, a, use_reentrant=False)
    found += [a.grad, chain, torch.autograd.grad(chain.mean(), a)]
    return found, packed


def _once(x: Tensor, y: Tensor) -> Any:
    (a,) = _leaves(x)
    output = DoubledOnce.apply(a)
    (slope,) = torch.autograd.grad(output, a, y.clone().requires_grad_(), create_graph=True)
    return output, slope, _raised(lambda: torch.autograd.grad(slope.mean(), a))


def _dual(x: Tensor, y: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, y)
        found = forward_ad.unpack_dual(_f(dual, y))
        return found.primal, found.tangent, forward_ad.unpack_dual(y * 2).tangent is None


class _Scaled(nn.Module):
    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale.clone())
        self.shift: Tensor
        self.register_buffer("shift", shift.clone())

    def forward(self, x: Tensor, times: float = 1.0) -> Tensor:
        self.shift.add_(x.detach().mean())
        return (x * self.scale + self.shift) * times


def _modules(x: Tensor, y: Tensor) -> Any:
    models = [_Scaled(one, y) for one in (x, y, x - y)]
    parameters, buffers = _func.stack_module_state(models)
    made = _func.functional_call(models[0], {"scale": y, "shift": x.clone()}, (x,), {"times": 3.0})
    kept = x.clone()
    given = ({"scale": y}, {"shift": kept})
    seen = _func.functional_call(models[1], given, (x,), strict=True)
    strict = _raised(lambda: _func.functional_call(models[1], {"scale": y}, (x,), strict=True))
    return parameters, buffers, made, kept, seen, strict, dict(models[0].named_buffers())


def _vmap(x: Tensor, y: Tensor) -> Any:
    found: list[Any] = [
        _func.vmap(_f)(x, y),
        _func.vmap(_f, in_dims=(1, None), out_dims=1)(x, y[:, 0]),
        _func.vmap(_f, chunk_size=1)(x, y),
        _func.vmap(lambda one: {"a": one["a"] * 2, "b": (one["b"],)}, in_dims=({"a": 0, "b": 1},))(
            {"a": x, "b": y.t()}
        ),
        _func.vmap(_func.grad(_scalar))(x, y),
        _func.functionalize(_f)(x, y),
    ]
    for randomness in ("same", "different"):
        torch.manual_seed(0)
        found.append(_func.vmap(lambda one: one * torch.rand_like(one), randomness=randomness)(x))
    found.append(_raised(lambda: _func.vmap(lambda one: one * torch.rand_like(one))(x)))
    return found


def _jacobians(x: Tensor, y: Tensor) -> Any:
    both = (0, 1)
    return [
        _func.jacrev(_f)(x, y),
        _func.jacrev(_f, both)(x, y),
        _func.jacrev(_aux, 1, has_aux=True)(x, y),
        *(_func.jacrev(_f, chunk_size=size)(x, y) for size in (1, 2)),
        _func.jacfwd(_f, both)(x, y),
        _func.jacfwd(_aux, has_aux=True)(x, y),
        _func.hessian(_scalar, both)(x, y),
        _func.jacrev(_func.jacfwd(_scalar, 1), 0)(x, y),
    ]


PROGRAMS: dict[str, Program] = {
    "grad": lambda x, y: (
        _func.grad(_scalar)(x, y),
        _func.grad(_scalar, (1, 0))(x, y),
        _func.grad(_scalar_aux, 1, has_aux=True)(x, y),
    ),
    "grad_and_value": lambda x, y: (
        _func.grad_and_value(_scalar)(x, y),
        _func.grad_and_value(_scalar_aux, (0, 1), has_aux=True)(x, y),
    ),
    "vjp": _vjp,
    "jvp": lambda x, y: (
        _func.jvp(_f, (x, y), (y, x)),
        _func.jvp(_aux, (x, y), (y, x), has_aux=True),
        _func.jvp(_f, (x, y), (y, x), strict=True),
    ),
    "linearize": _linearize,
    "jacobians": _jacobians,
    "vmap": _vmap,
    "modules": _modules,
    "autograd.functional": _functional,
    "autograd.grad": _grad,
    "autograd.backward": _backward,
    "saved tensors": _saved,
    "once_differentiable": _once,
    "dual numbers": _dual,
}
SLOW = ("linearize",)  # which traces the function
