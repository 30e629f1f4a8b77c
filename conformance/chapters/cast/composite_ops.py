"""List modules and functions composed of several ops: a call, the dtype in a region, and the form as single ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ...data import fixture, read_toml
from ...oracles.policy.samples import Inputs

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Composite:
    """The recorded result of a composite on a backend; the fields are those of fixtures/cast_composites.toml."""

    name: str
    backend: str
    outputs: tuple[str, ...]
    manual: str
    source: str
    needs: str | None = None
    real: bool = False


@functools.cache
def composites(*names: str) -> tuple[Composite, ...]:
    """Return the rows of these composites, in the order of the fixture."""
    rows = read_toml(fixture("cast_composites.toml"))["composite"]
    return tuple(Composite(**{**row, "outputs": tuple(row["outputs"])}) for row in rows if row["name"] in names)


def _filled(t: Inputs, make: Callable[..., nn.Module], *sizes: int, **options: Any) -> nn.Module:
    """Return the module on the device of `t`, in training, with random normal weights of standard deviation 1/2."""
    module = make(*sizes, device="meta", **options).train()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(t.f(*parameter.shape) * 0.5, requires_grad=not t.fake))
    if isinstance(module, nn.RNNBase):
        module.flatten_parameters()  # the weight layout of cuDNN; a no-op elsewhere
    return module


def _call(t: Inputs, x: torch.Tensor, make: Callable[..., nn.Module], *sizes: int, **options: Any) -> partial[Any]:
    return partial(_filled(t, make, *sizes, **options), x)


class _Packed(nn.Module):
    """A recurrent net that gets its input as sequences packed one after the other, here of one length."""

    def __init__(self, net: nn.RNNBase) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> Tensors:
        packed, state = self.net(pack_padded_sequence(x, torch.full((x.shape[1],), len(x))))
        return pad_packed_sequence(packed)[0], state


def _packed(t: Inputs, make: Callable[..., nn.RNNBase]) -> partial[Any]:
    call = _call(t, t.f(5, 2, 4), make, 4, 3)
    module: nn.Module = _Packed(call.func)
    return partial(module, *call.args)


def _attention(t: Inputs) -> partial[Any]:
    x = t.f(2, 4, 8)
    return partial(_filled(t, nn.MultiheadAttention, 8, 2, batch_first=True), x, x, x)


def _attention_inference(t: Inputs) -> partial[Any]:
    x = t.f(2, 4, 8)
    attention = _filled(t, nn.MultiheadAttention, 8, 2, batch_first=True).eval()
    return partial(torch.no_grad()(_Itself(attention)), x)


class _Itself(nn.Module):
    """Attention of an input to itself, which its fused path needs."""

    def __init__(self, net: nn.MultiheadAttention) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> Tensors:
        weighted: Tensors = self.net(x, x, x)
        return weighted


def _encoder(t: Inputs) -> partial[Any]:
    return _call(t, t.f(2, 4, 8), nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, dropout=0.0)


def _inference(t: Inputs) -> partial[Any]:
    x = t.f(2, 4, 8)
    layer = _filled(t, nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True, dropout=0.0).eval()
    return partial(torch.no_grad()(layer), x)


def _ctc(t: Inputs) -> partial[Any]:
    lengths = torch.tensor([6, 5]), torch.tensor([2, 2])
    labels = torch.tensor([[1, 2], [3, 1]], device=t.device)
    return partial(lambda x: F.ctc_loss(F.log_softmax(x, 2), labels, *lengths), t.f(6, 2, 4))


def _spectrum(t: Inputs) -> partial[Any]:
    x, window = t.f(3, 64), t.f(16)
    return partial(lambda x: torch.view_as_real(torch.stft(x, 16, 4, window=window, return_complex=True)), x)


def _sampled(t: Inputs, *places: int) -> partial[Any]:
    """Return samples of a picture or volume between its elements, whose grid has more bits than an amp dtype."""
    x, grid = t.f(2, 3, *places), t.f(2, *(3,) * len(places), len(places))
    return partial(F.grid_sample, x, grid, align_corners=False)


def _rank(t: Inputs, **tolerance: float) -> partial[Any]:
    """Return the rank of matrices of full rank whose smallest singular values the tolerance takes for zero."""
    sizes = torch.tensor([1.0, 0.5, 0.25, 0.0625], device=t.device)
    x = torch.diag(sizes).to(t.f(1).dtype)
    return partial(lambda x: torch.linalg.matrix_rank(x, **tolerance).to(torch.get_default_dtype()), x)


# The input comes first, so that it may have another dtype than the weights, which follow.
CALLS: dict[str, Callable[[Inputs], partial[Any]]] = {
    "gru": lambda t: _call(t, t.f(5, 2, 4), nn.GRU, 4, 3),
    "gru-packed": lambda t: _packed(t, nn.GRU),
    "lstm": lambda t: _call(t, t.f(5, 2, 4), nn.LSTM, 4, 3),
    "lstm-deep": lambda t: _call(t, t.f(5, 2, 4), nn.LSTM, 4, 3, num_layers=2, bidirectional=True),
    "rnn-tanh": lambda t: _call(t, t.f(5, 2, 4), nn.RNN, 4, 3),
    "rnn-relu": lambda t: _call(t, t.f(5, 2, 4), nn.RNN, 4, 3, nonlinearity="relu"),
    "rnn-packed": lambda t: _packed(t, nn.RNN),
    "gru-cell": lambda t: _call(t, t.f(2, 4), nn.GRUCell, 4, 3),
    "lstm-cell": lambda t: _call(t, t.f(2, 4), nn.LSTMCell, 4, 3),
    "rnn-cell": lambda t: _call(t, t.f(2, 4), nn.RNNCell, 4, 3),
    "attention": _attention,
    "attention-inference": _attention_inference,
    "encoder": _encoder,
    "encoder-inference": _inference,
    "pairwise_distance": lambda t: partial(lambda x: F.pairwise_distance(x, x.flip(0)), t.f(3, 4)),
    "normalize": lambda t: partial(F.normalize, t.f(3, 4)),
    "ctc_loss": _ctc,
    "stft": _spectrum,
    "grid_sample": lambda t: _sampled(t, 40, 40),
    "grid_sample-of-volumes": lambda t: _sampled(t, 9, 9, 9),
    "cdist": lambda t: partial(torch.cdist, t.f(3, 4), t.f(5, 4)),
    "cdist-of-many": lambda t: partial(torch.cdist, t.f(30, 4), t.f(40, 4)),
    "matrix_rank": lambda t: _rank(t, rtol=0.125),
    "matrix_rank-absolute": lambda t: _rank(t, atol=0.375),
    "einsum": lambda t: partial(torch.einsum, "bij,bjk->bik", t.f(2, 3, 4), t.f(2, 4, 5)),
    "einsum-of-three": lambda t: partial(torch.einsum, "ij,jk,kl->il", t.f(3, 4), t.f(4, 5), t.f(5, 2)),
    "einsum-of-a-list": lambda t: partial(torch.einsum, "ij,jk,kl->il", [t.f(3, 4), t.f(4, 5), t.f(5, 2)]),
    "einsum-by-numbers": lambda t: partial(torch.einsum, t.f(3, 4), [0, 1], t.f(4, 5), [1, 2], [0, 2]),
}


def gru_cell(inward: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute a GRU step (`torch.nn.GRU`) from input gates (batch, 3 width) and hidden state (batch, width)."""
    reset_in, update_in, new_in = inward.chunk(3, 1)
    reset_on, update_on, new_on = F.linear(hidden, weight, bias).chunk(3, 1)
    reset, update = torch.sigmoid(reset_on + reset_in), torch.sigmoid(update_on + update_in)
    new = torch.tanh(new_in + new_on * reset)
    return (hidden - new) * update + new


def _gru_cell(module: nn.GRUCell, x: torch.Tensor) -> torch.Tensor:
    inward = F.linear(x, module.weight_ih, module.bias_ih)
    return gru_cell(inward, x.new_zeros(len(x), module.hidden_size), module.weight_hh, module.bias_hh)


def _gru(module: nn.GRU, x: torch.Tensor) -> Tensors:
    hidden, states = x.new_zeros(x.shape[1], module.hidden_size), []
    for inward in F.linear(x, module.weight_ih_l0, module.bias_ih_l0):
        hidden = gru_cell(inward, hidden, module.weight_hh_l0, module.bias_hh_l0)
        states.append(hidden)
    return torch.stack(states), hidden.unsqueeze(0)


def _lstm_cell(module: nn.LSTMCell, x: torch.Tensor) -> Tensors:
    hidden = cell = x.new_zeros(len(x), module.hidden_size)
    gates = F.linear(hidden, module.weight_hh, module.bias_hh) + F.linear(x, module.weight_ih, module.bias_ih)
    entry, forget, change, exit_ = gates.chunk(4, 1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(change)
    return torch.sigmoid(exit_) * torch.tanh(cell), cell


# The formulas of torch.nn's documentation, one op a step, in the order of operations of aten/src/ATen/native/RNN.cpp.
WRITTEN: dict[str, Callable[..., Any]] = {
    "gru": _gru,
    "gru-packed": lambda module, x: _gru(module.net, x),
    "gru-cell": _gru_cell,
    "lstm-cell": _lstm_cell,
}
