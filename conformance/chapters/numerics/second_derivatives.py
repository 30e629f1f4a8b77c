"""Second derivatives of ops in 16 bits, each term of them alone, by each order of modes, and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Twice:
    """An op that is differentiated twice, and the shapes of its operands, all of which learn.

    The one operand is `at` numbers that matter, where they are given, and not drawn.
    """

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    at: tuple[float, ...] = ()

    def operands(self, rng: torch.Generator) -> list[Tensor]:
        """Return the operands in float32."""
        if self.at:
            return [torch.tensor(self.at).view(self.shapes[0])]
        return [torch.randn(shape, generator=rng) for shape in self.shapes]


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the one that can be differentiated twice
        return F.scaled_dot_product_attention(q, k, v, **options)


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


_X = ((5, 6),)
# Lambdas where a name alone would do look the function up when it is called: it may be replaced after the import.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x),
    "logsigmoid": F.logsigmoid,
    "tanh": lambda x: torch.tanh(x),
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "glu": lambda x: F.glu(x, -1),
    "relu of a square": lambda x: F.relu(x).square(),
    "exp": torch.exp,
    "square": torch.square,
    "pow": lambda x: (x.square() + 1).pow(1.5),
    "rsqrt": lambda x: (x.square() + 1).rsqrt(),
    "log": lambda x: (x.square() + 1).log(),
    "sin": lambda x: torch.sin(x),
    "erf": torch.erf,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax in float32": lambda x: F.softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32)),
    "log_softmax in float32": lambda x: F.log_softmax(x, -1, dtype=torch.promote_types(x.dtype, torch.float32)),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "prod": lambda x: (x.square() + 0.5).prod(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}
CONVOLUTIONS: dict[str, Twice] = {
    "conv1d": Twice(F.conv1d, ((2, 3, 7), (4, 3, 3), (4,))),
    "conv1d of groups": Twice(lambda x, w, b: F.conv1d(x, w, b, padding=1, groups=2), ((2, 4, 6), (6, 2, 3), (6,))),
    "conv1d depthwise": Twice(lambda x, w: F.conv1d(x, w, stride=2, groups=4), ((2, 4, 7), (4, 1, 3))),
    "conv1d dilated": Twice(lambda x, w, b: F.conv1d(x, w, b, dilation=2), ((2, 3, 7), (4, 3, 3), (4,))),
    "conv2d": Twice(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), ((2, 3, 5, 5), (4, 3, 3, 3), (4,))),
    "conv2d of groups": Twice(lambda x, w: F.conv2d(x, w, groups=2, dilation=2), ((2, 4, 6, 6), (4, 2, 2, 2))),
    "conv2d depthwise": Twice(
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=4), ((2, 4, 4, 4), (8, 1, 3, 3), (8,))
    ),
    "conv2d dilated": Twice(lambda x, w, b: F.conv2d(x, w, b, dilation=2), ((2, 3, 5, 5), (4, 3, 2, 2), (4,))),
    "conv2d pointwise": Twice(F.conv2d, ((2, 3, 4, 4), (4, 3, 1, 1), (4,))),
    "conv2d channels last": Twice(lambda x, w, b: F.conv2d(_last(x), _last(w), b), ((2, 3, 4, 4), (4, 3, 3, 3), (4,))),
    "conv3d": Twice(F.conv3d, ((1, 2, 3, 4, 4), (2, 2, 2, 2, 2), (2,))),
    "conv3d of groups": Twice(
        lambda x, w, b: F.conv3d(x, w, b, stride=2, padding=1, groups=2), ((2, 4, 3, 3, 3), (4, 2, 2, 2, 2), (4,))
    ),
    "conv3d depthwise": Twice(lambda x, w: F.conv3d(x, w, groups=3), ((2, 3, 3, 3, 3), (3, 1, 2, 2, 2))),
    "conv3d dilated": Twice(lambda x, w, b: F.conv3d(x, w, b, dilation=2), ((1, 2, 3, 4, 4), (2, 2, 2, 2, 2), (2,))),
    "conv_transpose1d": Twice(F.conv_transpose1d, ((2, 3, 5), (3, 4, 3), (4,))),
    "conv_transpose1d of groups": Twice(
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, groups=2), ((2, 4, 4), (4, 3, 3), (6,))
    ),
    "conv_transpose2d": Twice(lambda x, w: F.conv_transpose2d(x, w, stride=2), ((2, 3, 3, 3), (3, 2, 2, 2))),
    "conv_transpose2d of groups": Twice(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1, groups=2),
        ((2, 4, 3, 3), (4, 1, 2, 2), (2,)),
    ),
    "conv_transpose2d depthwise": Twice(
        lambda x, w: F.conv_transpose2d(x, w, padding=1, groups=4), ((2, 4, 3, 3), (4, 1, 3, 3))
    ),
    "conv_transpose2d dilated": Twice(
        lambda x, w, b: F.conv_transpose2d(x, w, b, dilation=2), ((2, 3, 3, 3), (3, 2, 2, 2), (2,))
    ),
    "conv_transpose3d": Twice(F.conv_transpose3d, ((1, 2, 2, 3, 3), (2, 3, 2, 2, 2), (3,))),
    "conv_transpose3d of groups": Twice(
        lambda x, w, b: F.conv_transpose3d(x, w, b, groups=2), ((2, 4, 2, 2, 2), (4, 1, 2, 2, 2), (2,))
    ),
}
_PRODUCTS: dict[str, Twice] = {
    "dot": Twice(torch.dot, ((6,), (6,))),
    "mv": Twice(torch.mv, ((5, 6), (6,))),
    "outer": Twice(torch.outer, ((5,), (6,))),
    "mm": Twice(torch.mm, ((5, 6), (6, 4))),
    "bmm": Twice(torch.bmm, ((2, 5, 6), (2, 6, 4))),
    "matmul": Twice(torch.matmul, ((2, 1, 5, 6), (3, 6, 4))),
    "addmm": Twice(torch.addmm, ((5, 4), (5, 6), (6, 4))),
    "addmm of factors": Twice(lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=-2), ((5, 4), (5, 6), (6, 4))),
    "addmv": Twice(torch.addmv, ((5,), (5, 6), (6,))),
    "addr": Twice(torch.addr, ((5, 6), (5,), (6,))),
    "addbmm": Twice(torch.addbmm, ((5, 4), (2, 5, 6), (2, 6, 4))),
    "baddbmm": Twice(lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5, alpha=2), ((2, 5, 4), (2, 5, 6), (2, 6, 4))),
    "einsum": Twice(lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z), ((5, 3), (3, 4), (5, 4))),
    "multi_dot": Twice(lambda *given: torch.linalg.multi_dot(given), ((3, 4), (4, 5), (5, 2))),
    "linear": Twice(F.linear, ((5, 6), (4, 6), (4,))),
    "linear of sequences": Twice(F.linear, ((2, 3, 6), (4, 6), (4,))),
    "linear without a bias": Twice(F.linear, ((5, 6), (4, 6))),
    "bilinear": Twice(F.bilinear, ((5, 3), (5, 4), (2, 3, 4), (2,))),
}
_OTHERS: dict[str, Twice] = {
    "prelu": Twice(F.prelu, ((5, 6), (1,))),
    "prod of three": Twice(lambda x: x.prod(-1), ((5, 3),)),
    "prod of all": Twice(lambda x: x.prod(), ((3,),)),
    "prod of a zero": Twice(lambda x: x.prod(), ((4,),), (2, 0, 3, -1)),
    "prod of two zeros": Twice(lambda x: x.prod(), ((4,),), (2, 3, 0, 0)),
    "prod of rows of zeros": Twice(lambda x: x.prod(-1), ((3, 3),), (2, 3, 4, 0, -2, 3, 0, 5, 0)),
    "cumsum": Twice(lambda x: x.cumsum(-1).square(), ((5, 6),)),
    "var": Twice(lambda x: x.var(-1), ((5, 6),)),
    "det": Twice(lambda x: torch.linalg.det(x.to(torch.promote_types(x.dtype, torch.float32))), ((3, 3),)),
    "mul": Twice(torch.mul, ((5, 6), (6,))),
    "div": Twice(lambda x, y: x / (y.square() + 1), ((5, 6), (6,))),
    "addcmul": Twice(torch.addcmul, ((5, 6), (5, 6), (6,))),
    "addcmul of a factor": Twice(lambda x, y, z: torch.addcmul(x, y, z, value=-0.5), ((5, 6), (5, 6), (6,))),
    "addcdiv": Twice(lambda x, y, z: torch.addcdiv(x, y, z.square() + 1), ((5, 6), (5, 6), (6,))),
    "addcdiv of a factor": Twice(
        lambda x, y, z: torch.addcdiv(x, y, z.square() + 1, value=-0.5), ((5, 6), (5, 6), (6,))
    ),
    "sub of a factor": Twice(lambda x, y: torch.sub(x, y, alpha=2).square(), ((5, 6), (6,))),
    "lerp": Twice(torch.lerp, ((5, 6), (5, 6), (6,))),
    "pow of tensors": Twice(lambda x, y: (x.square() + 1).pow(y), ((5, 6), (5, 6))),
    "atan2": Twice(lambda x, y: torch.atan2(x, y.square() + 1), ((5, 6), (5, 6))),
    "logaddexp": Twice(torch.logaddexp, ((5, 6), (5, 6))),
    "logaddexp2": Twice(torch.logaddexp2, ((5, 6), (5, 6))),
    "hypot": Twice(torch.hypot, ((5, 6), (5, 6))),
    "layer_norm": Twice(lambda x, w, b: F.layer_norm(x, (6,), w, b), ((5, 6), (6,), (6,))),
    "group_norm": Twice(lambda x, w, b: F.group_norm(x, 2, w, b), ((3, 4, 6), (4,), (4,))),
    "rms_norm": Twice(lambda x, w: F.rms_norm(x, (6,), w, eps=1e-3), ((5, 6), (6,))),
    "batch_norm": Twice(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((5, 4, 3), (4,), (4,))),
    "instance_norm": Twice(lambda x, w, b: F.instance_norm(x, None, None, w, b), ((3, 4, 6), (4,), (4,))),
    "attention": Twice(_attention, ((2, 5, 4), (2, 6, 4), (2, 6, 3))),
    "causal attention": Twice(lambda q, k, v: _attention(q, k, v, is_causal=True), ((2, 5, 4),) * 3),
    "attention with a mask": Twice(
        lambda q, k, v, mask: _attention(q, k, v, attn_mask=mask), ((2, 5, 4), (2, 6, 4), (2, 6, 3), (5, 6))
    ),
    "mse_loss": Twice(F.mse_loss, ((5, 6), (5, 6))),
    "huber_loss": Twice(F.huber_loss, ((5, 6), (5, 6))),
    "smooth_l1_loss": Twice(F.smooth_l1_loss, ((5, 6), (5, 6))),
    "cosine_similarity": Twice(F.cosine_similarity, ((5, 6), (5, 6))),
    "kl_div": Twice(lambda x, y: F.kl_div(x, y.square() + 0.5, reduction="batchmean"), ((5, 6), (5, 6))),
    "cross_entropy of probabilities": Twice(F.cross_entropy, ((5, 6), (5, 6))),
    "binary_cross_entropy_with_logits": Twice(F.binary_cross_entropy_with_logits, ((5, 6), (5, 6))),
    "binary_cross_entropy_with_logits, a sum": Twice(
        partial(F.binary_cross_entropy_with_logits, reduction="sum"), ((5, 6), (5, 6))
    ),
    "mse_loss, a sum": Twice(partial(F.mse_loss, reduction="sum"), ((5, 6), (5, 6))),
    "mse_loss, not reduced": Twice(partial(F.mse_loss, reduction="none"), ((5, 6), (5, 6))),
    "poisson_nll_loss": Twice(F.poisson_nll_loss, ((5, 6), (5, 6))),
    "avg_pool2d": Twice(lambda x: F.avg_pool2d(x, 2).square(), ((2, 3, 4, 4),)),
    "interpolate": Twice(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").square(), ((2, 2, 3, 3),)),
}
_ELEMENTWISE = {name: Twice(call, _X) for name, call in _ACTIVATIONS.items()}
FAMILIES: dict[str, dict[str, Twice]] = {
    "activations": _ELEMENTWISE,
    "convolutions": CONVOLUTIONS,
    "products": _PRODUCTS,
    "others": _OTHERS,
}
TWICE: dict[str, Twice] = {name: op for family in FAMILIES.values() for name, op in family.items()}

Derivatives = dict[str, Tensor]
Region = Callable[[], AbstractContextManager[Any]]


def derivatives(op: Twice, values: list[Tensor], rng: torch.Generator, region: Region) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each term: of each first gradient, the gradient by each operand and by what came in.

    Those of the sum of all first gradients follow, for which a double backward is given all of its operands at once.
    `values` are the operands; what comes in and the weights of the gradients are numbers of the generator.
    """
    leaves = [value.detach().requires_grad_() for value in values]
    with region():
        result = op.call(*leaves)
    incoming = draw(result, rng).requires_grad_()
    first = torch.autograd.grad(result, leaves, incoming, create_graph=True)
    slopes = {f"gradient {number}": slope for number, slope in enumerate(first) if slope.requires_grad}
    weights = [draw(slope, rng) for slope in slopes.values()]
    terms = {name: ([slope], [weight]) for (name, slope), weight in zip(slopes.items(), weights, strict=True)}
    if len(slopes) > 1:
        terms["all gradients"] = ([*slopes.values()], weights)
    for name, (differentiated, weighted) in terms.items():
        second = torch.autograd.grad(
            differentiated, [*leaves, incoming], weighted, retain_graph=True, allow_unused=True
        )
        for place, found in enumerate(second):
            by = "what comes in" if place == len(leaves) else f"operand {place}"
            yield f"{name} by {by}", _or_zero(found)


def first_derivatives(op: Twice, values: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of its sum."""
    leaves = [value.detach().requires_grad_() for value in values]
    result = op.call(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def forward_over_reverse(
    op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor, region: Region
) -> Derivatives:
    """Return how each gradient moves where the operands move along `along`: forward mode through a backward pass."""
    with forward_ad.dual_level():
        duals, result = _moved(op, values, along, region)
        gradients = torch.autograd.grad(result, duals, incoming, allow_unused=True)
        return {
            f"gradient {number}": _or_zero(None if one is None else forward_ad.unpack_dual(one).tangent)
            for number, one in enumerate(gradients)
        }


def reverse_over_forward(
    op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor, region: Region
) -> Derivatives:
    """Return the gradients of the tangent of the result: backward through what forward mode computed."""
    with forward_ad.dual_level():
        duals, result = _moved(op, values, along, region)
        tangent = forward_ad.unpack_dual(result).tangent
        # A dual is a view of its operand with a tangent; the gradient by it is the one by the operand.
        gradients = torch.autograd.grad(tangent, duals, incoming.to(tangent.dtype), allow_unused=True)
        return {f"gradient {number}": _or_zero(one) for number, one in enumerate(gradients)}


def reverse_over_reverse(op: Twice, values: list[Tensor], along: list[Tensor], incoming: Tensor) -> Derivatives:
    """Return what both orders with forward mode compute, by two backward passes: the gradients of each move's part."""
    leaves = [value.detach().requires_grad_() for value in values]
    first = torch.autograd.grad(op.call(*leaves), leaves, incoming, create_graph=True, allow_unused=True)
    moved = [
        (one * step).sum() for one, step in zip(first, along, strict=True) if one is not None and one.requires_grad
    ]
    second = torch.autograd.grad(torch.stack(moved).sum(), leaves, allow_unused=True) if moved else [None] * len(leaves)
    return {f"gradient {number}": _or_zero(one) for number, one in enumerate(second)}


def _moved(op: Twice, values: list[Tensor], along: list[Tensor], region: Region) -> tuple[list[Tensor], Tensor]:
    """Return the operands, each moving along its step, and the result."""
    duals = [
        forward_ad.make_dual(value.detach().requires_grad_(), step) for value, step in zip(values, along, strict=True)
    ]
    with region():
        return duals, op.call(*duals)


def _or_zero(derivative: Tensor | None) -> Tensor:
    return torch.zeros(()) if derivative is None else derivative.detach()


def draw(like: Tensor, rng: torch.Generator) -> Tensor:
    """Return numbers that every 16-bit type has, so that both runs have the same."""
    signs = torch.randint(0, 2, like.shape, generator=rng) * 2 - 1  # of one sign, they cancel in a normalization
    return (torch.randint(4, 9, like.shape, generator=rng) * signs / 8).to(like.device, like.dtype)
