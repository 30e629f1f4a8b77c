"""Check that every way to take gradients gives the same, and that hooks and checkpoints act as outside of regions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.utils import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.garbage import uncollected
from ...workloads.once_differentiable import DoubledOnce

ROUNDS = 2  # of which the second adds to the gradients of the first


def _leaves(target: Target, rng: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=rng).to(target.device).requires_grad_() for shape in ((4, 6), (5, 6), (5,))]


def _loss(target: Target, dtype: torch.dtype, leaves: list[Tensor]) -> Tensor:
    """A product in 16 bits, and operations in float32 on the same leaves, whose gradients are no 16-bit numbers."""
    x, weight, bias = leaves
    with target.autocast(dtype):
        return F.linear(x, weight, bias).float().tanh().sum() + sum(leaf.exp().mean() for leaf in leaves)


def _add(leaves: list[Tensor], slopes: Iterable[Tensor]) -> None:
    for leaf, slope in zip(leaves, slopes, strict=True):
        leaf.grad = slope.detach() if leaf.grad is None else leaf.grad + slope.detach()


def _from_grad(loss: Tensor, leaves: list[Tensor], **options: Any) -> None:
    _add(leaves, torch.autograd.grad(loss, leaves, **options))


def _from_grad_of_a_batch(loss: Tensor, leaves: list[Tensor]) -> None:
    found = torch.autograd.grad(loss, leaves, torch.ones_like(loss)[None], is_grads_batched=True)
    _add(leaves, (slopes[0] for slopes in found))


def _taken(leaves: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves, and leave none."""
    slopes = [None if leaf.grad is None else leaf.grad.detach() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return slopes


WAYS: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "loss.backward()": lambda loss, leaves: loss.backward(),
    "loss.backward(inputs=)": lambda loss, leaves: loss.backward(inputs=leaves),
    "loss.backward(retain_graph=True)": lambda loss, leaves: loss.backward(retain_graph=True),
    "loss.backward(create_graph=True)": lambda loss, leaves: loss.backward(create_graph=True),
    "loss.backward(gradient)": lambda loss, leaves: loss.backward(torch.ones_like(loss)),
    "autograd.backward": lambda loss, leaves: torch.autograd.backward([loss], inputs=leaves),
    "autograd.grad": _from_grad,
    "autograd.grad(create_graph=True)": lambda loss, leaves: _from_grad(loss, leaves, create_graph=True),
    "autograd.grad(allow_unused=True)": lambda loss, leaves: _from_grad(loss, leaves, allow_unused=True),
    "autograd.grad(is_grads_batched=True)": _from_grad_of_a_batch,
}


@contract("AMP-BACKWARD-080")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_ways_to_take_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str
) -> None:
    leaves = _leaves(target, rng)
    found: dict[str, list[Tensor | None]] = {}
    for name, way in WAYS.items():
        for _ in range(ROUNDS):
            loss = _loss(target, amp_dtype, leaves)
            with target.autocast(amp_dtype) if place == "inside" else contextlib.nullcontext():
                way(loss, leaves)
        found[name] = _taken(leaves)
    first = found.pop("loss.backward()")
    coarse = [number for number, one in enumerate(first) if one is None or torch.equal(one, one.to(amp_dtype).float())]
    case.equal(f"gradients that are numbers of 16 bits, called {place} (control)", coarse, [])
    for name, slopes in found.items():
        for number, (seen, wanted) in enumerate(zip(slopes, first, strict=True)):
            case.identical(f"{name}, called {place}: gradient of leaf {number}", seen, wanted)


@contract("AMP-BACKWARD-080")
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_gradients_of_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str
) -> None:
    """The penalty of the AMP examples, which hand parameters over as a generator."""
    containers: dict[str, Callable[[list[Tensor]], Any]] = {
        "list": list,
        "tuple": tuple,
        "generator": lambda leaves: (leaf for leaf in leaves),
        "values of a dict": lambda leaves: dict(enumerate(leaves)).values(),
    }
    leaves = _leaves(target, rng)
    found = {}
    for name, container in containers.items():
        loss = _loss(target, amp_dtype, leaves)
        with target.autocast(amp_dtype) if place == "inside" else contextlib.nullcontext():
            slopes = torch.autograd.grad(loss, container(leaves), create_graph=True)
            case.equal(f"gradients of a {name} that have no graph", sum(not one.requires_grad for one in slopes), 0)
            penalty = torch.stack([slope.float().square().mean() for slope in slopes]).mean()
            penalty.backward()
        found[name] = _taken(leaves)
    first = found.pop("list")
    case.equal("gradients of the penalty that are missing", [one is None for one in first], [False] * len(first))
    for name, seen in found.items():
        for number, (one, wanted) in enumerate(zip(seen, first, strict=True)):
            case.identical(f"gradients of a {name}, called {place}: those of the penalty, leaf {number}", one, wanted)


@contract("AMP-BACKWARD-080")
def test_once_differentiable_refuses_a_second_derivative(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    for dtype in (torch.float32, amp_dtype):
        for region in (contextlib.nullcontext(), target.autocast(amp_dtype)):
            x = torch.ones(3, device=target.device, dtype=dtype, requires_grad=True)
            where = f"{dtype}, {'outside' if isinstance(region, contextlib.nullcontext) else 'in a region'}"
            with region:
                weight = torch.ones_like(x, requires_grad=True)
                (slope,) = torch.autograd.grad(DoubledOnce.apply(x), x, weight, create_graph=True)
            case.true(f"{where}: the gradient has a graph", slope.requires_grad, slope.requires_grad)
            case.raises(f"{where}: a second derivative", RuntimeError, slope.sum().backward)


# Hooks


def _doubled(given: Any) -> Any:
    return tuple(None if one is None else one * 2 for one in given)


def _forward_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[1].register_forward_hook(lambda module, given, made: made * 2)


def _forward_pre_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[1].register_forward_pre_hook(lambda module, given: _doubled(given))


def _full_backward_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[1].register_full_backward_hook(lambda module, given, slopes: _doubled(given))


def _full_backward_pre_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[1].register_full_backward_pre_hook(lambda module, slopes: _doubled(slopes))


def _tensor_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[1].register_forward_hook(
        lambda module, given, made: made.register_hook(lambda slope: slope * 2) and None
    )


def _parameter_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[0].weight.register_hook(lambda slope: slope * 2)


def _accumulated_hook(layers: Any, taken: list[Any]) -> Any:
    return layers[0].weight.register_post_accumulate_grad_hook(lambda weight: taken.append(weight.grad.clone()))


def _of_all(register: Callable[[Any], Any], act: Callable[..., Any]) -> Callable[[Any, list[Any]], Any]:
    """Return what registers a hook of all modules that acts on the middle one of the layers."""
    return lambda layers, taken: register(lambda module, *given: act(*given) if module is layers[1] else None)


def _several_hook(layers: Any, taken: list[Any]) -> Any:
    weights = [layer.weight for layer in layers]
    return torch.autograd.graph.register_multi_grad_hook(
        weights, lambda slopes: taken.extend(slope.clone() for slope in slopes)
    )


def _several_outputs_hook(mode: str) -> Callable[[Any, list[Any]], Any]:
    """Return what registers a hook of the outputs of layers, which are 16-bit in a region.

    The last one is the root of backward, for whose gradient torch does not wait.
    """

    def register(layers: Any, taken: list[Any]) -> Any:
        outputs: list[Tensor] = []

        def noted(slopes: Any) -> None:
            taken.extend(slope.clone() for slope in (slopes if mode == "all" else [slopes]))

        def made(module: Any, given: Any, output: Tensor) -> None:
            if module is layers[-1]:
                torch.autograd.graph.register_multi_grad_hook(outputs, noted, mode=mode)
            elif module is not layers:
                outputs.append(output)

        return modules.register_module_forward_hook(made)

    return register


HOOKS = {
    "forward": _forward_hook,
    "forward-pre": _forward_pre_hook,
    "full-backward": _full_backward_hook,
    "full-backward-pre": _full_backward_pre_hook,
    "tensor": _tensor_hook,
    "parameter": _parameter_hook,
    "accumulated": _accumulated_hook,
    "global-forward": _of_all(modules.register_module_forward_hook, lambda given, made: made * 2),
    "global-forward-pre": _of_all(modules.register_module_forward_pre_hook, _doubled),
    "global-full-backward": _of_all(modules.register_module_full_backward_hook, lambda given, slopes: _doubled(given)),
    "global-full-backward-pre": _of_all(modules.register_module_full_backward_pre_hook, _doubled),
    "several": _several_hook,
    "several-outputs": _several_outputs_hook("all"),
    "any-of-several-outputs": _several_outputs_hook("any"),
    "data-full-backward-pre": lambda layers, taken: layers[0].register_full_backward_pre_hook(
        lambda module, slopes: _doubled(slopes)
    ),
    "data-full-backward": lambda layers, taken: layers[0].register_full_backward_hook(
        lambda module, given, slopes: taken.extend(slope.clone() for slope in slopes)
    ),
}
"""What registers a hook that doubles what it gets: on the middle one of three layers, or on the first weight.

Those of "data" are on the first layer, whose input needs no gradient: one doubles, the other notes what it gets.
"""


@contract("AMP-BACKWARD-081")
@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_act_in_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, hook: str
) -> None:
    """Numbers that 16 bits hold, so that a region changes no bit of the results."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).to(target.device)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randint(0, 2, parameter.shape, generator=rng))
        for layer in layers:
            layer.weight.fill_diagonal_(1)  # so that no gradient is zero
    x = torch.randint(0, 2, (3, 4), generator=rng).float().index_fill(1, torch.tensor([0]), 1).to(target.device)

    def ran(hooked: bool, region: bool) -> list[Tensor]:
        taken: list[Any] = []
        handle = HOOKS[hook](layers, taken) if hooked else None
        layers.zero_grad()
        leaf = x.clone().requires_grad_(not hook.startswith("data"))
        with target.autocast(amp_dtype) if region else contextlib.nullcontext():
            made = layers(leaf)
        made.backward(torch.ones_like(made))
        if handle is not None:
            handle.remove()
        slopes = [leaf.grad, *(parameter.grad for parameter in layers.parameters()), *taken]
        return [one.detach().float().clone() for one in (made, *slopes) if one is not None]

    plain, hooked = ran(False, False), ran(True, False)
    acts = len(plain) != len(hooked) or any(not torch.equal(*pair) for pair in zip(plain, hooked, strict=True))
    case.true("outside of a region the hook changes something (control)", acts)
    if hook.startswith("data"):
        expected = [one * 2 for one in plain[1:3]] if hook == "data-full-backward-pre" else plain[1:3]
        for what, ours, theirs in zip(("weight", "bias"), hooked[1:3], expected, strict=True):
            case.identical(f"gradient of the {what} of the first layer, outside", ours, theirs)
    seen = ran(True, True)
    case.equal("tensors in the region", len(seen), len(hooked))
    for number, (ours, theirs) in enumerate(zip(seen, hooked, strict=True)):
        case.identical(f"result, gradients of input and parameters, what the hook saw: {number}", ours, theirs)


@contract("AMP-BACKWARD-081")
def test_a_forward_hook_chooses_the_type(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    """What a hook returns is the output of the module, in the type that the hook gave it."""
    for dtype in (torch.float32, amp_dtype):

        def hook(module: Any, given: Any, made: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return made.to(dtype)

        layer = torch.nn.Linear(4, 3).to(target.device)
        layer.register_forward_hook(hook)
        chain = torch.nn.Sequential(layer, torch.nn.Identity())
        with target.autocast(amp_dtype):
            made = chain(torch.ones(2, 4, device=target.device))
        case.equal(f"output of a module whose hook returns {dtype}", made.dtype, dtype)
        (slope,) = torch.autograd.grad(made.sum(), layer.weight)
        case.equal(f"gradient of its weight, a hook that returns {dtype}", slope.dtype, torch.float32)


# Checkpoints


@contract("AMP-BACKWARD-081")
@pytest.mark.parametrize("stops", [True, False], ids=["stops", "runs-on"])
def test_early_stop_of_a_checkpoint(case: Case, target: Target, amp_dtype: torch.dtype, stops: bool) -> None:
    """Without early stop the recomputation runs to the end of the function."""
    leaf = torch.ones(3, 4, device=target.device, requires_grad=True)

    def events(region: bool) -> list[str]:
        seen: list[str] = []

        def part(x: Tensor) -> Tensor:
            seen.append("start")
            made = torch.tanh(F.linear(x, x))
            seen.append("end")
            return made

        with (
            checkpoint.set_checkpoint_early_stop(stops),
            target.autocast(amp_dtype) if region else contextlib.nullcontext(),
        ):
            made = checkpoint.checkpoint(part, leaf, use_reentrant=False)
            made.float().sum().backward()
        return seen

    case.equal("outside of a region (control)", events(False), ["start", "end", "start"] + ["end"] * (not stops))
    case.equal("in a region", events(True), ["start", "end", "start"] + ["end"] * (not stops))


@contract("AMP-BACKWARD-081")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpoint_of_several_outputs(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, reentrant: bool
) -> None:
    """Outputs of a 16-bit type, of float32 and of integers, each with a part in the gradients."""
    leaves = _leaves(target, rng)

    def part(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        low = F.linear(x, weight, bias)
        return low, x.exp(), low.argmax(-1), weight.tanh() * 3

    def slopes(keep: bool) -> list[Tensor | None]:
        with target.autocast(amp_dtype):
            made = part(*leaves) if keep else checkpoint.checkpoint(part, *leaves, use_reentrant=reentrant)
        (made[0].float().sum() + made[1].mean() + made[3].float().sum()).backward()
        return _taken(leaves)

    wanted = slopes(True)
    for number, (seen, right) in enumerate(zip(slopes(False), wanted, strict=True)):
        case.identical(f"gradient of leaf {number}", seen, right)


@contract("AMP-BACKWARD-081")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_nothing_of_a_recomputation_survives(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, reentrant: bool
) -> None:
    """No cycle of references keeps what the recomputation made until Python looks for garbage."""
    leaves = _leaves(target, rng)

    def alive() -> list[bool]:
        made: list[weakref.ref[Tensor]] = []

        def part(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            low = F.linear(x, weight, bias)
            made.append(weakref.ref(low))
            return low.tanh()

        given = [leaf * 2 for leaf in leaves]
        made.append(weakref.ref(given[0]))
        with target.autocast(amp_dtype):
            result = checkpoint.checkpoint(part, *given, use_reentrant=reentrant)
        del given
        result.float().sum().backward()
        del result
        return [one() is not None for one in made]

    with uncollected():
        found = [alive()]
        # A cycle is there each time; once, something else of the process may still have held a frame.
        while any(found[-1]) and len(found) < 3:
            found.append(alive())
    case.note("programs run", len(found))
    case.equal("the input and tensors of both runs that are alive", found[-1], [False, False, False])
