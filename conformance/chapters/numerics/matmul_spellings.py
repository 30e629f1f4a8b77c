"""Ways to call a matrix product, and its three outputs: the result and two gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def integers(rng: torch.Generator, size: int, *shape: int) -> Tensor:
    """Return a float32 CPU tensor of integers from -`size` to `size`."""
    return torch.randint(-size, size + 1, shape, generator=rng).float()


def _module_linear(left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    layer = torch.nn.Linear(*right.shape, device=left.device)
    return torch.func.functional_call(layer, {"weight": right.t(), "bias": bias}, (left,))


# (m, k) times (k, n), plus what is added (n): each spelling leads to a kernel, a view or a cast of its own.
PLAIN: dict[str, dict[str, Product]] = {
    "functions": {
        "torch.mm": lambda left, right, bias: torch.mm(left, right),
        "torch.matmul": lambda left, right, bias: torch.matmul(left, right),
        "linalg.matmul": lambda left, right, bias: torch.linalg.matmul(left, right),
        "F.linear": lambda left, right, bias: F.linear(left, right.t()),
        "linalg.multi_dot": lambda left, right, bias: torch.linalg.multi_dot([left, right]),
        "inner": lambda left, right, bias: torch.inner(left, right.t()),
        "tensordot": lambda left, right, bias: torch.tensordot(left, right, dims=1),
        "einsum": lambda left, right, bias: torch.einsum("ik,kj->ij", left, right),
        "einsum, turned": lambda left, right, bias: torch.einsum("ik,kj->ji", left, right).t(),
        "matmul, vectors": lambda left, right, bias: torch.stack(
            [torch.matmul(left, column) for column in right.unbind(1)[:2]], 1
        ),
    },
    "methods": {
        "Tensor.mm": lambda left, right, bias: left.mm(right),
        "Tensor.matmul": lambda left, right, bias: left.matmul(right),
        "@": lambda left, right, bias: left @ right,
        "__rmatmul__": lambda left, right, bias: right.__rmatmul__(left),
        "@, vectors": lambda left, right, bias: torch.stack([left @ column for column in right.unbind(1)[:2]], 1),
    },
    "batched": {
        "bmm": lambda left, right, bias: torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[1],
        "Tensor.bmm": lambda left, right, bias: left.unsqueeze(0).bmm(right.unsqueeze(0))[0],
        "matmul, 3 by 2 dimensions": lambda left, right, bias: torch.matmul(left.unsqueeze(0), right)[0],
        "matmul, 2 by 3 dimensions": lambda left, right, bias: torch.matmul(left, right.expand(2, -1, -1))[0],
        "matmul, broadcast": lambda left, right, bias: torch.matmul(left.expand(2, 1, -1, -1), right)[1, 0],
        "matmul, rows alone": lambda left, right, bias: torch.stack([row @ right for row in left.unbind(0)[:2]]),
        "linear, 3 dimensions": lambda left, right, bias: F.linear(left.unsqueeze(1), right.t())[:, 0],
        "einsum, batched": lambda left, right, bias: torch.einsum(
            "bik,bkj->bij", left.expand(2, -1, -1), right.expand(2, -1, -1)
        )[0],
    },
    "convolutions": {
        "conv1d": lambda left, right, bias: F.conv1d(left[..., None], right.t()[..., None]).flatten(1),
        "conv2d": lambda left, right, bias: F.conv2d(left[..., None, None], right.t()[..., None, None]).flatten(1),
        "conv3d": lambda left, right, bias: F.conv3d(
            left[..., None, None, None], right.t()[..., None, None, None]
        ).flatten(1),
        "conv2d over places": lambda left, right, bias: (
            F.conv2d(left.t()[None, :, None], right.t()[..., None, None]).flatten(2)[0].t()
        ),
        "conv_transpose1d": lambda left, right, bias: F.conv_transpose1d(left[..., None], right[..., None]).flatten(1),
        "conv_transpose2d": lambda left, right, bias: F.conv_transpose2d(
            left[..., None, None], right[..., None, None]
        ).flatten(1),
    },
}
# The same with a bias that is added before the one rounding.
BIASED: dict[str, Product] = {
    "F.linear": lambda left, right, bias: F.linear(left, right.t(), bias),
    "nn.Linear": _module_linear,
    "torch.addmm": lambda left, right, bias: torch.addmm(bias, left, right),
    "Tensor.addmm": lambda left, right, bias: bias.expand(len(left), -1).addmm(left, right),
    "baddbmm": lambda left, right, bias: torch.baddbmm(bias.expand(1, 1, -1), left[None], right[None])[0],
    "addbmm": lambda left, right, bias: torch.addbmm(bias.expand(len(left), -1), left[None], right[None]),
}


# 16-bit operands without gradients: into a tensor that is there, or into what is added.
STORED: dict[str, tuple[Product, bool]] = {
    "mm, out=": (lambda left, right, bias: torch.mm(left, right, out=_room(left, right)), False),
    "matmul, out=": (lambda left, right, bias: torch.matmul(left, right, out=_room(left, right)), False),
    "bmm, out=": (lambda left, right, bias: torch.bmm(left[None], right[None], out=_room(left, right)[None])[0], False),
    "addmm, out=": (lambda left, right, bias: torch.addmm(bias, left, right, out=_room(left, right)), True),
    "addmm_": (lambda left, right, bias: bias.repeat(len(left), 1).addmm_(left, right), True),
    "baddbmm_": (lambda left, right, bias: bias.repeat(1, len(left), 1).baddbmm_(left[None], right[None])[0], True),
    "addbmm_": (lambda left, right, bias: bias.repeat(len(left), 1).addbmm_(left[None], right[None]), True),
    "into columns": (
        lambda left, right, bias: torch.mm(left, right, out=_room(right.t(), left.t()).t()),
        False,
    ),
}


def _room(left: Tensor, right: Tensor) -> Tensor:
    return torch.full((len(left), right.shape[1]), 7.0, dtype=left.dtype, device=left.device)


PLACES = ("result", "gradient of left", "gradient of right")


def through(
    product: Product, place: str, left: Tensor, right: Tensor, region: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """Return `left` @ `right`, (m, k) times (k, n), as the result of `product` or as the gradient of an operand.

    Of A B the gradient at A is G B', at B it is A' G: `left` and `right` are what the factors are made of. `region` is
    entered for the forward only, as autocast is; a gradient arrives in the type of its leaf, fp32.
    """
    if place == "result":
        with region():
            return product(left, right, torch.zeros(right.shape[1], device=left.device))
    leaf = torch.zeros(len(left), right.shape[1], device=left.device, requires_grad=True)
    first, second, seed = (leaf, right.t(), left) if place == "gradient of left" else (left.t(), leaf, right)
    with region():
        seen = product(first, second, torch.zeros(second.shape[1], device=left.device))
    seen.backward(seed.to(seen.dtype))
    assert leaf.grad is not None
    return leaf.grad
