"""Check that what an op saves for backward comes back as it was, of every size, from hooks, host and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target

Context = contextlib.AbstractContextManager[Any]


class BothKept(torch.autograd.Function):
    """Saves its input x and its output -x, and returns them as the gradients of its other two inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        made = x.negative()
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None, *ctx.saved_tensors)


def products(x: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs whose gradients, from ones, are for the three leaves x, x and -x: what the ops save."""
    weight, first, second = leaves
    return x * weight, BothKept.apply(x, first, second)


def to_host() -> Context:
    return graph.saved_tensors_hooks(lambda x: (x.device, x.cpu()), lambda kept: kept[1].to(kept[0]))


def copied() -> Context:
    return graph.saved_tensors_hooks(torch.clone, lambda kept: kept)


@contextlib.contextmanager
def within_other_hooks() -> Iterator[None]:
    """save_on_cpu within hooks that keep nothing: the innermost pair applies."""
    with graph.saved_tensors_hooks(lambda x: None, lambda kept: torch.zeros(())), graph.save_on_cpu():
        yield


def pinned() -> Context:
    return graph.save_on_cpu(pin_memory=True)


# Names of ways to keep tensors: the context of forward, and what runs the program.
Way = tuple[Callable[[], Context], Callable[..., Any]]
CHECKPOINT, REENTRANT = (functools.partial(checkpoint, products, use_reentrant=flag) for flag in (False, True))
WAYS: dict[str, Way] = {
    "save_on_cpu": (graph.save_on_cpu, products),
    "save_on_cpu with pinned memory": (pinned, products),
    "save_on_cpu in other hooks": (within_other_hooks, products),
    "hooks that copy to the host": (to_host, products),
    "hooks that clone": (copied, products),
    "a checkpoint": (contextlib.nullcontext, CHECKPOINT),
    "a reentrant checkpoint": (contextlib.nullcontext, REENTRANT),
    "a checkpoint in save_on_cpu": (graph.save_on_cpu, CHECKPOINT),
}

# Each makes a tensor of all or some of the elements of a vector.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "of no dimension": lambda x: x[-1] if x.numel() else x.sum(),
    "every other element": lambda x: x[::2],
    "transposed": lambda x: x[: x.numel() // 2 * 2].view(2, -1).t(),
    "a part": lambda x: x[1:],
    "expanded": lambda x: x[: x.numel() // 3].expand(3, -1),
    "channels last": lambda x: x[: x.numel() // 4 * 4].view(1, 2, -1, 2).to(memory_format=torch.channels_last),
}


def sizes(case: Case, rng: torch.Generator) -> list[int]:
    """Return numbers of elements below, at and above each power of two up to 2**16; one of the three at quick."""
    chosen = [0, 1]
    for power in range(2, 17):
        near = torch.randperm(3, generator=rng)[: case.samples(quick=1, standard=3, full=3)]
        chosen += [2**power - 1 + step for step in near.tolist()]
    return [*chosen, 2**16 + 1]


@contract("AMP-BACKWARD-049")
def test_saved_tensors_of_every_size(case: Case, target: Target, rng: torch.Generator) -> None:
    """In a region and outside, which is opened before the hooks and after them, in fp32 and 16 bits."""
    low = case.supported(target)
    wrong, compared = [], 0
    chosen, numbers = sizes(case, rng), torch.randn(2**16 + 1, generator=rng)
    of_type = {dtype: numbers.to(dtype).to(target.device) for dtype in (torch.float32, *low)}
    other_forms = [*FORMS][1:]
    for (way, (hooks, run)), (dtype, whole) in itertools.product(WAYS.items(), of_type.items()):
        if way == "save_on_cpu with pinned memory" and target.device_type not in ("cpu", "cuda"):
            continue  # by default its memory is pinned for CUDA
        # By turns contiguous and of another form; two sizes in a region, two outside.
        first = int(torch.randint(4, (), generator=rng))
        for number, size in enumerate(chosen, first):
            form = other_forms[int(torch.randint(len(other_forms), (), generator=rng))] if number % 2 else "contiguous"
            region = target.autocast(dtype if dtype in low else low[0])
            inside = number // 2 % 2 == 1
            contexts = ([hooks(), region] if number % 3 else [region, hooks()]) if inside else [hooks()]
            x = FORMS[form](whole[:size])
            leaves = [torch.zeros_like(x, requires_grad=True) for _ in range(3)]
            with contextlib.ExitStack() as around:
                for context in contexts:
                    around.enter_context(context)
                made = run(x, *leaves)
            torch.autograd.backward(made, [torch.ones_like(one) for one in made])
            for leaf, exact in zip(leaves, (x, x, -x), strict=True):
                compared += 1
                if leaf.grad is None or leaf.grad.dtype != dtype or not torch.equal(leaf.grad, exact):
                    wrong.append(f"{way}, {dtype}, {size} elements, {form}, {'in a region' if inside else 'outside'}")
    case.note("saved tensors compared", compared)
    case.equal("saved tensors that come back with other bits", wrong[:3], [])
    doubled = graph.saved_tensors_hooks(lambda x: x, lambda kept: kept * 2)
    x = of_type[torch.float32]
    leaves = [torch.zeros_like(x, requires_grad=True) for _ in range(3)]
    with doubled:
        made = products(x, *leaves)
    torch.autograd.backward(made, [torch.ones_like(one) for one in made])
    for leaf, exact in zip(leaves, (x, x, -x), strict=True):
        assert leaf.grad is not None
        case.identical("control: the gradient is what hooks return", leaf.grad, exact * 2)
