"""Check attention: rounding error, rounding of operands, gradients of logits far below zero on each backend."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds, exact
from ...oracles.numbers.formats import FORMATS, Format
from .attention_kernels import KERNELS
from .bounds_attention import MASKS, LowLogits, Problem, attempt, measured
from .matmul_ops import gaussians
from .op_error import Measured
from .support import by_kernel, compare, keeps_subnormals, leaves_on, within_window

# Lengths of half a tile of 128 more than whole ones. References take the square of the length and the size of a head.
QUICK = (LowLogits("boolean", 64, 64, 2), LowLogits("float", 64, 64))
STANDARD = (
    *(LowLogits(mask, 64, 64, group) for mask in MASKS for group in (1, 2)),
    *(LowLogits(mask, 192, 16) for mask in MASKS),
    LowLogits("float", 704, 16),
)
FULL = tuple(LowLogits(mask, length, 64, group) for mask in MASKS for length in (192, 704) for group in (1, 2))


@contract("AMP-NUMERICS-101")
@pytest.mark.parametrize(
    "low",
    [
        *(pytest.param(low, id=str(low)) for low in QUICK),
        *(deep("standard", low, id=str(low)) for low in STANDARD if low not in QUICK),
        *(deep("full", low, id=str(low)) for low in FULL),
    ],
)
def test_gradients_below_zero(case: Case, target: Target, rng: torch.Generator, low: LowLogits) -> None:
    ran: dict[str, list[Measured]] = {name: [] for name in reversed(KERNELS)}  # math, the plainest, first
    raised: dict[str, RuntimeError] = {}
    for dtype in case.supported(target):
        form = FORMATS[dtype]
        problem = Problem.draw(low, form, rng)
        case.at_most("control: largest logsumexp of a row", problem.logsumexp(), -900.0)
        flushes = dtype is torch.float16 and not keeps_subnormals(target, dtype)
        references = problem.references(form, form.smallest_normal if flushes else form.smallest)
        region = functools.partial(target.autocast, dtype)
        for name in ran:
            try:
                with full_precision(target.device_type):
                    tensors = attempt(problem, name, form, target.device, region)
            except RuntimeError as error:
                raised.setdefault(name, error)
            else:
                ran[name] += [] if tensors is None else measured(tensors, references, f"{name}, {form.name}", form)
    # Recorded by backend, so that a failure of one differs from a failure of all.
    case.note("backends that take these inputs", [name for name, found in ran.items() if found])
    if raised:
        case.note("backends that raise", sorted(raised))
        raise next(iter(raised.values()))
    case.true("a backend takes these inputs", any(ran.values()))
    for name, found in ran.items():
        if found:
            wrong = {one.what: one.error for one in found if not one.error <= 1}
            case.equal(f"{name}: tensors out of bounds, and how many times the bound", wrong, {})
            case.at_most(f"{name}: worst error of {len(found)} tensors", max(one.error for one in found), 1.0, "bounds")


ATTENTION = {
    "square": ((2, 3, 33, 32), (2, 3, 33, 32), False),
    "causal": ((2, 3, 33, 32), (2, 3, 33, 32), True),
    "tails": ((2, 3, 17, 16), (2, 3, 45, 16), False),
    "odd heads": ((2, 3, 17, 20), (2, 3, 45, 20), False),  # padded by kernels that want multiples of 8
}


@contract("AMP-NUMERICS-021")
@pytest.mark.parametrize("shape", ATTENTION, ids=lambda shape: shape.replace(" ", "_"))
def test_attention_runs_in_sixteen_bits(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, shape: str
) -> None:
    queries, keys, is_causal = ATTENTION[shape]
    form = FORMATS[amp_dtype]
    sources = gaussians(rng, queries, keys, keys)
    seed = torch.randn(queries, generator=rng)

    def run() -> list[Tensor]:
        leaves = leaves_on(target, *sources)
        with full_precision(target.device_type):
            with target.autocast(amp_dtype):
                seen = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=is_causal)
            seen.backward(seed.to(target.device, seen.dtype))
        return [seen.detach(), *(leaf.grad for leaf in leaves)]

    ran = by_kernel(case, target, rng, run)
    references = [source.double().requires_grad_() for source in sources]
    expected = exact.attention(*references, is_causal=is_causal)
    expected.backward(seed.double())
    expectations = [expected.detach(), *(reference.grad for reference in references)]
    windows = [error_bounds.attention_window(form), *[error_bounds.attention_window(form, stages=2)] * 3]
    names = ("attention", "gradient of the query", "gradient of the key", "gradient of the value")
    for place, name in enumerate(names):
        errors = {kernel: _in_units(tensors[place], expectations[place], form) for kernel, tensors in ran.items()}
        compare(case, f"{name}: normwise error", errors, "u")
    for kernel, tensors in ran.items():
        case.equal(f"{kernel}: dtype", tensors[0].dtype, amp_dtype)
        for name, tensor, reference, window in zip(names, tensors, expectations, windows, strict=True):
            within_window(case, f"{kernel}: {name}", tensor, reference, window, form.unit_roundoff)


def _in_units(seen: Tensor, expected: Tensor, form: Format) -> float:
    return error_bounds.normwise_error(seen, expected) / form.unit_roundoff


@contract("AMP-NUMERICS-021")
@pytest.mark.parametrize("operand", ["query", "key", "value"])
def test_attention_rounds_its_operands(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, operand: str
) -> None:
    # As in the products: numbers just above 1 round to 1, and minus as many ones they are exactly 0.
    unit = FORMATS[amp_dtype].unit_roundoff
    above = 1 + 0.9 * unit
    query, key, value = torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 2, 16), torch.ones(1, 1, 2, 16)
    value[..., 1, :] = -1.0
    if operand == "value":
        value[..., 0, :] = above
    else:
        # A logit of 1/u times (1 - 1): both keys weigh the same, unless the 1 was not rounded.
        differing, factor = torch.tensor([above, -1.0]), torch.full((2,), 1 / unit)
        query[..., :2], key[..., 0, :2] = (differing, factor) if operand == "query" else (factor, differing)

    def run() -> list[float]:
        with full_precision(target.device_type), target.autocast(amp_dtype):
            seen = F.scaled_dot_product_attention(*(part.to(target.device) for part in (query, key, value)))
        return [float(result) for result in seen.cpu().double().unique()]

    for kernel, results in by_kernel(case, target, rng, run).items():
        case.equal(f"{kernel}: {operand} just above 1: results", results, [0.0])


KEYS = 1100
# Which of the keys a mask leaves open. Kernels take them in tiles of 16 to 512.
OPEN: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda key: key >= 600,
    "first": lambda key: key < 500,
    "ends": lambda key: (key < 100) | (key >= 1000),
    "blocks": lambda key: key // 64 % 2 == 1,
    "one": lambda key: key == KEYS - 1,
}


def _operands(rng: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Return 24 queries of 16 features, KEYS keys and their values, in two heads."""
    return [source.to(dtype) for source in gaussians(rng, (1, 2, 24, 16), (1, 2, KEYS, 16), (1, 2, KEYS, 16))]


RESULTS = ("attention", "gradient of the query", "gradient of the key", "gradient of the value")


def _with_gradients(
    target: Target,
    mask: Tensor,
    seed: Tensor,
    operands: list[Tensor],
    region: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> list[Tensor]:
    """Return masked attention in a region, and its gradients by query, key and value where `seed` comes back."""
    leaves = leaves_on(target, *operands)
    with full_precision(target.device_type):
        with region():
            seen = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=mask)
        seen.backward(seed.to(target.device))
    return [seen.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


def _mask(is_open: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the mask that opens these keys: "boolean", or "float" with -inf for closed ones."""
    return is_open if kind == "boolean" else torch.zeros(is_open.shape).masked_fill(~is_open, -torch.inf).to(dtype)


@contract("AMP-NUMERICS-088")
@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize("blocks", OPEN)
def test_closed_keys_have_no_part(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, blocks: str, kind: str
) -> None:
    form = FORMATS[amp_dtype]
    sources = _operands(rng, amp_dtype)
    seed = torch.randn((1, 2, 24, 16), generator=rng).to(amp_dtype)
    is_open = OPEN[blocks](torch.arange(KEYS))
    mask = _mask(is_open, kind, amp_dtype).expand(24, KEYS).to(target.device)
    replaced = [sources[0], *(torch.where(is_open[:, None], source, 100.0) for source in sources[1:])]

    run = functools.partial(_with_gradients, target, mask, seed, region=functools.partial(target.autocast, amp_dtype))
    references = [source.double().requires_grad_() for source in sources]
    expected = exact.attention(references[0], *(reference[..., is_open, :] for reference in references[1:]))
    expected.backward(seed.double())
    expectations = [expected.detach(), *(reference.grad for reference in references)]
    ran = by_kernel(case, target, rng, lambda: (run(sources), run(replaced)))
    for kernel, (tensors, others) in ran.items():
        for name, tensor, reference in zip(RESULTS, tensors, expectations, strict=True):
            # With one open key the probabilities are 1, whatever the logits.
            if reference.any():
                case.at_most(f"{kernel}: {name}: normwise error", _in_units(tensor, reference, form), 16.0, "u")
            else:
                case.at_most(f"{kernel}: {name}: largest element", float(tensor.abs().max()), 16.0 * form.unit_roundoff)
        case.identical(f"{kernel}: attention with other closed keys and values", others[0], tensors[0])
        for name, tensor in zip(RESULTS[2:], tensors[2:], strict=True):
            case.equal(f"{kernel}: {name}: elements of closed ones", int(tensor[..., ~is_open, :].count_nonzero()), 0)


@contract("AMP-NUMERICS-088")
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_masks_of_every_shape(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str
) -> None:
    """Of samples, heads and queries, each its own or one for all, where operands learn and where none does."""
    wrong: dict[str, float] = {}
    form, judged = FORMATS[amp_dtype], 0
    for queries, features in itertools.product((1, 5, 17), (16, 64, 96, 128)):
        sizes = ((2, 3, queries, features), (2, 3, 24, features), (2, 3, 24, features))
        operands = [source.to(amp_dtype) for source in gaussians(rng, *sizes)]
        placed = [one.to(target.device) for one in operands]
        query, key, value = (one.double() for one in operands)
        for shape in itertools.product((1, 2), (1, 3), sorted({1, queries}), (24,)):
            is_open = torch.rand(shape, generator=rng) < 0.5
            is_open[..., 0] = True
            logits = (query @ key.mT / features**0.5).masked_fill(~is_open, -torch.inf)
            mask = _mask(is_open, kind, amp_dtype).to(target.device)
            for learned in (False, True):
                with full_precision(target.device_type), target.autocast(amp_dtype):
                    leaves = [one.clone().requires_grad_(learned) for one in placed]
                    seen = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], attn_mask=mask)
                judged += 1
                far = _in_units(seen.detach().cpu(), logits.softmax(-1) @ value, form)
                if not far <= 16.0:
                    wrong[f"{list(shape)} of {queries} queries, {features} features, learned: {learned}"] = far
    case.equal("masks of which attention is far from that in float64, with its error in u", wrong, {})
    case.at_least("calls judged", judged, 1)


@contract("AMP-NUMERICS-088")
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_rows_without_a_key(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str
) -> None:
    """A query to which every key is closed gets zeros and no gradient, and changes nothing for the others."""
    form = FORMATS[amp_dtype]
    sources = _operands(rng, amp_dtype)
    seed = torch.randn((1, 2, 24, 16), generator=rng).to(amp_dtype)
    is_open = torch.ones(24, KEYS, dtype=torch.bool)
    is_open[3] = is_open[20] = False
    closed = ~is_open.any(1)

    def run(dtype: torch.dtype) -> list[Tensor]:
        mask = _mask(is_open, kind, dtype).to(target.device)
        return _with_gradients(target, mask, seed.to(dtype), [source.to(dtype) for source in sources])

    references = [source.double().requires_grad_() for source in sources]
    expected = exact.attention(references[0][..., ~closed, :], *references[1:])
    expected.backward(seed[..., ~closed, :].double())
    expectations = [expected.detach(), *(reference.grad for reference in references)]
    expectations[1] = expectations[1][..., ~closed, :]
    wide = by_kernel(case, target, rng, lambda: run(torch.float32))
    for kernel, tensors in by_kernel(case, target, rng, lambda: run(amp_dtype)).items():
        # What PyTorch says of these rows is tested there on kernels that take float32 too.
        if kernel not in wide:
            continue
        for name, tensor in zip(("result", "gradient"), tensors[:2], strict=True):
            others = int((tensor[..., closed, :] != 0).count_nonzero())
            case.equal(f"{kernel}: {name} of queries without a key: elements that are not zero", others, 0)
        rows = [one[..., ~closed, :] for one in tensors[:2]] + tensors[2:]
        for name, tensor, reference in zip(RESULTS, rows, expectations, strict=True):
            case.at_most(f"{kernel}: {name}: normwise error", _in_units(tensor, reference, form), 16.0, "u")


def _within(mask: Tensor, longer: int, *, step: int = 1, start: int = 0) -> Tensor:
    """Return the mask as a view of longer rows, or of every so many elements of them."""
    rows = mask.new_ones(*mask.shape[:-1], step * mask.shape[-1] + longer)
    view = rows[..., start : start + step * mask.shape[-1] : step]
    view.copy_(mask)
    return view


# The same numbers, of which some are repeated, in other places of memory. Shapes: (batch, heads, queries, keys).
MASK_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda mask: mask,
    "heads last": lambda mask: mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "queries last": lambda mask: mask.mT.contiguous().mT,
    "parts of rows": lambda mask: _within(mask, 7),
    "behind an element": lambda mask: _within(mask, 1, start=1),
    "every second element": lambda mask: _within(mask, 0, step=2),
    "one for all heads": lambda mask: mask[:, :1].expand_as(mask),
    "one for all queries": lambda mask: mask[:, :, :1].expand_as(mask),
    "one for all of a batch": lambda mask: mask[:1].expand_as(mask),
    "keys of a batch": lambda mask: mask[:, :1, :1],
    "matrix": lambda mask: mask[0, 0],
    "turned matrix": lambda mask: mask[0, 0].t().contiguous().t(),
}


@contract("AMP-NUMERICS-088")
@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_layouts_of_a_mask(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str) -> None:
    """The numbers of a mask decide, wherever they lie in memory, for the gradients too."""
    form = FORMATS[amp_dtype]
    sources = [one.to(amp_dtype) for one in gaussians(rng, (2, 4, 40, 16), (2, 4, 43, 16), (2, 4, 43, 16))]
    seed = torch.randn((2, 4, 40, 16), generator=rng).to(amp_dtype)
    added = torch.randn((2, 4, 40, 43), generator=rng).to(amp_dtype)
    is_open = added > -0.5
    is_open[..., 0] = True
    for layout, lay_out in MASK_LAYOUTS.items():
        mask = lay_out(is_open if kind == "boolean" else added)
        numbers = _mask(mask, "float", torch.float64) if kind == "boolean" else mask.double()
        wide = [source.double().requires_grad_() for source in sources]
        logits = wide[0] @ wide[1].mT / 16**0.5 + numbers
        expected = logits.softmax(-1) @ wide[2]
        expected.backward(seed.double())
        expectations = [expected.detach(), *(one.grad for one in wide)]
        given = lay_out((is_open if kind == "boolean" else added).to(target.device))
        run = functools.partial(
            _with_gradients, target, given, seed, sources, functools.partial(target.autocast, amp_dtype)
        )
        for kernel, tensors in by_kernel(case, target, rng, run).items():
            for name, tensor, reference in zip(RESULTS, tensors, expectations, strict=True):
                error = _in_units(tensor, reference, form)
                case.at_most(f"{kernel}: mask {layout}: {name}: normwise error", error, 16.0, "u")


def _padded(name: str) -> torch.nn.Module:
    if name.startswith("MultiheadAttention"):
        return torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def _attended(module: Any, x: Tensor, masks: dict[str, Tensor], *, causal: bool, weights: bool) -> Tensor:
    options = {"attn_mask": masks["causal"], "is_causal": True} if causal else {}
    attended: Tensor = module(x, x, x, key_padding_mask=masks["padding"], need_weights=weights, **options)[0]
    return attended


def _encoded(module: Any, x: Tensor, masks: dict[str, Tensor], *, causal: bool) -> Tensor:
    options = {"src_mask": masks["causal"], "is_causal": True} if causal else {}
    encoded: Tensor = module(x, src_key_padding_mask=masks["padding"], **options)
    return encoded


# Also before keys that are open, which a causal mask does not close by itself.
CLOSED = torch.tensor([[False] * 5, [False, True, False, False, True]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
# Calls of a module that has a padding mask for its keys, and their outputs.
PADDED: dict[str, Callable[[Any, Tensor, dict[str, Tensor]], Tensor]] = {
    f"MultiheadAttention{', causal' * causal}{', weights' * weights}": functools.partial(
        _attended, causal=causal, weights=weights
    )
    for causal in (False, True)
    for weights in (False, True)
} | {
    f"TransformerEncoderLayer{', causal' * causal}": functools.partial(_encoded, causal=causal)
    for causal in (False, True)
}


@contract("AMP-NUMERICS-088")
@pytest.mark.parametrize("place", ["in", "outside"])
@pytest.mark.filterwarnings("ignore")
def test_padding_of_modules(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, place: str
) -> None:
    """Replace what a padding mask closes, in training and inference, and look at the rows that are open."""
    dtype = torch.float32 if place == "in" else amp_dtype
    given = torch.randn(2, 5, 8, generator=rng)
    masks = {"padding": CLOSED.to(target.device), "causal": CAUSAL.to(target.device)}
    wrong = []
    for name, call in PADDED.items():
        for training in (True, False):
            module = _padded(name).train(training).to(target.device, dtype)
            outputs = []
            for closed in (given, torch.where(CLOSED[..., None], 3 - given, given)):
                with torch.no_grad(), target.autocast(amp_dtype, enabled=place == "in"):
                    seen = call(module, closed.to(target.device, dtype), masks)
                outputs.append(seen.float().cpu()[~CLOSED])
            if not torch.equal(*outputs) or not bool(outputs[0].isfinite().all()):
                wrong.append(f"{name}{'' if training else ' in inference'}")
    case.equal("modules whose open rows depend on closed ones", wrong, [])
