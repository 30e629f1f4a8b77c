"""Check which share of 16-bit elements dropout drops, and what it makes of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from ...harness.check import Case, contract, deep
from ...harness.targets import Target

ELEMENTS = 2**18
SIGMAS = 6.0  # standard deviations of a binomial count, which chance exceeds twice in 10**9
SHARES = (0.001, 0.1, 0.5, 0.9)
# FlashAttention draws 8 bits for each weight (p_dropout_in_uint8_t), which hold these shares.
OF_EIGHT_BITS = (0.25, 0.5, 0.75)


def _deviations(count: float, trials: int, share: float) -> float:
    """Return how many of its standard deviations a binomial count is from the one expected."""
    return abs(count - trials * share) / (trials * share * (1 - share)) ** 0.5


def _attention(x: Tensor, p: float) -> Tensor:
    """Return equal weights of 256 keys, dropped out, times 256: the values are the unit vectors."""
    heads = x.view(1, 4, 256, 256)
    values = torch.eye(256, dtype=x.dtype, device=x.device).expand_as(heads)
    return 256 * F.scaled_dot_product_attention(torch.zeros_like(heads), heads, values, dropout_p=p)


# Each gets ELEMENTS ones, and gives as many elements that are dropped independently.
DROPOUTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dropout": F.dropout,
    "in-place": lambda x, p: F.dropout(x.clone(), p, inplace=True),
    "channels": lambda x, p: F.dropout2d(x.view(512, -1, 1, 1), p),
    "module": lambda x, p: torch.nn.Dropout(p)(x),
    "attention": _attention,
}


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize(
    "way", ["dropout", "attention", *(deep("standard", one) for one in ("in-place", "channels", "module"))]
)
def test_dropped_shares(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    ones = torch.ones(ELEMENTS, dtype=amp_dtype, device=target.device)
    for p in OF_EIGHT_BITS if way == "attention" else SHARES:
        torch.manual_seed(case.seed)
        leaf = ones.clone().requires_grad_(way != "attention")
        with target.autocast(amp_dtype):
            seen = DROPOUTS[way](leaf, p)
        case.equal(f"{way}, p = {p}: type", seen.dtype, amp_dtype)
        found = seen.detach().float().cpu().flatten()
        kept = found[found != 0]
        deviation = _deviations(len(found) - len(kept), ELEMENTS, p)
        case.at_most(f"{way}, p = {p}: dropped elements, from those expected", deviation, SIGMAS, "deviations")
        # Roundings of the factor and of the product.
        error = float((kept * (1 - p) - 1).abs().max()) / (torch.finfo(amp_dtype).eps / 2)
        case.at_most(f"{way}, p = {p}: error of a kept element", error, 2.5, "u")
        if seen.requires_grad:
            (slope,) = torch.autograd.grad(seen, leaf, torch.ones_like(seen))
            slopes = slope.float().cpu().flatten()
            case.equal(f"{way}, p = {p}: gradients of dropped elements", int(slopes[found == 0].count_nonzero()), 0)
            error = float((slopes[found != 0] * (1 - p) - 1).abs().max()) / (torch.finfo(amp_dtype).eps / 2)
            case.at_most(f"{way}, p = {p}: error of the gradient of a kept element", error, 2.5, "u")


# Launches, vectors and counters of kernels end at such distances.
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 2**14, 2**15, 2**16, 2**17)


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize("way", ["dropout", "module", "attention", *(deep("standard", one) for one in ("in-place",))])
def test_masks_do_not_repeat(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    """Of two elements a power of two apart, in an even share both are dropped or both are kept."""
    torch.manual_seed(case.seed)
    ones = torch.ones(ELEMENTS, dtype=amp_dtype, device=target.device)
    with target.autocast(amp_dtype):
        dropped = (DROPOUTS[way](ones, 0.5) == 0).flatten()
    for distance in DISTANCES:
        later, earlier = dropped[distance:], dropped[:-distance]
        deviation = _deviations(int((later == earlier).sum()), len(later), 0.5)
        what = f"{way}: pairs of elements {distance} apart that are dropped or kept alike, from those expected"
        case.at_most(what, deviation, SIGMAS, "deviations")


# Of 64 rows and 64 columns of ones, with a storage of another order or size.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second": lambda x: x.repeat(1, 2)[:, ::2],
    "channels last": lambda x: x.view(4, 16, 8, 8).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand_as(x),
}


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize("way", ["dropout", "module", "alpha_dropout"])
@pytest.mark.parametrize("place", ["in", "outside"])
def test_every_layout(case: Case, target: Target, amp_dtype: torch.dtype, way: str, place: str) -> None:
    """Rows and columns of each layout drop about half of their elements: no mask is that of another one."""
    call = ALPHAS[way] if way in ALPHAS else DROPOUTS[way]
    for layout, laid in LAYOUTS.items():
        torch.manual_seed(case.seed)
        given = laid(torch.ones(64, 64, dtype=amp_dtype, device=target.device))
        with target.autocast(amp_dtype, enabled=place == "in"):
            seen = call(given, 0.5)
        case.equal(f"{layout}: shape", seen.shape, given.shape)
        dropped = (seen < seen.max()).float().cpu().reshape(64, 64)
        # A row that is dropped or kept as a whole is at eight deviations.
        counts = torch.stack([dropped.sum(0), dropped.sum(1)])
        far = max(_deviations(count, 64, 0.5) for count in counts.flatten().tolist())
        case.at_most(f"{layout}: dropped elements of a row or column, from those expected", far, SIGMAS, "deviations")


# Each drops whole channels, of which it gets 8 in each of 64 samples.
OF_CHANNELS: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[int, ...]]] = {
    "dropout1d": (F.dropout1d, (7,)),
    "dropout2d": (F.dropout2d, (3, 5)),
    "dropout3d": (F.dropout3d, (2, 3, 2)),
    "feature_alpha_dropout": (lambda x, p: F.feature_alpha_dropout(x, p, training=True), (3, 5)),
    "Dropout1d": (lambda x, p: torch.nn.Dropout1d(p)(x), (7,)),
    "Dropout2d": (lambda x, p: torch.nn.Dropout2d(p)(x), (3, 5)),
    "Dropout3d": (lambda x, p: torch.nn.Dropout3d(p, inplace=True)(x.clone()), (2, 3, 2)),
}


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize("way", OF_CHANNELS)
def test_channels_are_dropped_whole(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    call, space = OF_CHANNELS[way]
    torch.manual_seed(case.seed)
    with target.autocast(amp_dtype):
        seen = call(torch.ones(64, 8, *space, dtype=amp_dtype, device=target.device), 0.5)
    channels = seen.float().cpu().flatten(2)
    case.equal(f"{way}: channels of two values", int((channels.amin(2) != channels.amax(2)).sum()), 0)
    dropped = int((channels[..., 0] < channels.max()).sum())
    # Of 512 channels, twice in 10**9 by chance.
    case.between(f"{way}: channels that are dropped", dropped, 256 - SIGMAS * 128**0.5, 256 + SIGMAS * 128**0.5)


SELU_LIMIT = -1.7580993408473766
"""What alpha dropout puts in the place of an element: -scale * alpha of SELU, the limit of its results."""
ALPHAS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alpha_dropout": lambda x, p: F.alpha_dropout(x, p, training=True),
    "in-place": lambda x, p: F.alpha_dropout(x.clone(), p, training=True, inplace=True),
    "AlphaDropout": lambda x, p: torch.nn.AlphaDropout(p)(x),
    "feature_alpha_dropout": lambda x, p: F.feature_alpha_dropout(x.view(512, -1, 1), p, training=True),
}


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize("way", ALPHAS)
def test_alpha_dropout(case: Case, target: Target, amp_dtype: torch.dtype, way: str) -> None:
    """Dropped and kept elements of ones are those that keep a mean of zero and a variance of one (torch.nn.SELU)."""
    ones = torch.ones(ELEMENTS // 16, dtype=amp_dtype, device=target.device)
    for p in (0.1, 0.5):
        torch.manual_seed(case.seed)
        with target.autocast(amp_dtype):
            seen = ALPHAS[way](ones, p).float().cpu().flatten()
        case.equal(f"{way}, p = {p}: type", seen.numel(), len(ones))
        factor = ((1 - p) * (1 + p * SELU_LIMIT**2)) ** -0.5
        shift = -factor * SELU_LIMIT * p
        dropped = seen < (factor * (1 + SELU_LIMIT) / 2 + shift)
        deviation = _deviations(int(dropped.sum()), len(seen), p)
        case.at_most(f"{way}, p = {p}: dropped elements, from those expected", deviation, SIGMAS, "deviations")
        # Roundings of the two numbers, of a product and of a sum, each below the largest of them, 2.
        unit = torch.finfo(amp_dtype).eps / 2
        for what, found, wanted in (
            ("dropped", seen[dropped], factor * SELU_LIMIT + shift),
            ("kept", seen[~dropped], factor + shift),
        ):
            error = float((found - wanted).abs().max()) / unit
            case.at_most(f"{way}, p = {p}: error of a {what} element", error, 8.0, "u")


WIDTH = 64
LAYERS: dict[str, tuple[Callable[..., Any], int]] = {  # with the number of their gates
    "RNN": (partial(torch.nn.RNN, nonlinearity="relu"), 1),
    "LSTM": (torch.nn.LSTM, 4),
    "GRU": (torch.nn.GRU, 3),
}


def _recurrent(kind: str, p: float, device: torch.device) -> Any:
    """Return two layers that pass on each number by itself: the second gives zero for what is dropped before it."""
    make, gates = LAYERS[kind]
    module = make(WIDTH, WIDTH, num_layers=2, dropout=p, bias=False).to(device)
    for name, parameter in module.named_parameters():
        unit = torch.eye(WIDTH, device=device).repeat(gates, 1)
        parameter.data.copy_(unit if "weight_ih" in name else torch.zeros_like(unit))
    return module


@contract("AMP-NUMERICS-110")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_between_recurrent_layers(case: Case, target: Target, amp_dtype: torch.dtype, kind: str, packed: bool) -> None:
    leaf = torch.ones(1, WIDTH, WIDTH, device=target.device, requires_grad=True)
    given: Any = pack_padded_sequence(leaf, torch.ones(WIDTH, dtype=torch.int64)) if packed else leaf

    def ran(module: Any) -> tuple[Tensor, Any]:
        """Return the numbers behind the second layer, and the states."""
        last, state = module(given)
        return last.data if packed else last, state

    def learn() -> None:
        last, _ = ran(_recurrent(kind, 0.5, target.device))
        torch.autograd.grad(last.sum(), leaf, retain_graph=True)

    case.require_call(target, f"train {kind}", learn)

    def outputs(module: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers behind the second layer and behind the first, whose last state nothing is dropped of."""
        torch.manual_seed(case.seed)
        with target.autocast(amp_dtype):
            last, state = ran(module)
        states = state[0] if kind == "LSTM" else state
        return last, *(one.detach().float().cpu().flatten() for one in (last, states[0]))

    for p in SHARES:
        module = _recurrent(kind, p, target.device)
        last, seen, before = outputs(module)
        (gradient,) = torch.autograd.grad(last.sum(), leaf, retain_graph=True)
        slopes = gradient.cpu().flatten()
        deviation = _deviations(int((seen == 0).sum()), seen.numel(), p)
        case.at_most(f"{kind}, p = {p}: dropped elements, from those expected", deviation, SIGMAS, "deviations")
        case.equal(f"{kind}, p = {p}: dropped elements of the first layer's last state", int((before == 0).sum()), 0)
        if kind == "RNN":
            error = float((seen[seen != 0] * (1 - p) - 1).abs().max()) / (torch.finfo(amp_dtype).eps / 2)
            case.at_most(f"{kind}, p = {p}: error of a kept element", error, 2.5, "u")
            error = float((slopes[slopes != 0] * (1 - p) - 1).abs().max()) / (torch.finfo(amp_dtype).eps / 2)
            case.at_most(f"{kind}, p = {p}: error of the gradient of a kept element", error, 2.5, "u")
        unlike = int(((slopes == 0) != (seen == 0)).sum())
        case.equal(f"{kind}, p = {p}: elements dropped in forward or backward alone", unlike, 0)
        _, evaluated, _ = outputs(module.eval())
        case.equal(f"{kind}, p = {p}: dropped elements in evaluation", int((evaluated == 0).sum()), 0)
