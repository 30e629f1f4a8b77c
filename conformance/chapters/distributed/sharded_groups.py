"""What one rank sees of modules that fully_shard takes as one group, and of parameters unlike the others in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from .comparison import unlike

WIDTH = 4
FIXED: dict[str, torch.Tensor] = {
    "int64": torch.tensor([300, 301, -302, 1 << 40]),
    "int32": torch.tensor([[300, 301], [-302, 1 << 20]], dtype=torch.int32),
    "uint8": torch.arange(250, 256, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "one integer": torch.tensor([257]),
}
"""Parameters that are not trained; bfloat16 holds none of the larger integers, and some are of odd length."""


def _sharded(modules: Any, **policy: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    return fully_shard(modules, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


class _Seeing(nn.Module):
    """A product that records the dtype of what its forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class _Listed(nn.Module):
    """Run layers in their order or against it, each on float32; return what each of them gave."""

    def __init__(self, count: int, against: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Seeing() for _ in range(count))
        self.against = against

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        order = reversed(self.layers) if self.against else self.layers
        return [layer(x) for layer in order]


def types_of_lists(dtype: torch.dtype) -> list[str]:
    """Name the modules of lists given to fully_shard whose input or output is not cast as the policy says."""
    found = []
    for count, against, cast, asked in itertools.product(
        (1, 2, 3), (False, True), (True, False), (torch.float32, None)
    ):
        model: Any = _Listed(count, against)
        _sharded(list(model.layers), param_dtype=dtype, cast_forward_inputs=cast, output_dtype=asked)
        _sharded(model)
        for step in range(2):
            outs = model(torch.ones(2, WIDTH))
            sum(one.float().sum() for one in outs).backward()
            seen = [layer.seen for layer in (reversed(model.layers) if against else model.layers)]
            right = (dtype if cast else torch.float32, asked or dtype)
            how = f"cast_forward_inputs={cast}, output_dtype={asked}, step {step}"
            found += [
                f"module {number} of {count} with {how}: {given} to {out.dtype} in place of {right[0]} to {right[1]}"
                for number, (given, out) in enumerate(zip(seen, outs, strict=True))
                if (given, out.dtype) != right
            ]
    return found


class _Holding(nn.Module):
    """A layer, and parameters that are not trained, which forward keeps a copy of."""

    def __init__(self, fixed: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.ParameterList(nn.Parameter(one.clone(), requires_grad=False) for one in fixed)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [one.detach().clone() for one in self.fixed]
        out: torch.Tensor = self.layer(x)
        return out


def integers_in_forward(dtype: torch.dtype) -> list[str]:
    """Name the integer and boolean parameters that forward under a policy sees with another type or other values."""
    found = []
    for names in (*((one,) for one in FIXED), tuple(FIXED)):
        model = _Holding([FIXED[one] for one in names])
        _sharded(model, param_dtype=dtype, reduce_dtype=torch.float32)
        for _ in range(2):
            model(torch.ones(2, WIDTH)).float().sum().backward()
            seen, right = dict(zip(names, model.seen, strict=True)), {one: FIXED[one] for one in names}
            found += [f"{len(names)} parameters: {one}" for one in unlike(seen, right)]
        found += [f"gradient of {name}" for name, one in zip(names, model.fixed, strict=True) if one.grad is not None]
    return found


class _Adapted(nn.Module):
    """A frozen layer of one type, and a trained one beside it."""

    def __init__(self, frozen: torch.dtype, first: bool) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH, bias=False).to(frozen).requires_grad_(False)
        added = nn.Linear(WIDTH, WIDTH, bias=False)
        for layer in (base, added):
            nn.init.eye_(layer.weight)
        self.parts = nn.ModuleDict({"base": base, "added": added} if first else {"added": added, "base": base})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts["base"](x) + self.parts["added"](x)
        return out


def gradients_beside_frozen(dtype: torch.dtype) -> list[str]:
    """Name the types of frozen layers beside which the gradient of a trained layer is not the mean, in float32.

    Small integers throughout; a policy computes in `dtype` and reduces in float32.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    found = []
    for frozen, first in itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False)):
        model = _Adapted(frozen, first)
        _sharded(model, param_dtype=dtype, reduce_dtype=torch.float32)
        for step in range(2):
            model.zero_grad()
            model(torch.full((1, WIDTH), 2.0 * rank)).float().sum().backward()
            gradient: Any = model.parts["added"].weight.grad
            right = torch.full((WIDTH, WIDTH), float(world - 1))
            what = f"{frozen} {'before' if first else 'behind'} it, step {step}"
            found += [f"{what}: {one}" for one in unlike({"": gradient.full_tensor()}, {"": right})]
        if model.parts["base"].weight.grad is not None:
            found.append(f"{frozen}: a gradient of the frozen layer")
    return found


GIVEN_TYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32))
"""Types of parameters and of the gradients that are asked for."""


def given_gradient_types(dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Name the settings with which fully_shard loses the grad_dtype of a parameter, and other attributes or the mean.

    One of the two parameters of a layer is trained, or both; small integers throughout.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    policies: tuple[dict[str, torch.dtype], ...] = (
        {},
        {"param_dtype": dtype, "reduce_dtype": torch.float32},
        {"param_dtype": dtype},
    )
    types: list[str] = []
    others: list[str] = []
    pairs = (*GIVEN_TYPES, (torch.float32, torch.float32), (dtype, dtype))
    for (own, asked), policy, trained in itertools.product(pairs, policies, (True, False)):
        what = f"{own} with grad_dtype {asked}, policy {policy or None}"
        model: Any = nn.Linear(WIDTH, WIDTH).to(own)
        model.bias.requires_grad_(trained)
        for one in model.parameters():
            one.grad_dtype = asked
        _sharded(model, **policy)
        types += [f"{what}: {one.grad_dtype} after it" for one in model.parameters() if one.grad_dtype != asked]
        others += [f"{what}: requires_grad"] * (
            (model.weight.requires_grad, model.bias.requires_grad) != (True, trained)
        )
        for _ in range(2):
            model(torch.full((1, WIDTH), 2.0 * rank, dtype=own)).float().sum().backward()
        for name, right in (("weight", 2.0 * (world - 1)), ("bias", 2.0)):
            gradient = getattr(model, name).grad
            if name == "bias" and not trained:
                others += [f"{what}: a gradient of the frozen bias"] * (gradient is not None)
            elif gradient is None or not bool((gradient.full_tensor() == right).all()):
                others.append(f"{what}: {name} without the mean as its gradient")
            elif gradient.dtype != asked:
                types.append(f"{what}: gradient of the {name} in {gradient.dtype}")
    return types, others
