"""Check that what calls a function for its caller passes each argument with its gradient, however it is given."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint as checkpointing

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER

Given = tuple[tuple[Any, ...], dict[str, Any]]


class Pair(NamedTuple):
    """Two values by their names."""

    left: Any
    right: Any


@dataclass
class Batch:
    """An object with tensors, which no container of Python's is."""

    image: Any
    others: Any


# How three tensors are given: by position, by keyword, in containers, beside what is no tensor, twice.
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Given]] = {
    "by position": lambda a, b, c: ((a, b, c), {}),
    "beside None and numbers": lambda a, b, c: ((None, a, 2, b, "x", c), {}),
    "twice": lambda a, b, c: ((a, b, c, b), {}),
    "by keyword": lambda a, b, c: ((), {"one": a, "other": b, "third": c}),
    "by position and keyword": lambda a, b, c: ((a,), {"other": b, "third": c, "flag": None}),
    "the same both ways": lambda a, b, c: ((a, b), {"other": b, "third": c}),
    "in a list": lambda a, b, c: (([a, b, c],), {}),
    "in a tuple": lambda a, b, c: (((a, b), c), {}),
    "in a dictionary": lambda a, b, c: (({"one": a, "other": b}, c), {}),
    "in a named tuple": lambda a, b, c: ((Pair(a, b), c), {}),
    "in an object": lambda a, b, c: ((Batch(a, [b, c]),), {}),
    "in nested containers": lambda a, b, c: (([{"x": (a, [b])}, None, c],), {}),
    "by keyword in a list": lambda a, b, c: ((a,), {"others": [b, c]}),
    "by keyword in a dictionary": lambda a, b, c: ((), {"given": {"one": a, "other": (b, c)}}),
    "by keyword in a named tuple": lambda a, b, c: ((a,), {"pair": Pair(b, c)}),
    "by keyword in an object": lambda a, b, c: ((a,), {"batch": Batch(b, {"x": c})}),
}
# The tensors that the reentrant kind of checkpoint, and a function of autograd, take part in autograd with.
FLAT = ("by position", "beside None and numbers", "twice")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in fields(value)])


class Sum(torch.nn.Module):
    """A layer that gives the sum of its products with each tensor of its arguments, the second one twice, and so on."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, *given: Any, **named: Any) -> Tensor:
        terms = [place * functional.linear(x, self.weight) for place, x in enumerate(_tensors([given, named]), 1)]
        return torch.stack([term.float() for term in terms]).sum(0).to(terms[0].dtype)


class Applied(torch.autograd.Function):
    """What a module gives of what stands by position, with the gradients that autograd finds by itself."""

    @staticmethod
    def forward(ctx: Any, module: Sum, weight: Tensor, *given: Any) -> Tensor:
        ctx.module, ctx.given = module, given
        ctx.kind = weight.device.type
        ctx.state = torch.is_autocast_enabled(ctx.kind), torch.get_autocast_dtype(ctx.kind)
        result: Tensor = module(*given)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in ctx.given]
        enabled, dtype = ctx.state
        with torch.enable_grad(), torch.autocast(ctx.kind, dtype, enabled=enabled):
            result = ctx.module(*leaves)
        asked = [ctx.module.weight, *(x for x in leaves if isinstance(x, Tensor))]
        found = iter(torch.autograd.grad(result, asked, slope))
        return None, next(found), *(next(found) if isinstance(x, Tensor) else None for x in leaves)


def _through(**options: Any) -> Callable[..., Tensor]:
    def call(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
        result: Tensor = checkpointing.checkpoint(module, *given, **options, **named)
        return result

    return call


def _early_stop_off(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    with checkpointing.set_checkpoint_early_stop(False):
        return _through(use_reentrant=False)(target, dtype, module, *given, **named)


def _nested(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    inner = functools.partial(_through(use_reentrant=False), target, dtype, module)
    result: Tensor = checkpointing.checkpoint(inner, *given, use_reentrant=False, **named)
    return result


def _functional(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    result: Tensor = torch.func.functional_call(module, {"weight": module.weight}, given, named)
    return result


def _under(hooks: Callable[[Sum], list[Any]]) -> Callable[..., Tensor]:
    """Return a call of the module under hooks, which are removed after it."""

    def call(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
        handles = hooks(module)
        try:
            result: Tensor = module(*given, **named)
        finally:
            for handle in handles:
                handle.remove()
        return result

    return call


def _forward_hooks(module: Sum) -> list[Any]:
    return [
        module.register_forward_pre_hook(lambda module, given, named: (given, named), with_kwargs=True),
        module.register_forward_hook(lambda module, given, named, result: result, with_kwargs=True),
    ]


def _backward_hooks(module: Sum) -> list[Any]:
    module.register_full_backward_pre_hook(lambda module, slopes: slopes)
    module.register_full_backward_hook(lambda module, gradients, slopes: None)
    return []  # they are called in the backward pass, after the call


def _global_hooks(_: Sum) -> list[Any]:
    everywhere = torch.nn.modules.module
    return [
        everywhere.register_module_forward_pre_hook(lambda module, given: None),
        everywhere.register_module_forward_hook(lambda module, given, result: None),
        everywhere.register_module_full_backward_hook(lambda module, gradients, slopes: None),
    ]


def _decorated(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    result: Tensor = target.autocast(dtype)(module.forward)(*given, **named)
    return result


def _with_gradients(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = torch.enable_grad()(module.forward)(*given, **named)
    return result


def _averaged(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
    average = AveragedModel(module)
    average.module = module  # the copy has a weight of its own
    result: Tensor = average(*given, **named)
    return result


def _applied(target: Target, dtype: torch.dtype, module: Sum, *given: Any) -> Tensor:
    result: Tensor = Applied.apply(module, module.weight, *given)
    return result


ALL = tuple(FORMS)
# What calls the module, and the forms that it takes.
CALLERS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "checkpoint": (_through(use_reentrant=False), ALL),
    "checkpoint without determinism check": (_through(use_reentrant=False, determinism_check="none"), ALL),
    "checkpoint without random state": (_through(use_reentrant=False, preserve_rng_state=False), ALL),
    "checkpoint without early stop": (_early_stop_off, ALL),
    "nested checkpoint": (_nested, ALL),
    "reentrant checkpoint": (_through(use_reentrant=True), FLAT),
    "functional_call": (_functional, ALL),
    "module with hooks": (_under(_forward_hooks), ALL),
    "module with backward hooks": (_under(_backward_hooks), ALL),
    "module with global hooks": (_under(_global_hooks), ALL),
    "decorator of autocast": (_decorated, ALL),
    "decorator of gradients": (_with_gradients, ALL),
    "AveragedModel": (_averaged, ALL),
    "custom function": (_applied, FLAT),
}


@contract("AMP-BACKWARD-083")
@pytest.mark.parametrize("caller", CALLERS, ids=lambda name: name.replace(" ", "_"))
def test_arguments_in_any_form(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, caller: str
) -> None:
    case.require_arithmetic(target, OTHER[amp_dtype])
    call, forms = CALLERS[caller]
    types = [torch.float32, amp_dtype, OTHER[amp_dtype]]
    # Products and sums of small integers are exact in each type.
    values = [torch.randint(-2, 3, (2, 4), generator=rng).to(target.device, dtype) for dtype in types]
    weight = torch.randint(-2, 3, (3, 4), generator=rng).float().to(target.device)

    def found(form: str, made: bool, run: Callable[..., Tensor]) -> dict[str, Tensor | None]:
        leaves = [value.clone().requires_grad_() for value in values]
        module = Sum(weight.clone())
        with target.autocast(amp_dtype):
            given, named = FORMS[form](*(leaf * 1 if made else leaf for leaf in leaves))
            output = run(target, amp_dtype, module, *given, **named)
        output.sum().backward()
        gradients = {f"gradient of the {leaf.dtype} one": leaf.grad for leaf in leaves}
        return {"output": output.detach(), **gradients, "gradient of the weight": module.weight.grad}

    def plain(target: Target, dtype: torch.dtype, module: Sum, *given: Any, **named: Any) -> Tensor:
        result: Tensor = module(*given, **named)
        return result

    wrong = {}
    for form, made in itertools.product(forms, (False, True)):
        wanted, seen = found(form, made, plain), found(form, made, call)
        if any(one is None for one in wanted.values()):
            case.true(f"control: {form}, each tensor has a gradient without it", False, wanted)
        apart = [name for name, one in wanted.items() if not _same(seen[name], one)]
        if apart:
            wrong[f"{form}, {'results' if made else 'leaves'}"] = apart
    case.equal(f"{caller}: what is not as of the module itself", wrong, {})


def _same(seen: Tensor | None, wanted: Tensor | None) -> bool:
    return seen is not None and wanted is not None and seen.dtype == wanted.dtype and torch.equal(seen, wanted)
