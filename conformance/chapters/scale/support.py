"""Helpers of the loss scaling checks: scalers in use, iterations, and expected gradients."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from ...harness.check import Case
from ...harness.targets import Target
from ...oracles.trace import counts
from ...oracles.trace.ops import Op
from ...scaler import model as oracle
from ...scaler.model import Gradient
from ...workloads.gradients import NON_FINITE
from ...workloads.third_party_optimizers import Ordinary, give, owning

FORMS = {
    torch.float16: oracle.FP16,
    torch.bfloat16: oracle.BF16,
    torch.float32: oracle.FP32,
    torch.float64: oracle.FP64,
}

EACH_NON_FINITE = pytest.mark.parametrize("bad", NON_FINITE.values(), ids=list(NON_FINITE))

ROUTES = pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-then-step"])


def has_xla() -> bool:
    """Return whether torch_xla is installed: without CUDA, torch then takes CUDA's scaler to be XLA's."""
    return importlib.util.find_spec("torch_xla") is not None


def started(target: Target, **settings: Any) -> torch.amp.GradScaler:
    """Return a scaler whose first scale() has been called, so that its scale tensor exists."""
    scaler = torch.amp.GradScaler(target.device_type, **settings)
    scaler.scale(torch.ones((), device=target.device))
    return scaler


def iterate(scaler: torch.amp.GradScaler, *optimizers: torch.optim.Optimizer, value: float = 1.0) -> None:
    """Run one iteration in which every gradient is `value`, already scaled."""
    for optimizer in optimizers:
        give(optimizer, value)
        scaler.step(optimizer)
    scaler.update()


def tracker(scaler: torch.amp.GradScaler) -> int:
    return int(scaler.state_dict()["_growth_tracker"])


def has_tensor(scaler: torch.amp.GradScaler, name: str) -> bool:
    """Return whether the scaler keeps torch's tensor `_scale` or `_growth_tracker`, which is None before scale().

    A scaler of another maker may keep its state otherwise, and is judged by its effects.
    """
    found = getattr(scaler, name, False)
    return found is None or isinstance(found, torch.Tensor)


def scale_dtype(scaler: torch.amp.GradScaler, device: torch.device) -> torch.dtype | None:
    """Return the type of the tensor `_scale`.

    For a scaler without one it is the type of a scaled 0-dim fp16 output, which is fp32 if the scale is.
    """
    held: torch.Tensor | None
    if has_tensor(scaler, "_scale"):
        held = scaler._scale
    else:
        held = scaler.scale(torch.ones((), dtype=torch.float16, device=device))
    return None if held is None else held.dtype


def expect_traced(case: Case, ops: Iterable[Op]) -> None:
    """Expect that a trace has ops that compute, as a control."""
    work = counts.work(ops)
    case.true("control: the trace saw ops that compute", bool(work), work)


@contextlib.contextmanager
def on_fake_tensors(case: Case) -> Iterator[None]:
    """End the case where a scaler of another maker calls what needs the runtime of a device that is not there.

    Tensor.copy_ and float() do, also of fake tensors, and so does making a tensor there.
    """
    try:
        yield
    except RuntimeError as error:
        runtime = any(words in str(error) for words in ("not linked with support for", "Could not run 'aten::empty"))
        if runtime and "_scale" not in vars(torch.amp.GradScaler("cpu")):
            case.untestable(f"this GradScaler calls an op that fake tensors do not run: {error}")
        raise


def track(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, pattern: str) -> list[tuple[float, int]]:
    """Return the scale and the tracker after each iteration of `pattern`: "." is clean, "!" overflows."""
    seen = []
    for letter in pattern:
        iterate(scaler, optimizer, value=math.inf if letter == "!" else 1.0)
        seen.append((scaler.get_scale(), tracker(scaler)))
    return seen


def as_gradient(tensor: torch.Tensor) -> Gradient:
    return Gradient(tuple(tensor.detach().flatten().tolist()), FORMS[tensor.dtype])


def as_tensor(gradient: Gradient, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(gradient.values, dtype=like.dtype).reshape(like.shape)


def expected_unscaled(tensor: torch.Tensor, scale: float, seen: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as the exact model unscales it, on the CPU: in the way that was `seen`, or as torch does it."""
    ways = [as_tensor(one, tensor) for one in oracle.unscalings(as_gradient(tensor), scale)]
    return next((one for one in ways if torch.equal(seen.detach().cpu(), one)), ways[0])


SETTINGS = {"init_scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}


def contiguous(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clone()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # 24 numbers in one layout each, on the device of the argument
    "vector": contiguous,
    "transposed": lambda numbers: numbers.reshape(4, 6).t().contiguous().t(),
    "every-other": lambda numbers: torch.stack([numbers, torch.full_like(numbers, 7.0)], 1).flatten()[::2],
    "offset": lambda numbers: torch.cat([torch.full_like(numbers[:1], 7.0), numbers])[1:],
    "channels-last": lambda numbers: numbers.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "column": lambda numbers: torch.stack([numbers, torch.full_like(numbers, 7.0)], 1)[:, 0],
}


def sparse(values: list[float], dtype: torch.dtype, target: Target, *, coalesced: bool) -> torch.Tensor:
    """Return a sparse vector of 8 numbers; if not `coalesced`, every value is at index 2."""
    indices = [list(range(len(values)))] if coalesced else [[2] * len(values)]
    made = torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (8,), check_invariants=True)
    return (made.coalesce() if coalesced else made).to(target.device, copy=True)


def in_use(target: Target) -> tuple[torch.amp.GradScaler, Ordinary]:
    return started(target, growth_interval=2), owning(torch.full((2,), 65536.0, device=target.device))


RESUMED = {"scale": 96.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "_growth_tracker": 1}

DUPLICATES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
}


def raises_error(call: Callable[..., object], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except (RuntimeError, TypeError):
        return True
    return False
