"""List one sample call for every op name of the cast chapter."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = partial[Any]


@dataclass
class Inputs:
    """Makes the tensors of a sample call; the same seed gives the same values in every dtype.

    `dtypes` are given to the floating inputs in the order in which they are made, the last one to all that
    follow, so `(float32, float16)` is a call of mixed types. Where `cast_to` is set, each input is then cast to
    it outside autocast: the call that autocast promises to be equal to. `absolute` takes away the signs, after the
    casts: what is then computed is |A||B|, the size that the error of AB is measured by. Values are random, hence as
    good as never representable in 16 bits; on a `fake` target there are none.
    """

    dtypes: Sequence[torch.dtype]
    device: torch.device
    seed: int = 0
    fake: bool = False
    cast_to: torch.dtype | None = None
    absolute: bool = False
    made: int = field(default=0, init=False)

    @functools.cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def f(self, *shape: int) -> torch.Tensor:
        """Standard normal values."""
        return self._finish(lambda: torch.randn(shape, generator=self._generator), shape)

    def p(self, *shape: int) -> torch.Tensor:
        """Values in [0.5, 1.5): a positive argument."""
        return self._finish(lambda: torch.rand(shape, generator=self._generator) + 0.5, shape)

    def u(self, *shape: int) -> torch.Tensor:
        """Values in (0.05, 0.95): a probability, or the argument of an inverse function."""
        return self._finish(lambda: torch.rand(shape, generator=self._generator) * 0.9 + 0.05, shape)

    def spd(self, n: int) -> torch.Tensor:
        """A symmetric positive definite matrix with eigenvalues near 1, 2, ... n: well-conditioned, none repeated."""

        def make() -> torch.Tensor:
            noise = torch.randn((n, n), generator=self._generator) * 0.02
            return noise + noise.T + torch.diag(torch.arange(1.0, n + 1))

        return self._finish(make, (n, n))

    def tril(self, n: int) -> torch.Tensor:
        """A lower triangular matrix with a diagonal near 1, 2, ... n."""
        return self._finish(lambda: self._triangle(n), (n, n))

    def i(self, high: int, *shape: int) -> torch.Tensor:
        """Class numbers or indices below `high`, distinct where there are no more than `high` of them."""
        count = torch.Size(shape).numel()
        if self.fake:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)
        factor = next(each for each in (3, 5, 7, 2) if math.gcd(each, high) == 1)
        return (torch.arange(count) * factor % high).reshape(shape).to(self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        """Booleans, of which each fourth is false, the first one true."""
        if self.fake:
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        return (torch.arange(torch.Size(shape).numel()) % 4 != 1).reshape(shape).to(self.device)

    def sets(self) -> torch.Tensor:
        """For each of three rows, the classes of five that it belongs to, ended by -1."""
        return torch.tensor([[3, 0, -1, 1, 2], [1, -1, 0, 2, 3], [4, 2, 1, -1, 0]]).to(self.device)

    def lengths(self, *numbers: int) -> torch.Tensor:
        """Lengths of sequences. On the device: a dispatch mode has ctc_loss divide there, by lengths where they are."""
        return torch.tensor(numbers).to(self.device)

    def sign(self, *shape: int) -> torch.Tensor:
        """Values -1 and 1, alternating: the target of a margin loss."""
        return self._finish(lambda: 1.0 - 2.0 * (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape), shape)

    def _triangle(self, n: int) -> torch.Tensor:
        noise = torch.randn((n, n), generator=self._generator) * 0.1
        return torch.tril(noise, -1) + torch.diag(torch.arange(1.0, n + 1))

    def _finish(self, make: Callable[[], torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        dtype = self.dtypes[min(self.made, len(self.dtypes) - 1)]
        self.made += 1
        if self.fake:
            return torch.empty(shape, dtype=self.cast_to or dtype, device=self.device)
        value = make()
        if dtype.is_complex:
            value = torch.complex(value, value.flip(0))
        elif not dtype.is_floating_point:
            value = value * 3
        tensor = value.to(self.device).to(dtype)
        tensor = tensor if self.cast_to is None else tensor.to(self.cast_to)
        return tensor.abs() if self.absolute else tensor


def spell(call: Call) -> str | None:
    """Return `call` as Python that needs only torch; None where its function has no public name."""
    name = str(call.func) if isinstance(call.func, torch._ops.OpOverload) else torch.overrides.resolve_name(call.func)
    if name is None:
        return None
    words = [_word(value) for value in call.args]
    words += [f"{key}={_word(value)}" for key, value in call.keywords.items()]
    return f"{'torch.ops.' if name.startswith('aten.') else ''}{name}({', '.join(words)})"


def _word(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return f'torch.rand({tuple(value.shape)}, dtype={value.dtype}, device="{value.device.type}")'
    if isinstance(value, torch.Tensor):
        return f'torch.zeros({tuple(value.shape)}, dtype={value.dtype}, device="{value.device.type}")'
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    return f'float("{value}")' if isinstance(value, float) and math.isinf(value) else repr(value)


aten = torch.ops.aten


def _plain_attention(*inputs: torch.Tensor) -> torch.Tensor:
    """Run unfused attention: to select a backend, torch 2.6 to 2.8 queries hardware that fake tensors lack."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs)


SAMPLES: dict[str, Callable[[Inputs], Call]] = {
    # Products, convolutions, recurrent cells, attention
    "__matmul__": lambda t: partial(operator.matmul, t.f(3, 4), t.f(4, 5)),
    "matmul": lambda t: partial(torch.matmul, t.f(2, 3, 4), t.f(4, 5)),
    "mm": lambda t: partial(torch.mm, t.f(3, 4), t.f(4, 5)),
    "mv": lambda t: partial(torch.mv, t.f(3, 4), t.f(4)),
    "bmm": lambda t: partial(torch.bmm, t.f(2, 3, 4), t.f(2, 4, 5)),
    "addmm": lambda t: partial(torch.addmm, t.f(3, 5), t.f(3, 4), t.f(4, 5), beta=0.5, alpha=2.0),
    "addmv": lambda t: partial(torch.addmv, t.f(3), t.f(3, 4), t.f(4)),
    "addr": lambda t: partial(torch.addr, t.f(3, 4), t.f(3), t.f(4)),
    "addbmm": lambda t: partial(torch.addbmm, t.f(3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "baddbmm": lambda t: partial(torch.baddbmm, t.f(2, 3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "chain_matmul": lambda t: partial(torch.chain_matmul, t.f(3, 4), t.f(4, 5), t.f(5, 2)),
    "multi_dot": lambda t: partial(torch.linalg.multi_dot, [t.f(3, 4), t.f(4, 5), t.f(5, 2)]),
    "linalg_vecdot": lambda t: partial(torch.linalg.vecdot, t.f(3, 4), t.f(3, 4)),
    "linear": lambda t: partial(F.linear, t.f(3, 4), t.f(5, 4), t.f(5)),
    "conv1d": lambda t: partial(F.conv1d, t.f(2, 3, 8), t.f(4, 3, 3), t.f(4)),
    # Not 3 by 3: a GPU's library may compute that by Winograd's transform, whose error no bound by element holds.
    "conv2d": lambda t: partial(F.conv2d, t.f(2, 3, 6, 6), t.f(4, 3, 3, 2), t.f(4), padding=1),
    "conv3d": lambda t: partial(F.conv3d, t.f(1, 2, 4, 4, 4), t.f(3, 2, 2, 2, 2), t.f(3)),
    "conv_tbc": lambda t: partial(torch.conv_tbc, t.f(6, 2, 3), t.f(3, 3, 4), t.f(4)),
    "conv_transpose1d": lambda t: partial(F.conv_transpose1d, t.f(2, 3, 8), t.f(3, 4, 3), t.f(4)),
    "conv_transpose2d": lambda t: partial(F.conv_transpose2d, t.f(2, 3, 4, 4), t.f(3, 4, 3, 2), t.f(4)),
    "conv_transpose3d": lambda t: partial(F.conv_transpose3d, t.f(1, 2, 3, 3, 3), t.f(2, 3, 2, 2, 2), t.f(3)),
    "_convolution": lambda t: partial(
        torch._C._VariableFunctions._convolution,
        *(t.f(2, 3, 6, 6), t.f(4, 3, 3, 3), t.f(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        *(False, False, True),  # the spelling with three flags is the one that CPU registers
    ),
    "conv1d.padding": lambda t: partial(F.conv1d, t.f(2, 3, 8), t.f(4, 3, 3), t.f(4), padding="same"),
    "conv2d.padding": lambda t: partial(F.conv2d, t.f(2, 3, 6, 6), t.f(4, 3, 1, 3), t.f(4), padding="same"),
    "conv3d.padding": lambda t: partial(F.conv3d, t.f(1, 2, 4, 4, 4), t.f(3, 2, 3, 3, 3), t.f(3), padding="same"),
    "linear.plain": lambda t: partial(F.linear, t.f(2, 3, 4), t.f(5, 4)),
    "einsum": lambda t: partial(torch.einsum, "bij,bjk->bik", t.f(2, 3, 4), t.f(2, 4, 5)),
    "_addmm_activation": lambda t: partial(torch._addmm_activation, t.f(5), t.f(3, 4), t.f(4, 5)),
    "prelu": lambda t: partial(F.prelu, t.f(2, 3, 4), t.u(3)),
    "GRUCell": lambda t: partial(torch.gru_cell, t.f(2, 4), t.f(2, 3), t.f(9, 4), t.f(9, 3), t.f(9), t.f(9)),
    "LSTMCell": lambda t: partial(
        torch.lstm_cell, t.f(2, 4), [t.f(2, 3), t.f(2, 3)], t.f(12, 4), t.f(12, 3), t.f(12), t.f(12)
    ),
    "RNNCell": lambda t: partial(torch.rnn_tanh_cell, t.f(2, 4), t.f(2, 3), t.f(3, 4), t.f(3, 3), t.f(3), t.f(3)),
    "rnn_relu_cell": lambda t: partial(torch.rnn_relu_cell, t.f(2, 4), t.f(2, 3), t.f(3, 4), t.f(3, 3), t.f(3), t.f(3)),
    "mkldnn_rnn_layer": lambda t: partial(
        lambda *given: torch.mkldnn_rnn_layer(*given)[:3],  # the fourth output is scratch memory
        *(t.f(5, 2, 4), t.f(12, 4), t.f(12, 3), t.f(12), t.f(12), t.f(2, 3), t.f(2, 3)),
        *(False, [], 2, 3, 1, True, False, False, False),  # one LSTM layer, one direction, time first, inference
    ),
    "scaled_dot_product_attention": lambda t: partial(
        _plain_attention, t.f(1, 2, 4, 8), t.f(1, 2, 4, 8), t.f(1, 2, 4, 8)
    ),
    "_native_multi_head_attention": lambda t: partial(
        torch._native_multi_head_attention,
        *(t.f(1, 4, 8), t.f(1, 4, 8), t.f(1, 4, 8), 8, 2, t.f(24, 8), t.f(24), t.f(8, 8), t.f(8)),
        need_weights=False,
    ),
    # Powers, exponentials, other element by element functions
    "__pow__": lambda t: partial(operator.pow, t.p(3, 4), 2.5),
    "__rpow__": lambda t: partial(operator.pow, 2.5, t.f(3, 4)),
    "__rdiv__": lambda t: partial(lambda tensor: tensor.__rdiv__(1.5), t.p(3, 4)),
    "__rtruediv__": lambda t: partial(operator.truediv, 1.5, t.p(3, 4)),
    "acos": lambda t: partial(torch.acos, t.u(3, 4)),
    "asin": lambda t: partial(torch.asin, t.u(3, 4)),
    "cosh": lambda t: partial(torch.cosh, t.f(3, 4)),
    "erfinv": lambda t: partial(torch.erfinv, t.u(3, 4)),
    "exp": lambda t: partial(torch.exp, t.f(3, 4)),
    "expm1": lambda t: partial(torch.expm1, t.f(3, 4)),
    "log": lambda t: partial(torch.log, t.p(3, 4)),
    "log10": lambda t: partial(torch.log10, t.p(3, 4)),
    "log1p": lambda t: partial(torch.log1p, t.p(3, 4)),
    "log2": lambda t: partial(torch.log2, t.p(3, 4)),
    "pow": lambda t: partial(torch.pow, t.p(3, 4), t.f(3, 4)),
    "pow.scalar": lambda t: partial(torch.pow, t.p(3, 4), 2.5),
    "pow.base": lambda t: partial(torch.pow, 2.5, t.f(3, 4)),
    "reciprocal": lambda t: partial(torch.reciprocal, t.p(3, 4)),
    "rsqrt": lambda t: partial(torch.rsqrt, t.p(3, 4)),
    "sinh": lambda t: partial(torch.sinh, t.f(3, 4)),
    "softplus": lambda t: partial(F.softplus, t.f(3, 4)),
    "tan": lambda t: partial(torch.tan, t.u(3, 4)),
    # Sums, norms, distances, normalisations
    "cdist": lambda t: partial(torch.cdist, t.f(3, 4), t.f(5, 4)),
    "cosine_similarity": lambda t: partial(F.cosine_similarity, t.f(3, 4), t.f(3, 4)),
    "cumprod": lambda t: partial(torch.cumprod, t.p(3, 4), 1),
    "cumsum": lambda t: partial(torch.cumsum, t.f(3, 4), 1),
    "dist": lambda t: partial(torch.dist, t.f(3, 4), t.f(3, 4)),
    "group_norm": lambda t: partial(F.group_norm, t.f(2, 6, 5), 3, t.f(6), t.f(6)),
    "layer_norm": lambda t: partial(F.layer_norm, t.f(3, 8), (8,), t.f(8), t.f(8)),
    "rms_norm": lambda t: partial(F.rms_norm, t.f(3, 8), (8,), t.f(8)),
    "log_softmax": lambda t: partial(F.log_softmax, t.f(3, 4), 1),
    "norm": lambda t: partial(torch.norm, t.f(3, 4), 2, 1),
    "norm.all": lambda t: partial(torch.norm, t.f(3, 4), 3),
    "norm.inf": lambda t: partial(torch.norm, t.f(3, 4), float("inf"), 1),
    "norm.fro": lambda t: partial(torch.norm, t.f(3, 4), "fro"),
    "frobenius_norm": lambda t: partial(torch.frobenius_norm, t.f(3, 4), [0, 1]),
    "nuclear_norm": lambda t: partial(torch.nuclear_norm, t.f(3, 4)),
    "linalg_vector_norm": lambda t: partial(torch.linalg.vector_norm, t.f(3, 4), 3, 1),
    "linalg_matrix_norm": lambda t: partial(torch.linalg.matrix_norm, t.f(3, 4)),
    "linalg_matrix_norm.one": lambda t: partial(torch.linalg.matrix_norm, t.f(3, 4), 1),
    "logsumexp": lambda t: partial(torch.logsumexp, t.f(3, 4), 1),
    "native_layer_norm": lambda t: partial(torch.native_layer_norm, t.f(3, 8), (8,), t.f(8), t.f(8), 1e-5),
    "normalize": lambda t: partial(F.normalize, t.f(3, 4)),
    "pdist": lambda t: partial(F.pdist, t.f(4, 3)),
    "prod": lambda t: partial(torch.prod, t.p(3, 4), 1),
    "prod.all": lambda t: partial(torch.prod, t.p(3, 4)),
    "renorm": lambda t: partial(torch.renorm, t.f(3, 4), 2, 0, 0.5),
    "softmax": lambda t: partial(F.softmax, t.f(3, 4), 1),
    "softmin": lambda t: partial(F.softmin, t.f(3, 4), 1),
    "sum": lambda t: partial(torch.sum, t.p(3, 40), 1),
    "sum.all": lambda t: partial(torch.sum, t.p(3, 40)),
    "trace": lambda t: partial(torch.trace, t.p(4, 4)),
    # Losses
    "binary_cross_entropy": lambda t: partial(F.binary_cross_entropy, t.u(3, 4), t.u(3, 4)),
    "binary_cross_entropy_with_logits": lambda t: partial(F.binary_cross_entropy_with_logits, t.f(3, 4), t.u(3, 4)),
    "cosine_embedding_loss": lambda t: partial(F.cosine_embedding_loss, t.f(3, 4), t.f(3, 4), t.sign(3)),
    "cross_entropy": lambda t: partial(F.cross_entropy, t.f(3, 5), t.i(5, 3)),
    "cross_entropy_loss": lambda t: partial(aten.cross_entropy_loss, t.f(3, 5), t.i(5, 3)),
    "ctc_loss": lambda t: partial(F.ctc_loss, t.f(6, 2, 5), t.i(4, 2, 3) + 1, (6, 6), (3, 3)),
    "ctc_loss.tensors": lambda t: partial(F.ctc_loss, t.f(6, 2, 5), t.i(4, 2, 3) + 1, t.lengths(6, 6), t.lengths(3, 3)),
    "hinge_embedding_loss": lambda t: partial(F.hinge_embedding_loss, t.p(3, 4), t.sign(3, 4)),
    "huber_loss": lambda t: partial(F.huber_loss, t.f(3, 4), t.f(3, 4)),
    "kl_div": lambda t: partial(F.kl_div, -4 * t.p(3, 4), t.u(3, 4), reduction="sum"),
    "l1_loss": lambda t: partial(F.l1_loss, t.f(3, 4), t.f(3, 4)),
    "margin_ranking_loss": lambda t: partial(F.margin_ranking_loss, t.f(4), t.f(4), t.sign(4), margin=5.0),
    "mse_loss": lambda t: partial(F.mse_loss, t.f(3, 4), t.f(3, 4)),
    "multi_margin_loss": lambda t: partial(F.multi_margin_loss, t.f(3, 5), t.i(5, 3)),
    "multilabel_margin_loss": lambda t: partial(F.multilabel_margin_loss, t.f(3, 5), t.sets()),
    "multilabel_margin_loss_forward": lambda t: partial(aten.multilabel_margin_loss_forward, t.f(3, 5), t.sets(), 1),
    "nll_loss": lambda t: partial(F.nll_loss, -t.p(3, 5), t.i(5, 3)),
    "nll_loss2d": lambda t: partial(aten.nll_loss2d, -t.p(2, 3, 4, 4), t.i(3, 2, 4, 4)),
    "poisson_nll_loss": lambda t: partial(F.poisson_nll_loss, t.f(3, 4), t.p(3, 4)),
    "smooth_l1_loss": lambda t: partial(F.smooth_l1_loss, t.f(3, 4), t.f(3, 4)),
    "soft_margin_loss": lambda t: partial(F.soft_margin_loss, t.f(3, 4), t.sign(3, 4)),
    "triplet_margin_loss": lambda t: partial(F.triplet_margin_loss, t.f(3, 4), t.f(3, 4), t.f(3, 4), margin=5.0),
    # Several inputs that need one type
    "addcdiv": lambda t: partial(torch.addcdiv, t.f(3, 4), t.f(3, 4), t.p(3, 4)),
    "addcmul": lambda t: partial(torch.addcmul, t.f(3, 4), t.f(3, 4), t.f(3, 4)),
    "atan2": lambda t: partial(torch.atan2, t.f(3, 4), t.p(3, 4)),
    "bilinear": lambda t: partial(F.bilinear, t.f(3, 4), t.f(3, 5), t.f(2, 4, 5)),
    "cat": lambda t: partial(torch.cat, [t.f(3, 4), t.f(2, 4), t.f(1, 4)]),
    "cross": lambda t: partial(torch.cross, t.f(4, 3), t.f(4, 3), dim=1),
    "vdot": lambda t: partial(torch.vdot, t.f(6), t.f(6)),
    "dot": lambda t: partial(torch.dot, t.f(6), t.f(6)),
    # In five dimensions: the four-dimensional decomposition indexes, for which fake tensors ask for the hardware.
    "grid_sample": lambda t: partial(F.grid_sample, t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), align_corners=False),
    "index_copy": lambda t: partial(lambda x, i, s: torch.index_copy(x, 0, i, s), t.f(5, 3), t.i(5, 2), t.f(2, 3)),
    "index_put": lambda t: partial(lambda x, i, v: torch.index_put(x, (i,), v), t.f(5), t.i(5, 3), t.f(3)),
    "scatter_add": lambda t: partial(lambda x, i, s: torch.scatter_add(x, 0, i, s), t.f(5, 3), t.i(5, 2, 3), t.f(2, 3)),
    "stack": lambda t: partial(torch.stack, [t.f(3, 4), t.f(3, 4), t.f(3, 4)]),
    "tensordot": lambda t: partial(torch.tensordot, t.f(3, 4, 5), t.f(4, 5, 2), 2),
    # Pooling, padding, sampling
    "adaptive_avg_pool3d": lambda t: partial(F.adaptive_avg_pool3d, t.f(1, 2, 4, 4, 4), 2),
    "adaptive_max_pool3d": lambda t: partial(aten.adaptive_max_pool3d, t.f(1, 2, 4, 4, 4), [2, 2, 2]),
    "avg_pool3d": lambda t: partial(F.avg_pool3d, t.f(1, 2, 4, 4, 4), 2),
    "fractional_max_pool2d": lambda t: partial(
        aten.fractional_max_pool2d, t.f(1, 2, 6, 6), [2, 2], [3, 3], t.u(1, 2, 2)
    ),
    "fractional_max_pool3d": lambda t: partial(
        aten.fractional_max_pool3d, t.f(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], t.u(1, 2, 3)
    ),
    "grid_sampler": lambda t: partial(torch.grid_sampler, t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), 0, 0, False),
    "grid_sampler_2d": lambda t: partial(torch.grid_sampler_2d, t.f(1, 2, 4, 4), t.u(1, 3, 3, 2), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": lambda t: partial(
        torch._grid_sampler_2d_cpu_fallback, t.f(1, 2, 4, 4), t.u(1, 3, 3, 2), 0, 0, False
    ),
    "grid_sampler_3d": lambda t: partial(torch.grid_sampler_3d, t.f(1, 2, 3, 3, 3), t.u(1, 2, 2, 2, 3), 0, 0, False),
    "max_pool3d": lambda t: partial(F.max_pool3d, t.f(1, 2, 4, 4, 4), 2),
    "max_unpool2d": lambda t: partial(F.max_unpool2d, t.f(1, 1, 2, 2), t.i(16, 1, 1, 2, 2), 2),
    "max_unpool3d": lambda t: partial(F.max_unpool3d, t.f(1, 1, 2, 2, 2), t.i(64, 1, 1, 2, 2, 2), 2),
    "reflection_pad1d": lambda t: partial(aten.reflection_pad1d, t.f(1, 2, 5), [1, 2]),
    "reflection_pad2d": lambda t: partial(aten.reflection_pad2d, t.f(1, 2, 5, 5), [1, 2, 2, 1]),
    "replication_pad1d": lambda t: partial(aten.replication_pad1d, t.f(1, 2, 5), [1, 2]),
    "replication_pad2d": lambda t: partial(aten.replication_pad2d, t.f(1, 2, 5, 5), [1, 2, 2, 1]),
    "replication_pad3d": lambda t: partial(aten.replication_pad3d, t.f(1, 1, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    "upsample_nearest1d": lambda t: partial(F.interpolate, t.f(1, 2, 4), scale_factor=2),
    "upsample_nearest2d": lambda t: partial(F.interpolate, t.f(1, 2, 3, 3), scale_factor=2),
    "upsample_nearest3d": lambda t: partial(F.interpolate, t.f(1, 1, 2, 2, 2), scale_factor=2),
    "_upsample_nearest_exact1d": lambda t: partial(F.interpolate, t.f(1, 2, 4), scale_factor=2, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda t: partial(
        F.interpolate, t.f(1, 2, 3, 3), scale_factor=2, mode="nearest-exact"
    ),
    "_upsample_nearest_exact3d": lambda t: partial(
        F.interpolate, t.f(1, 1, 2, 2, 2), scale_factor=2, mode="nearest-exact"
    ),
    "upsample_linear1d": lambda t: partial(F.interpolate, t.f(1, 2, 4), scale_factor=2, mode="linear"),
    "upsample_bilinear2d": lambda t: partial(F.interpolate, t.f(1, 2, 3, 3), scale_factor=2, mode="bilinear"),
    "_upsample_bilinear2d_aa": lambda t: partial(
        F.interpolate, t.f(1, 2, 6, 6), size=3, mode="bilinear", antialias=True
    ),
    "upsample_trilinear3d": lambda t: partial(F.interpolate, t.f(1, 1, 2, 2, 2), scale_factor=2, mode="trilinear"),
    "upsample_bicubic2d": lambda t: partial(F.interpolate, t.f(1, 2, 4, 4), scale_factor=2, mode="bicubic"),
    "_upsample_bicubic2d_aa": lambda t: partial(F.interpolate, t.f(1, 2, 6, 6), size=3, mode="bicubic", antialias=True),
    # Statistics, complex numbers, spectra, quantisation
    "fake_quantize_per_tensor_affine": lambda t: partial(
        torch.fake_quantize_per_tensor_affine, t.f(3, 4), 0.1, 0, 0, 255
    ),
    "nanquantile": lambda t: partial(torch.nanquantile, t.f(3, 5), t.u(2), dim=1),
    "nanquantile.scalar": lambda t: partial(torch.nanquantile, t.f(3, 5), 0.3, dim=1),
    "quantile.scalar": lambda t: partial(torch.quantile, t.f(3, 5), 0.3, dim=1),
    "polar": lambda t: partial(torch.polar, t.p(3, 4), t.f(3, 4)),
    "quantile": lambda t: partial(torch.quantile, t.f(3, 5), t.u(2), dim=1),
    "stft": lambda t: partial(torch.stft, t.f(32), 8, hop_length=4, window=t.p(8), center=False, return_complex=True),
    "stft.center": lambda t: partial(
        aten.stft.center, t.f(32), 8, hop_length=4, window=t.p(8), center=True, return_complex=True
    ),
    "view_as_complex": lambda t: partial(torch.view_as_complex, t.f(3, 2)),
    "fft_fft": lambda t: partial(torch.fft.fft, t.f(3, 8)),
    "fft_ifft": lambda t: partial(torch.fft.ifft, t.f(3, 8)),
    "fft_fft2": lambda t: partial(torch.fft.fft2, t.f(4, 8)),
    "fft_ifft2": lambda t: partial(torch.fft.ifft2, t.f(4, 8)),
    "fft_fftn": lambda t: partial(torch.fft.fftn, t.f(4, 8)),
    "fft_ifftn": lambda t: partial(torch.fft.ifftn, t.f(4, 8)),
    "fft_rfft": lambda t: partial(torch.fft.rfft, t.f(3, 8)),
    "fft_irfft": lambda t: partial(torch.fft.irfft, t.f(3, 5)),
    "fft_rfft2": lambda t: partial(torch.fft.rfft2, t.f(4, 8)),
    "fft_irfft2": lambda t: partial(torch.fft.irfft2, t.f(4, 5)),
    "fft_rfftn": lambda t: partial(torch.fft.rfftn, t.f(4, 8)),
    "fft_irfftn": lambda t: partial(torch.fft.irfftn, t.f(4, 5)),
    "fft_hfft": lambda t: partial(torch.fft.hfft, t.f(3, 5)),
    "fft_ihfft": lambda t: partial(torch.fft.ihfft, t.f(3, 8)),
    # Linear algebra
    "_lu_with_info": lambda t: partial(torch._lu_with_info, t.spd(3)),
    "cholesky": lambda t: partial(torch.cholesky, t.spd(3)),
    "cholesky_inverse": lambda t: partial(torch.cholesky_inverse, t.tril(3)),
    "cholesky_solve": lambda t: partial(torch.cholesky_solve, t.f(3, 2), t.tril(3)),
    "geqrf": lambda t: partial(torch.geqrf, t.f(4, 3)),
    "inverse": lambda t: partial(torch.inverse, t.spd(3)),
    "linalg_cholesky": lambda t: partial(torch.linalg.cholesky, t.spd(3)),
    "linalg_cholesky_ex": lambda t: partial(torch.linalg.cholesky_ex, t.spd(3)),
    "linalg_cond": lambda t: partial(torch.linalg.cond, t.spd(3)),
    "linalg_cond.fro": lambda t: partial(torch.linalg.cond, t.spd(3), "fro"),
    "linalg_eig": lambda t: partial(torch.linalg.eig, t.spd(3)),
    "linalg_eigh": lambda t: partial(torch.linalg.eigh, t.spd(3)),
    "linalg_eigvals": lambda t: partial(torch.linalg.eigvals, t.spd(3)),
    "linalg_eigvalsh": lambda t: partial(torch.linalg.eigvalsh, t.spd(3)),
    "linalg_householder_product": lambda t: partial(torch.linalg.householder_product, t.f(4, 3), t.u(3)),
    "linalg_inv": lambda t: partial(torch.linalg.inv, t.spd(3)),
    "linalg_inv_ex": lambda t: partial(torch.linalg.inv_ex, t.spd(3)),
    "linalg_lstsq": lambda t: partial(torch.linalg.lstsq, t.spd(3), t.f(3, 2)),
    "linalg_matrix_rank": lambda t: partial(torch.linalg.matrix_rank, t.spd(3)),
    "linalg_matrix_rank.bounds": lambda t: partial(torch.linalg.matrix_rank, t.spd(3), atol=0.1, rtol=0.1),
    "linalg_matrix_rank.tensors": lambda t: partial(
        torch.linalg.matrix_rank, t.spd(3), atol=torch.tensor(0.1, dtype=torch.float64, device=t.device)
    ),
    "linalg_qr": lambda t: partial(torch.linalg.qr, t.f(4, 3)),
    "linalg_solve": lambda t: partial(torch.linalg.solve, t.spd(3), t.f(3, 2)),
    "linalg_svd": lambda t: partial(torch.linalg.svd, t.f(4, 3)),
    "linalg_svdvals": lambda t: partial(torch.linalg.svdvals, t.f(4, 3)),
    "linalg_tensorinv": lambda t: partial(torch.linalg.tensorinv, t.spd(3), ind=1),
    "linalg_tensorsolve": lambda t: partial(torch.linalg.tensorsolve, t.spd(3), t.f(3)),
    "lu_solve": lambda t: partial(
        torch.lu_solve, t.f(3, 2), t.spd(3), torch.arange(1, 4, dtype=torch.int32, device=t.device)
    ),
    "orgqr": lambda t: partial(torch.orgqr, t.f(4, 3), t.u(3)),
    "ormqr": lambda t: partial(torch.ormqr, t.f(4, 3), t.u(3), t.f(4, 2)),
    "pinverse": lambda t: partial(torch.pinverse, t.f(4, 3)),
    "qr": lambda t: partial(torch.qr, t.f(4, 3)),
    "svd": lambda t: partial(torch.svd, t.f(4, 3)),
    "triangular_solve": lambda t: partial(torch.triangular_solve, t.f(3, 2), t.tril(3), upper=False),
    # Ops that no list of the op reference names, on any backend
    "abs": lambda t: partial(torch.abs, t.f(3, 4)),
    "ceil": lambda t: partial(torch.ceil, t.f(3, 4)),
    "cos": lambda t: partial(torch.cos, t.f(3, 4)),
    "erf": lambda t: partial(torch.erf, t.f(3, 4)),
    "exp2": lambda t: partial(torch.exp2, t.f(3, 4)),
    "floor": lambda t: partial(torch.floor, t.f(3, 4)),
    "neg": lambda t: partial(torch.neg, t.f(3, 4)),
    "round": lambda t: partial(torch.round, t.f(3, 4)),
    "sign": lambda t: partial(torch.sign, t.f(3, 4)),
    "sin": lambda t: partial(torch.sin, t.f(3, 4)),
    "square": lambda t: partial(torch.square, t.f(3, 4)),
    "tanh": lambda t: partial(torch.tanh, t.f(3, 4)),
    "clone": lambda t: partial(torch.clone, t.f(3, 4)),
    "atan": lambda t: partial(torch.atan, t.f(3, 4)),
    "lgamma": lambda t: partial(torch.lgamma, t.p(3, 4)),
    "digamma": lambda t: partial(torch.digamma, t.p(3, 4)),
    "sqrt": lambda t: partial(torch.sqrt, t.p(3, 4)),
    "sigmoid": lambda t: partial(torch.sigmoid, t.f(3, 4)),
    "elu": lambda t: partial(F.elu, t.f(3, 4)),
    "celu": lambda t: partial(F.celu, t.f(3, 4)),
    "selu": lambda t: partial(F.selu, t.f(3, 4)),
    "gelu": lambda t: partial(F.gelu, t.f(3, 4)),
    "hardsigmoid": lambda t: partial(F.hardsigmoid, t.f(3, 4)),
    "hardswish": lambda t: partial(F.hardswish, t.f(3, 4)),
    "hardtanh": lambda t: partial(F.hardtanh, t.f(3, 4)),
    "leaky_relu": lambda t: partial(F.leaky_relu, t.f(3, 4)),
    "logsigmoid": lambda t: partial(F.logsigmoid, t.f(3, 4)),
    "mish": lambda t: partial(F.mish, t.f(3, 4)),
    "relu": lambda t: partial(F.relu, t.f(3, 4)),
    "relu6": lambda t: partial(F.relu6, t.f(3, 4)),
    "silu": lambda t: partial(F.silu, t.f(3, 4)),
    "softshrink": lambda t: partial(F.softshrink, t.f(3, 4)),
    "softsign": lambda t: partial(F.softsign, t.f(3, 4)),
    "glu": lambda t: partial(F.glu, t.f(3, 4), 1),
    "threshold": lambda t: partial(F.threshold, t.f(3, 4), 0.1, 20.0),
    "add": lambda t: partial(torch.add, t.f(3, 4), t.f(3, 4)),
    "sub": lambda t: partial(torch.sub, t.f(3, 4), t.f(3, 4)),
    "mul": lambda t: partial(torch.mul, t.f(3, 4), t.f(3, 4)),
    "hypot": lambda t: partial(torch.hypot, t.f(3, 4), t.f(3, 4)),
    "maximum": lambda t: partial(torch.maximum, t.f(3, 4), t.f(3, 4)),
    "minimum": lambda t: partial(torch.minimum, t.f(3, 4), t.f(3, 4)),
    "logaddexp": lambda t: partial(torch.logaddexp, t.f(3, 4), t.f(3, 4)),
    "div": lambda t: partial(torch.div, t.f(3, 4), t.p(3, 4)),
    "lerp": lambda t: partial(torch.lerp, t.f(3, 4), t.f(3, 4), 0.3),
    "clamp": lambda t: partial(torch.clamp, t.f(3, 4), -0.5, 0.5),
    "where": lambda t: partial(lambda x, y: torch.where(x > 0, x, y), t.f(3, 4), t.f(3, 4)),
    "masked_fill": lambda t: partial(lambda x: x.masked_fill(x > 0, 0.5), t.f(3, 4)),
    "mean": lambda t: partial(torch.mean, t.f(3, 4), 1),
    "amax": lambda t: partial(torch.amax, t.f(3, 4), 1),
    "amin": lambda t: partial(torch.amin, t.f(3, 4), 1),
    "argmax": lambda t: partial(torch.argmax, t.f(3, 4), 1),
    "var": lambda t: partial(torch.var, t.f(3, 4), 1),
    "std": lambda t: partial(torch.std, t.f(3, 4), 1),
    "nansum": lambda t: partial(torch.nansum, t.f(3, 4), 1),
    "max": lambda t: partial(torch.max, t.f(3, 4), 1),
    "min": lambda t: partial(torch.min, t.f(3, 4), 1),
    "sort": lambda t: partial(torch.sort, t.f(3, 4), 1),
    "topk": lambda t: partial(torch.topk, t.f(3, 4), 2),
    "logcumsumexp": lambda t: partial(torch.logcumsumexp, t.f(3, 4), 1),
    "diff": lambda t: partial(torch.diff, t.f(3, 4)),
    "flip": lambda t: partial(torch.flip, t.f(3, 4), [1]),
    "tril": lambda t: partial(torch.tril, t.f(3, 4)),
    "transpose": lambda t: partial(torch.transpose, t.f(3, 4), 0, 1),
    "reshape": lambda t: partial(torch.reshape, t.f(3, 4), (4, 3)),
    "gather": lambda t: partial(torch.gather, t.f(5, 3), 0, t.i(5, 2, 3)),
    "index_select": lambda t: partial(torch.index_select, t.f(5, 3), 0, t.i(5, 2)),
    "embedding": lambda t: partial(F.embedding, t.i(5, 4), t.f(5, 3)),
    "pad": lambda t: partial(F.pad, t.f(3, 4), (1, 2)),
    "dropout": lambda t: partial(F.dropout, t.f(3, 4), 0.5, training=False),
    "max_pool2d": lambda t: partial(F.max_pool2d, t.f(1, 2, 4, 4), 2),
    "avg_pool2d": lambda t: partial(F.avg_pool2d, t.f(1, 2, 4, 4), 2),
    "batch_norm": lambda t: partial(F.batch_norm, t.f(4, 3), None, None, training=True),
    "interpolate": lambda t: partial(F.interpolate, t.f(1, 2, 3, 3), scale_factor=2, mode="bilinear"),
}

# Calls that are allowed in a region and do not autocast: the first argument is changed in place.
IN_PLACE: dict[str, Callable[[Inputs], Call]] = {
    "addbmm_": lambda t: partial(torch.Tensor.addbmm_, t.f(3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "addcmul_": lambda t: partial(torch.Tensor.addcmul_, t.f(3, 4), t.f(3, 4), t.f(3, 4)),
    "addmm_": lambda t: partial(torch.Tensor.addmm_, t.f(3, 5), t.f(3, 4), t.f(4, 5)),
    "baddbmm_": lambda t: partial(torch.Tensor.baddbmm_, t.f(2, 3, 5), t.f(2, 3, 4), t.f(2, 4, 5)),
    "cumsum_": lambda t: partial(torch.Tensor.cumsum_, t.f(3, 4), 1),
    "exp_": lambda t: partial(torch.Tensor.exp_, t.f(3, 4)),
    "log_": lambda t: partial(torch.Tensor.log_, t.p(3, 4)),
    "pow_": lambda t: partial(torch.Tensor.pow_, t.p(3, 4), 2.5),
    "reciprocal_": lambda t: partial(torch.Tensor.reciprocal_, t.p(3, 4)),
    "rsqrt_": lambda t: partial(torch.Tensor.rsqrt_, t.p(3, 4)),
}

# Likewise with a tensor for the result.
OUT: dict[str, Callable[[Inputs], Call]] = {
    "baddbmm": lambda t: partial(torch.baddbmm, t.f(2, 3, 5), t.f(2, 3, 4), t.f(2, 4, 5), out=t.f(2, 3, 5)),
    "bmm": lambda t: partial(torch.bmm, t.f(2, 3, 4), t.f(2, 4, 5), out=t.f(2, 3, 5)),
    "cat": lambda t: partial(torch.cat, [t.f(3, 4), t.f(2, 4)], out=t.f(5, 4)),
    "exp": lambda t: partial(torch.exp, t.f(3, 4), out=t.f(3, 4)),
    "matmul": lambda t: partial(torch.matmul, t.f(3, 4), t.f(4, 5), out=t.f(3, 5)),
    "mm": lambda t: partial(torch.mm, t.f(3, 4), t.f(4, 5), out=t.f(3, 5)),
    "pow": lambda t: partial(torch.pow, t.p(3, 4), 2.5, out=t.f(3, 4)),
    "prod": lambda t: partial(torch.prod, t.p(3, 4), 1, out=t.f(3)),
    "stack": lambda t: partial(torch.stack, [t.f(3, 4), t.f(3, 4)], out=t.f(2, 3, 4)),
    "sum": lambda t: partial(torch.sum, t.p(3, 40), 1, out=t.f(3)),
}

# Ops that take a dtype, without it.
TAKES_DTYPE: dict[str, Callable[[Inputs], Call]] = {
    "cumprod": lambda t: partial(torch.cumprod, t.p(3, 4), 1),
    "cumsum": lambda t: partial(torch.cumsum, t.f(3, 4), 1),
    "log_softmax": lambda t: partial(F.log_softmax, t.f(3, 4), 1),
    "prod": lambda t: partial(torch.prod, t.p(3, 4), 1),
    "softmax": lambda t: partial(F.softmax, t.f(3, 4), 1),
    "softmin": lambda t: partial(F.softmin, t.f(3, 4), 1),
    "sum": lambda t: partial(torch.sum, t.p(3, 40), 1),
    "vector_norm": lambda t: partial(torch.linalg.vector_norm, t.f(3, 4), 2, 1),
}

# Ops that no CPU list names, made of products that are listed.
COMPOSITES: dict[str, Callable[[Inputs], Call]] = {
    "chain_matmul": SAMPLES["chain_matmul"],
    "einsum": SAMPLES["einsum"],
    "inner": lambda t: partial(torch.inner, t.f(3, 4), t.f(5, 4)),
    "multi_dot": SAMPLES["multi_dot"],
    "tensordot": SAMPLES["tensordot"],
}
