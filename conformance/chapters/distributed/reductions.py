"""How exact one rank's reductions of sharded tensors are, by their length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from .comparison import all_of

ROWS = 3
LENGTHS = (8, 2000, 8192)
NOT_SHARDED = "not implemented for sharded tensors"
Run = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Reduction:
    """A reduction of the second dimension, and in how many roundings of its result it may come over two ranks.

    Each rank's part is rounded once where parts are added up, and of positive numbers no part is larger than their sum.
    `parallel` asks for loss_parallel. `normal` is for inputs of both signs.
    """

    run: Run
    roundings: int = 1
    parallel: bool = False
    normal: bool = True


REDUCTIONS: dict[str, Reduction] = {
    "log_softmax under loss_parallel": Reduction(lambda x, labels: functional.log_softmax(x, 1), parallel=True),
    # The logarithm of the softmax, the mean over rows, and a sum over ranks.
    "cross_entropy under loss_parallel": Reduction(
        lambda x, labels: functional.cross_entropy(x, labels).reshape(1), roundings=3, parallel=True
    ),
    "cross_entropy by sums under loss_parallel": Reduction(
        lambda x, labels: functional.cross_entropy(x, labels, reduction="sum").reshape(1), roundings=3, parallel=True
    ),
    "log_softmax": Reduction(lambda x, labels: functional.log_softmax(x, 1)),
    "softmax": Reduction(lambda x, labels: functional.softmax(x, 1)),
    "logsumexp": Reduction(lambda x, labels: torch.logsumexp(x, 1), roundings=4),
    "sum": Reduction(lambda x, labels: x.sum(1), roundings=2, normal=False),
    # Squares of the parts' norms, their sum, its root; the root halves what came before.
    "vector_norm": Reduction(lambda x, labels: torch.linalg.vector_norm(x, dim=1), roundings=4),
    "var": Reduction(lambda x, labels: x.var(1), roundings=1),
    "layer_norm": Reduction(lambda x, labels: functional.layer_norm(x, (x.shape[1],)), roundings=2),
}


def errors(name: str, dtype: torch.dtype, seed: int, lengths: int) -> list[str]:
    """Name the lengths of a sharded dimension over which a reduction is further from float64 than it may be.

    It may be as far as the plain tensor's is.
    """
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    reduction = REDUCTIONS[name]
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    found = []
    for length in LENGTHS[:lengths]:
        generator = torch.Generator().manual_seed(seed + length)
        drawn = torch.randn((ROWS, length), generator=generator)
        x = (drawn if reduction.normal else drawn.abs() + 0.5).to(dtype)
        labels = torch.randint(0, length, (ROWS,), generator=generator)
        sharded = distribute_tensor(x.clone(), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel() if reduction.parallel else contextlib.nullcontext():
            try:
                ours = reduction.run(sharded, labels)
            except NotImplementedError as error:  # before any rank waits for another
                return [f"{NOT_SHARDED}: {error}"]
            if "cross_entropy" in name:
                ours.sum().backward()
        (plain, slope), (exact, exact_slope) = (_with_gradient(reduction, one, labels) for one in (x, x.double()))
        seen = all_of(ours).detach()
        # A sum of so many terms in float32, in any order, of a maximal rounding each.
        slack = length * 2.0**-24 * (1 + exact.abs())
        unit = torch.finfo(dtype).eps / 2
        allowed = reduction.roundings * unit * exact.abs() + slack
        allowed = torch.maximum(allowed, (plain.double() - exact).abs())
        if seen.dtype != plain.dtype:
            found.append(f"{length}: {seen.dtype} in place of {plain.dtype}")
        excess = float(((seen.double() - exact).abs() / allowed.clamp_min(1e-300)).max())
        if not excess <= 1:
            found.append(f"{length}: {excess:.3g} times the error that is allowed")
        if "cross_entropy" in name:
            # The exponential of a rounded logarithm, two more roundings, and that of the gradient of the loss.
            least = float(functional.log_softmax(x.double(), 1).abs().max())
            relative = max((least + 3) * unit + length * 2.0**-24, _apart(slope, exact_slope))
            if not _apart(all_of(sharded.grad), exact_slope) <= relative:
                found.append(f"{length}: gradient {_apart(all_of(sharded.grad), exact_slope):.3g} of its norm apart")
    return found


def _with_gradient(reduction: Reduction, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    given = x.clone().requires_grad_()
    result = reduction.run(given, labels)
    result.sum().backward()
    assert given.grad is not None
    return result.detach(), given.grad


def _apart(seen: Tensor, exact: Tensor) -> float:
    return float((seen.double() - exact).norm() / exact.norm())
