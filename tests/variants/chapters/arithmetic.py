"""Kernels that add in another order or more precisely, and round once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from conformance.self_check.planting import kernel, replaced
from tests.variants import Uses, variant
from tests.variants.around import HALF, LOW, Stock, around, has_kernels, kernels, wide

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def _in_float64(stock: Stock, *args: Any, **kwargs: Any) -> Any:
    """The op in float64, rounded once to the type of its first argument."""
    dtype = args[0].dtype
    if dtype not in LOW or kwargs.get("dtype") is not None:
        return stock(*args, **kwargs)
    return stock(*map(wide, args), **kwargs).to(dtype)


@variant(
    *("AMP-NUMERICS-012", "AMP-NUMERICS-013", "AMP-NUMERICS-014", "AMP-NUMERICS-018", "AMP-NUMERICS-029"),
    *("AMP-NUMERICS-040", "AMP-NUMERICS-068", "AMP-NUMERICS-093", "AMP-CAST-062"),
    possible=has_kernels,
)
def products_in_float64(uses: Uses) -> Iterator[None]:
    """Matrix products add up in float64 and round once.

    Notes, Numerical accuracy: floating-point addition is not associative, so the order and the precision of the partial
    sums are the implementation's.
    """
    with kernels(uses, "CPU", _in_float64, *_PRODUCTS):
        yield


@variant(
    *("AMP-NUMERICS-012", "AMP-NUMERICS-015", "AMP-NUMERICS-016", "AMP-NUMERICS-031", "AMP-NUMERICS-032"),
    *("AMP-NUMERICS-040", "AMP-NUMERICS-092"),
    possible=has_kernels,
)
def products_in_blocks(uses: Uses) -> Iterator[None]:
    """Matrix products add float32 partial sums of 16 terms, the last block first, and round once.

    Notes, Numerical accuracy: batched and blocked computations may differ in their last bits.
    """

    def run(stock: Stock, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        terms = first.shape[-1]
        if first.dtype not in LOW or first.dtype != second.dtype or not 16 < terms <= 4096:
            return stock(first, second)
        parts = [
            stock(first[..., at : at + 16].float().contiguous(), second[..., at : at + 16, :].float().contiguous())
            for at in reversed(range(0, terms, 16))
        ]
        return sum(parts[1:], parts[0]).to(first.dtype)

    with kernels(uses, "CPU", run, "mm", "bmm"):
        yield


@variant(
    *("AMP-NUMERICS-023", "AMP-NUMERICS-024", "AMP-NUMERICS-062", "AMP-NUMERICS-063", "AMP-NUMERICS-065"),
    *("AMP-NUMERICS-069", "AMP-NUMERICS-111"),
    possible=has_kernels,
)
def softmax_in_two_passes(uses: Uses) -> Iterator[None]:
    """Softmax and its logarithm subtract the maximum and add up in float64, and round once.

    torch.nn.functional.softmax gives the formula and no order of its operations.
    """

    def logarithm(stock: Stock, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        if x.dtype not in LOW or x.numel() == 0 or x.dim() == 0:
            return stock(x, dim, half_to_float)
        shifted = x.double() - x.double().amax(dim, keepdim=True)
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(x.dtype).contiguous()

    def softmax(stock: Stock, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
        return stock(wide(x), dim, half_to_float).to(x.dtype)

    with around(uses, "_log_softmax", "CPU", logarithm), around(uses, "_softmax", "CPU", softmax):
        yield


@variant(
    *("AMP-NUMERICS-062", "AMP-NUMERICS-063", "AMP-NUMERICS-066", "AMP-NUMERICS-069", "AMP-NUMERICS-116"),
    possible=has_kernels,
)
def layer_norm_in_two_passes(uses: Uses) -> Iterator[None]:
    """Layer norm takes mean and variance in two passes in float64, and so does its backward.

    torch.nn.LayerNorm gives the formula, with the biased estimator of the variance, and no algorithm for it.
    """

    def forward(stock: Stock, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        out, mean, rstd = stock(x, shape, weight, bias, eps)
        if x.dtype not in LOW or x.numel() == 0:
            return out, mean, rstd
        dims = list(range(x.dim() - len(shape), x.dim()))
        centred = x.double() - x.double().mean(dims, keepdim=True)
        inverse = (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
        scaled = centred * inverse * (1.0 if weight is None else wide(weight))
        mean.copy_(x.double().mean(dims).view(mean.shape))
        rstd.copy_(inverse.view(rstd.shape))
        return out.copy_(scaled + (0.0 if bias is None else wide(bias))), mean, rstd

    def backward(stock: Stock, grad: Any, x: Any, shape: Any, *saved: Any) -> Any:
        results = stock(grad, x, shape, *saved)
        if x.dtype not in LOW or x.numel() == 0:
            return results
        exact = stock(wide(grad), wide(x), shape, *map(wide, saved))
        return tuple(None if one is None else one.copy_(other) for one, other in zip(results, exact, strict=True))

    with (
        around(uses, "native_layer_norm", "CPU", forward),
        around(uses, "native_layer_norm_backward", "CPU", backward),
    ):
        yield


@variant(
    *("AMP-NUMERICS-025", "AMP-NUMERICS-060", "AMP-NUMERICS-061", "AMP-NUMERICS-084", "AMP-NUMERICS-111"),
    *("AMP-NUMERICS-129",),
    possible=has_kernels,
)
def reductions_in_float64(uses: Uses) -> Iterator[None]:
    """Sums, means, products, norms and running sums are computed in float64 and rounded once.

    Notes, Numerical accuracy: the result of a reduction depends on the order of its operations, which is free.
    """
    ops = ("sum.dim_IntList", "mean.dim", "prod", "prod.dim_int", "cumsum", "cumprod", "linalg_vector_norm")
    with kernels(uses, "CPU", _in_float64, *ops):
        yield


@variant(
    *("AMP-NUMERICS-044", "AMP-NUMERICS-045", "AMP-NUMERICS-082", "AMP-NUMERICS-122"),
    possible=has_kernels,
)
def functions_in_float64(uses: Uses) -> Iterator[None]:
    """Functions of one 16-bit number are computed in float64 and rounded once.

    The functions of torch are documented by their formulas; float64 is nearer to them than float32.
    """

    def run(stock: Stock, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return stock(x.double() if x.dtype in HALF else x, **kwargs).to(x.dtype)

    ops = ("exp", "exp2", "expm1", "log", "log1p", "tanh", "sigmoid", "sqrt", "rsqrt", "erf", "gelu", "silu")
    with kernels(uses, "CPU", run, *ops):
        yield


@variant(
    *("AMP-NUMERICS-021", "AMP-NUMERICS-048", "AMP-NUMERICS-067", "AMP-NUMERICS-088", "AMP-NUMERICS-094"),
    possible=has_kernels,
)
def attention_in_float64(uses: Uses) -> Iterator[None]:
    """The fused attention of the CPU computes in float64 and rounds once.

    torch.nn.functional.scaled_dot_product_attention: due to the nature of fusing floating point operations, the output
    may be different depending on what backend kernel is chosen.
    """

    def run(stock: Stock, query: Any, key: Any, value: Any, *rest: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        results = stock(query, key, value, *rest, attn_mask=attn_mask, **kwargs)
        exact = stock(wide(query), wide(key), wide(value), *rest, attn_mask=wide(attn_mask), **kwargs)
        return tuple(one.copy_(other) for one, other in zip(results, exact, strict=True))

    with around(uses, "_scaled_dot_product_flash_attention_for_cpu", "CPU", run):
        yield


@variant("AMP-NUMERICS-110", "AMP-NUMERICS-114", "AMP-TRANSFORM-007", "AMP-BACKWARD-059", possible=has_kernels)
def masks_from_uniform_numbers(uses: Uses) -> Iterator[None]:
    """Bernoulli numbers, of which dropout makes its masks, are uniform numbers below the probability.

    Notes, Reproducibility: random numbers of other releases and platforms may be others; the distribution is promised.
    """

    def run(stock: Stock, x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> torch.Tensor:
        if not 0 <= p <= 1:
            return stock(x, p, generator=generator)
        return x.copy_(torch.rand(x.shape, dtype=torch.float64, generator=generator) < p)

    with around(uses, "bernoulli_.float", "CPU", run):
        yield


@variant("AMP-SCALE-008", "AMP-SCALE-043", "AMP-NUMERICS-024", "AMP-BF16-001", possible=has_kernels)
def empty_memory_is_nan(uses: Uses) -> Iterator[None]:
    """Memory that torch.empty gives is filled with NaN.

    torch.empty: returns a tensor filled with uninitialized data.
    """

    def run(stock: Stock, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = stock(*args, **kwargs)
        if made.layout == torch.strided and made.is_floating_point():
            made.fill_(float("nan"))
        return made

    with kernels(uses, "CPU", run, "empty.memory_format", "empty_strided"):
        yield


@variant("AMP-NUMERICS-122", "AMP-NUMERICS-125", possible=has_kernels)
def ties_in_another_order(uses: Uses) -> Iterator[None]:
    """An unstable sort returns equal elements in the reverse of their order.

    torch.sort: only if stable is True the order of equivalent elements is preserved.
    """

    def run(stock: Stock, x: torch.Tensor, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        if stable or x.dim() == 0:
            return stock(x, stable=stable, dim=dim, descending=descending)
        values, places = stock(x.flip(dim), stable=True, dim=dim, descending=descending)
        return values, x.shape[dim] - 1 - places

    with around(uses, "sort.stable", "CPU", run):
        yield


@variant("AMP-CAST-036", "AMP-CAST-038", "AMP-CAST-054", "AMP-CACHE-001", "AMP-LOSS-001", possible=has_kernels)
def autocast_kernels_are_wrapped(uses: Uses) -> Iterator[None]:
    """A tool has kernels of its own at autocast's key of the CPU, which call autocast's.

    torch.library.Library.impl: a registration may replace the kernel of an operator at a dispatch key.
    """

    def run(stock: Stock, *args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for op in ("linear", "matmul", "mm", "bmm", "addmm", "conv2d", "mse_loss", "scaled_dot_product_attention"):
            stack.enter_context(around(uses, op, "AutocastCPU", run))
        yield


@variant(
    *("AMP-CAST-068", "AMP-NUMERICS-062", "AMP-NUMERICS-069", "AMP-NUMERICS-113", "AMP-NUMERICS-116"),
    possible=has_kernels,
)
def batch_norm_of_merged_parts(uses: Uses) -> Iterator[None]:
    """Batch norm merges the statistics of parts of 64 numbers in float64 (Chan, Golub, LeVeque 1979).

    torch.nn.BatchNorm2d gives the formula, with the biased estimator of the variance, and no algorithm for it.
    """

    def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = squares = torch.zeros(x.shape[1], dtype=torch.float64)
        seen = 0
        for part in x.double().transpose(0, 1).reshape(x.shape[1], -1).split(64, dim=1):
            size = part.shape[1]
            apart = part.mean(1) - mean
            squares = squares + part.var(1, correction=0) * size + apart.square() * (seen * size / (seen + size))
            seen += size
            mean = mean + apart * (size / seen)
        return mean, squares / seen

    def run(
        stock: Stock, x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
    ) -> Any:
        out, saved_mean, saved_inverse = stock(x, weight, bias, mean, var, training, momentum, eps)
        if x.dtype not in LOW or x.numel() == 0 or not training:
            return out, saved_mean, saved_inverse
        shape = [1, -1] + [1] * (x.dim() - 2)
        centre, spread = statistics(x)
        inverse = (spread + eps).rsqrt()
        scaled = (x.double() - centre.view(shape)) * inverse.view(shape)
        if weight is not None:
            scaled = scaled * weight.double().view(shape)
        if bias is not None:
            scaled = scaled + bias.double().view(shape)
        return out.copy_(scaled), saved_mean.copy_(centre), saved_inverse.copy_(inverse)

    with around(uses, "native_batch_norm", "CPU", run):
        yield


@variant(
    *("AMP-NUMERICS-020", "AMP-NUMERICS-047", "AMP-NUMERICS-087", "AMP-CAST-062"),
    possible=has_kernels,
)
def convolutions_in_float64(uses: Uses) -> Iterator[None]:
    """Convolutions add up in float64 and round once.

    Notes, Numerical accuracy: the order and the precision of the partial sums are the implementation's.
    """

    def run(stock: Stock, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        out = stock(x, weight, bias, *rest)
        if x.dtype not in LOW or x.dtype != weight.dtype or x.layout != torch.strided:
            return out
        return out.copy_(stock(wide(x), wide(weight), wide(bias), *rest))

    with around(uses, "convolution", "CPU", run):
        yield


@variant("AMP-NUMERICS-085", "AMP-BACKWARD-004", "AMP-OPTIMIZER-013", possible=has_kernels)
def steps_and_scatters_in_float64(uses: Uses) -> Iterator[None]:
    """addcdiv_, addcmul_, lerp_, and sums into the rows of an embedding or an index, round once from float64.

    A fused multiply-add does so; the formulas of torch.optim and torch.nn.Embedding promise no roundings between.
    """

    def in_place(stock: Stock, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype != torch.float32:
            return stock(x, *args, **kwargs)
        return x.copy_(stock(x.double(), *map(wide, args), **kwargs))

    with (
        kernels(uses, "CPU", in_place, "addcdiv_", "addcmul_", "lerp_.Scalar"),
        kernels(uses, "CPU", _in_float64, "embedding_dense_backward", "index_add"),
    ):
        yield


@variant(
    *("AMP-NUMERICS-001", "AMP-NUMERICS-005", "AMP-NUMERICS-031", "AMP-NUMERICS-042", "AMP-CAST-062"),
    possible=has_kernels,
)
def nan_of_another_sign(uses: Uses) -> Iterator[None]:
    """Casts to 16 bits give a NaN whose sign and payload bits are all set.

    IEEE 754-2019, 6.2 and 6.3: a conversion specifies no sign of a NaN and need not keep its payload.
    """

    def run(stock: Stock, x: Any, **kwargs: Any) -> Any:
        if not isinstance(x, torch.Tensor):  # a number that the dispatcher has unwrapped
            return torch.tensor(x, dtype=kwargs.get("dtype"))
        made = stock(x, **kwargs)
        if made.dtype in HALF and made.device.type == "cpu" and made.layout == torch.strided:
            made.view(torch.int16)[made.isnan()] = -1
        return made

    with around(uses, "_to_copy", "CPU", run):
        yield


@variant("AMP-CAST-065")
def gates_in_float32(uses: Uses) -> Iterator[None]:
    """A GRU of one layer on the CPU keeps its gates in float32 and rounds each state once.

    torch.nn.GRU: its formula; the roundings between its terms are the implementation's.
    """

    def run(x: Any, state: Any, weights: Any, biases: bool, layers: int, *options: Any) -> Any:
        assert biases
        assert layers == 1
        assert not any(options[2:])  # neither both ways nor the batch first
        uses["gru"] += 1
        hidden, states = state[0], []
        for gates in torch.nn.functional.linear(x, weights[0], weights[2]):
            given = gates.float().chunk(3, 1)
            kept = torch.nn.functional.linear(hidden, weights[1], weights[3]).float().chunk(3, 1)
            reset, update = torch.sigmoid(given[0] + kept[0]), torch.sigmoid(given[1] + kept[1])
            new = torch.tanh(given[2] + reset * kept[2])
            hidden = torch.lerp(new, hidden.float(), update).to(state.dtype)
            states.append(hidden)
        return torch.stack(states), hidden.unsqueeze(0)

    with kernel("gru.input", run, "AutogradCPU"):
        yield


@variant(
    *("AMP-BACKWARD-001", "AMP-BACKWARD-008", "AMP-NUMERICS-005", "AMP-MEMORY-001", "AMP-MEMORY-002"),
    *("AMP-MEMORY-014", "AMP-MEMORY-015", "AMP-MEMORY-017"),
)
def relu_saves_a_mask(uses: Uses) -> Iterator[None]:
    """relu selects by a comparison, whose bool mask it saves for backward in place of its result.

    torch.nn.ReLU: max(0, x); what an op saves for backward is the implementation's, and a mask needs less memory.
    """

    def run(x: torch.Tensor) -> torch.Tensor:
        uses["relu"] += 1
        return torch.where(x <= 0, torch.zeros((), dtype=x.dtype), x)

    with kernel("relu", run, "AutogradCPU"):
        yield


@variant("AMP-CAST-066", "AMP-MEMORY-014", "AMP-MEMORY-015", "AMP-MEMORY-016")
def attention_gives_contiguous_results(uses: Uses) -> Iterator[None]:
    """scaled_dot_product_attention gives a contiguous result, which a transformer copies where it merges the heads.

    torch.nn.functional.scaled_dot_product_attention: the shape of the result; no memory format is documented.
    """
    stock = torch.nn.functional.scaled_dot_product_attention

    def run(*args: Any, **kwargs: Any) -> Any:
        uses["scaled_dot_product_attention"] += 1
        return stock(*args, **kwargs).contiguous()

    with replaced(torch.nn.functional, "scaled_dot_product_attention", run):
        yield
