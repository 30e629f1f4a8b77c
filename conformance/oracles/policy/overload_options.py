"""List calls with non-default options, combined as far as possible, for each ATen overload that has any."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .samples import Inputs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Maker = Callable[[Inputs], Arguments]

_NONE, _SUM = 0, 2  # at::Reduction


def option_calls(overload: str, inputs: Callable[[], Inputs]) -> list[partial[Any]]:
    """Return the calls of exactly this overload in this table, each on inputs of its own; none where it has none."""
    name, _, which = overload.partition(".")
    own = getattr(getattr(torch.ops.aten, name), which or "default")
    made = [make(inputs()) for make in OPTIONS.get(overload, ())]
    return [partial(own, *args, **keywords) for args, keywords in made]


def _a(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def _upsampled(*size: int, corners: bool | None = None) -> Maker:
    """Upsample by a factor that is not quite that of the sizes; `corners` where the overload requires it."""
    return lambda t: _a(
        t.f(1, 2, *size),
        [side * 3 // 2 for side in size],
        *([] if corners is None else [corners]),
        *[1.6] * len(size),
    )


def _transposed(*size: int) -> Maker:
    """Return a transposed convolution with stride, padding at both ends, groups and dilation."""
    ones = [1] * len(size)
    twos = [2] * len(size)
    return lambda t: _a(t.f(1, 4, *size), t.f(4, 3, *twos), t.f(6), twos, ones, ones, 2, twos)


def _unpadded(*size: int) -> Maker:
    twos = [2] * len(size)
    return lambda t: _a(t.f(1, 4, *size), t.f(6, 2, *twos), t.f(6), twos, "valid", twos, 2)


def _grouped_queries(t: Inputs, **options: Any) -> Arguments:
    """Return attention with four query heads and two key and value heads."""
    return _a(t.f(1, 4, 6, 8), t.f(1, 2, 6, 8), t.f(1, 2, 6, 8), enable_gqa=True, **options)


def _nilpotent(t: Inputs) -> torch.Tensor:
    """Return a matrix of rank 2 whose lower triangle, mirrored, is one of rank 3."""
    return t.tril(3).tril(-1)


def _sampled(mode: int, padding: int, corners: bool, *size: int) -> Maker:
    """Sample at places around and beyond the borders of an image, given by numbers that 16 bits do not hold."""
    rank = len(size)
    return lambda t: _a(t.f(2, 3, *size), t.f(2, *(4,) * rank, rank) * 1.3, mode, padding, corners)


def _sampled_in_each_mode(*ranks: int) -> tuple[Maker, ...]:
    """Return each mode (bicubic in two dimensions alone) with each padding, every other one with aligned corners."""
    return tuple(
        _sampled(mode, padding, (mode + padding + rank) % 2 == 0, *(4, 5, 3)[:rank])
        for rank in ranks
        for mode, padding in itertools.product(range(3 if rank == 2 else 2), range(3))
    )


def _alignments(of: Callable[..., Any]) -> tuple[Maker, ...]:
    """Return losses of targets in rows, one after the other, and of one sequence, with each reduction and option."""
    rows = tuple(
        partial(lambda how, t: _a(*_log_probabilities(t), of(t, 6, 5), of(t, 3, 2), *how), how)
        for how in ((0, _NONE, False), (4, _SUM, True), (4, 1, False))
    )
    joined = tuple(
        partial(lambda how, t: _a(t.f(6, 2, 5), t.i(4, 5) + 1, of(t, 6, 5), of(t, 3, 2), *how), how)
        for how in ((0, _NONE, False), (0, _SUM, True), (0, 1, False))
    )
    return (*rows, *joined, lambda t: _a(t.f(6, 5), t.i(4, 3) + 1, of(t, 6), of(t, 3), 0, _NONE))


def _log_probabilities(t: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """6 steps, 2 samples, 5 classes, and targets of length 3 among the first four."""
    return t.f(6, 2, 5), t.i(4, 2, 3)


def _quantiles(at: Callable[[Inputs], Any]) -> tuple[Maker, ...]:
    ways = ("linear", "lower", "higher", "midpoint", "nearest")
    return tuple(
        partial(lambda dim, keep, way, t: _a(t.f(3, 5), at(t), dim, keep, interpolation=way), dim, keep, way)
        for dim, keep, way in [(0, True, way) for way in ways] + [(None, False, way) for way in ways]
    )


_FACTORS = {"beta": 0.5, "alpha": 2.0}
_DROPPED = {"beta": 0, "alpha": -1}  # without the summand, for which kernels have a way of their own


def _added(*shapes: tuple[int, ...]) -> tuple[Maker, ...]:
    """Return a product that is added to its first operand, by factors, and one that is not."""
    return tuple(
        partial(lambda factors, t: _a(*(t.f(*shape) for shape in shapes), **factors), factors)
        for factors in (_FACTORS, _DROPPED)
    )


OPTIONS: dict[str, tuple[Maker, ...]] = {
    # Products
    "addmm": _added((3, 5), (3, 4), (4, 5)),
    "_addmm_activation": (lambda t: _a(t.f(5), t.f(3, 4), t.f(4, 5), use_gelu=False, **_FACTORS),),
    "addmv": _added((3,), (3, 4), (4,)),
    "addr": _added((3, 4), (3,), (4,)),
    "addbmm": _added((3, 5), (2, 3, 4), (2, 4, 5)),
    "baddbmm": _added((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "einsum": (lambda t: _a("ij,jk,kl->il", [t.f(3, 4), t.f(4, 5), t.f(5, 2)], path=[1, 2, 0, 1]),),
    "linalg_vecdot": (lambda t: _a(t.f(3, 4), t.f(3, 4), dim=0),),
    # Convolutions
    "conv1d.padding": (_unpadded(9),),
    "conv2d.padding": (_unpadded(9, 8),),
    "conv3d.padding": (_unpadded(6, 5, 6),),
    "conv3d": (lambda t: _a(t.f(1, 4, 5, 5, 5), t.f(6, 2, 2, 2, 2), t.f(6), [2] * 3, [1] * 3, [2] * 3, 2),),
    "conv_tbc": (lambda t: _a(t.f(6, 2, 3), t.f(3, 3, 4), t.f(4), 1),),
    "conv_transpose1d": (_transposed(5),),
    "conv_transpose2d.input": (_transposed(4, 3),),
    "conv_transpose3d.input": (_transposed(3, 2, 3),),
    # Attention
    "scaled_dot_product_attention": (
        lambda t: _grouped_queries(t),
        lambda t: _grouped_queries(t, is_causal=True, scale=0.5),
        lambda t: _grouped_queries(t, attn_mask=t.f(6, 6), scale=0.25),
        lambda t: _grouped_queries(t, attn_mask=t.mask(6, 6)),
        lambda t: _a(t.f(1, 2, 4, 8), t.f(1, 2, 6, 8), t.f(1, 2, 6, 8), t.mask(4, 6), scale=2.0),
        lambda t: _a(t.f(1, 2, 4, 8), t.f(1, 2, 6, 8), t.f(1, 2, 6, 8), is_causal=True),
        lambda t: _a(t.f(1, 2, 4, 8), t.f(1, 2, 6, 8), t.f(1, 2, 6, 8), scale=2.0),
    ),
    "_scaled_dot_product_flash_attention": (
        lambda t: _a(t.f(1, 2, 16, 8), t.f(1, 2, 16, 8), t.f(1, 2, 16, 8), 0.0, True, scale=0.5),
    ),
    # Element by element
    "softplus": (lambda t: _a(t.f(3, 4), 2.0, 1.0),),
    "addcdiv": (lambda t: _a(t.f(3, 4), t.f(3, 4), t.p(3, 4), value=2.5),),
    "addcmul": (lambda t: _a(t.f(3, 4), t.f(3, 4), t.f(3, 4), value=2.5),),
    "cross": (lambda t: _a(t.f(3, 3), t.f(3, 3), 1),),
    # Sums, norms, distances
    "sum.dim_IntList": (lambda t: _a(t.p(3, 40), [0], True), lambda t: _a(t.p(3, 4, 5), [-1, 0], True)),
    "prod.dim_int": (lambda t: _a(t.p(3, 4), 0, True), lambda t: _a(t.p(3, 4), -1, True)),
    "cumprod": (lambda t: _a(t.p(3, 4), 0), lambda t: _a(t.p(3, 4), -1)),
    "cumsum": (lambda t: _a(t.p(3, 4), 0), lambda t: _a(t.p(3, 4), -1)),
    "softmax.int": (lambda t: _a(t.f(3, 4, 5), 0), lambda t: _a(t.f(3, 4, 5), -1)),
    "log_softmax.int": (lambda t: _a(t.f(3, 4, 5), 0), lambda t: _a(t.f(3, 4, 5), -1)),
    "logsumexp": (lambda t: _a(t.f(3, 4), [0], True),),
    "norm.ScalarOpt_dim": (lambda t: _a(t.f(3, 4), 3, [0], True),),
    "frobenius_norm.dim": (lambda t: _a(t.f(3, 4), [0], True),),
    "nuclear_norm": (lambda t: _a(t.f(3, 4), True),),
    "nuclear_norm.dim": (lambda t: _a(t.f(3, 4), [1, 0], True),),
    "linalg_vector_norm": (lambda t: _a(t.f(3, 4), 1, [0], True),),
    "linalg_matrix_norm": (lambda t: _a(t.f(3, 4, 2), 1, [2, 0], True),),
    "linalg_matrix_norm.str_ord": (lambda t: _a(t.f(3, 4, 2), "fro", [2, 0], True),),
    "cdist": tuple(
        partial(lambda order, mode, t: _a(t.f(2, 3, 4), t.f(5, 4), order, mode), order, mode)
        for order, mode in ((0.0, None), (1.0, 2), (2.0, None), (2.0, 1), (2.0, 2), (3.0, 1), (math.inf, None))
    ),
    "pdist": (lambda t: _a(t.f(4, 3), 1.0),),
    "dist": (lambda t: _a(t.f(3, 4), t.f(3, 4), 1),),
    "cosine_similarity": (lambda t: _a(t.f(3, 4), t.f(3, 4), 0, 4.0),),
    "quantile": _quantiles(lambda t: t.u(2)),
    "quantile.scalar": _quantiles(lambda t: 0.3),
    "nanquantile": _quantiles(lambda t: t.u(2)),
    "nanquantile.scalar": _quantiles(lambda t: 0.3),
    # Normalisations
    "layer_norm": (lambda t: _a(t.f(3, 8), [8], t.f(8), t.f(8), 0.125, False),),
    "rms_norm": (lambda t: _a(t.f(3, 8), [8], t.f(8), 0.125),),
    "group_norm": (lambda t: _a(t.f(2, 6, 5), 2, t.f(6), t.f(6), 0.125, False),),
    # Losses
    "binary_cross_entropy": (lambda t: _a(t.u(3, 4), t.u(3, 4), t.p(3, 4), _SUM),),
    "binary_cross_entropy_with_logits": (lambda t: _a(t.f(3, 4), t.u(3, 4), t.p(3, 4), t.p(4), _SUM),),
    "cosine_embedding_loss": (
        lambda t: _a(t.f(3, 4), t.f(3, 4), t.sign(3), -0.5, _NONE),
        lambda t: _a(t.f(4), t.f(4), t.sign(), 0.5, _SUM),
    ),
    "cross_entropy_loss": (
        lambda t: _a(t.f(3, 5), t.i(5, 3), t.p(5), _SUM, 3, 0.25),
        lambda t: _a(t.f(3, 5), t.u(3, 5), t.p(5), _NONE, -100, 0.25),
        lambda t: _a(t.f(2, 5, 3, 4), t.u(2, 5, 3, 4), None, 1),
        lambda t: _a(t.f(2, 5, 3, 4), t.i(5, 2, 3, 4), t.p(5), _NONE, 2),
        lambda t: _a(t.f(5), t.i(5), None, _SUM, -100, 0.125),
    ),
    "ctc_loss.IntList": (
        lambda t: _a(*_log_probabilities(t), [6, 2], [3, 3], 4, _SUM, True),
        *_alignments(lambda t, *lengths: list(lengths)),
    ),
    "ctc_loss.Tensor": (
        lambda t: _a(*_log_probabilities(t), t.lengths(6, 2), t.lengths(3, 3), 4, _SUM, True),
        *_alignments(Inputs.lengths),
    ),
    "hinge_embedding_loss": (lambda t: _a(t.p(3, 4), t.sign(3, 4), 0.5, _NONE),),
    "huber_loss": (lambda t: _a(t.f(3, 4), t.f(3, 4), _NONE, 0.5),),
    "kl_div": (
        lambda t: _a(t.f(3, 4), t.f(3, 4), _SUM, log_target=True),
        lambda t: _a(t.f(3, 4), t.u(3, 4), _NONE, log_target=False),
        lambda t: _a(t.f(3, 4), t.u(3, 1), 1),
    ),
    "l1_loss": (lambda t: _a(t.f(3, 4), t.f(3, 4), _SUM),),
    "margin_ranking_loss": (lambda t: _a(t.f(4), t.f(4), t.sign(4), 0.5, _NONE),),
    "mse_loss": (lambda t: _a(t.f(3, 4), t.f(3, 4), _SUM),),
    "multi_margin_loss": (lambda t: _a(t.f(3, 5), t.i(5, 3), 2, 0.5, t.p(5), _SUM),),
    "multilabel_margin_loss": (lambda t: _a(t.f(3, 5), t.sets(), _NONE),),
    "nll_loss": (
        lambda t: _a(t.f(3, 5), t.i(5, 3), t.p(5), _SUM, 3),
        lambda t: _a(t.f(5), t.i(5), t.p(5), _NONE),
        lambda t: _a(t.f(3, 5), t.i(5, 3), None, 1, 2),
    ),
    "nll_loss2d": (lambda t: _a(t.f(2, 3, 4, 4), t.i(3, 2, 4, 4), t.p(3), _NONE, 1),),
    "poisson_nll_loss": tuple(
        partial(lambda how, t: _a(t.p(3, 4), t.p(3, 4), *how), how)
        for how in itertools.product((False, True), (False, True), (0.125,), (_NONE, _SUM))
    ),
    "smooth_l1_loss": (lambda t: _a(t.f(3, 4), t.f(3, 4), _NONE, 0.5),),
    "soft_margin_loss": (lambda t: _a(t.f(3, 4), t.sign(3, 4), _NONE),),
    "triplet_margin_loss": (
        lambda t: _a(t.f(3, 4), t.f(3, 4), t.f(3, 4), 4.0, 1.0, 0.125, True, _NONE),
        lambda t: _a(t.f(3, 4), t.f(3, 4), t.f(3, 4), 4.0, 3.0, 0.125, False, _SUM),
        lambda t: _a(t.f(4), t.f(4), t.f(4), 4.0, 2.0, 0.125, True, _NONE),
    ),
    # Lists, indices
    "cat": (lambda t: _a([t.f(3, 4), t.f(3, 2)], -1), lambda t: _a([t.f(3, 4, 2), t.f(3, 1, 2)], 1)),
    "stack": (lambda t: _a([t.f(3, 4), t.f(3, 4)], -1), lambda t: _a([t.f(3, 4), t.f(3, 4)], -2)),
    "index_copy": (lambda t: _a(t.f(3, 5), -1, t.i(5, 2), t.f(3, 2)),),
    "index_put": (lambda t: _a(t.f(5), [t.i(5, 3)], t.f(3), True), lambda t: _a(t.f(5), [t.mask(5)], t.f(1), True)),
    "scatter_add": (lambda t: _a(t.f(3, 5), -1, t.i(5, 3, 2), t.f(3, 2)),),
    # Pooling, sampling
    "avg_pool3d": (
        lambda t: _a(t.f(1, 2, 6, 6, 6), [3] * 3, [2] * 3, [1] * 3, True, False, 5),
        lambda t: _a(t.f(1, 2, 6, 6, 6), [3] * 3, [2] * 3, [1] * 3, True, False),
    ),
    "max_pool3d": (lambda t: _a(t.f(1, 2, 6, 6, 6), [2] * 3, [3] * 3, [1] * 3, [2] * 3, True),),
    "grid_sampler": _sampled_in_each_mode(2, 3),
    "grid_sampler_2d": _sampled_in_each_mode(2),
    "grid_sampler_3d": _sampled_in_each_mode(3),
    "upsample_nearest1d": (_upsampled(4),),
    "upsample_nearest2d": (_upsampled(4, 6),),
    "upsample_nearest3d": (_upsampled(4, 4, 4),),
    "_upsample_nearest_exact1d": (_upsampled(4),),
    "_upsample_nearest_exact2d": (_upsampled(4, 6),),
    "_upsample_nearest_exact3d": (_upsampled(4, 4, 4),),
    "upsample_linear1d": (_upsampled(4, corners=False), _upsampled(4, corners=True)),
    "upsample_bilinear2d": (_upsampled(4, 6, corners=False), _upsampled(4, 6, corners=True)),
    "_upsample_bilinear2d_aa": (_upsampled(4, 6, corners=False), _upsampled(4, 6, corners=True)),
    "upsample_trilinear3d": (_upsampled(4, 4, 4, corners=False), _upsampled(4, 2, 2, corners=True)),
    "upsample_bicubic2d": (_upsampled(4, 6, corners=False), _upsampled(4, 6, corners=True)),
    "_upsample_bicubic2d_aa": (_upsampled(4, 6, corners=False), _upsampled(4, 6, corners=True)),
    # Spectra
    "stft": (lambda t: _a(t.f(32), 8, 4, 6, t.p(6), True, False, True),),
    "stft.center": (
        lambda t: _a(t.f(32), 8, 4, 6, t.p(6), False, "constant", True, False, True),
        lambda t: _a(t.f(32), 8, 4, 6, t.p(6), True, "constant", True, False, True),
    ),
    **{
        f"fft_{name}": (lambda t: _a(t.f(6, 4), 4, 0, "ortho"),)
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    **{
        f"fft_{name}": (lambda t: _a(t.f(6, 4), [4, 2], [1, 0], "forward"),)
        for name in ("fft2", "ifft2", "fftn", "ifftn", "rfft2", "irfft2", "rfftn", "irfftn")
    },
    # Linear algebra
    "_lu_with_info": (lambda t: _a(t.spd(3), True, False),),
    "cholesky": (lambda t: _a(t.spd(3), True),),
    "cholesky_inverse": (lambda t: _a(t.tril(3), True),),
    "cholesky_solve": (lambda t: _a(t.f(3, 2), t.tril(3), True),),
    "linalg_cholesky": (lambda t: _a(t.spd(3), upper=True),),
    "linalg_cholesky_ex": (lambda t: _a(t.spd(3), upper=True, check_errors=True),),
    "linalg_cond": (lambda t: _a(t.spd(3), 1),),
    "linalg_eigh": (lambda t: _a(t.spd(3), "U"),),
    "linalg_eigvalsh": (lambda t: _a(t.spd(3), "U"),),
    "linalg_inv_ex": (lambda t: _a(t.spd(3), check_errors=True),),
    "linalg_lstsq": (lambda t: _a(t.spd(3), t.f(3, 2), 0.9, driver="gelsd"),),
    "linalg_matrix_rank": (lambda t: _a(_nilpotent(t), 0.001, True), lambda t: _a(t.spd(3), 1.5)),
    "linalg_matrix_rank.atol_rtol_float": (
        lambda t: _a(t.spd(3), atol=1.5),
        lambda t: _a(t.spd(3), rtol=0.5),
        lambda t: _a(_nilpotent(t), atol=0.001, rtol=0.001, hermitian=True),
    ),
    "linalg_matrix_rank.atol_rtol_tensor": (
        lambda t: _a(t.spd(3), atol=t.u(1) + 1.2),
        lambda t: _a(t.spd(3), rtol=t.u(1) * 0.2 + 0.4),
        lambda t: _a(_nilpotent(t), atol=t.u(1) * 0.001, rtol=t.u(1) * 0.001, hermitian=True),
    ),
    "linalg_matrix_rank.tol_tensor": (lambda t: _a(_nilpotent(t), t.u(1) * 0.001, True),),
    "linalg_qr": (lambda t: _a(t.f(4, 3), "complete"),),
    "linalg_solve": (lambda t: _a(t.spd(3), t.f(2, 3), left=False),),
    "linalg_svd": (lambda t: _a(t.f(4, 3), False),),
    "linalg_tensorsolve": (lambda t: _a(t.tril(3), t.f(3), [0]),),
    "ormqr": (lambda t: _a(t.f(4, 3), t.u(3), t.f(2, 4), False, True),),
    "pinverse": (lambda t: _a(t.f(4, 3), 0.9),),
    "qr": (lambda t: _a(t.f(4, 3), False),),
    "svd": (lambda t: _a(t.f(4, 3), False), lambda t: _a(t.f(4, 3), False, False)),
    "triangular_solve": (lambda t: _a(t.f(3, 2), t.tril(3), False, True, True),),
}
