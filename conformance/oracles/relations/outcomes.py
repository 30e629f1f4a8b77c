"""Run a program in a region, outside one or with manual casts, with its gradients, and compare the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..numbers.bits import same
from .programs import SIXTEEN_BIT, Program

Region = Callable[[], AbstractContextManager[object]]
Change = Callable[[torch.Tensor], torch.Tensor]

# 64 units of the norm's last place in float32 or wider: kernels may add in another order, by thread or alignment.
_REORDERED = 64


@dataclass(frozen=True)
class Outcome:
    """The tensors that a program returned, the gradients of its float arguments (None: unused), or its exception."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]
    exception: Exception | None

    @property
    def error(self) -> str | None:
        if self.exception is None:
            return None
        return f"{type(self.exception).__name__}: {(str(self.exception).splitlines() or [''])[0]}"

    @property
    def dtypes(self) -> str:
        """The dtypes of the outputs, or the class of the exception."""
        if self.exception is not None:
            return type(self.exception).__name__
        return ", ".join(str(one.dtype).removeprefix("torch.") for one in self.outputs)


def taken(call: Callable[[], object]) -> bool:
    """Return whether a call raises nothing."""
    try:
        call()
    except Exception:
        return False
    return True


def run(
    program: Program,
    region: Region = contextlib.nullcontext,
    *,
    gradients: bool | Collection[int] = False,
    copy: Change = torch.clone,
    weights: Change = torch.ones_like,
    arguments: bool = False,
) -> Outcome:
    """Run a program from seed 0 with autocast as `region` sets it; what torch raises is recorded.

    With `gradients` each floating-point argument, or those at these positions, is a leaf made by `copy`, and the
    gradient of the outputs' sum, with `weights` of each, is taken outside the region, as the documentation recommends;
    its errors are recorded as those of the program. `arguments` adds the floating-point arguments that are no leaves,
    as the program leaves them, to its outputs.
    """
    leaves = list(program.leaves)
    _seed(leaves)
    positions = program.tensors if gradients is True else tuple(gradients or ())
    if gradients is not False:
        for index in program.tensors:
            leaves[index] = copy(leaves[index].detach()).requires_grad_(index in positions)
    try:
        with region():
            result = program.call(leaves)
        outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        found = _gradients(outputs, [leaves[index] for index in positions], weights)
        if arguments:
            outputs += tuple(leaves[index] for index in program.tensors if index not in positions)
    except (RuntimeError, AssertionError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
        return Outcome((), (), error)
    return Outcome(tuple(one.detach() for one in outputs), found, None)


def _seed(leaves: list[Any]) -> None:
    """Seed the generators that the program may use; torch.manual_seed would queue a call for each unused backend."""
    torch.default_generator.manual_seed(0)
    real = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor))
    for device in {leaf.device for leaf in real}:
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).manual_seed(0)


def _gradients(
    outputs: tuple[torch.Tensor, ...], leaves: list[torch.Tensor], weights: Change
) -> tuple[torch.Tensor | None, ...]:
    differentiable = [one for one in outputs if one.requires_grad]
    if not differentiable or not leaves:
        return ()
    return torch.autograd.grad(differentiable, leaves, [weights(one) for one in differentiable], allow_unused=True)


def difference(seen: Outcome, wanted: Outcome, again: Outcome) -> str | None:
    """Return how an outcome differs from the one wanted, or None: dtypes, shapes, which gradients exist, and values.

    16-bit results are compared bit for bit, unless `again`, a repetition of `wanted`, shows that the kernel is not
    deterministic. All else may differ by 64 units in the last place of the norm.
    """
    if seen.error is not None or wanted.error is not None:
        return None if seen.dtypes == wanted.dtypes else f"seen: {seen.error}; expected: {wanted.error}"
    for what, ours, theirs, repeated in (
        ("output", seen.outputs, wanted.outputs, again.outputs),
        ("gradient", seen.gradients, wanted.gradients, again.gradients),
    ):
        if len(ours) != len(theirs):
            return f"{len(ours)} {what}s; expected {len(theirs)}"
        for number, (one, other, more) in enumerate(zip(ours, theirs, repeated, strict=True)):
            text = _tensor_difference(one, other, more)
            if text is not None:
                return f"{what} {number}: {text}"
    return None


def _tensor_difference(
    seen: torch.Tensor | None, wanted: torch.Tensor | None, again: torch.Tensor | None
) -> str | None:
    if seen is None or wanted is None or again is None:
        return None if seen is wanted else f"{_form(seen)}; expected {_form(wanted)}"
    if _form(seen) != _form(wanted):
        return f"{_form(seen)}; expected {_form(wanted)}"
    if isinstance(seen, FakeTensor):
        return None
    if seen.layout is not torch.strided:
        seen, wanted, again = seen.to_dense(), wanted.to_dense(), again.to_dense()
    if seen.numel() == 0 or same(seen, wanted):
        return None
    narrow = seen.dtype in SIXTEEN_BIT
    if not (seen.is_floating_point() or seen.is_complex()) or (narrow and same(wanted, again)):
        return f"values differ by {_distance(seen, wanted):.3g}"
    bound = _REORDERED * torch.finfo(wanted.dtype).eps * float(_finite(wanted).norm())
    distance = _distance(seen, wanted)
    return None if distance <= bound else f"values differ by {distance:.3g}, more than {bound:.3g}"


def _distance(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest distance of two elements, inf where one is not finite and they are not equal."""
    ours, theirs = seen.isfinite(), wanted.isfinite()
    if bool((ours != theirs).any()) or not same(seen[~ours], wanted[~ours]):
        return float("inf")
    return float((_finite(seen) - _finite(wanted)).abs().max())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0.0)


def _form(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
