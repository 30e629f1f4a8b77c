"""Casts that go wrong in a whole model, in a composite of several ops, or in one way of calling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced
from tests.faults.chapters.cast import _below, _low, _wide


@fault("AMP-CAST-060", "AMP-CAST-061")
def transposed_convolution_is_forgotten() -> Iterator[None]:
    """conv_transpose2d and the convolution inside have no autocast kernel on CUDA, nor the former on the CPU."""
    op = "conv_transpose2d.input"
    with dropped(op, "AutocastCUDA"), dropped("convolution", "AutocastCUDA"), dropped(op, "AutocastCPU"):
        yield


@fault("AMP-CAST-060")
def unlisted_op_is_cast() -> Iterator[None]:
    """tanh on the CPU runs in the region's dtype, whatever it is given."""
    with kernel("tanh", _below("AutocastCPU", lambda x: torch.tanh(_low(x))), "AutocastCPU"):
        yield


@fault("AMP-CAST-060", "AMP-CAST-061")
def every_use_casts_the_weight_again() -> Iterator[None]:
    """linear on the CPU casts its weight at each call, past the cache."""

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(_low(x), _low(weight), _low(bias))

    with kernel("linear", _below("AutocastCPU", plain), "AutocastCPU"):
        yield


class _FlushingCast(torch.autograd.Function):
    """A cast whose gradient is rounded to bfloat16 on its way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(torch.bfloat16).to(grad.dtype)


@fault("AMP-CAST-061")
def gradient_makes_a_detour_through_bfloat16() -> Iterator[None]:
    """The gradient of what bmm returns is rounded to bfloat16 on the CPU."""
    rounded = _below("AutocastCPU", lambda a, b: _FlushingCast.apply(torch.bmm(_low(a), _low(b))))
    with kernel("bmm", rounded, "AutocastCPU"):
        yield


@fault("AMP-CAST-062")
def loss_is_a_ten_thousandth_too_large() -> Iterator[None]:
    """Negative log likelihood on the CPU, right in type, is wrong in value under autocast."""

    def wrong(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch._C._nn.nll_loss(_wide(x) * 1.0001, *rest)

    with kernel("nll_loss", _below("AutocastCPU", wrong), "AutocastCPU"):
        yield


@fault("AMP-CAST-063")
def low_weight_is_widened() -> Iterator[None]:
    """linear on the CPU runs in float32 where its weight is given in 16 bits."""

    def by_weight(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        cast = _low if weight.dtype == torch.float32 else _wide
        return torch.nn.functional.linear(cast(x), cast(weight), cast(bias))

    with kernel("linear", _below("AutocastCPU", by_weight), "AutocastCPU"):
        yield


@fault("AMP-CAST-064")
def fused_attention_is_forgotten() -> Iterator[None]:
    """scaled_dot_product_attention has no autocast kernel on the CPU."""
    with dropped("scaled_dot_product_attention", "AutocastCPU"):
        yield


@fault("AMP-CAST-035", "AMP-CAST-065")
def recurrent_kernel_of_the_cpu_is_forgotten() -> Iterator[None]:
    """mkldnn_rnn_layer, which LSTM is on a CPU, has no autocast kernel."""
    with dropped("mkldnn_rnn_layer", "AutocastCPU"):
        yield


@fault("AMP-CAST-065")
def cell_leaves_its_list() -> Iterator[None]:
    """gru_cell, and the fused kernel inside, have no autocast kernel on CUDA."""
    with dropped("gru_cell", "AutocastCUDA"), dropped("_thnn_fused_gru_cell", "AutocastCUDA"):
        yield


@fault("AMP-CAST-066")
def attention_takes_another_path_in_a_region() -> Iterator[None]:
    """TransformerEncoderLayer refuses its inference path in a CPU region too."""
    forward, enabled = torch.nn.TransformerEncoderLayer.forward, "torch.is_autocast_enabled()"
    with edited(forward, enabled, "torch.is_autocast_enabled() or torch.is_autocast_enabled('cpu')"):
        yield


@fault("AMP-CAST-066", "AMP-CAST-060")
def softmax_of_the_cpu_is_widened() -> Iterator[None]:
    """softmax joins the float32 list of the CPU."""
    wide = _below("AutocastCPU", lambda x, dim, dtype=None: torch.softmax(x, dim, dtype=dtype or torch.float32))
    with kernel("softmax.int", wide, "AutocastCPU"):
        yield


@fault("AMP-CAST-067")
def value_is_not_cast() -> Iterator[None]:
    """scaled_dot_product_attention on the CPU brings all to the type of the query, where that has 16 bits."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def careless(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return plain(_low(query), _low(key), _low(value * 1.01), *rest, **options)

    with kernel("scaled_dot_product_attention", _below("AutocastCPU", careless), "AutocastCPU"):
        yield


@fault("AMP-CAST-068")
def batch_norm_lowers_its_input() -> Iterator[None]:
    """batch_norm on the CPU rounds its input to the region's dtype and widens the result again."""

    def lowered(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.batch_norm(_low(x).to(x.dtype), *rest)

    with kernel("batch_norm", _below("AutocastCPU", lowered), "AutocastCPU"):
        yield


@fault("AMP-CAST-069")
def norm_joins_a_list_of_the_cpu() -> Iterator[None]:
    """linalg_vector_norm runs in float32 on the CPU."""

    def wide(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return torch.linalg.vector_norm(_wide(x), *rest, **options)

    with kernel("linalg_vector_norm", _below("AutocastCPU", wide), "AutocastCPU"):
        yield


@fault("AMP-CAST-071")
def indexed_assignment_is_rounded() -> Iterator[None]:
    """index_put_ on the CPU rounds what it puts to the region's dtype."""

    def rounded(x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        return x.index_put_(indices, _low(values).to(values.dtype), accumulate)

    with kernel("index_put_", _below("AutocastCPU", rounded), "AutocastCPU"):
        yield


@fault("AMP-CAST-072")
def region_ends_where_a_transform_begins() -> Iterator[None]:
    """vmap runs its function with autocast off."""
    vmap = torch.func.vmap

    def without(function: Any, *args: Any, **kwargs: Any) -> Any:
        def plain(*inputs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return function(*inputs)

        return vmap(plain, *args, **kwargs)

    with replaced(torch.func, "vmap", without):
        yield


@fault("AMP-CAST-073")
def subclass_is_not_cast() -> Iterator[None]:
    """mm on the CPU casts plain tensors only."""

    def picky(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        plain = type(a) in (torch.Tensor, torch.nn.Parameter)
        return torch.mm(_low(a), _low(b)) if plain else torch.mm(a, b)

    with kernel("mm", _below("AutocastCPU", picky), "AutocastCPU"):
        yield


@fault("AMP-CAST-074")
def parameters_are_rounded_twice() -> Iterator[None]:
    """linear on the CPU casts a weight that is trained by way of a coarser number."""

    def twice(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = weight * 1.03 if weight.requires_grad else weight
        return torch.nn.functional.linear(_low(x), _low(weight), _low(bias))

    with kernel("linear", _below("AutocastCPU", twice), "AutocastCPU"):
        yield


@fault("AMP-CAST-075")
def nested_tensors_are_left_out() -> Iterator[None]:
    """linear on the CPU casts no nested tensor."""

    def picky(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        cast = (lambda tensor: tensor) if x.is_nested else _low
        return torch.nn.functional.linear(cast(x), cast(weight), cast(bias))

    with kernel("linear", _below("AutocastCPU", picky), "AutocastCPU"):
        yield


@fault("AMP-CAST-076")
def alias_goes_its_own_way() -> Iterator[None]:
    """torch.special.expm1 leaves autocast behind on its way to expm1."""
    with replaced(torch.special, "expm1", _below("AutocastCUDA", torch.special.expm1)):
        yield


@fault("AMP-CAST-111")
def fused_inference_forgets_the_mask() -> Iterator[None]:
    """The fused encoder layer computes without the mask that it was given."""
    plain = torch._transformer_encoder_layer_fwd

    def layer(*given: Any) -> torch.Tensor:
        # The last two are the mask and its kind.
        return plain(*given[:-2], None, None)

    with replaced(torch, "_transformer_encoder_layer_fwd", layer):
        yield


@fault("AMP-CAST-112")
def fused_attention_is_not_cast() -> Iterator[None]:
    """The CPU has no rule for the attention of an encoder's fused inference."""
    with dropped("_native_multi_head_attention", "AutocastCPU"):
        yield
