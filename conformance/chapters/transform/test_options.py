"""Check ops with their options under vmap in a region against a loop over the samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import normwise_distance

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]
SAMPLES, ROWS, CLASSES = 3, 6, 5
# Roundings of the type of the result, by norm: a rule for vmap may round what it is made of where the op does not.
ROUNDINGS = 8
Op = Callable[[Tensor], Tensor]


def _on(values: list[Any], x: Tensor) -> Tensor:
    return torch.tensor(values, device=x.device)


def _labels(x: Tensor) -> Tensor:
    return _on([0, 3, 1, 1, 4, 3], x)


def _weights(x: Tensor) -> Tensor:
    return _on([0.25, 4.0, 1.0, 0.5, 2.0], x)


def _shares(x: Tensor) -> Tensor:
    """Return probabilities of the classes, exact in 16 bits."""
    return (torch.arange(ROWS * CLASSES, device=x.device).view(ROWS, CLASSES) % 4 + 1) / 16


def _picture(x: Tensor) -> Tensor:
    return x.reshape(1, 1, ROWS, CLASSES)


def _filters(x: Tensor, outputs: int = 2) -> Tensor:
    return (torch.arange(outputs * 9, device=x.device) % 5 - 2.0).view(outputs, 1, 3, 3)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy of weights": lambda x, **of: F.cross_entropy(x, _labels(x), _weights(x), **of),
    "cross_entropy that ignores a class": lambda x, **of: F.cross_entropy(x, _labels(x), ignore_index=3, **of),
    "cross_entropy, smoothed": lambda x, **of: F.cross_entropy(x, _labels(x), _weights(x), label_smoothing=0.25, **of),
    "cross_entropy of probabilities": lambda x, **of: F.cross_entropy(x, _shares(x), _weights(x), **of),
    "nll_loss of weights": lambda x, **of: F.nll_loss(x.log_softmax(1), _labels(x), _weights(x), **of),
    "nll_loss that ignores a class": lambda x, **of: F.nll_loss(x.log_softmax(1), _labels(x), ignore_index=3, **of),
    "binary_cross_entropy_with_logits of weights": lambda x, **of: F.binary_cross_entropy_with_logits(
        x, _shares(x), _weights(x), pos_weight=_weights(x).flip(0), **of
    ),
    "kl_div": lambda x, **of: F.kl_div(x.log_softmax(1), _shares(x), **of),
    "kl_div of logarithms": lambda x, **of: F.kl_div(x.log_softmax(1), _shares(x).log(), log_target=True, **of),
    "huber_loss": lambda x, **of: F.huber_loss(x, _shares(x), delta=0.25, **of),
    "smooth_l1_loss": lambda x, **of: F.smooth_l1_loss(x, _shares(x), beta=0.25, **of),
    "poisson_nll_loss": lambda x, **of: F.poisson_nll_loss(x, _shares(x), full=True, **of),
    "soft_margin_loss": lambda x, **of: F.soft_margin_loss(x, _shares(x).sign(), **of),
    "triplet_margin_loss": lambda x, **of: F.triplet_margin_loss(
        x, x.flip(0), x.roll(1, 0), margin=2.0, swap=True, **of
    ),
}
OPS: dict[str, Op] = {
    **{
        f"{name}, {reduction}": functools.partial(loss, reduction=reduction)
        for name, loss in LOSSES.items()
        for reduction in ("mean", "sum", "none")
    },
    "softmax over rows": lambda x: x.softmax(0),
    "layer_norm of a large eps": lambda x: F.layer_norm(x, (CLASSES,), _weights(x), -_weights(x), 0.5),
    "rms_norm of a large eps": lambda x: F.rms_norm(x, (CLASSES,), _weights(x), 0.5),
    "group_norm of a large eps": lambda x: F.group_norm(x[None], 3, _on([1.0, 2, 3, 4, 5, 6], x), eps=0.5),
    "batch_norm of running statistics": lambda x: F.batch_norm(x, _weights(x), 2 * _weights(x), eps=0.5),
    "embedding with padding": lambda x: F.embedding(_labels(x), x, padding_idx=1),
    "linear with a bias": lambda x: F.linear(x, _shares(x), _on([1.0, 2, 3, 4, 5, 6], x)),
    "conv2d with a bias, stride and padding": lambda x: F.conv2d(
        _picture(x), _filters(x), _on([1.0, -1.0], x), stride=2, padding=1
    ),
    "conv2d, dilated": lambda x: F.conv2d(_picture(x), _filters(x), padding=2, dilation=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(
        _picture(x), _filters(x, 1), stride=2, padding=1, output_padding=1
    ),
    "max_pool2d": lambda x: F.max_pool2d(_picture(x), 3, 2, 1, ceil_mode=True),
    "avg_pool2d without its padding": lambda x: F.avg_pool2d(_picture(x), 3, 2, 1, True, False),
    "avg_pool2d with another divisor": lambda x: F.avg_pool2d(_picture(x), 2, divisor_override=3),
    "interpolate to other sizes": lambda x: F.interpolate(_picture(x), (4, 7), mode="bilinear", align_corners=True),
    "interpolate, nearest": lambda x: F.interpolate(_picture(x), (4, 7)),
    "padding by reflection": lambda x: F.pad(_picture(x), (1, 2, 2, 1), mode="reflect"),
    "attention of a scale": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None, :, :3], is_causal=True, scale=0.25
    ),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "var, corrected by 2": lambda x: x.var(0, correction=2),
    "logit with an eps": lambda x: torch.logit(x, 0.25),
    "rows added up": lambda x: x.index_add(0, _on([0, 2, 0], x), x[:3], alpha=2),
    "numbers added up at pairs": lambda x: x.index_put(
        (_on([0, 2, 0], x), _on([1, 1, 1], x)), x[0, :3], accumulate=True
    ),
}
QUICK_GRADIENTS = ("embedding with padding", "rows added up", "cross_entropy that ignores a class, sum")


@contract("AMP-TRANSFORM-003", on="cpu")
@pytest.mark.parametrize("way", ["vmap", "vmap of grad"])
def test_vmap_of_options(case: Case, target: Target, rng: torch.Generator, way: str) -> None:
    batch = torch.randn(SAMPLES, ROWS, CLASSES, generator=rng)
    dtypes = case.supported(target)
    judged, wrong = 0, {}
    # At quick the gradients are those of what moves or picks elements: the others cost seconds.
    names = QUICK_GRADIENTS if (case.level, way) == ("quick", "vmap of grad") else OPS
    for dtype in dtypes[: case.samples(quick=1, standard=len(dtypes), full=len(dtypes))]:
        for kind in (torch.float32, dtype):
            given = batch.to(target.device, kind)
            for name in names:
                op = OPS[name]
                call = op if way == "vmap" else torch.func.grad(functools.partial(_total, op))
                with target.autocast(dtype):
                    try:
                        expected = torch.stack([call(one) for one in given])
                        seen = torch.func.vmap(call)(given)
                    except (RuntimeError, NotImplementedError) as error:
                        case.note(f"{name} of {kind} in a region of {dtype}: raised", str(error)[:80])
                        continue
                judged += 1
                if text := _difference(seen, expected, dtype):
                    wrong[f"{name} of {kind} in a region of {dtype}"] = text
    case.at_least("calls judged", judged, 1)
    case.equal("calls whose vmap is not a loop over them", wrong, {})


def _total(op: Op, x: Tensor) -> Tensor:
    return op(x).float().square().sum()


def _difference(seen: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Compare the values; the sweep of ops judges the types, which vmap changes where it takes an op apart."""
    if seen.shape != expected.shape:
        return f"{tuple(seen.shape)} in place of {tuple(expected.shape)}"
    far = normwise_distance(seen.double(), expected.double())
    return None if far <= ROUNDINGS * torch.finfo(dtype).eps / 2 else f"normwise distance {far:.3g}"
