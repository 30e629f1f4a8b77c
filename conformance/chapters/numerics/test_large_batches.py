"""Check that ops give for a large batch what they give for its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import full_precision

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
CHANNELS, LENGTH = 8, 60
# At standard a batch has more than 2 ** 20 numbers, which no whole number of blocks of threads hold.
SAMPLES = {"quick": 131, "standard": 2203, "full": 4409}
# In roundings of the largest number: products of another shape may be added up in another order.
LIMIT = 4.0


def _weight(x: Tensor, *shape: int) -> Tensor:
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) % 7 - 3) / 8).reshape(shape).to(x.device, x.dtype)


def _classes(x: Tensor) -> Tensor:
    """Return a class for each place, which the numbers there choose, so that a part has those of the whole."""
    return x.detach().abs().argmax(1)


def _pictures(x: Tensor) -> Tensor:
    return x.unflatten(2, (6, 10))


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(2, (15, 4))


CALLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_softmax of channels": lambda x: x.log_softmax(1),
    "log_softmax": lambda x: x.log_softmax(2),
    "softmax of channels": lambda x: x.softmax(1),
    "softmax": lambda x: x.softmax(2),
    "cross_entropy": lambda x: F.cross_entropy(x, _classes(x), reduction="none"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, _classes(x), label_smoothing=0.25, reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x, _classes(x), reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().flip(2), reduction="none"),
    "layer_norm": lambda x: F.layer_norm(x, (LENGTH,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": lambda x: F.instance_norm(x),
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "glu": lambda x: F.glu(x, 1),
    "sum": lambda x: x.sum(1),
    "cumsum": lambda x: x.cumsum(1),
    "amax": lambda x: x.amax(1),
    "sort": lambda x: x.sort(1).values,
    "gather": lambda x: x.gather(1, _classes(x)[:, None]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, _classes(x)[:, None].expand_as(x), x),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "linear": lambda x: F.linear(x, _weight(x, 16, LENGTH)),
    "bmm": lambda x: torch.bmm(x, x.detach().mT),
    "conv1d": lambda x: F.conv1d(x, _weight(x, 6, CHANNELS, 3)),
    "depthwise conv1d": lambda x: F.conv1d(x, _weight(x, CHANNELS, 1, 3), groups=CHANNELS),
    "conv2d": lambda x: F.conv2d(_pictures(x), _weight(x, 4, CHANNELS, 2, 2)),
    "avg_pool2d": lambda x: F.avg_pool2d(_pictures(x), 2),
    "max_pool2d": lambda x: F.max_pool2d(_pictures(x), 2),
    "nearest": lambda x: F.interpolate(_pictures(x), scale_factor=2, mode="nearest"),
    "bilinear": lambda x: F.interpolate(_pictures(x), scale_factor=2, mode="bilinear"),
    "pad": lambda x: F.pad(_pictures(x), (1, 2, 1, 0), mode="reflect"),
    "attention": lambda x: F.scaled_dot_product_attention(_heads(x), _heads(x).detach(), _heads(x).detach()),
}


def _answers(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    result = call(leaf)
    number = torch.arange(result[:1].numel(), device=x.device) % 5 + 1
    incoming = number.to(result.dtype).reshape(result[:1].shape).expand(result.shape).contiguous()
    return result.detach(), torch.autograd.grad(result, leaf, incoming)[0]


@contract("AMP-NUMERICS-144")
@pytest.mark.parametrize("op", CALLS)
def test_parts_of_a_batch(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, op: str) -> None:
    count = SAMPLES[case.level]
    x = (torch.randint(-24, 25, (count, CHANNELS, LENGTH), generator=rng) / 8).to(target.device, amp_dtype)
    cuts = (count // 3, count // 3 + 1, count - count // 3 - count // 3 - 1)
    with full_precision(target.device_type):
        try:
            whole = _answers(CALLS[op], x)
        except NotImplementedError as error:
            case.unsupported(f"no kernel of {op} for {amp_dtype}: {str(error).splitlines()[0][:80]}")
        parts = [_answers(CALLS[op], part) for part in x.split(cuts)]
    for what, seen, found in zip(("result", "gradient"), whole, zip(*parts, strict=True), strict=True):
        right = torch.cat(found).double()
        unit = torch.finfo(amp_dtype).eps / 2
        far = (seen.double() - right).abs().nan_to_num(nan=float("inf")) / (unit * right.abs().max().clamp(min=1e-6))
        case.at_most(f"{what}: roundings that the whole is from the parts", float(far.max()), LIMIT)


# So many that each row of a table has some forty of them, a number that 16 bits count to.
COUNTS = {"quick": 1200, "standard": 5003, "full": 70001}
EACH = 40


@contract("AMP-NUMERICS-144")
@pytest.mark.parametrize("kind", ["embedding", "embedding, padded", "bags", "bags, padded", "index_select", "gather"])
def test_counts_of_many_indices(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str
) -> None:
    """Each of many indices adds one to the gradient of its row, but for those of the padding."""
    count, hole = COUNTS[case.level], 2 if "padded" in kind else None
    rows = count // EACH
    table = torch.zeros(rows, 3, dtype=amp_dtype, device=target.device).requires_grad_()
    indices = torch.randint(0, rows, (count,), generator=rng).to(target.device)
    calls: dict[str, Callable[[], Tensor]] = {
        "embedding": lambda: F.embedding(indices, table, padding_idx=hole),
        "bags": lambda: F.embedding_bag(indices[:, None], table, mode="sum", padding_idx=hole),
        "index_select": lambda: table.index_select(0, indices),
        "gather": lambda: table.gather(0, indices[:, None].expand(-1, 3)),
    }
    result = calls[kind.removesuffix(", padded")]()
    (gradient,) = torch.autograd.grad(result, table, torch.ones_like(result))
    times = torch.bincount(indices.cpu(), minlength=rows).double()
    if hole is not None:
        case.at_least("indices of the padding (control)", int(times[hole]), 1)
        times[hole] = 0
    case.equal("rows whose gradient is not their count", (gradient.cpu().double() != times[:, None]).sum().item(), 0)
