"""Check the fused inference of encoders: its results, and the policy of the ops that it calls."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import FAKE_DEVICE_TYPES, Target
from ...oracles.policy import overloads
from .support import fused_inference

BATCH, LENGTH, WIDTH = 3, 6, 16


def _pairs() -> torch.Tensor:
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[0, -1] = hidden[3, 1] = True
    return hidden


def _padding() -> torch.Tensor:
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[0, -2:] = hidden[2, -1:] = True
    return hidden


def _added(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))


def _distances() -> torch.Tensor:
    """Return what is added to the logits of attention: less, the farther two positions are apart."""
    places = torch.arange(float(LENGTH))
    return (places[:, None] - places).abs() / -4


# The arguments of forward that hide positions, or give them less weight.
MASKS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "none": dict,
    "pairs": lambda: {"mask": _pairs()},
    "added-pairs": lambda: {"mask": _added(_pairs())},
    "padding": lambda: {"src_key_padding_mask": _padding()},
    "added-padding": lambda: {"src_key_padding_mask": _added(_padding())},
    "pairs-and-padding": lambda: {"mask": _pairs(), "src_key_padding_mask": _padding()},
    "causal": lambda: {"mask": torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)},
    "weighted-pairs": lambda: {"mask": _distances()},
    "weighted-causal": lambda: {
        "mask": torch.nn.Transformer.generate_square_subsequent_mask(LENGTH) + _distances().tril()
    },
    "weighted-padding": lambda: {"src_key_padding_mask": -1.5 * _padding().float()},
}


@contract("AMP-CAST-111")
@pytest.mark.parametrize("nested", [False, True], ids=["dense", "nested"])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_inference(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, mask: str, nested: bool
) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=rng).to(target.device)
    hidden = "padding" in mask and not mask.startswith("weighted")
    kept = ~_padding() if hidden else torch.ones(BATCH, LENGTH, dtype=torch.bool)
    arguments = {name: value.to(target.device) for name, value in MASKS[mask]().items()}
    for activation, first in itertools.product(("relu", "gelu"), (False, True)):
        what = f"{activation}, norm_first={first}"
        model = _encoder(rng, activation, first, nested).to(target.device)
        results = {}
        for fused, within in itertools.product((True, False), (True, False)):
            # torch takes the fused path where no gradient is asked for.
            with fused_inference(), torch.set_grad_enabled(not fused), target.autocast(amp_dtype, enabled=within):
                results[fused, within] = model(x, **arguments).detach().cpu().double()[kept]
        exact = results[False, False]
        unit = torch.finfo(amp_dtype).eps / 2
        case.at_most(
            f"{what}: distance of fused inference outside of regions", _distance(results[True, False], exact), unit
        )
        # Two layers of eight roundings, which the norms and residuals do not amplify; of measured errors, 3u at most.
        for fused in (True, False):
            path = "fused inference" if fused else "layer by layer"
            case.at_most(f"{what}: distance of {path} in a region", _distance(results[fused, True], exact), 16 * unit)


def _encoder(rng: torch.Generator, activation: str, first: bool, nested: bool) -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, batch_first=True, activation=activation, norm_first=first
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that norm_first rules nested tensors out
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) / WIDTH**0.5)
    return model


def _distance(seen: torch.Tensor, exact: torch.Tensor) -> float:
    return float((seen - exact).norm() / exact.norm())


# The ops that torch.nn.TransformerEncoderLayer and MultiheadAttention call in their fused inference, and the plain ops.
FUSED = {"_addmm_activation": "addmm", "_native_multi_head_attention": "linear"}
# Where they take it in a region: torch/nn/modules/transformer.py. In a CUDA region they do not.
TAKEN = ("cpu", "xpu")


@contract("AMP-CAST-112")
@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("backend", TAKEN)
def test_policy_of_fused_inference(case: Case, backend: str, op: str) -> None:
    if backend != "cpu" and backend not in FAKE_DEVICE_TYPES:
        case.unsupported(f"this torch has no autocast for {backend}")
    registered = overloads.registered(backend)
    plain = FUSED[op]
    case.true(f"control: {plain} has an autocast kernel of {backend}", plain in registered)
    case.equal(f"{op} has an autocast kernel of {backend} as {plain} has", op in registered, True)
