"""Gradients of some of the operands of normalizations and convolutions, computed in a process that they may end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Op = Callable[[Tensor, Tensor, Tensor], Tensor]
PICTURES = (2, 4, 3, 5)
VOLUMES = (2, 4, 2, 3, 3)
# Of pictures or volumes, a weight and a bias: the op and the shapes of these two.
OPS: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...]]] = {
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (4,), (4,)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (4,), (4,)),
    "evaluated batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros_like(b), torch.full_like(b, 2), w, b),
        (4,),
        (4,),
    ),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (4,), (4,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w[: x.shape[-1]], b[: x.shape[-1]]), (5,), (5,)),
    "prelu": (lambda x, w, b: F.prelu(x, w) + b[0], (4,), (1,)),
    "linear": (lambda x, w, b: F.linear(x, w[:, : x.shape[-1]], b), (3, 5), (3,)),
    "conv2d": (F.conv2d, (3, 4, 2, 2), (3,)),
    "depthwise conv2d": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (4, 1, 2, 2), (4,)),
    "conv_transpose2d": (F.conv_transpose2d, (4, 3, 2, 2), (3,)),
    "conv3d": (F.conv3d, (3, 4, 2, 2, 2), (3,)),
}
# Of pictures and of volumes.
LAYOUTS = {
    "contiguous": (torch.contiguous_format, torch.contiguous_format),
    "channels last": (torch.channels_last, torch.channels_last_3d),
}
OPERANDS = ("input", "weight", "bias")
SETS = [chosen for count in (1, 2) for chosen in itertools.combinations(range(3), count)]
END = "the end"


def _calls(amp_dtype: torch.dtype) -> Iterator[tuple[str, Op, tuple[Tensor, ...], Any]]:
    """Yield what a call is, the op, its operands, and how its region opens."""
    rng = torch.Generator().manual_seed(0)
    in_region = partial(torch.autocast, "cpu", dtype=amp_dtype)
    kinds = {
        "float32": (torch.float32, contextlib.nullcontext),
        "16 bits": (amp_dtype, contextlib.nullcontext),
        "a region": (torch.float32, in_region),
    }
    for (name, (op, *shapes)), (where, layouts), kind in itertools.product(OPS.items(), LAYOUTS.items(), kinds):
        shape, layout = (VOLUMES, layouts[1]) if name == "conv3d" else (PICTURES, layouts[0])
        dtype, region = kinds[kind]
        x = torch.randn(shape, generator=rng).to(dtype).contiguous(memory_format=layout)
        parameters = [(torch.randn(one, generator=rng) / 2).to(dtype) for one in shapes]
        yield f"{name}, {where}, {kind}", op, (x, *parameters), region


def _gradients(op: Op, given: tuple[Tensor, ...], region: Any, wanted: tuple[int, ...]) -> dict[int, Tensor]:
    leaves = [one.detach().requires_grad_(place in wanted) for place, one in enumerate(given)]
    with region():
        result = op(*leaves)
    incoming = (torch.arange(result.numel()) % 7 - 3).view(result.shape).to(result.dtype)
    found = torch.autograd.grad(result, [leaves[place] for place in wanted], incoming)
    return {place: one.double() for place, one in zip(wanted, found, strict=True)}


def send(amp_dtype: torch.dtype, skipped: Collection[str], sender: Any) -> None:
    """Send each call before it is made; then how far its gradients are from those among all of them, or its error."""
    torch.set_num_threads(1)
    for call, op, given, region in _calls(amp_dtype):
        whole = None
        for wanted in SETS:
            name = f"{call}: {' and '.join(OPERANDS[place] for place in wanted)}"
            if name in skipped:
                continue
            sender.send((name, None))
            try:
                if whole is None:
                    whole = _gradients(op, given, region, tuple(range(3)))
                found = _gradients(op, given, region, wanted)
            except Exception as error:
                sender.send((name, str(error).splitlines()[0]))
                continue
            errors = [float((one - whole[place]).norm() / whole[place].norm()) for place, one in found.items()]
            sender.send((name, max(errors, key=lambda error: (error != error, error))))
    sender.send((END, None))
