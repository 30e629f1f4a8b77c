"""Check which casts autocast's weight cache holds, for how long, and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import linear

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS, FP32, OTHER, midpoints, narrow, tensor_of
from ...oracles.trace.casts import alive
from ...oracles.trace.ops import OpTrace

# Seconds after which a thread is considered dead.
PATIENCE = 60.0


class Interruption(Exception):
    """Raised to leave a region early."""


def weight_of(target: Target, rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a leaf on the target that requires a gradient, (5, 4) by default."""
    return torch.randn(*(shape or (5, 4)), generator=rng).to(target.device, dtype).requires_grad_()


def features_of(target: Target, rng: torch.Generator) -> torch.Tensor:
    """Return an input of shape (3, 4) for a weight of four columns."""
    return torch.randn(3, 4, generator=rng).to(target.device)


def manual_linear(features: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result of `linear` on manually cast tensors outside any region."""
    return linear(features.detach().to(dtype), weight.detach().to(dtype))


# How often a weight is cast


@contract("AMP-CACHE-001")
@pytest.mark.parametrize("uses", [2, deep("standard", 7)])
def test_one_cast(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, uses: int) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        for use in range(1, uses + 1):
            output = linear(features, weight)
            case.equal(f"casts of the weight after {use} uses", len(trace.casts_of(weight)), 1)
    case.equal("dtype of the output", output.dtype, amp_dtype)


@contract("AMP-CACHE-001")
def test_one_cast_over_several_ops(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        outputs = [
            linear(features, weight),
            torch.mm(weight, features.t()),
            torch.matmul(weight, features[0]),
            torch.bmm(features.reshape(3, 1, 4), weight.new_ones(3, 4, 2)),
            torch.addmm(features.new_ones(5, 3), weight, features.t()),
        ]
    case.equal("casts of the weight over linear, mm, matmul and addmm", len(trace.casts_of(weight)), 1)
    case.equal("dtypes of the outputs", {output.dtype for output in outputs}, {amp_dtype})


@contract("AMP-CACHE-001")
def test_one_cast_of_each(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)).to(target.device)
    features = torch.ones(3, 4, device=target.device)
    with target.autocast(amp_dtype), OpTrace() as trace:
        for _ in range(3):
            features = layers(features)
    for name, each in layers.named_parameters():
        case.equal(f"casts of {name} over three calls of the module", len(trace.casts_of(each)), 1)


@contract("AMP-CACHE-002")
def test_nested_region_keeps_the_cache(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    inner = {
        "of the same kind": lambda: target.autocast(amp_dtype),
        "disabled": lambda: target.autocast(amp_dtype, enabled=False),
        "of another device type": lambda: torch.autocast("xpu" if target.device_type == "cpu" else "cpu"),
        "left by an exception": lambda: target.autocast(amp_dtype),
        "with the cache off": lambda: target.autocast(amp_dtype, cache_enabled=False),
    }
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        linear(features, weight)
        for kind, opened in inner.items():
            with contextlib.suppress(Interruption), opened():
                linear(features, weight)
                if kind == "left by an exception":
                    raise Interruption
            linear(features, weight)
            casts = 2 if kind == "with the cache off" else 1  # its own use is one
            case.equal(f"casts of the weight after a nested region {kind}", len(trace.casts_of(weight)), casts)


@contract("AMP-CACHE-003")
def test_cast_again_in_the_next_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    for number in range(1, 4):
        with target.autocast(amp_dtype):
            with OpTrace() as trace:
                linear(features, weight)
                linear(features, weight)
            case.equal(f"casts of the weight by two uses in region {number}", len(trace.casts_of(weight)), 1)
            with target.autocast(amp_dtype):
                linear(features, weight)
            linear(features, weight)


@contract("AMP-CACHE-003")
@pytest.mark.parametrize("outermost", ["disabled", "uncached", "another device type", "no gradients"])
def test_cast_again_whatever_the_outermost_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, outermost: str
) -> None:
    neighbour = "cpu" if target.device_type == "xpu" else "xpu"
    weight, features = weight_of(target, rng), features_of(target, rng)
    with OpTrace() as trace:
        for number in range(1, 4):
            with contextlib.ExitStack() as around:
                if outermost == "disabled":
                    around.enter_context(target.autocast(amp_dtype, enabled=False))
                elif outermost == "uncached":
                    around.enter_context(target.autocast(amp_dtype, cache_enabled=False))
                elif outermost == "another device type":
                    around.enter_context(torch.autocast(neighbour, dtype=amp_dtype))
                else:
                    # The region is left with gradients off; its casts are made with gradients on.
                    around.enter_context(torch.no_grad())
                with target.autocast(amp_dtype, cache_enabled=True):
                    for _ in range(2):
                        with torch.enable_grad():
                            linear(features, weight)
            case.equal(f"casts of the weight after {number} outermost regions", len(trace.casts_of(weight)), number)


@contract("AMP-CACHE-004")
@pytest.mark.parametrize("depth", [1, 3])
def test_dropped_by_an_exception(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, depth: int
) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with OpTrace() as trace:
        for number in range(1, 4):
            with contextlib.suppress(Interruption), contextlib.ExitStack() as stack:
                for _ in range(depth):
                    stack.enter_context(target.autocast(amp_dtype))
                linear(features, weight)
                raise Interruption
            case.equal(f"casts of the weight after {number} broken regions", len(trace.casts_of(weight)), number)


@contract("AMP-CACHE-005")
def test_cache_off(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype, cache_enabled=False), OpTrace() as trace:
        for use in range(1, 4):
            output = linear(features, weight)
            case.equal(f"casts of the weight after {use} uses", len(trace.casts_of(weight)), use)
    case.equal("dtype of the output", output.dtype, amp_dtype)
    with target.autocast(amp_dtype), OpTrace() as trace:
        for _ in range(3):
            linear(features, weight)
    case.equal("casts over three uses with the cache on (control)", len(trace.casts_of(weight)), 1)


@contract("AMP-CACHE-005")
def test_cache_off_in_a_subregion(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        linear(features, weight)
        with target.autocast(amp_dtype, cache_enabled=False):
            linear(features, weight)
            linear(features, weight)
        case.equal("casts after one use with the cache on and two with it off", len(trace.casts_of(weight)), 3)


# Weights by name: how to create one from a float32 leaf, and the number of casts in three uses.
KINDS: dict[str, tuple[Callable[[torch.Tensor, torch.dtype], torch.Tensor], int]] = {
    "leaf": (lambda leaf, dtype: leaf, 1),
    "parameter": (lambda leaf, dtype: torch.nn.Parameter(leaf.detach().clone()), 1),
    "frozen": (lambda leaf, dtype: leaf.detach().clone(), 3),
    "frozen_parameter": (lambda leaf, dtype: torch.nn.Parameter(leaf.detach().clone(), requires_grad=False), 3),
    "result": (lambda leaf, dtype: leaf * 1.0, 3),
    "view": (lambda leaf, dtype: leaf[:], 3),
    "view_leaf": (lambda leaf, dtype: leaf.detach().clone()[1:].requires_grad_(), 3),
    "other_16_bit": (lambda leaf, dtype: leaf.detach().to(OTHER[dtype]).requires_grad_(), 3),
    "same_16_bit": (lambda leaf, dtype: leaf.detach().to(dtype).requires_grad_(), 0),
}


@contract("AMP-CACHE-006")
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_cached(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, kind: str) -> None:
    make, promised = KINDS[kind]
    if kind == "other_16_bit":
        case.require_arithmetic(target, OTHER[amp_dtype])
    weight, features = make(weight_of(target, rng), amp_dtype), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        outputs = [linear(features, weight) for _ in range(3)]
    case.equal(f"casts over three uses of a {kind}", len(trace.casts_of(weight)), promised)
    case.equal("dtypes of the outputs", {output.dtype for output in outputs}, {amp_dtype})


@contract("AMP-CACHE-007")
def test_clear(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype), OpTrace() as trace:
        for number in range(1, 4):
            linear(features, weight)
            linear(features, weight)
            case.equal(
                f"casts of the weight, the cache cleared {number - 1} times", len(trace.casts_of(weight)), number
            )
            torch.clear_autocast_cache()


@contract("AMP-CACHE-007")
def test_clear_shows_an_update(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with target.autocast(amp_dtype):
        linear(features, weight)
        with torch.no_grad():
            weight.mul_(-3.0)
        torch.clear_autocast_cache()
        output = linear(features, weight)
    case.identical(
        "output after an update and a cleared cache", output.detach(), manual_linear(features, weight, amp_dtype)
    )


# Values of cached casts


@contract("AMP-CACHE-010")
def test_values(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = weight_of(target, rng)
    batches = [features_of(target, rng) for _ in range(3)]
    for cache in (True, False):
        with target.autocast(amp_dtype, cache_enabled=cache):
            outputs = [linear(features, weight) for features in batches]
        for number, (features, output) in enumerate(zip(batches, outputs, strict=True)):
            promised = manual_linear(features, weight, amp_dtype)
            case.identical(f"output {number} with cache_enabled={cache}", output.detach(), promised)


# Other uses of a weight with four columns, as of one that an embedding and a linear layer share.
OTHER_USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": lambda weight: functional.embedding(_rows(weight), weight),
    "embedding_bag": lambda weight: functional.embedding_bag(_rows(weight).view(1, -1), weight, mode="sum"),
    "indexing": lambda weight: weight[_rows(weight)],
    "index_select": lambda weight: weight.index_select(0, _rows(weight)),
    "gather": lambda weight: weight.gather(0, _rows(weight).view(-1, 1)),
    "product with a number": lambda weight: weight * 3,
    "sum with another tensor": lambda weight: weight + torch.ones_like(weight),
    "where": lambda weight: torch.where(weight > 0, weight, torch.zeros_like(weight)),
    "cat": lambda weight: torch.cat([weight, torch.ones_like(weight)]),
    "clone": lambda weight: weight.clone(),
    "float": lambda weight: weight.float(),
    "square": lambda weight: weight.square().mean(),
    "norm": torch.linalg.vector_norm,
    "softmax": lambda weight: weight.softmax(1),
    "l1_loss": lambda weight: functional.l1_loss(weight, torch.zeros_like(weight)),
    "layer_norm": lambda weight: functional.layer_norm(weight, weight.shape[1:], weight[0]),
    "normalize": functional.normalize,
    "dropout of no share": lambda weight: functional.dropout(weight, 0.0),
}


def _rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1, 0, 1], device=weight.device)


@contract("AMP-CACHE-010")
def test_other_uses_of_a_weight(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Ops that take no cast read the weight, also after an op that does has left one in the cache."""
    weight, features = torch.nn.Parameter(weight_of(target, rng).detach()), features_of(target, rng)
    differ = []
    for name, use in OTHER_USES.items():
        found = []
        for first in (False, True):
            with target.autocast(amp_dtype):
                if first:
                    functional.linear(features, weight)
                result = use(weight)
            found.append((result, *torch.autograd.grad(result.float().sum(), weight)))
        differ += [name for one, other in zip(*found, strict=True) if one.dtype != other.dtype or not one.equal(other)]
    case.equal("uses that differ after linear has cast the weight", sorted(set(differ)), [])
    case.true("control: the weight is no number of 16 bits", not weight.equal(weight.to(amp_dtype).float()), weight)


@contract("AMP-CACHE-011")
def test_cast_is_rounded_to_nearest(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    form = FORMATS[amp_dtype]
    # All ties of the type with their neighbours would be 190,000 numbers; a prime stride meets every exponent.
    patterns = midpoints(form, case.samples(quick=61, standard=13, full=1))
    # A view would not be cached, hence the clone.
    weight = tensor_of(patterns, FP32).reshape(-1, 1).clone().to(target.device).requires_grad_()
    with target.autocast(amp_dtype), OpTrace() as trace:
        torch.mm(weight, torch.ones(1, 1, device=target.device))
        cached = alive(trace.casts_of(weight))
        case.equal("casts that the cache holds", len(cached), 1)
        promised = tensor_of([narrow(pattern, form) for pattern in patterns], form).reshape(-1, 1)
        case.identical("the cached cast of ties and their neighbours", cached[0].detach(), promised)


@contract("AMP-CACHE-012")
@pytest.mark.parametrize("update", ["in place", "optimizer", "data"])
def test_update_between_regions(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, update: str
) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for step in range(1, case.samples(quick=3, standard=5, full=20) + 1):
        with target.autocast(amp_dtype):
            linear(features, weight)
            output = linear(features, weight)
        case.identical(f"output of region {step}", output.detach(), manual_linear(features, weight, amp_dtype))
        if update == "optimizer":
            optimizer.zero_grad()
            output.float().square().sum().backward()
            optimizer.step()
        elif update == "data":
            weight.data.copy_(torch.randn(weight.shape, generator=rng))
        else:
            with torch.no_grad():
                weight.add_(step)


@contract("AMP-CACHE-013")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("memory", ["its own", "the last one's"])
def test_new_weight_at_an_old_address(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    mode: Callable[[], contextlib.AbstractContextManager],
    memory: str,
) -> None:
    # A quarter of a mebibyte: the CPU allocator rarely reuses the address of small blocks.
    side, wrong, addresses = 256, [], set()
    ones = torch.ones(1, side, device=target.device)
    block = torch.empty(side, side, device=target.device)
    uses = case.samples(quick=8, standard=24, full=500)
    case.require_call(target, "share a storage", lambda: torch.empty_like(block).set_(block.untyped_storage()))
    with target.autocast(amp_dtype), mode():
        for number in range(uses):
            value = float(number % 32)
            weight = torch.full((side, side), value, device=target.device)
            if memory == "the last one's":
                block.fill_(value)
                weight.set_(block.untyped_storage(), 0, weight.size(), weight.stride())
            weight.requires_grad_()
            addresses.add(weight.data_ptr())
            # 256 times an integer below 32: exact in both types.
            if not bool((linear(ones, weight) == side * value).all()):
                wrong.append(number)
            del weight
    case.note("weights made and freed in the region", uses)
    case.note("addresses that they had", len(addresses))
    case.equal("weights that were given another one's cast", wrong, [])


@contract("AMP-CACHE-015")
@pytest.mark.parametrize("leave", ["normally", "by an exception", "by clearing"])
def test_nothing_survives(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, leave: str) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    with contextlib.suppress(Interruption), target.autocast(amp_dtype):
        with OpTrace() as trace:
            linear(features, weight)
        case.equal("casts alive in the region (control)", len(alive(trace.casts_of(weight))), 1)
        with target.autocast(amp_dtype):
            pass
        with trace:
            linear(features, weight)
        case.equal(
            "casts alive after a nested region and one more use (control)", len(alive(trace.casts_of(weight))), 1
        )
        if leave == "by an exception":
            raise Interruption
        if leave == "by clearing":
            torch.clear_autocast_cache()
            case.equal("casts alive after clearing", len(alive(trace.casts_of(weight))), 0)
    case.equal("casts alive after the region", len(alive(trace.casts_of(weight))), 0)


# Gradients


def small_integers(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Return float64 integers from -3 to 3: sums of 27 products of two stay exact in bf16, which holds all to 256."""
    return torch.randint(-3, 4, shape, generator=rng).double()


@contract("AMP-CACHE-020")
@pytest.mark.parametrize("regions", [1, 2])
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_gradient_over_several_uses(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, cache: bool, regions: int
) -> None:
    exact, uses = small_integers(rng, 5, 4), 3
    weight = exact.float().to(target.device).requires_grad_()
    promised = torch.zeros(5, 4, dtype=torch.float64)
    for _ in range(regions):
        loss = torch.zeros((), device=target.device)
        with target.autocast(amp_dtype, cache_enabled=cache):
            for _ in range(uses):
                features, factors = small_integers(rng, 3, 4), small_integers(rng, 3, 5)
                output = linear(features.float().to(target.device), weight)
                case.identical("output", output.detach(), (features @ exact.T).to(amp_dtype))
                loss = loss + (output.float() * factors.float().to(target.device)).sum()
                promised += factors.T @ features
        loss.backward()
    case.identical("gradient of the weight", weight.grad, promised.float())


@contract("AMP-CACHE-020")
def test_two_losses_of_one_region(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = small_integers(rng, 5, 4).float().to(target.device).requires_grad_()
    batches = [small_integers(rng, 3, 4) for _ in range(2)]
    with target.autocast(amp_dtype):
        losses = [linear(batch.float().to(target.device), weight).float().sum() for batch in batches]
    promised = torch.zeros(5, 4, dtype=torch.float64)
    for number, (loss, batch) in enumerate(zip(losses, batches, strict=True), 1):
        loss.backward()
        promised += batch.sum(0)
        case.identical(f"gradient after {number} backward passes", weight.grad, promised.float())


def gradient_after(
    target: Target, amp_dtype: torch.dtype, rng: torch.Generator, first: Callable[[], contextlib.AbstractContextManager]
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Use a weight under `first` and then with gradients on, in one region; return its gradient and the exact one.

    The gradient is None where it does not reach the weight.
    """
    weight = small_integers(rng, 5, 4).float().to(target.device).requires_grad_()
    batch = small_integers(rng, 3, 4)
    features = batch.float().to(target.device)
    with target.autocast(amp_dtype):
        with first():
            linear(features, weight)
        output = linear(features, weight)
    if output.requires_grad:
        output.float().sum().backward()
    return weight.grad, batch.sum(0).expand(5, 4).float()


@contract("AMP-CACHE-021")
@pytest.mark.parametrize("use", ["no_grad", "set_grad_enabled"])
def test_no_grad_first(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, use: str) -> None:
    first = torch.no_grad if use == "no_grad" else lambda: torch.set_grad_enabled(False)
    gradient, promised = gradient_after(target, amp_dtype, rng, torch.enable_grad)
    case.identical("gradient after a use with gradients on (control)", gradient, promised)
    gradient, promised = gradient_after(target, amp_dtype, rng, first)
    case.true("the gradient reaches the weight", gradient is not None)
    case.identical("gradient after a use under no_grad", gradient, promised)


@contract("AMP-CACHE-022")
def test_inference_mode_first(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    gradient, promised = gradient_after(target, amp_dtype, rng, torch.inference_mode)
    case.true("the gradient reaches the weight", gradient is not None)
    case.identical("gradient after a use in inference mode", gradient, promised)


@contract("AMP-CACHE-023")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    mode: Callable[[], contextlib.AbstractContextManager],
) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    lowered = weight.detach().to(amp_dtype)

    def used() -> torch.Tensor:
        with mode():
            return linear(features.to(amp_dtype), lowered)

    case.require_call(target, f"use a tensor of before under {mode.__name__}", used)
    with target.autocast(amp_dtype):
        linear(features, weight)
        with mode():
            inner = linear(features, weight)
            case.equal("the result in the mode requires a gradient", inner.requires_grad, False)
            case.identical("the result in the mode", inner, manual_linear(features, weight, amp_dtype))
        outer = linear(features, weight)
        case.equal("the result after the mode requires a gradient", outer.requires_grad, True)


# Regions of two dtypes


def product(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | str:
    """Return the output, or the error of a product that is refused, as that of two dtypes is."""
    try:
        return linear(features, weight).detach()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def is_product(
    case: Case,
    what: str,
    output: torch.Tensor | str,
    features: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Check that an output is that of manual casts."""
    if isinstance(output, str):
        case.equal(what, output, f"a tensor of {dtype}")
    else:
        case.identical(what, output, manual_linear(features, weight, dtype))


@contract("AMP-CACHE-030")
def test_nested_regions_of_two_dtypes(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    other = OTHER[amp_dtype]
    case.require(target, other)
    weight, features = weight_of(target, rng), features_of(target, rng)

    def nested(cache: bool) -> list[torch.Tensor | str]:
        with target.autocast(amp_dtype, cache_enabled=cache):
            outer = product(features, weight)
            with target.autocast(other):
                inner = product(features, weight)
            return [outer, inner, product(features, weight)]

    promised = [("outer", amp_dtype), ("inner", other), ("outer again", amp_dtype)]
    for cache in (False, True):
        for (place, dtype), output in zip(promised, nested(cache), strict=True):
            is_product(case, f"{place} region's output with cache_enabled={cache}", output, features, weight, dtype)


def beside(
    target: Target, here: torch.dtype, there: torch.dtype, rng: torch.Generator
) -> tuple[dict[str, torch.Tensor | str], torch.Tensor, torch.Tensor]:
    """Use one weight in a region of `here`, and at the same time in another thread's region of `there`.

    Return the outputs here before, there, and here after, by what they are, then the input and the weight.
    """
    weight, features = weight_of(target, rng), features_of(target, rng)

    def other() -> torch.Tensor | str:
        with target.autocast(there):
            return product(features, weight)

    with target.autocast(here):
        before = product(features, weight)
        with ThreadPoolExecutor(max_workers=1) as pool:
            aside = pool.submit(other).result(PATIENCE)
        after = product(features, weight)
    outputs = {
        "output before the other thread's region": before,
        "output in the other thread's region": aside,
        "output after it, in the region that is still open": after,
    }
    return outputs, features, weight


@contract("AMP-CACHE-031")
def test_region_in_another_thread(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    outputs, features, weight = beside(target, amp_dtype, amp_dtype, rng)
    for what, output in outputs.items():
        is_product(case, what, output, features, weight, amp_dtype)


@contract("AMP-CACHE-032")
def test_two_dtypes_in_two_threads(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    other = OTHER[amp_dtype]
    case.require(target, other)
    outputs, features, weight = beside(target, amp_dtype, other, rng)
    for (what, output), dtype in zip(outputs.items(), (amp_dtype, other, amp_dtype), strict=True):
        is_product(case, what, output, features, weight, dtype)


# Updates


def stepped(weight: torch.Tensor) -> None:
    weight.grad = -torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()


UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "in-place": lambda weight: weight.add_(1.0),
    "copy": lambda weight: weight.copy_(weight + 1.0),
    "data": lambda weight: weight.data.add_(1.0),
    "assignment": lambda weight: setattr(weight, "data", weight.data + 1.0),
    "optimizer": stepped,
}


@contract("AMP-CACHE-040")
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("way", list(UPDATES))
def test_update_inside_a_region(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, way: str, cache: bool
) -> None:
    weight, features = weight_of(target, rng), features_of(target, rng)
    old, new = (manual_linear(features, weight + more, amp_dtype) for more in (0.0, 1.0))
    with target.autocast(amp_dtype, cache_enabled=cache):
        case.identical("control: output before the update", linear(features, weight), old)
        with torch.no_grad():
            UPDATES[way](weight)
        case.identical("output after the update", linear(features, weight), new)
