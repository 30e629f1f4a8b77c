"""List one call for every ATen overload with an autocast kernel in PyTorch's core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .samples import Inputs

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MEAN = 1  # at::Reduction::Mean


def call(overload: str, inputs: Inputs) -> partial[Any]:
    """Return the call of exactly this overload ("mm", "sum.dim_IntList") on sample inputs.

    Raises KeyError for an overload that has no line here, AttributeError for one that this torch lacks.
    """
    args, kwargs = CALLS[overload](inputs)
    name, _, which = overload.partition(".")
    return partial(getattr(getattr(torch.ops.aten, name), which or "default"), *args, **kwargs)


def _a(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def _convolution(t: Inputs, *rest: Any) -> Arguments:
    return _a(t.f(2, 3, 6, 6), t.f(4, 3, 3, 2), t.f(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1, *rest)


def _attention(t: Inputs, length: int, *, masked: bool) -> Arguments:
    query, key, value = (t.f(1, 2, length, 8) for _ in range(3))
    return _a(query, key, value, *([t.f(length, length)] if masked else []))


def _cell(t: Inputs, gates: int, *, pair: bool = False) -> Arguments:
    """One step of a recurrent cell: 2 samples, 4 inputs, 3 hidden."""
    x, hidden = t.f(2, 4), t.f(2, 3)
    state = [hidden, t.f(2, 3)] if pair else hidden
    return _a(x, state, t.f(3 * gates, 4), t.f(3 * gates, 3), t.f(3 * gates), t.f(3 * gates))


def _fused_cell(t: Inputs, gates: int) -> Arguments:
    return _a(t.f(2, 3 * gates), t.f(2, 3 * gates), t.f(2, 3), t.f(3 * gates), t.f(3 * gates))


def _mkldnn_rnn(t: Inputs) -> Arguments:
    """One LSTM layer, one direction, time first, inference."""
    weights = (t.f(12, 4), t.f(12, 3), t.f(12), t.f(12), t.f(2, 3), t.f(2, 3))
    return _a(t.f(5, 2, 4), *weights, False, [], 2, 3, 1, True, False, False, False)


def _log_probabilities(t: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """6 steps, 2 samples, 5 classes, and targets of length 3."""
    return t.f(6, 2, 5), t.i(4, 2, 3) + 1


CALLS: dict[str, Callable[[Inputs], Arguments]] = {
    # Matrix and vector products; matmul and linear of three dimensions, so that what they call inside sees views.
    "matmul": lambda t: _a(t.f(2, 3, 4), t.f(2, 4, 5)),
    "mm": lambda t: _a(t.f(3, 4), t.f(4, 5)),
    "mv": lambda t: _a(t.f(3, 4), t.f(4)),
    "bmm": lambda t: _a(t.f(2, 3, 4), t.f(2, 4, 5)),
    "addmm": lambda t: _a(t.f(3, 5), t.f(3, 4), t.f(4, 5), beta=0.5, alpha=2.0),
    "_addmm_activation": lambda t: _a(t.f(5), t.f(3, 4), t.f(4, 5), use_gelu=True),
    "addmv": lambda t: _a(t.f(3), t.f(3, 4), t.f(4)),
    "addr": lambda t: _a(t.f(3, 4), t.f(3), t.f(4)),
    "addbmm": lambda t: _a(t.f(3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "baddbmm": lambda t: _a(t.f(2, 3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "chain_matmul": lambda t: _a([t.f(3, 4), t.f(4, 5), t.f(5, 2)]),
    "linalg_multi_dot": lambda t: _a([t.f(3, 4), t.f(4, 5), t.f(5, 2)]),
    "linalg_vecdot": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "linear": lambda t: _a(t.f(2, 3, 4), t.f(5, 4), t.f(5)),
    "einsum": lambda t: _a("bij,bjk->bik", [t.f(2, 3, 4), t.f(2, 4, 5)]),
    "dot": lambda t: _a(t.f(6), t.f(6)),
    "vdot": lambda t: _a(t.f(6), t.f(6)),
    "tensordot": lambda t: _a(t.f(3, 4, 5), t.f(4, 5, 2), [1, 2], [0, 1]),
    "bilinear": lambda t: _a(t.f(3, 4), t.f(3, 5), t.f(2, 4, 5), t.f(2)),
    # Convolutions, deterministic where they are asked; not 3 by 3, which a GPU's library may compute by Winograd's
    # transform
    "conv1d": lambda t: _a(t.f(2, 3, 8), t.f(4, 3, 3), t.f(4)),
    "conv1d.padding": lambda t: _a(t.f(2, 3, 8), t.f(4, 3, 3), t.f(4), padding="same"),
    "conv2d": lambda t: _a(t.f(2, 3, 6, 6), t.f(4, 3, 3, 2), t.f(4), padding=[1, 1]),
    "conv2d.padding": lambda t: _a(t.f(2, 3, 6, 6), t.f(4, 3, 1, 3), t.f(4), padding="same"),
    "conv3d": lambda t: _a(t.f(1, 2, 4, 4, 4), t.f(3, 2, 2, 2, 2), t.f(3)),
    "conv3d.padding": lambda t: _a(t.f(1, 2, 4, 4, 4), t.f(3, 2, 3, 3, 3), t.f(3), padding="same"),
    "conv_tbc": lambda t: _a(t.f(6, 2, 3), t.f(3, 3, 4), t.f(4)),
    "conv_transpose1d": lambda t: _a(t.f(2, 3, 8), t.f(3, 4, 3), t.f(4)),
    "conv_transpose2d.input": lambda t: _a(t.f(2, 3, 4, 4), t.f(3, 4, 3, 2), t.f(4)),
    "conv_transpose3d.input": lambda t: _a(t.f(1, 2, 3, 3, 3), t.f(2, 3, 2, 2, 2), t.f(3)),
    "convolution": _convolution,
    "_convolution": lambda t: _convolution(t, False, True, True, True),
    "_convolution.deprecated": lambda t: _convolution(t, False, True, True),
    "cudnn_convolution": lambda t: _a(t.f(2, 3, 6, 6), t.f(4, 3, 3, 2), [1, 1], [1, 1], [1, 1], 1, False, True, True),
    "cudnn_convolution_transpose": lambda t: _a(
        t.f(2, 3, 4, 4), t.f(3, 4, 3, 2), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True
    ),
    "_mps_convolution": lambda t: _a(t.f(2, 3, 6, 6), t.f(4, 3, 3, 2), t.f(4), [1, 1], [1, 1], [1, 1], 1),
    # Recurrent cells, attention
    "gru_cell": lambda t: _cell(t, 3),
    "lstm_cell": lambda t: _cell(t, 4, pair=True),
    "rnn_relu_cell": lambda t: _cell(t, 1),
    "rnn_tanh_cell": lambda t: _cell(t, 1),
    "_thnn_fused_gru_cell": lambda t: _fused_cell(t, 3),
    "_thnn_fused_lstm_cell": lambda t: _fused_cell(t, 4),
    "mkldnn_rnn_layer": _mkldnn_rnn,
    "scaled_dot_product_attention": lambda t: _attention(t, 4, masked=True),
    "_scaled_dot_product_flash_attention": lambda t: _attention(t, 16, masked=False),
    "_native_multi_head_attention": lambda t: _a(
        *(t.f(1, 4, 8), t.f(1, 4, 8), t.f(1, 4, 8), 8, 2, t.f(24, 8), t.f(24), t.f(8, 8), t.f(8)),
        need_weights=False,
    ),
    # Element by element
    "acos": lambda t: _a(t.u(3, 4)),
    "asin": lambda t: _a(t.u(3, 4)),
    "cosh": lambda t: _a(t.f(3, 4)),
    "erfinv": lambda t: _a(t.u(3, 4)),
    "exp": lambda t: _a(t.f(3, 4)),
    "expm1": lambda t: _a(t.f(3, 4)),
    "log": lambda t: _a(t.p(3, 4)),
    "log10": lambda t: _a(t.p(3, 4)),
    "log1p": lambda t: _a(t.p(3, 4)),
    "log2": lambda t: _a(t.p(3, 4)),
    "reciprocal": lambda t: _a(t.p(3, 4)),
    "rsqrt": lambda t: _a(t.p(3, 4)),
    "sinh": lambda t: _a(t.f(3, 4)),
    "tan": lambda t: _a(t.u(3, 4)),
    "softplus": lambda t: _a(t.f(3, 4)),
    "prelu": lambda t: _a(t.f(2, 3, 4), t.u(3)),
    "pow.Scalar": lambda t: _a(2.5, t.f(3, 4)),
    "pow.Tensor_Scalar": lambda t: _a(t.p(3, 4), 2.5),
    "pow.Tensor_Tensor": lambda t: _a(t.p(3, 4), t.f(3, 4)),
    "addcdiv": lambda t: _a(t.f(3, 4), t.f(3, 4), t.p(3, 4)),
    "addcmul": lambda t: _a(t.f(3, 4), t.f(3, 4), t.f(3, 4)),
    "atan2": lambda t: _a(t.f(3, 4), t.p(3, 4)),
    "cross": lambda t: _a(t.f(4, 3), t.f(4, 3), 1),
    "polar": lambda t: _a(t.p(3, 4), t.f(3, 4)),
    "view_as_complex": lambda t: _a(t.f(3, 2)),
    "fake_quantize_per_tensor_affine": lambda t: _a(t.f(3, 4), 0.1, 0, 0, 255),
    # Sums, norms, distances
    "sum": lambda t: _a(t.p(3, 40)),
    "sum.dim_IntList": lambda t: _a(t.p(3, 40), [1]),
    "prod": lambda t: _a(t.p(3, 4)),
    "prod.dim_int": lambda t: _a(t.p(3, 4), 1),
    "cumprod": lambda t: _a(t.p(3, 4), 1),
    "cumsum": lambda t: _a(t.f(3, 4), 1),
    "softmax.int": lambda t: _a(t.f(3, 4), 1),
    "log_softmax.int": lambda t: _a(t.f(3, 4), 1),
    "logsumexp": lambda t: _a(t.f(3, 4), [1]),
    "norm.Scalar": lambda t: _a(t.f(3, 4), 3),
    "norm.ScalarOpt_dim": lambda t: _a(t.f(3, 4), 2, [1], False),
    "frobenius_norm.dim": lambda t: _a(t.f(3, 4), [0, 1]),
    "nuclear_norm": lambda t: _a(t.f(3, 4)),
    "nuclear_norm.dim": lambda t: _a(t.f(3, 4), [0, 1]),
    "linalg_vector_norm": lambda t: _a(t.f(3, 4), 3, [1]),
    "linalg_matrix_norm": lambda t: _a(t.f(3, 4), 1),
    "linalg_matrix_norm.str_ord": lambda t: _a(t.f(3, 4)),
    "renorm": lambda t: _a(t.f(3, 4), 2, 0, 0.5),
    "cdist": lambda t: _a(t.f(3, 4), t.f(5, 4)),
    "pdist": lambda t: _a(t.f(4, 3)),
    "dist": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "cosine_similarity": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "trace": lambda t: _a(t.p(4, 4)),
    "quantile": lambda t: _a(t.f(3, 5), t.u(2), 1),
    "quantile.scalar": lambda t: _a(t.f(3, 5), 0.3, 1),
    "nanquantile": lambda t: _a(t.f(3, 5), t.u(2), 1),
    "nanquantile.scalar": lambda t: _a(t.f(3, 5), 0.3, 1),
    # Normalisations
    "layer_norm": lambda t: _a(t.f(3, 8), [8], t.f(8), t.f(8)),
    "native_layer_norm": lambda t: _a(t.f(3, 8), [8], t.f(8), t.f(8), 1e-5),
    "rms_norm": lambda t: _a(t.f(3, 8), [8], t.f(8)),
    "group_norm": lambda t: _a(t.f(2, 6, 5), 3, t.f(6), t.f(6)),
    "batch_norm": lambda t: _a(t.f(4, 3), t.f(3), t.f(3), t.f(3), t.p(3), False, 0.1, 1e-5, False),
    # Losses
    "binary_cross_entropy": lambda t: _a(t.u(3, 4), t.u(3, 4), t.p(3, 4)),
    "binary_cross_entropy_with_logits": lambda t: _a(t.f(3, 4), t.u(3, 4), t.p(3, 4), t.p(4)),
    "cosine_embedding_loss": lambda t: _a(t.f(3, 4), t.f(3, 4), t.sign(3)),
    "cross_entropy_loss": lambda t: _a(t.f(3, 5), t.i(5, 3), t.p(5)),
    "ctc_loss.IntList": lambda t: _a(*_log_probabilities(t), [6, 6], [3, 3]),
    "ctc_loss.Tensor": lambda t: _a(*_log_probabilities(t), t.lengths(6, 6), t.lengths(3, 3)),
    "hinge_embedding_loss": lambda t: _a(t.p(3, 4), t.sign(3, 4)),
    "huber_loss": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "kl_div": lambda t: _a(-4 * t.p(3, 4), t.u(3, 4)),
    "l1_loss": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "margin_ranking_loss": lambda t: _a(t.f(4), t.f(4), t.sign(4), 5.0),
    "mse_loss": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "multi_margin_loss": lambda t: _a(t.f(3, 5), t.i(5, 3), 1, 5.0, t.p(5)),
    "multilabel_margin_loss": lambda t: _a(t.f(3, 5), t.sets()),
    "multilabel_margin_loss_forward": lambda t: _a(t.f(3, 5), t.sets(), _MEAN),
    "nll_loss": lambda t: _a(t.f(3, 5), t.i(5, 3), t.p(5)),
    "nll_loss2d": lambda t: _a(t.f(2, 3, 4, 4), t.i(3, 2, 4, 4), t.p(3)),
    "poisson_nll_loss": lambda t: _a(t.f(3, 4), t.p(3, 4), True, False, 1e-8, _MEAN),
    "smooth_l1_loss": lambda t: _a(t.f(3, 4), t.f(3, 4)),
    "soft_margin_loss": lambda t: _a(t.f(3, 4), t.sign(3, 4)),
    "triplet_margin_loss": lambda t: _a(t.f(3, 4), t.f(3, 4), t.f(3, 4), 5.0),
    # Lists, indices
    "cat": lambda t: _a([t.f(3, 4), t.f(2, 4), t.f(1, 4)]),
    "stack": lambda t: _a([t.f(3, 4), t.f(3, 4), t.f(3, 4)]),
    "index_copy": lambda t: _a(t.f(5, 3), 0, t.i(5, 2), t.f(2, 3)),
    "index_put": lambda t: _a(t.f(5), [t.i(5, 3)], t.f(3)),
    "scatter_add": lambda t: _a(t.f(5, 3), 0, t.i(5, 2, 3), t.f(2, 3)),
    # Pooling, padding, sampling
    "avg_pool3d": lambda t: _a(t.f(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool3d": lambda t: _a(t.f(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_avg_pool3d": lambda t: _a(t.f(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda t: _a(t.f(1, 2, 4, 4, 4), [2, 2, 2]),
    "fractional_max_pool2d": lambda t: _a(t.f(1, 2, 6, 6), [2, 2], [3, 3], t.u(1, 2, 2)),
    "fractional_max_pool3d": lambda t: _a(t.f(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], t.u(1, 2, 3)),
    "max_unpool2d": lambda t: _a(t.f(1, 1, 2, 2), t.i(16, 1, 1, 2, 2), [4, 4]),
    "max_unpool3d": lambda t: _a(t.f(1, 1, 2, 2, 2), t.i(64, 1, 1, 2, 2, 2), [4, 4, 4], [2, 2, 2], [0, 0, 0]),
    "reflection_pad1d": lambda t: _a(t.f(1, 2, 5), [1, 2]),
    "reflection_pad2d": lambda t: _a(t.f(1, 2, 5, 5), [1, 2, 2, 1]),
    "replication_pad1d": lambda t: _a(t.f(1, 2, 5), [1, 2]),
    "replication_pad2d": lambda t: _a(t.f(1, 2, 5, 5), [1, 2, 2, 1]),
    "replication_pad3d": lambda t: _a(t.f(1, 1, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    # In five dimensions: what the four-dimensional one does inside asks fake tensors for the hardware.
    "grid_sampler": lambda t: _a(t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), 0, 0, False),
    "grid_sampler_2d": lambda t: _a(t.f(1, 2, 4, 4), t.u(1, 3, 3, 2), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": lambda t: _a(t.f(1, 2, 4, 4), t.u(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": lambda t: _a(t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), 0, 0, False),
    "upsample_nearest1d": lambda t: _a(t.f(1, 2, 4), [8]),
    "upsample_nearest2d": lambda t: _a(t.f(1, 2, 3, 3), [6, 6]),
    "upsample_nearest3d": lambda t: _a(t.f(1, 1, 2, 2, 2), [4, 4, 4]),
    "_upsample_nearest_exact1d": lambda t: _a(t.f(1, 2, 4), [8]),
    "_upsample_nearest_exact2d": lambda t: _a(t.f(1, 2, 3, 3), [6, 6]),
    "_upsample_nearest_exact3d": lambda t: _a(t.f(1, 1, 2, 2, 2), [4, 4, 4]),
    "upsample_linear1d": lambda t: _a(t.f(1, 2, 4), [8], False),
    "upsample_bilinear2d": lambda t: _a(t.f(1, 2, 3, 3), [6, 6], False),
    "_upsample_bilinear2d_aa": lambda t: _a(t.f(1, 2, 6, 6), [3, 3], False),
    "upsample_trilinear3d": lambda t: _a(t.f(1, 1, 2, 2, 2), [4, 4, 4], False),
    "upsample_bicubic2d": lambda t: _a(t.f(1, 2, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda t: _a(t.f(1, 2, 6, 6), [3, 3], False),
    # Spectra
    "stft": lambda t: _a(t.f(32), 8, 4, window=t.p(8), return_complex=True),
    "stft.center": lambda t: _a(t.f(32), 8, 4, window=t.p(8), center=True, return_complex=True),
    "fft_fft": lambda t: _a(t.f(3, 8)),
    "fft_ifft": lambda t: _a(t.f(3, 8)),
    "fft_fft2": lambda t: _a(t.f(4, 8)),
    "fft_ifft2": lambda t: _a(t.f(4, 8)),
    "fft_fftn": lambda t: _a(t.f(4, 8)),
    "fft_ifftn": lambda t: _a(t.f(4, 8)),
    "fft_rfft": lambda t: _a(t.f(3, 8)),
    "fft_irfft": lambda t: _a(t.f(3, 5)),
    "fft_rfft2": lambda t: _a(t.f(4, 8)),
    "fft_irfft2": lambda t: _a(t.f(4, 5)),
    "fft_rfftn": lambda t: _a(t.f(4, 8)),
    "fft_irfftn": lambda t: _a(t.f(4, 5)),
    "fft_hfft": lambda t: _a(t.f(3, 5)),
    "fft_ihfft": lambda t: _a(t.f(3, 8)),
    # Linear algebra
    "_lu_with_info": lambda t: _a(t.spd(3)),
    "cholesky": lambda t: _a(t.spd(3)),
    "cholesky_inverse": lambda t: _a(t.tril(3)),
    "cholesky_solve": lambda t: _a(t.f(3, 2), t.tril(3)),
    "geqrf": lambda t: _a(t.f(4, 3)),
    "inverse": lambda t: _a(t.spd(3)),
    "linalg_cholesky": lambda t: _a(t.spd(3)),
    "linalg_cholesky_ex": lambda t: _a(t.spd(3)),
    "linalg_cond": lambda t: _a(t.spd(3)),
    "linalg_cond.p_str": lambda t: _a(t.spd(3), "fro"),
    "linalg_eig": lambda t: _a(t.spd(3)),
    "linalg_eigh": lambda t: _a(t.spd(3)),
    "linalg_eigvals": lambda t: _a(t.spd(3)),
    "linalg_eigvalsh": lambda t: _a(t.spd(3)),
    "linalg_householder_product": lambda t: _a(t.f(4, 3), t.u(3)),
    "linalg_inv": lambda t: _a(t.spd(3)),
    "linalg_inv_ex": lambda t: _a(t.spd(3)),
    "linalg_lstsq": lambda t: _a(t.spd(3), t.f(3, 2)),
    "linalg_matrix_rank": lambda t: _a(t.spd(3), 0.1),
    "linalg_matrix_rank.atol_rtol_float": lambda t: _a(t.spd(3), atol=0.1, rtol=0.1),
    "linalg_matrix_rank.atol_rtol_tensor": lambda t: _a(t.spd(3), atol=t.u(1), rtol=t.u(1)),
    "linalg_matrix_rank.tol_tensor": lambda t: _a(t.spd(3), t.u(1)),
    "linalg_matrix_sqrth": lambda t: _a(t.spd(3)),
    "linalg_qr": lambda t: _a(t.f(4, 3)),
    "linalg_solve": lambda t: _a(t.spd(3), t.f(3, 2)),
    "linalg_svd": lambda t: _a(t.f(4, 3)),
    "linalg_svdvals": lambda t: _a(t.f(4, 3)),
    "linalg_tensorinv": lambda t: _a(t.spd(3), 1),
    "linalg_tensorsolve": lambda t: _a(t.spd(3), t.f(3)),
    "lu_solve": lambda t: _a(t.f(3, 2), t.spd(3), torch.arange(1, 4, dtype=torch.int32, device=t.device)),
    "orgqr": lambda t: _a(t.f(4, 3), t.u(3)),
    "ormqr": lambda t: _a(t.f(4, 3), t.u(3), t.f(4, 2)),
    "pinverse": lambda t: _a(t.f(4, 3)),
    "qr": lambda t: _a(t.f(4, 3)),
    "svd": lambda t: _a(t.f(4, 3)),
    "triangular_solve": lambda t: _a(t.f(3, 2), t.tril(3), False),
}

# Further calls, which differ from those above in the number or shape of their tensors.
MORE: dict[str, tuple[Callable[[Inputs], Arguments], ...]] = {
    "matmul": (
        lambda t: _a(t.f(4), t.f(4)),
        lambda t: _a(t.f(4), t.f(4, 5)),
        lambda t: _a(t.f(2, 3, 4), t.f(4)),
        lambda t: _a(t.f(3, 4), t.f(4, 5)),
        lambda t: _a(t.f(2, 2, 3, 4), t.f(4, 5)),
    ),
    "linear": (
        lambda t: _a(t.f(4), t.f(5, 4), t.f(5)),
        lambda t: _a(t.f(3, 4), t.f(4)),
        lambda t: _a(t.f(3, 4), t.f(5, 4), t.f(5)),
        lambda t: _a(t.f(2, 2, 3, 4), t.f(5, 4), t.f(5)),
    ),
    "addmm": (lambda t: _a(t.f(5), t.f(3, 4), t.f(4, 5)), lambda t: _a(t.f(3, 1), t.f(3, 4), t.f(4, 5))),
    "baddbmm": (lambda t: _a(t.f(5), t.f(2, 3, 4), t.f(2, 4, 5)),),
    "addbmm": (lambda t: _a(t.f(5), t.f(2, 3, 4), t.f(2, 4, 5)),),
    "einsum": (
        lambda t: _a("ij,jk,kl->il", [t.f(3, 4), t.f(4, 5), t.f(5, 2)]),
        lambda t: _a("i,i->", [t.f(4), t.f(4)]),
        lambda t: _a("ij->ji", [t.f(3, 4)]),
    ),
    "chain_matmul": (lambda t: _a([t.f(3, 4), t.f(4, 5), t.f(5, 2), t.f(2, 6)]), lambda t: _a([t.f(3, 4), t.f(4, 5)])),
    "linalg_multi_dot": (
        lambda t: _a([t.f(3, 4), t.f(4, 5), t.f(5, 2), t.f(2, 6)]),
        lambda t: _a([t.f(4), t.f(4, 5), t.f(5)]),
    ),
    "cat": (
        lambda t: _a([t.f(3, 4)]),
        lambda t: _a([t.f(3, 4) for _ in range(5)], 1),
        lambda t: _a([t.f(3, 4), t.f(0, 4)]),
        lambda t: _a([t.f(0, 4), t.f(3, 4)]),
    ),
    "stack": (
        lambda t: _a([t.f(3, 4)]),
        lambda t: _a([t.f(3, 4) for _ in range(5)], 1),
        lambda t: _a([t.f(0, 4), t.f(0, 4)]),
    ),
    "conv1d": (
        lambda t: _a(t.f(2, 4, 9), t.f(6, 2, 3), t.f(6), [2], [1], [2], 2),
        lambda t: _a(t.f(3, 8), t.f(4, 3, 3), t.f(4)),
    ),
    "conv2d": (
        lambda t: _a(t.f(2, 4, 9, 9), t.f(6, 2, 3, 2), t.f(6), [2, 1], [1, 0], [1, 2], 2),
        lambda t: _a(t.f(2, 4, 9, 9), t.f(4, 1, 3, 2), t.f(4), groups=4),
        lambda t: _a(t.f(3, 6, 6), t.f(4, 3, 1, 1), t.f(4)),
    ),
    "scaled_dot_product_attention": (
        lambda t: _attention(t, 4, masked=False),
        lambda t: _a(t.f(2, 4, 8), t.f(2, 4, 8), t.f(2, 4, 8)),
        lambda t: _a(t.f(1, 2, 4, 8), t.f(1, 2, 6, 8), t.f(1, 2, 6, 16)),
    ),
    "layer_norm": (lambda t: _a(t.f(2, 3, 8), [3, 8], t.f(3, 8), t.f(3, 8)), lambda t: _a(t.f(2, 1100), [1100])),
    "native_layer_norm": (lambda t: _a(t.f(2, 3, 8), [3, 8], t.f(3, 8), t.f(3, 8), 1e-5),),
    "rms_norm": (lambda t: _a(t.f(2, 3, 8), [3, 8], t.f(3, 8)),),
    "softmax.int": (lambda t: _a(t.f(2, 1100), 1),),
    "log_softmax.int": (lambda t: _a(t.f(2, 1100), 1),),
    "logsumexp": (lambda t: _a(t.f(2, 3, 4), [0, 2]),),
    "sum.dim_IntList": (lambda t: _a(t.p(2, 3, 4), [0, 2]), lambda t: _a(t.p(2, 3, 4), None)),
    "linalg_vector_norm": (lambda t: _a(t.f(3, 4)), lambda t: _a(t.f(2, 3, 4), 2, [0, 2])),
    "norm.ScalarOpt_dim": (lambda t: _a(t.f(2, 3, 4), None, [0, 2], True),),
    "index_put": (lambda t: _a(t.f(5), [t.i(5, 3)], t.f(3), True), lambda t: _a(t.f(5, 3), [t.i(5, 2)], t.f(2, 3))),
    "grid_sampler": (lambda t: _a(t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), 1, 1, True),),
    "pow.Tensor_Tensor": (lambda t: _a(t.p(3, 4), t.i(3, 3, 4)), lambda t: _a(t.i(3, 3, 4), t.p(3, 4))),
    "cross_entropy_loss": (
        lambda t: _a(t.f(3, 5), t.u(3, 5)),
        lambda t: _a(t.f(2, 5, 3), t.i(5, 2, 3), None, 1, -100, 0.1),
    ),
    "nll_loss": (lambda t: _a(t.f(5), torch.zeros((), dtype=torch.int64, device=t.device)),),
    "multi_margin_loss": (lambda t: _a(t.f(3, 5), t.i(5, 3), 2, 0.5),),
    "prelu": (lambda t: _a(t.f(2, 3, 4), t.u(1)), lambda t: _a(t.f(4), t.u(1))),
    # Without a batch; conv2d and nll_loss above
    "conv1d.padding": (lambda t: _a(t.f(3, 8), t.f(4, 3, 3), t.f(4), padding="same"),),
    "conv2d.padding": (lambda t: _a(t.f(3, 6, 6), t.f(4, 3, 1, 3), t.f(4), padding="same"),),
    "conv3d": (lambda t: _a(t.f(2, 4, 4, 4), t.f(3, 2, 2, 2, 2), t.f(3)),),
    "conv3d.padding": (lambda t: _a(t.f(2, 4, 4, 4), t.f(3, 2, 3, 3, 3), t.f(3), padding="same"),),
    "conv_transpose1d": (lambda t: _a(t.f(3, 8), t.f(3, 4, 3), t.f(4)),),
    "conv_transpose2d.input": (lambda t: _a(t.f(3, 4, 4), t.f(3, 4, 3, 2), t.f(4)),),
    "conv_transpose3d.input": (lambda t: _a(t.f(2, 3, 3, 3), t.f(2, 3, 2, 2, 2), t.f(3)),),
    "bilinear": (
        lambda t: _a(t.f(4), t.f(5), t.f(2, 4, 5), t.f(2)),
        lambda t: _a(t.f(2, 3, 4), t.f(2, 3, 5), t.f(2, 4, 5)),
    ),
    "avg_pool3d": (lambda t: _a(t.f(2, 4, 4, 4), [2, 2, 2]),),
    "max_pool3d": (lambda t: _a(t.f(2, 4, 4, 4), [2, 2, 2]),),
    "adaptive_avg_pool3d": (lambda t: _a(t.f(2, 4, 4, 4), [2, 2, 2]),),
    "adaptive_max_pool3d": (lambda t: _a(t.f(2, 4, 4, 4), [2, 2, 2]),),
    "max_unpool2d": (lambda t: _a(t.f(1, 2, 2), t.i(16, 1, 2, 2), [4, 4]),),
    "max_unpool3d": (lambda t: _a(t.f(1, 2, 2, 2), t.i(64, 1, 2, 2, 2), [4, 4, 4], [2, 2, 2], [0, 0, 0]),),
    "reflection_pad1d": (lambda t: _a(t.f(2, 5), [1, 2]),),
    "reflection_pad2d": (lambda t: _a(t.f(2, 5, 5), [1, 2, 2, 1]),),
    "replication_pad1d": (lambda t: _a(t.f(2, 5), [1, 2]),),
    "replication_pad2d": (lambda t: _a(t.f(2, 5, 5), [1, 2, 2, 1]),),
    "replication_pad3d": (lambda t: _a(t.f(1, 3, 3, 3), [1, 1, 1, 1, 1, 1]),),
    "cosine_embedding_loss": (lambda t: _a(t.f(4), t.f(4), t.sign()),),
    "triplet_margin_loss": (lambda t: _a(t.f(4), t.f(4), t.f(4), 5.0),),
    "cdist": (lambda t: _a(t.f(2, 3, 4), t.f(2, 5, 4)), lambda t: _a(t.f(3, 4), t.f(2, 5, 4))),
}
