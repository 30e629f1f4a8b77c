"""Check what an error in a checkpointed segment, that is caught and kept, leaves behind, and the step after it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.generators import seed_torch
from .support import gradients, plain


class RejectedBatchError(RuntimeError):
    """What a user's segment raises; a caller catches it and keeps it, such as in a list of errors."""


class Segment(torch.nn.Module):
    """Two layers with dropout between them, of which a call fails once at the place that `failing` names."""

    def __init__(self, target: Target, rng: torch.Generator) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.failing: str | None = None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
        self.to(target.device)

    def fail(self, place: str) -> None:
        if self.failing == place:
            self.failing = None
            raise RejectedBatchError(place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fail("at the start")
        hidden = functional.dropout(self.first(x).sin(), 0.4)
        self.fail("in the middle")
        result: torch.Tensor = self.second(hidden).sin()
        self.fail("at the end")
        return result


Call = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


class Surroundings:
    """Contexts and policies of checkpoints that note what goes on: the open ones, and the ops that were asked for."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.asked = 0

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        self.open.append(name)
        try:
            yield
        finally:
            self.open.remove(name)

    def contexts(self) -> tuple[Any, Any]:
        return self._noted("forward"), self._noted("recomputation")

    def policy(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return getattr(checkpointing.CheckpointPolicy, "MUST_SAVE" if kept else "PREFER_RECOMPUTE")


def _nested(outside: bool, inside: bool, around: Surroundings) -> Call:
    inner = functools.partial(checkpoint, use_reentrant=inside)
    return lambda part, x: checkpoint(functools.partial(inner, part), x, use_reentrant=outside)


def _selective(around: Surroundings) -> Call:
    contexts = functools.partial(checkpointing.create_selective_checkpoint_contexts, around.policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


KINDS: Mapping[str, Callable[[Surroundings], Call]] = {
    "reentrant": lambda around: functools.partial(checkpoint, use_reentrant=True),
    "other": lambda around: functools.partial(checkpoint, use_reentrant=False),
    "contexts": lambda around: functools.partial(checkpoint, use_reentrant=False, context_fn=around.contexts),
    "selective": _selective,
    "reentrant-in-reentrant": functools.partial(_nested, True, True),
    "other-in-reentrant": functools.partial(_nested, True, False),
    "reentrant-in-other": functools.partial(_nested, False, True),
    "other-in-other": functools.partial(_nested, False, False),
}


def state(target: Target) -> dict[str, Any]:
    """Return the state of this thread, with random numbers that follow."""
    kind = target.device_type
    return {
        "autocast": torch.is_autocast_enabled(kind),
        "autocast dtype": torch.get_autocast_dtype(kind),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "random numbers": torch.rand(2).tolist(),
        "random numbers of the device": torch.rand(2, device=target.device).tolist(),
    }


def step(segment: Segment, x: torch.Tensor, region: Callable[[], Any], call: Call) -> dict[str, Any]:
    """Return output and gradients of a step from a fixed random state, or the error that it raised."""
    seed_torch(5)
    try:
        with region():
            output = call(segment, x)
            loss = functional.mse_loss(output.float(), torch.ones_like(x), reduction="sum")
        loss.backward()
    except Exception as error:
        gradients({"x": x, **dict(segment.named_parameters())})
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    taken = gradients({"x": x, **dict(segment.named_parameters())})
    return {name: (value.dtype, value.tolist()) for name, value in {"output": output.detach(), **taken}.items()}


def attempt(
    segment: Segment, x: torch.Tensor, region: Callable[[], Any], call: Call, place: str, ahead: bool, around: bool
) -> RejectedBatchError | None:
    """Return the error of a step that fails at `place`, in forward (`ahead`) or in the recomputation.

    It is caught in the region or `around` it.
    """
    seed_torch(3)
    segment.failing = place if ahead else None
    caught: RejectedBatchError | None = None

    def compute() -> torch.Tensor | None:
        nonlocal caught
        try:
            return call(segment, x)
        except RejectedBatchError as error:
            caught = error
            if around:
                raise
            return None

    output: torch.Tensor | None = None
    with contextlib.suppress(RejectedBatchError), region():
        output = compute()
    if output is None:
        return caught
    segment.failing = None if ahead else place
    for device in ("cpu", x.device):  # a training loop may generate random numbers in between
        torch.rand(3, device=device)
    try:
        output.float().sum().backward()
    except RejectedBatchError as error:
        caught = error
    segment.failing = None
    gradients({"x": x, **dict(segment.named_parameters())})
    return caught


def different(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    if "error" in seen:
        return [str(seen["error"])]
    return sorted(name for name in {*seen, *expected} if seen.get(name) != expected.get(name))


@contract("AMP-BACKWARD-088")
@pytest.mark.parametrize("kind", KINDS)
def test_failed_checkpoints(case: Case, kind: str, target: Target, rng: torch.Generator) -> None:
    places = ["in the middle"] if case.level == "quick" else ["at the start", "in the middle", "at the end"]
    failed = 0
    left: dict[str, list[str]] = {"state": [], "contexts": [], "step": [], "checkpointed step": []}
    for dtype, place, ahead, around in itertools.product(case.supported(target), places, (True, False), (True, False)):
        segment = Segment(target, rng)
        x = torch.randn(4, 8, generator=rng).to(target.device).requires_grad_()
        # A reentrant forward is one without gradients, of which later parts of the region see the cached casts.
        region = functools.partial(target.autocast, dtype, cache_enabled=around)
        noted = Surroundings()
        call = KINDS[kind](noted)
        which = (
            f"{dtype}, {place} of {'forward' if ahead else 'the recomputation'}, {'outside' if around else 'inside'}"
        )
        expected = step(segment, x, region, plain)
        attempt(segment, x, region, plain, place, ahead, around)
        promised = state(target)
        error = attempt(segment, x, region, call, place, ahead, around)
        try:
            # A recomputation ends as soon as it has what it needs.
            failed += error is not None or place == "at the end"
            asked = noted.asked
            if wrong := different(state(target), promised):
                left["state"].append(f"{which}: {', '.join(wrong)}")
            if wrong := different(step(segment, x, region, plain), expected):
                left["step"].append(f"{which}: {', '.join(wrong)}")
            if noted.open or noted.asked != asked:
                left["contexts"].append(f"{which}: {noted.open}, asked for {noted.asked - asked} ops of another step")
            if wrong := different(step(segment, x, region, call), expected):
                left["checkpointed step"].append(f"{which}: {', '.join(wrong)}")
        finally:
            if error is not None:  # its frames, which hold the error, may hold what the checkpoint left open
                error.__traceback__ = None
    tried = len(case.supported(target)) * len(places) * 4
    case.equal("attempts that failed as they should", failed, tried)
    case.equal("states after a failed attempt unlike those after one without a checkpoint", left["state"][:3], [])
    case.equal("contexts that a failed attempt left open", left["contexts"][:3], [])
    case.equal("next steps, without a checkpoint, that differ", left["step"][:3], [])
    case.equal("next steps, with a checkpoint, that differ", left["checkpointed step"][:3], [])
