"""Ops in 16 bits that are differentiated twice, by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
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


def _wide(x: Tensor) -> Tensor:
    """Return `x` in float32, or float64 where it is in that: for ops that have no kernel of 16-bit types."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
    "det": Twice(lambda x: torch.linalg.det(_wide(x)), ((3, 3),)),
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
    "avg_pool2d": Twice(lambda x: F.avg_pool2d(x, 2).square(), ((2, 3, 4, 4),)),
    "interpolate": Twice(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").square(), ((2, 2, 3, 3),)),
}


def _cross_entropy_of_probabilities(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    # Outside of the region, in which CUDA refuses it: the documented way around.
    with torch.autocast(x.device.type, enabled=False):
        return F.binary_cross_entropy(_share(_wide(x)), _share(_wide(y)), **options)


def _share(x: Tensor) -> Tensor:
    """Return numbers from 1/4 to 3/4."""
    return x.tanh() / 4 + 0.5


def _classes(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device) % x.shape[1]


def _at(x: Tensor) -> Tensor:
    return torch.tensor([3, 0, 0, 2], device=x.device)


_XY = ((5, 6), (5, 6))
_LOSSES: dict[str, Twice] = {
    "mse_loss": Twice(F.mse_loss, _XY),
    "mse_loss, a sum": Twice(partial(F.mse_loss, reduction="sum"), _XY),
    "mse_loss, not reduced": Twice(partial(F.mse_loss, reduction="none"), _XY),
    "huber_loss": Twice(F.huber_loss, _XY),
    "huber_loss, a sum": Twice(partial(F.huber_loss, reduction="sum"), _XY),
    "huber_loss, not reduced": Twice(partial(F.huber_loss, reduction="none", delta=0.5), _XY),
    "smooth_l1_loss": Twice(F.smooth_l1_loss, _XY),
    "smooth_l1_loss, a sum": Twice(partial(F.smooth_l1_loss, reduction="sum"), _XY),
    "smooth_l1_loss, not reduced": Twice(partial(F.smooth_l1_loss, reduction="none", beta=0.5), _XY),
    "cosine_similarity": Twice(F.cosine_similarity, _XY),
    "cosine_embedding_loss": Twice(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x), device=x.device)), _XY
    ),
    "pairwise_distance": Twice(F.pairwise_distance, _XY),
    "dist": Twice(torch.dist, _XY),
    "triplet_margin_loss": Twice(lambda x, y, z: F.triplet_margin_loss(x, y, z, margin=4.0), ((5, 6),) * 3),
    "kl_div": Twice(lambda x, y: F.kl_div(x, y.square() + 0.5, reduction="batchmean"), _XY),
    "kl_div, a sum": Twice(lambda x, y: F.kl_div(x, y.square() + 0.5, reduction="sum"), _XY),
    "kl_div of a logarithm": Twice(lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), _XY),
    "cross_entropy of probabilities": Twice(F.cross_entropy, _XY),
    "cross_entropy": Twice(lambda x: F.cross_entropy(x, _classes(x)), _X),
    "cross_entropy, a smoothed sum": Twice(
        lambda x: F.cross_entropy(x, _classes(x), label_smoothing=0.25, reduction="sum"), _X
    ),
    "cross_entropy of positions": Twice(
        lambda x: F.cross_entropy(x, torch.ones(2, 4, dtype=torch.long, device=x.device)), ((2, 3, 4),)
    ),
    "nll_loss": Twice(lambda x: F.nll_loss(x.square(), _classes(x), reduction="sum"), _X),
    "binary_cross_entropy": Twice(_cross_entropy_of_probabilities, _XY),
    "binary_cross_entropy, a sum": Twice(partial(_cross_entropy_of_probabilities, reduction="sum"), _XY),
    "binary_cross_entropy, not reduced": Twice(partial(_cross_entropy_of_probabilities, reduction="none"), _XY),
    "binary_cross_entropy of weights": Twice(
        lambda x, y: _cross_entropy_of_probabilities(x, y, weight=torch.full_like(_wide(x), 0.5)), _XY
    ),
    "binary_cross_entropy_with_logits": Twice(F.binary_cross_entropy_with_logits, _XY),
    "binary_cross_entropy_with_logits, a sum": Twice(partial(F.binary_cross_entropy_with_logits, reduction="sum"), _XY),
    "binary_cross_entropy_with_logits of weights": Twice(
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, y, torch.full_like(x, 0.5), pos_weight=torch.full_like(x[0], 2), reduction="none"
        ),
        _XY,
    ),
    "poisson_nll_loss": Twice(F.poisson_nll_loss, _XY),
    "poisson_nll_loss of rates": Twice(
        lambda x, y: F.poisson_nll_loss(x.square() + 0.5, y.square() + 1.5, log_input=False, full=True), _XY
    ),
    "gaussian_nll_loss": Twice(lambda x, y, z: F.gaussian_nll_loss(x, y, z.square() + 0.5), ((5, 6),) * 3),
    "soft_margin_loss": Twice(lambda x: F.soft_margin_loss(x, torch.ones_like(x)), _X),
    "soft_margin_loss, a sum": Twice(lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="sum"), _X),
    "multilabel_soft_margin_loss": Twice(lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)), _X),
    "margin_ranking_loss": Twice(
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), margin=1.0).square(), _XY
    ),
    "hinge_embedding_loss": Twice(lambda x: F.hinge_embedding_loss(x.square(), torch.ones_like(x)), _X),
}
# A linear op's own second derivative is zero: it is squared, so that its backward is differentiated at numbers.
_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x).square(),
    "leaky_relu": lambda x: F.leaky_relu(x).square(),
    "relu6": lambda x: F.relu6(x).square(),
    "softshrink": lambda x: F.softshrink(x).square(),
    "softplus of a threshold": lambda x: F.softplus(x, beta=2, threshold=3),
    "elu of a factor": lambda x: F.elu(x, alpha=0.5),
    "rrelu": lambda x: F.rrelu(x).square(),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0).square(),
    "abs": lambda x: x.abs().square(),
    "reciprocal": lambda x: (x.square() + 1).reciprocal(),
    "sqrt": lambda x: (x.square() + 1).sqrt(),
    "log1p": lambda x: x.square().log1p(),
    "log2": lambda x: (x.square() + 1).log2(),
    "log10": lambda x: (x.square() + 1).log10(),
    "expm1": lambda x: torch.expm1(x),
    "exp2": lambda x: torch.exp2(x),
    "tan": lambda x: x.sin().tan(),  # within 1: a step of tan near a pole leaves the type, whatever divides it again
    "asin": lambda x: (x / 8).asin(),
    "acos": lambda x: (x / 8).acos(),
    "atan": lambda x: x.atan(),
    "sinh": lambda x: x.sinh(),
    "cosh": lambda x: x.cosh(),
    "asinh": lambda x: x.asinh(),
    "acosh": lambda x: (x.square() + 2).acosh(),
    "atanh": lambda x: (x / 8).atanh(),
    "cos": lambda x: x.cos(),
    "erfc": lambda x: x.erfc(),
    "erfinv": lambda x: (x / 8).erfinv(),
    "lgamma": lambda x: (x.square() + 1).lgamma(),
    "digamma": lambda x: (x.square() + 1).digamma(),
    "xlogy": lambda x: torch.xlogy(x, x.square() + 1),
    "logit": lambda x: _share(x).logit(),
    "clamp": lambda x: x.clamp(-1, 1).square(),
    "maximum": lambda x: torch.maximum(x, x.square()),
    "fmod": lambda x: torch.fmod(x, 0.75).square(),
    "remainder": lambda x: torch.remainder(x, 0.75).square(),
    "nan_to_num": lambda x: x.nan_to_num().square(),
    "lerp of a number": lambda x: torch.lerp(x, x * x, 0.25),
}
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of columns": lambda x: F.softmax(x, 0),
    "logcumsumexp": lambda x: _wide(x).logcumsumexp(-1),
    "cumprod": lambda x: _wide(x).cumprod(-1),
    "cummax": lambda x: x.cummax(1).values.square(),
    "amax": lambda x: x.amax(-1).square(),
    "max": lambda x: x.max(-1).values.square(),
    "median": lambda x: x.median(-1).values.square(),
    "sum": lambda x: x.sum(-1).square(),
    "mean": lambda x: x.mean(-1).square(),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "norm of order 1": lambda x: x.norm(1, -1).square(),
    "norm of order 1.5": lambda x: _wide(x).norm(1.5, -1),
    "norm of order 3": lambda x: _wide(x).norm(3, -1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "vector_norm of the largest": lambda x: torch.linalg.vector_norm(x, float("inf")).square(),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(_wide(x)),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "trapezoid": lambda x: torch.trapezoid(x.square(), dim=1),
    "diff": lambda x: x.diff(dim=1).square(),
    "sort": lambda x: x.sort(1).values.square(),
    "topk": lambda x: x.topk(2, 1).values.square(),
    "cov": lambda x: _wide(x).cov(),
    "inv": lambda x: torch.linalg.inv(_wide(x)[:5, :5] + 4 * torch.eye(5, device=x.device)),
    "matrix_exp": lambda x: torch.matrix_exp(_wide(x)[:5, :5] / 4),
    "rfft": lambda x: torch.fft.rfft(_wide(x)).abs().square(),
}
_PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: x.gather(1, torch.zeros(5, 2, dtype=torch.long, device=x.device)).square(),
    "index_select": lambda x: x.index_select(0, _at(x)).square(),
    "index": lambda x: x[_at(x)].square(),
    "take": lambda x: x.take(_at(x)).square(),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(0, _at(x)[:, None].expand(4, 6), x[:4]).square(),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, _at(x), x[:4]).square(),
    "index_put": lambda x: torch.zeros_like(x).index_put((_at(x),), x[:4], accumulate=True).square(),
    "embedding": lambda x: F.embedding(_at(x), x).square(),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5).square(),
    "masked_select": lambda x: x.masked_select(x > 0).square(),
    "where": lambda x: torch.where(x < 0, x.square(), x),
    "roll": lambda x: x.roll(2, 1).square(),
    "flip": lambda x: x.flip(1).square(),
    "tril": lambda x: x.tril().square(),
    "diagonal": lambda x: x.diagonal().square(),
    "unfold": lambda x: x.unfold(1, 3, 2).square(),
    "repeat": lambda x: x.repeat(2, 2).square(),
    "expand": lambda x: x[None].expand(3, 5, 6).square(),
    "cat": lambda x: torch.cat([x, x.square()]).square(),
    "stack": lambda x: torch.stack([x, x.square()]).square(),
    "pad": lambda x: F.pad(x, (1, 2)).square(),
    "kron": lambda x: torch.kron(x, x),
    "cross": lambda x: torch.linalg.cross(x[:, :3], x[:, 3:]),
}
_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(x[0], 2).square(),
    "max_pool2d": lambda x: F.max_pool2d(x, 2).square(),
    "max_pool3d": lambda x: F.max_pool3d(x, 2).square(),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2).square(),
    "avg_pool1d": lambda x: F.avg_pool1d(x[0], 3, 2, 1).square(),
    "avg_pool2d of the padded": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False).square(),
    "avg_pool3d": lambda x: F.avg_pool3d(_wide(x), 2).square(),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3).square(),
    "adaptive_avg_pool2d of all": lambda x: F.adaptive_avg_pool2d(x, 1).square(),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3).square(),
    "lp_pool2d": lambda x: F.lp_pool2d(_wide(x), 2.0, 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2).square(),
    "linear of corners": lambda x: F.interpolate(x[0], 7, mode="linear", align_corners=True).square(),
    "bicubic": lambda x: F.interpolate(x, (5, 6), mode="bicubic").square(),
    "trilinear": lambda x: F.interpolate(x[None], (3, 5, 5), mode="trilinear").square(),
    "area": lambda x: F.interpolate(x, (3, 3), mode="area").square(),
    "reflection": lambda x: F.pad(x, (1, 2, 1, 0), "reflect").square(),
    "replication": lambda x: F.pad(x, (1, 2, 1, 0), "replicate").square(),
    "circular padding": lambda x: F.pad(x, (1, 2, 1, 0), "circular").square(),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 8, 2, 4), 2).square(),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2).square(),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2).square(),
    "windows": lambda x: F.unfold(x, 2, padding=1).square(),
    "fold": lambda x: F.fold(x.reshape(2, 8, 4), (3, 3), 2).square(),
    "local_response_norm": lambda x: F.local_response_norm(_wide(x), 3),
}


def _by_name(calls: dict[str, Callable[[Tensor], Tensor]], shapes: tuple[tuple[int, ...], ...]) -> dict[str, Twice]:
    return {name: Twice(call, shapes) for name, call in calls.items()}


FAMILIES: dict[str, dict[str, Twice]] = {
    "activations": _by_name(_ACTIVATIONS, _X),
    "convolutions": CONVOLUTIONS,
    "products": _PRODUCTS,
    "losses": _LOSSES,
    "functions": _by_name(_MAPS, _X),
    "reductions": _by_name(_REDUCTIONS, _X),
    "places": _by_name(_PLACES, _X),
    "images": _by_name(_IMAGES, ((2, 2, 4, 4),)),
    "others": _OTHERS,
}
TWICE: dict[str, Twice] = {name: op for family in FAMILIES.values() for name, op in family.items()}


def _ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape or x.shape, device=x.device, dtype=x.dtype)


# Results whose tangent is that of the operand, number by number, and memory of their own.
SAME_TANGENT: dict[str, Callable[[Tensor], Tensor]] = {
    "a number added": lambda x: x + 1,
    "added to a number": lambda x: 1 + x,
    "a number taken away": lambda x: x - 1,
    "a tensor added": lambda x: x + _ones(x),
    "added to a tensor": lambda x: _ones(x) + x,
    "a tensor taken away": lambda x: x - _ones(x),
    "add with alpha": lambda x: torch.add(x, _ones(x), alpha=3),
    "added in place": lambda x: x.clone().add_(1),
    "times one": lambda x: x * 1,
    "by one": lambda x: x / 1,
    "negated twice": lambda x: x.neg().neg(),
    "clone": torch.clone,
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x]),
    "repeat": lambda x: x.repeat(1, 1),
    "flip": lambda x: x.flip(0).flip(0),
    "contiguous": lambda x: x.t().contiguous().t(),
    "where": lambda x: torch.where(x > 0, x, -x),
    "clamp": lambda x: x.clamp(-9, 9),
    "relu": lambda x: F.relu(x),
    "maximum": lambda x: torch.maximum(x, x.detach() - 1),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "nan_to_num": lambda x: torch.nan_to_num(x),
    "sum of one row": lambda x: x[None].sum(0),
    "lerp": lambda x: torch.lerp(x, x.detach() + 1, 0.0),
    "addmm": lambda x: torch.addmm(x, _ones(x, len(x), 2), _ones(x, 2, x.shape[1])),
    "baddbmm": lambda x: torch.baddbmm(x[None], _ones(x, 1, len(x), 2), _ones(x, 1, 2, x.shape[1]))[0],
}
