"""Modules of torch.nn with each of their options: how each is made and called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Use:
    """A module, and a call of it: `shapes` of the tensors that `call` takes after the module.

    `smooth` is False where a rounding may move a number over a kink, beyond which gradients are others; `of_cudnn` is
    True of layers that cuDNN has, whose backward it has in training alone ("cudnn RNN backward can only be called in
    training mode"). `exact` computes what `call` does without a kernel of the CPU that has been wrong in every type.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any] = lambda module, *given: module(*given)
    training: bool = True
    smooth: bool = True
    of_cudnn: bool = False
    exact: Callable[..., Any] | None = None

    def differentiable(self, device_type: str) -> bool:
        """Whether the module has gradients on a device."""
        return self.training or not self.of_cudnn or device_type != "cuda"


def families() -> dict[str, dict[str, Use]]:
    """Return every use by its family and its name."""
    made = (*_WITH_PRODUCTS, _embeddings, _pools, _norms, _others, _containers, _losses, _adaptive, _without_rows)
    return {family.__name__.strip("_"): dict(family()) for family in made}


def uses(*, multiplying: bool = False) -> dict[str, Use]:
    """Return every use by its name, of one family after the other; `multiplying`: of those families with products."""
    chosen = {family.__name__.strip("_") for family in _WITH_PRODUCTS} if multiplying else families().keys()
    return {name: use for family, named in families().items() if family in chosen for name, use in named.items()}


LENGTHS = (2, 5, 3)  # of sequences that are packed, not sorted by length


def _packed(module: Any, x: Tensor, *state: Tensor, in_order: bool) -> Any:
    lengths = sorted(LENGTHS, reverse=True) if in_order else LENGTHS
    packed = pack_padded_sequence(x, torch.tensor(lengths), module.batch_first, in_order)
    given = (state if len(state) == 2 else state[0],) if state else ()
    outputs, last = module(packed, *given)
    return pad_packed_sequence(outputs, module.batch_first)[0], last


def _with_state(module: Any, x: Tensor, *state: Tensor) -> Any:
    return module(x, state if len(state) == 2 else state[0])


def _recurrent() -> Iterator[tuple[str, Use]]:
    yield "RNN of relu", Use(partial(nn.RNN, 4, 6, nonlinearity="relu"), ((5, 3, 4),), smooth=False)
    yield from _layers_of({"RNN": nn.RNN, "GRU": nn.GRU})


def _lstm() -> Iterator[tuple[str, Use]]:
    yield from _layers_of({"LSTM": nn.LSTM})
    yield "LSTM with projections", Use(partial(nn.LSTM, 4, 6, proj_size=3), ((5, 3, 4),))
    yield "LSTM twice", Use(partial(nn.LSTM, 4, 4), ((5, 3, 4),), lambda module, x: module(module(x)[0])[0])


def _layers_of(kinds: dict[str, Any]) -> Iterator[tuple[str, Use]]:
    for name, kind in kinds.items():
        made: Any = kind
        states = 2 if name == "LSTM" else 1
        batch, state = (5, 3, 4), ((2, 3, 6),) * states
        both = partial(made, 4, 6, bidirectional=True)
        deep, drops = (partial(made, 4, 6, 2, dropout=share) for share in (0.5, 1.0))
        yield f"{name}", Use(partial(made, 4, 6), (batch,))
        yield f"{name} without batch", Use(partial(made, 4, 6), ((5, 4),))
        yield f"{name} without bias", Use(partial(made, 4, 6, bias=False), (batch,))
        yield f"{name} of batches first", Use(partial(both, batch_first=True), ((3, 5, 4),))
        yield f"{name} in two directions", Use(both, (batch, *state), _with_state)
        yield (
            f"{name} of two layers in inference",
            Use(deep, (batch, *state), _with_state, training=False, of_cudnn=True),
        )
        # What goes from the first layer to the second is all dropped, and nothing else is.
        yield f"{name} of two layers that drop everything", Use(drops, (batch, *state), _with_state)
        for how, in_order in (("sorted", True), ("unsorted", False)):
            call = partial(_packed, in_order=in_order)
            yield f"{name} of {how} packs", Use(both, (batch,), call)
            yield f"{name} of {how} packs with a state", Use(both, (batch, *state), call)


def _cells() -> Iterator[tuple[str, Use]]:
    for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):
        made: Any = kind
        state = ((3, 6),) * (2 if kind is nn.LSTMCell else 1)
        yield kind.__name__, Use(partial(made, 4, 6), ((3, 4),))
        yield f"{kind.__name__} with a state", Use(partial(made, 4, 6), ((3, 4), *state), _with_state)
        yield f"{kind.__name__} without bias", Use(partial(made, 4, 6, bias=False), ((3, 4), *state), _with_state)


CLOSED = torch.tensor([[False] * 5, [False, False, False, True, True]])
"""The keys that are padding, of two sequences of five."""
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def _on(x: Tensor, mask: Tensor, numbers: float | None = None) -> Tensor:
    """Return a mask on the device of x; with `numbers` one of float32 to add, that much where it is closed."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (mask if numbers is None else mask.to(wide) * numbers).to(x.device)


def _attention() -> Iterator[tuple[str, Use]]:
    made = partial(nn.MultiheadAttention, 8, 2, batch_first=True)
    x = ((2, 5, 8),)

    def attend(module: Any, x: Tensor, given: Callable[[Tensor], dict[str, Any]]) -> Any:
        return module(x, x, x, **given(x))

    def causal(x: Tensor) -> dict[str, Any]:
        return {"attn_mask": _on(x, CAUSAL), "is_causal": True}

    def masked(x: Tensor) -> dict[str, Any]:
        """Return masks of the type of x."""
        each, padding = _on(x, CAUSAL, -0.75).expand(4, 5, 5), _on(x, CLOSED, -1e4)
        return {"attn_mask": each.to(x.dtype), "key_padding_mask": padding.to(x.dtype)}

    calls: dict[str, Callable[[Tensor], dict[str, Any]]] = {
        "weights": lambda x: {},
        "no weights": lambda x: {"need_weights": False},
        "weights of each head": lambda x: {"average_attn_weights": False},
        "padding": lambda x: {"key_padding_mask": _on(x, CLOSED)},
        "padding by numbers": lambda x: {"key_padding_mask": _on(x, CLOSED, -1.5), "need_weights": False},
        "a causal mask": lambda x: {"attn_mask": _on(x, CAUSAL), "is_causal": True, "need_weights": False},
        "a causal mask and padding": lambda x: {**causal(x), "key_padding_mask": _on(x, CLOSED)},
        "a causal mask and padding, no weights": lambda x: {
            **causal(x),
            "key_padding_mask": _on(x, CLOSED),
            "need_weights": False,
        },
        "a mask of numbers": lambda x: {"attn_mask": _on(x, CAUSAL, -0.75)},
        "a mask of each head": lambda x: {"attn_mask": _on(x, CAUSAL).expand(4, 5, 5), "need_weights": False},
        "a mask and padding": lambda x: {
            "attn_mask": _on(x, CAUSAL, -0.75),
            "key_padding_mask": _on(x, CLOSED, -1.5),
        },
        "a mask of each head and padding": masked,
        "a mask of each head and padding, no weights": lambda x: {**masked(x), "need_weights": False},
    }
    for name, given in calls.items():
        yield f"MultiheadAttention with {name}", Use(made, x, partial(attend, given=given))
        if "mask" not in name:
            yield (
                f"MultiheadAttention with {name} in inference",
                Use(made, x, partial(attend, given=given), training=False),
            )
    plain = partial(attend, given=lambda x: {})
    yield "MultiheadAttention with biases of keys", Use(partial(made, add_bias_kv=True), x, plain)
    yield "MultiheadAttention with a zero key", Use(partial(made, add_zero_attn=True), x, plain)
    yield "MultiheadAttention without bias", Use(partial(made, bias=False), x, plain)
    yield "MultiheadAttention of other keys", Use(partial(made, kdim=6, vdim=4), ((2, 5, 8), (2, 3, 6), (2, 3, 4)))
    yield "MultiheadAttention of sequences first", Use(partial(nn.MultiheadAttention, 8, 2), ((5, 2, 8),) * 3)
    yield from _attention_of_pairs()


def _attention_of_pairs() -> Iterator[tuple[str, Use]]:
    """Each option of the module with each of the call."""
    modules: dict[str, dict[str, Any]] = {
        "biases of keys": {"add_bias_kv": True},
        "a zero key": {"add_zero_attn": True},
        "biases and a zero key": {"add_bias_kv": True, "add_zero_attn": True},
        "no bias": {"bias": False},
        "other keys": {"kdim": 6, "vdim": 4},
        "sequences first": {"batch_first": False},
    }
    calls: dict[str, Callable[[Tensor], dict[str, Any]]] = {
        "no weights": lambda x: {"need_weights": False},
        "weights of each head": lambda x: {"average_attn_weights": False},
        "padding": lambda x: {"key_padding_mask": _on(x, CLOSED), "need_weights": False},
        "padding and weights": lambda x: {"key_padding_mask": _on(x, CLOSED)},
        "a mask": lambda x: {"attn_mask": _on(x, CAUSAL, -0.75), "need_weights": False},
    }
    for (kind, options), (how, given) in itertools.product(modules.items(), calls.items()):
        first = not options.get("batch_first", True)
        key, value = options.get("kdim", 8), options.get("vdim", 8)
        shapes = tuple((5, 2, size) if first else (2, 5, size) for size in (8, key, value))
        made = partial(nn.MultiheadAttention, 8, 2, **{"batch_first": True, **options})
        yield f"MultiheadAttention with {kind}, {how}", Use(made, shapes, partial(_attended, named=given))
    for how in ("no weights", "weights of each head"):
        call = partial(_attended, named=calls[how])
        yield f"MultiheadAttention without batch, {how}", Use(partial(nn.MultiheadAttention, 8, 2), ((5, 8),) * 3, call)


def _attended(module: Any, *given: Tensor, named: Callable[[Tensor], dict[str, Any]]) -> Any:
    return module(*given, **named(given[0]))


def _transformers() -> Iterator[tuple[str, Use]]:
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
    encoder = partial(nn.TransformerEncoderLayer, 8, 2, 16, activation="gelu", **options)
    decoder = partial(nn.TransformerDecoderLayer, 8, 2, 16, activation="gelu", **options)
    x = ((2, 5, 8),)

    def padded(module: Any, x: Tensor) -> Any:
        return module(x, src_key_padding_mask=_on(x, CLOSED))

    def causal(module: Any, x: Tensor) -> Any:
        return module(x, _on(x, CAUSAL, -1e4))

    def decoded(module: Any, x: Tensor, memory: Tensor) -> Any:
        return module(x, memory, tgt_mask=_on(x, CAUSAL), memory_key_padding_mask=_on(x, CLOSED))

    def masked(module: Any, x: Tensor, memory: Tensor) -> Any:
        """Close what comes later and what is padding, on both sides."""
        tgt, padding = _on(x, CAUSAL, -0.75), _on(x, CLOSED, -1e4)
        return module(x, memory, tgt, tgt.flip(0), padding.flip(1), padding)

    for training in (True, False):
        when = "" if training else " in inference"
        yield f"TransformerEncoderLayer{when}", Use(encoder, x, training=training)
        yield f"TransformerEncoderLayer with padding{when}", Use(encoder, x, padded, training)
        yield f"TransformerEncoderLayer with a mask{when}", Use(encoder, x, causal, training)
        first = partial(encoder, norm_first=True)
        yield f"TransformerEncoderLayer, norms first{when}", Use(first, x, training=training)
        kinked = partial(encoder, activation="relu")
        yield f"TransformerEncoderLayer of relu{when}", Use(kinked, x, padded, training, smooth=False)
        yield f"TransformerDecoderLayer{when}", Use(decoder, ((2, 5, 8), (2, 5, 8)), decoded, training)
        yield f"TransformerDecoderLayer with each mask{when}", Use(decoder, ((2, 5, 8), (2, 5, 8)), masked, training)


NUMBERS = torch.tensor([[1, 3, 3, 0], [2, 1, 4, 1]])
"""Rows of an embedding, of which row 1 may be padding."""


def _embeddings() -> Iterator[tuple[str, Use]]:
    def look_up(module: Any) -> Any:
        return module(NUMBERS.to(module.weight.device))

    def bags(module: Any, *weights: Tensor) -> Any:
        device = module.weight.device
        return module(NUMBERS.to(device), None, *weights)

    def flat(module: Any, *weights: Tensor) -> Any:
        device = module.weight.device
        return module(NUMBERS.flatten().to(device), torch.tensor([0, 3, 8], device=device), *weights)

    yield "Embedding", Use(partial(nn.Embedding, 6, 4), (), look_up)
    yield "Embedding with padding", Use(partial(nn.Embedding, 6, 4, padding_idx=1), (), look_up)
    yield "Embedding by frequency", Use(partial(nn.Embedding, 6, 4, scale_grad_by_freq=True), (), look_up)
    yield "Embedding of sparse gradients", Use(partial(nn.Embedding, 6, 4, padding_idx=1, sparse=True), (), look_up)
    for mode in ("sum", "mean", "max"):
        made = partial(nn.EmbeddingBag, 6, 4, mode=mode)
        yield f"EmbeddingBag, {mode}", Use(made, (), bags)
        yield f"EmbeddingBag, {mode}, with padding", Use(partial(made, padding_idx=1), (), bags)
        yield f"EmbeddingBag, {mode}, with all ends", Use(partial(made, include_last_offset=True), (), flat)
        sparse = partial(made, padding_idx=1, sparse=True)
        if mode != "max":  # which has no sparse gradient
            yield f"EmbeddingBag, {mode}, of sparse gradients", Use(sparse, (), bags)
    yield "EmbeddingBag with weights", Use(partial(nn.EmbeddingBag, 6, 4, mode="sum"), ((2, 4),), bags)

    def parts(module: Any, *weights: Tensor) -> Any:
        device = module.weight.device
        return module(NUMBERS.flatten().to(device), torch.tensor([0, 3], device=device), *weights)

    def by_frequency(module: Any) -> Any:
        """Add up rows of an embedding, whose backward is not that of bags (pytorch issue 190063)."""
        numbers = NUMBERS.flatten()
        rows = F.embedding(numbers, module.weight, scale_grad_by_freq=True)
        kept = numbers != (-1 if module.padding_idx is None else module.padding_idx)
        taken = [rows[start:end][kept[start:end]] for start, end in ((0, 3), (3, 8))]
        return torch.stack([one.sum(0) if module.mode == "sum" else one.mean(0) for one in taken])

    for padding, ends in itertools.product((None, 1), (False, True)):
        options = {"padding_idx": padding, "include_last_offset": ends}
        how = f"{' with padding' if padding else ''}{' with all ends' if ends else ''}"
        weighted = partial(nn.EmbeddingBag, 6, 4, mode="sum", **options)
        yield f"EmbeddingBag of parts{how} and weights", Use(weighted, ((8,),), flat if ends else parts)
        for mode in ("sum", "mean"):
            made = partial(nn.EmbeddingBag, 6, 4, mode=mode, scale_grad_by_freq=True, **options)
            use = Use(made, (), flat if ends else parts, exact=by_frequency)
            yield f"EmbeddingBag of parts{how} by frequency, {mode}", use


def _convolutions() -> Iterator[tuple[str, Use]]:
    for rank in (1, 2, 3):
        conv: Any = getattr(nn, f"Conv{rank}d")
        transposed: Any = getattr(nn, f"ConvTranspose{rank}d")
        x = ((2, 4, *(6,) * rank),)
        for mode in ("zeros", "reflect", "replicate", "circular"):
            yield f"Conv{rank}d padded by {mode}", Use(partial(conv, 4, 6, 3, padding=1, padding_mode=mode), x)
            several = partial(conv, 4, 6, 3, 2, 2, 2, 2, bias=False, padding_mode=mode)
            yield f"Conv{rank}d padded by {mode}, with stride, dilation and groups", Use(several, x)
            alone = partial(conv, 4, 6, 3, padding="same", padding_mode=mode)
            yield f"Conv{rank}d padded by {mode} to the same size, without batch", Use(alone, (x[0][1:],))
        yield f"Conv{rank}d of the same size", Use(partial(conv, 4, 6, 3, padding="same", dilation=2), x)
        yield f"Conv{rank}d in groups", Use(partial(conv, 4, 6, 3, 2, 1, groups=2, bias=False), x)
        yield f"ConvTranspose{rank}d", Use(partial(transposed, 4, 6, 3, 2, 1, 1, groups=2), x)
        yield f"ConvTranspose{rank}d, dilated", Use(partial(transposed, 4, 6, 2, dilation=2, bias=False), x)


def _without_rows() -> Iterator[tuple[str, Use]]:
    """Layers of a batch without samples, whose parameters have gradients of zero."""
    for rank in (1, 2, 3):
        places = (0, 4, *(6,) * rank)
        yield f"Conv{rank}d of no samples", Use(partial(getattr(nn, f"Conv{rank}d"), 4, 6, 3), (places,))
        turned = partial(getattr(nn, f"ConvTranspose{rank}d"), 4, 6, 3)
        yield f"ConvTranspose{rank}d of no samples", Use(turned, (places,))
    yield "Linear of no rows", Use(partial(nn.Linear, 6, 5), ((0, 6),))
    yield "Linear of no sequences", Use(partial(nn.Linear, 6, 5), ((2, 0, 6),))
    yield "LayerNorm of no rows", Use(partial(nn.LayerNorm, 6), ((0, 6),))
    yield "GroupNorm of no samples", Use(partial(nn.GroupNorm, 2, 4), ((0, 4, 6),))
    yield "BatchNorm1d of no rows in inference", Use(partial(nn.BatchNorm1d, 6), ((0, 6),), training=False)


def _linear() -> Iterator[tuple[str, Use]]:
    yield "Linear", Use(partial(nn.Linear, 6, 5), ((2, 3, 6),))
    yield "Linear of a vector", Use(partial(nn.Linear, 6, 5), ((6,),))
    yield "Linear of a matrix", Use(partial(nn.Linear, 6, 5), ((3, 6),))
    yield "Linear without bias", Use(partial(nn.Linear, 6, 5, bias=False), ((6,),))
    yield "Linear of batches without bias", Use(partial(nn.Linear, 6, 5, bias=False), ((2, 3, 6),))


def _pools() -> Iterator[tuple[str, Use]]:
    for rank in (1, 2, 3):
        average: Any = getattr(nn, f"AvgPool{rank}d")
        largest: Any = getattr(nn, f"MaxPool{rank}d")
        adaptive: Any = getattr(nn, f"AdaptiveAvgPool{rank}d")
        x = ((2, 3, *(7,) * rank),)
        yield f"AvgPool{rank}d", Use(partial(average, 3, 2, 1), x)
        yield (
            f"AvgPool{rank}d without its padding",
            Use(partial(average, 3, 2, 1, ceil_mode=True, count_include_pad=False), x),
        )
        yield f"MaxPool{rank}d", Use(partial(largest, 3, 2, 1, ceil_mode=True), x)
        yield f"MaxPool{rank}d with places", Use(partial(largest, 2, dilation=2, return_indices=True), x)
        # Kernels without places, which keep nothing for backward, run where no gradient is recorded.
        yield (
            f"MaxPool{rank}d of options in inference",
            Use(partial(largest, 2, 1, 1, dilation=2, ceil_mode=True), x, training=False),
        )
        yield f"AdaptiveAvgPool{rank}d", Use(partial(adaptive, 3), x)
        yield f"LPPool{rank}d", Use(partial(getattr(nn, f"LPPool{rank}d"), 2, 3, 2), x)
        yield f"InstanceNorm{rank}d", Use(partial(getattr(nn, f"InstanceNorm{rank}d"), 3, affine=True), x)


def _last_channels(module: Any, x: Tensor) -> Any:
    """Call it on numbers around one, whose mean is far from zero."""
    return module((x + 1).contiguous(memory_format=torch.channels_last))


def _of_several_batches(module: Any, x: Tensor) -> Any:
    """Call it on batches of several means, whose averages depend on the weight of each."""
    return module(x) + module(2 * x + 1) - module(x - 3)


def _lived(make: Callable[..., Any]) -> Any:
    """Return a norm whose running statistics are those of no new one, and another for each channel."""
    module = make()
    module.running_mean.copy_(torch.linspace(-1, 1, len(module.running_mean)))
    module.running_var.copy_(torch.linspace(0.5, 2, len(module.running_var)))
    return module


def _averaged() -> Iterator[tuple[str, Use]]:
    """Norms that use running statistics, of each rank and layout."""
    for rank, last in ((1, None), (2, torch.channels_last), (3, torch.channels_last_3d)):
        places = ((4, 6, *(3,) * rank),)
        for name in ("BatchNorm", "InstanceNorm"):
            kind: Any = getattr(nn, f"{name}{rank}d")
            made = partial(_lived, partial(kind, 6, affine=True, track_running_stats=True))
            yield f"{name}{rank}d of running statistics", Use(made, places, training=False)
            if last is not None:
                call = partial(_in_format, layout=last)
                yield f"{name}{rank}d of running statistics, channels last", Use(made, places, call, training=False)


def _in_format(module: Any, x: Tensor, layout: torch.memory_format) -> Any:
    return module(x.contiguous(memory_format=layout))


def _norms() -> Iterator[tuple[str, Use]]:
    x = ((4, 6, 5, 5),)
    yield from _averaged()
    for training in (True, False):
        when = "" if training else " in inference"
        yield f"BatchNorm2d{when}", Use(partial(nn.BatchNorm2d, 6), x, training=training)
        yield f"BatchNorm2d without weights{when}", Use(partial(nn.BatchNorm2d, 6, affine=False), x, training=training)
        yield (
            f"BatchNorm2d without averages{when}",
            Use(partial(nn.BatchNorm2d, 6, track_running_stats=False), x, training=training),
        )
    for rank, kind in (("1", nn.BatchNorm1d), ("2", nn.BatchNorm2d), ("3", nn.BatchNorm3d)):
        near = Use(partial(kind, 6, eps=0.5), ((4, 6, *(3,) * int(rank)),))  # of the size of the variance
        yield f"BatchNorm{rank}d of a large eps", near
    yield "GroupNorm of a large eps", Use(partial(nn.GroupNorm, 3, 6, eps=0.5), x)
    yield "LayerNorm of a large eps", Use(partial(nn.LayerNorm, 5, eps=0.5), x)
    many = ((16, 3, 96, 96),)  # 147,456 places of each channel, whose sums are beyond fp16
    yield "BatchNorm2d of many places", Use(partial(nn.BatchNorm2d, 3), many, _last_channels)
    yield "GroupNorm of many places", Use(partial(nn.GroupNorm, 1, 3), many, _last_channels)
    yield "BatchNorm1d", Use(partial(nn.BatchNorm1d, 6, momentum=None), ((8, 6),))
    several = Use(partial(nn.BatchNorm1d, 6, momentum=None), ((8, 6),), _of_several_batches)
    yield "BatchNorm1d of cumulative averages", several
    for training in (True, False):
        when = "" if training else " in inference"
        averaged = partial(nn.InstanceNorm2d, 6, affine=True, track_running_stats=True)
        yield f"InstanceNorm2d with averages{when}", Use(averaged, x, training=training)
    yield "BatchNorm3d", Use(partial(nn.BatchNorm3d, 6), ((2, 6, 3, 3, 3),))
    yield "GroupNorm", Use(partial(nn.GroupNorm, 3, 6), x)
    yield "GroupNorm without weights", Use(partial(nn.GroupNorm, 3, 6, affine=False), x)
    yield "LayerNorm", Use(partial(nn.LayerNorm, (5, 5)), x)
    yield "LayerNorm without weights", Use(partial(nn.LayerNorm, 5, elementwise_affine=False), x)
    yield "LayerNorm without bias", Use(partial(nn.LayerNorm, 5, bias=False), x)
    yield "RMSNorm", Use(partial(nn.RMSNorm, 5), x)
    yield "LocalResponseNorm", Use(partial(nn.LocalResponseNorm, 2), x)


def _others() -> Iterator[tuple[str, Use]]:
    image = ((2, 4, 6, 6),)
    for mode in ("nearest", "bilinear", "bicubic"):
        yield f"Upsample, {mode}", Use(partial(nn.Upsample, scale_factor=1.5, mode=mode), image)
        # 10 places of 6: 1.7 is not their ratio.
        uneven = partial(nn.Upsample, scale_factor=1.7, mode=mode)
        yield f"Upsample, {mode}, by its factor", Use(uneven, image)
        yield f"Upsample, {mode}, by the sizes", Use(partial(uneven, recompute_scale_factor=True), image)
    for mode in ("bilinear", "bicubic"):
        made = partial(nn.Upsample, size=(9, 7), mode=mode, align_corners=True)
        yield f"Upsample, {mode}, of aligned corners", Use(made, image)
    yield "Upsample, trilinear", Use(partial(nn.Upsample, scale_factor=2, mode="trilinear"), ((1, 2, 3, 3, 3),))
    yield "PixelShuffle", Use(partial(nn.PixelShuffle, 2), image)
    yield "Unfold", Use(partial(nn.Unfold, 3, 1, 1, 2), image)
    yield "Fold", Use(partial(nn.Fold, (6, 6), 2), ((1, 8, 25),))
    yield "Bilinear", Use(partial(nn.Bilinear, 4, 3, 5), ((6, 4), (6, 3)))
    yield "CosineSimilarity", Use(partial(nn.CosineSimilarity, 0), ((4, 6), (4, 6)))
    yield "PairwiseDistance", Use(partial(nn.PairwiseDistance, 1.0), ((4, 6), (4, 6)))
    yield "PReLU", Use(partial(nn.PReLU, 4), image)
    yield "GLU", Use(partial(nn.GLU, 1), image)
    yield "Softmax2d", Use(nn.Softmax2d, image)
    for name in ("ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Softplus", "LogSigmoid", "Hardswish", "Tanhshrink"):
        yield name, Use(getattr(nn, name), image)
    yield "Hardsigmoid", Use(nn.Hardsigmoid, image, smooth=False)
    yield "RReLU in inference", Use(nn.RReLU, image, training=False, smooth=False)
    yield "ChannelShuffle", Use(partial(nn.ChannelShuffle, 2), image)
    yield "PixelUnshuffle", Use(partial(nn.PixelUnshuffle, 2), image)
    yield "CrossMapLRN2d", Use(partial(nn.CrossMapLRN2d, 2), image)
    yield "UpsamplingNearest2d", Use(partial(nn.UpsamplingNearest2d, scale_factor=2), image)
    yield "UpsamplingBilinear2d", Use(partial(nn.UpsamplingBilinear2d, scale_factor=2), image)
    for name in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"):
        drop: Any = getattr(nn, name)
        yield f"{name} in inference", Use(drop, ((2, 4, 5),), training=False)
        yield f"{name} of everything", Use(partial(drop, p=1.0), ((2, 4, 5),))
    for rank in (1, 2, 3):
        pool: Any = getattr(nn, f"MaxPool{rank}d")
        unpool: Any = getattr(nn, f"MaxUnpool{rank}d")
        both = partial(_Unpooled, partial(pool, 2, return_indices=True), partial(unpool, 2))
        yield f"MaxUnpool{rank}d", Use(both, ((2, 3, *(6,) * rank),))


class _Unpooled(nn.Module):
    """A pool, a change of its values, and the pool undone."""

    def __init__(self, pool: Callable[[], nn.Module], unpool: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.pool, self.unpool = pool(), unpool()

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = self.pool(x)
        made: Tensor = self.unpool(pooled * 2, places)
        return made


def _lazy(make: Callable[[], nn.Module], *shape: int) -> nn.Module:
    """Return a lazy module that has seen a batch, which gave it its shape and its running statistics."""
    module = make()
    module(torch.linspace(-1, 1, math.prod(shape)).reshape(shape))
    return module


def _sequence(*makers: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(make() for make in makers))


class _Lists(nn.Module):
    """Layers and parameters in each container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"both": nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])})
        self.rows = nn.ParameterList([torch.ones(6), torch.linspace(-1, 1, 6)])
        self.gates = nn.ParameterDict({"one": torch.linspace(1, 2, 6)})

    def forward(self, x: Tensor) -> Tensor:
        both: Any = self.layers["both"]
        for layer, row in zip(both, self.rows, strict=True):
            x = torch.tanh(layer(x) * row)
        made: Tensor = x * self.gates["one"]
        return made


def _containers() -> Iterator[tuple[str, Use]]:
    """Modules of modules, and those that take their shapes from the first batch."""
    options: dict[str, Any] = {"batch_first": True, "dropout": 0.0, "activation": "gelu"}
    decoder = partial(nn.TransformerDecoderLayer, 8, 2, 16, **options)
    encoder = partial(nn.TransformerEncoderLayer, 8, 2, 16, **options)
    sequences = ((2, 5, 8),) * 2
    yield "TransformerDecoder", Use(lambda: nn.TransformerDecoder(decoder(), 2, nn.LayerNorm(8)), sequences)
    yield "TransformerEncoder", Use(lambda: nn.TransformerEncoder(encoder(), 2, nn.LayerNorm(8)), sequences[:1])
    yield "Transformer", Use(partial(nn.Transformer, 8, 2, 1, 1, 16, **options), sequences)
    shaped = partial(_sequence, nn.Flatten, partial(nn.Linear, 12, 6), partial(nn.Unflatten, 1, (2, 3)), nn.Identity)
    yield "Flatten, Linear and Unflatten", Use(shaped, ((2, 3, 4),))
    yield "Lists and dictionaries of layers and of parameters", Use(_Lists, ((3, 6),))
    yield "LazyLinear", Use(lambda: _lazy(partial(nn.LazyLinear, 5), 2, 6), ((3, 6),))
    for rank in (1, 2, 3):
        shape = (2, 4, *(5,) * rank)
        for name in ("LazyConv", "LazyConvTranspose"):
            kind: Any = getattr(nn, f"{name}{rank}d")
            yield f"{name}{rank}d", Use(partial(_lazy, partial(kind, 6, 3), *shape), (shape,))
        for name in ("LazyBatchNorm", "LazyInstanceNorm"):
            kind = getattr(nn, f"{name}{rank}d")
            yield f"{name}{rank}d", Use(partial(_lazy, partial(kind, affine=True), *shape), (shape,))


CLASSES = torch.tensor([0, 3, 5, 1, 7, 2])


def _adaptive() -> Iterator[tuple[str, Use]]:
    adaptive = partial(nn.AdaptiveLogSoftmaxWithLoss, 6, 8, [2, 4], 2.0)
    yield "AdaptiveLogSoftmaxWithLoss", Use(adaptive, ((6, 6),), lambda module, x: module(x, CLASSES.to(x.device)))
    yield (
        "AdaptiveLogSoftmaxWithLoss, all classes",
        Use(partial(adaptive, head_bias=True), ((6, 6),), lambda module, x: module.log_prob(x)),
    )


def _losses() -> Iterator[tuple[str, Use]]:
    triple = ((6, 4),) * 3
    yield "TripletMarginLoss", Use(partial(nn.TripletMarginLoss, 9.0), triple)
    yield "TripletMarginLoss of each", Use(partial(nn.TripletMarginLoss, 9.0, swap=True, reduction="none"), triple)
    distance = partial(F.pairwise_distance, p=1.0)
    yield (
        "TripletMarginWithDistanceLoss",
        Use(partial(nn.TripletMarginWithDistanceLoss, distance_function=distance, margin=9.0), triple),
    )


class _Adapted(nn.Module):
    """A layer with an adapter of low rank beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(6, 5), nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) + 2 * self.up(self.down(x))
        return made


class _Standardized(nn.Conv2d):
    """A convolution whose weight is computed at each call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-3), self.bias, padding=1)


def _tied(module: Any, x: Tensor) -> Tensor:
    words = torch.tensor([[0, 5, 1], [1, 1, 4]], device=x.device)
    return F.linear(torch.tanh(module(words) + x), module.weight)


def _in_parts(module: Any, x: Tensor) -> Tensor:
    query, key, value = (F.linear(x, part) for part in module.weight.chunk(3))
    return query * 2 + key - value * 3


def _shared() -> Iterator[tuple[str, Use]]:
    """Modules that are called several times, and weights that have several uses or are computed."""
    image = ((4, 6, 5, 5),)
    yield "BatchNorm2d twice", Use(partial(nn.BatchNorm2d, 6), image, lambda module, x: module(x) + module(2 * x + 1))
    yield (
        "Linear and its weight turned",
        Use(partial(nn.Linear, 6, 5), ((3, 6),), lambda module, x: F.linear(torch.tanh(module(x)), module.weight.t())),
    )
    yield "Embedding whose weight is the head", Use(partial(nn.Embedding, 6, 4), ((2, 3, 4),), _tied)
    yield "Linear in parts", Use(partial(nn.Linear, 6, 12, bias=False), ((3, 6),), _in_parts)
    yield "Linear with an adapter", Use(_Adapted, ((3, 6),))
    yield "Conv2d of a standardized weight", Use(partial(_Standardized, 6, 4, 3), image)
    yield "Linear of a normed weight", Use(lambda: parametrizations.weight_norm(nn.Linear(6, 5)), ((3, 6),))
    yield "Linear of a weight that is cached twice", Use(_scaled, ((3, 6),), _cached_twice)
    yield (
        "Conv1d in a checkpoint",
        Use(partial(nn.Conv1d, 4, 6, 3), ((2, 4, 7),), lambda module, x: checkpoint(module, x, use_reentrant=False)),
    )


class _Scale(nn.Module):
    """A weight times a number."""

    factor = 1.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor


def _scaled() -> nn.Module:
    layer = nn.Linear(6, 5)
    parametrize.register_parametrization(layer, "weight", _Scale())
    return layer


def _cached_twice(module: Any, x: Tensor) -> Tensor:
    """Use the weight twice in each of two contexts that cache it, between which it changes."""
    results = []
    for factor in (1.0, 2.0):
        module.parametrizations.weight[0].factor = factor
        with parametrize.cached():
            results += [module(x), module(2 * x)]
    return torch.cat(results)


_WITH_PRODUCTS = (_recurrent, _lstm, _cells, _attention, _transformers, _convolutions, _linear, _shared)
