"""What one rank computes of losses, reductions and modules' ops on DTensors in each placement of their operands."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from .comparison import all_of

ROWS, COLUMNS = 4, 8
Run = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """An op, the shapes of its operands and how many roundings of its type two right answers may be apart.

    Operands are small integers, and sums and products of few of them, so that most ops round nowhere. `classes` is the
    number of values of a last operand of indices.
    """

    run: Run
    shapes: Sequence[tuple[int, ...]]
    roundings: int = 0
    classes: int = 0


_PAIR = ((ROWS, COLUMNS), (ROWS, COLUMNS))


def _of_signs(y: Any) -> Any:
    return 1 - 2 * (y > 0).to(y.dtype)


def _of_probabilities(y: Any) -> Any:
    return (y.abs() + 1) / 2


def _of_numbers(y: Any) -> Any:
    return y


# What the second operand is made into, and roundings.
_LOSSES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "mse_loss": (_of_numbers, 0),
    "l1_loss": (_of_numbers, 0),
    "smooth_l1_loss": (_of_numbers, 0),
    "huber_loss": (_of_numbers, 0),
    "soft_margin_loss": (_of_signs, 16),
    "hinge_embedding_loss": (_of_signs, 0),
    "binary_cross_entropy_with_logits": (_of_probabilities, 16),
    "poisson_nll_loss": (_of_numbers, 16),
    "kl_div": (_of_probabilities, 16),
}


def _loss(name: str, how: str) -> Op:
    made, roundings = _LOSSES[name]
    return Op(lambda x, y: getattr(functional, name)(x, made(y), reduction=how), _PAIR, roundings)


LOSSES = {f"{name}, {how}": _loss(name, how) for name in _LOSSES for how in ("mean", "sum", "none")}


def _cross_entropy(x: Any, labels: Any, how: str) -> Any:
    return functional.cross_entropy(x, labels, reduction=how)


LOSSES |= {
    f"cross_entropy, {how}": Op(partial(_cross_entropy, how=how), ((ROWS, COLUMNS), (ROWS,)), 16, classes=COLUMNS)
    for how in ("mean", "sum", "none")
}


def _over(name: str, dim: int | None, roundings: int = 0, **options: Any) -> Op:
    def run(x: Any) -> Any:
        return getattr(torch, name)(x, **({} if dim is None else {"dim": dim}), **options)

    return Op(run, _PAIR[:1], roundings)


REDUCTIONS = {
    f"{name} over {'all' if dim is None else f'dimension {dim}'}": _over(name, dim, count)
    for name, count in {
        "sum": 0,
        "mean": 0,
        "amax": 0,
        "amin": 0,
        "var": 16,
        "std": 16,
        "norm": 16,
        "logsumexp": 16,
        "cumsum": 0,
    }.items()
    for dim in (None, 0, 1)
    if dim is not None or name not in ("logsumexp", "cumsum", "amax", "amin")
}

_MATRIX, _IMAGE = (ROWS, COLUMNS), (2, 2, 4, 4)
MODULES: dict[str, Op] = {
    "matmul": Op(torch.matmul, (_MATRIX, (COLUMNS, ROWS))),
    "bmm": Op(torch.bmm, ((2, 4, 4), (2, 4, 4))),
    "addmm": Op(torch.addmm, ((4, 4), _MATRIX, (COLUMNS, 4))),
    "linear": Op(lambda x, w, b: functional.linear(x, w, b), (_MATRIX, (ROWS, COLUMNS), (ROWS,))),
    "conv1d": Op(lambda x, w: functional.conv1d(x, w, padding=1), ((2, 2, 8), (4, 2, 3))),
    "conv2d": Op(functional.conv2d, (_IMAGE, (4, 2, 3, 3))),
    "conv2d with padding": Op(lambda x, w: functional.conv2d(x, w, padding=1), (_IMAGE, (2, 2, 3, 3))),
    "conv2d with a bias": Op(functional.conv2d, (_IMAGE, (2, 2, 1, 1), (2,))),
    "avg_pool2d": Op(lambda x: functional.avg_pool2d(x, 2), (_IMAGE,)),
    "max_pool2d": Op(lambda x: functional.max_pool2d(x, 2), (_IMAGE,)),
    "embedding": Op(lambda w, where: functional.embedding(where, w), (_MATRIX, (2, 4)), classes=ROWS),
    "layer_norm": Op(lambda x, w, b: functional.layer_norm(x, (8,), w, b), (_MATRIX, (8,), (8,)), 32),
    "softmax": Op(lambda x: functional.softmax(x, 1), (_MATRIX,), 16),
    "softmax of rows": Op(lambda x: functional.softmax(x, 0), (_MATRIX,), 16),
    "gelu": Op(functional.gelu, (_MATRIX,), 16),
}

EVERY = {"losses": LOSSES, "reductions": REDUCTIONS, "modules": MODULES}
ALWAYS = {"losses": "mse_loss, mean", "reductions": "mean over all", "modules": "conv2d"}
"""The op of each kind that every run has, whatever the seed draws."""


def _operands(op: Op, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(-1, 2, shape, generator=generator).to(dtype) for shape in op.shapes]
    if op.classes:
        found[-1] = torch.randint(0, op.classes, op.shapes[-1], generator=generator)
    return found


def _placements(op: Op) -> list[tuple[Any, ...]]:
    """Return each placement of each operand: replicas, and shards of each dimension that the ranks divide evenly."""
    from torch.distributed.tensor import Replicate, Shard

    world = distributed.get_world_size()
    first = op.shapes[0]
    each = [
        # The window of a convolution is of no use in parts.
        [Replicate(), *(Shard(dim) for dim, size in enumerate(one) if size % world == 0 and (one is first or dim < 2))]
        for one in op.shapes
    ]
    return list(itertools.product(*each))


def _sums(op: Op) -> list[tuple[Any, ...]]:
    """Return the placement of a sum over ranks beside replicas."""
    from torch.distributed.tensor import Partial, Replicate

    return [(Partial(), *(Replicate() for _ in op.shapes[1:]))]


def _placed(whole: Tensor, mesh: Any, place: Any) -> Any:
    """Return a DTensor of the values of `whole`, which is a leaf that requires a gradient if it can have one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if place.is_partial():
        rank, other = distributed.get_rank(), whole.roll(1, 0)
        part = (other, whole - other)[rank] if rank < 2 else torch.zeros_like(whole)
        made = DTensor.from_local(part, mesh, [place], run_check=False)
    else:
        made = distribute_tensor(whole.clone(), mesh, [place])
    return made.requires_grad_(whole.is_floating_point())


def _results(op: Op, operands: Sequence[Any], region: torch.dtype | None, through: Any) -> dict[str, Any]:
    """Return the result and the gradients of it, or of a sum of it times small numbers."""
    first, *others = operands
    with torch.autocast("cpu", dtype=region) if region else contextlib.nullcontext():
        out = op.run(first if through is None else first @ through, *others)
    result = all_of(out)
    if out.dim() == 0:
        out.backward()
    else:
        (result * torch.arange(result.numel()).remainder(3).reshape(result.shape)).sum().backward()
    theirs = {f"gradient {number}": one.grad for number, one in enumerate(operands) if one.is_floating_point()}
    return {"result": result.detach(), **{name: None if one is None else all_of(one) for name, one in theirs.items()}}


def _unlike(name: str, ours: Any, right: Any, allowed: float) -> list[str]:
    if ours is None or right is None:
        return [] if ours is right else [f"{name} is there only in one"]
    if (ours.dtype, ours.shape) != (right.dtype, right.shape):
        return [f"{name} is {ours.dtype} {tuple(ours.shape)} in place of {right.dtype} {tuple(right.shape)}"]
    most = float(right.abs().max())
    apart = float((ours.double() - right.double()).abs().max())
    return [] if apart <= allowed * most else [f"{name} is {apart:.4g} off, of at most {most:.4g}"]


def _computes(op: Op, operands: Sequence[Any], through: Any) -> bool:
    """Return whether an op takes its operands, as they are placed, without a region."""
    try:
        _results(op, operands, None, through)
    except Exception:  # of whatever kind
        return False
    return True


def unlike_one_process(
    kind: str, names: Sequence[str], dtype: torch.dtype, region: torch.dtype | None, seed: int, sums: bool
) -> dict[str, tuple[int, list[str]]]:
    """Return by op how many placements of its operands were computed, and where they differ from one process.

    Operands are of `dtype`; in a region the first operand of losses and reductions is a product of 16 bits. With `sums`
    it is a sum over ranks. Placements that DTensors refuse are left out, and so are ops that plain tensors refuse.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    found = {}
    for name in names:
        op = EVERY[kind][name]
        given = _operands(op, dtype, seed)
        eye = torch.eye(op.shapes[0][-1], dtype=dtype) if region and kind != "modules" else None
        through = None if eye is None else distribute_tensor(eye, mesh, [Replicate()])
        try:
            plain = _results(op, [one.clone().requires_grad_(one.is_floating_point()) for one in given], region, eye)
        except RuntimeError:  # no kernel for this type
            continue
        allowed = op.roundings * torch.finfo(region or dtype).eps
        computed, wrong = 0, []
        for places in _sums(op) if sums else _placements(op):
            try:
                operands = [_placed(one, mesh, place) for one, place in zip(given, places, strict=True)]
            except Exception:  # of whatever kind: there is no such placement
                continue
            try:
                seen = _results(op, operands, region, through)
            except Exception as error:  # a kernel that refuses a part raises what it likes
                if region is not None and _computes(op, operands, through):
                    wrong.append(f"{', '.join(map(str, places))}: raises in a region alone: {error!r}"[:200])
                continue
            computed += 1
            differences = [one for part, right in plain.items() for one in _unlike(part, seen[part], right, allowed)]
            wrong += [f"{', '.join(map(str, places))}: {one}" for one in differences]
        found[name] = computed, wrong
    return found
