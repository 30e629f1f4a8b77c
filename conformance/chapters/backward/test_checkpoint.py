"""Check activation checkpointing under AMP: state, contexts, nested regions, random numbers and options."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...measure.generators import seed_torch
from ...measure.precision import repeatable_convolutions
from ...oracles.trace.ops import OpTrace
from .support import ambient, around_backward, cotangent, gradients, plain, same_gradients

KINDS = (False, True)


@dataclass(frozen=True)
class State:
    """The autocast state around a call; a dtype of None means no region."""

    dtype: torch.dtype | None
    enabled: bool = True
    cached: bool = True

    def open(self, target: Target) -> contextlib.AbstractContextManager[None]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return target.autocast(self.dtype, enabled=self.enabled, cache_enabled=self.cached)


def states(dtypes: tuple[torch.dtype, ...]) -> list[State]:
    flags = itertools.product(dtypes, (True, False), (True, False))
    return [State(None), *(State(*each) for each in flags)]


def seen_state(target: Target) -> tuple[bool, torch.dtype, bool]:
    kind = target.device_type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


@contract("AMP-BACKWARD-054")
def test_state_of_the_recomputation(case: Case, target: Target, rng: torch.Generator) -> None:
    weight = torch.randn(4, 4, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(2, 4, generator=rng).to(target.device).requires_grad_()
    recorded: list[tuple[bool, torch.dtype, bool]] = []

    def segment(x: torch.Tensor) -> torch.Tensor:
        recorded.append(seen_state(target))
        return functional.linear(x, weight).sin()

    wrong = []
    combinations = list(itertools.product(states(case.supported(target)), states(case.supported(target)), KINDS))
    for ahead, behind, reentrant in combinations:
        recorded.clear()
        with ahead.open(target):
            promised = seen_state(target)
            output = checkpointing.checkpoint(segment, x, use_reentrant=reentrant)
        with behind.open(target):
            around = seen_state(target)
            loss = output.float().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            after = seen_state(target)
        if recorded != [promised] * 3 or after != around:
            wrong.append(f"forward {ahead}, backward {behind}, reentrant {reentrant}: {recorded}, after it {after}")
    gradients({"x": x, "weight": weight})
    case.equal("recomputations in another state than forward", wrong[:3], [])
    case.note("combinations of a state for forward, one for backward, and the kind of checkpoint", len(combinations))


@contract("AMP-BACKWARD-054")
def test_default_device_of_the_recomputation(case: Case, target: Target, rng: torch.Generator) -> None:
    """Tensors that a segment makes without naming a device are where those of forward were; reentrant ones differ."""
    x = torch.randn(2, 4, generator=rng).to(target.device).requires_grad_()
    found: list[str] = []

    def segment(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.empty(0).device.type)
        return x.sin()

    checkpointing.checkpoint(segment, x, use_reentrant=False).sum().backward()  # which imports what it needs
    for device in dict.fromkeys(("meta", target.device_type, "cpu")):
        found.clear()
        with target.autocast(case.supported(target)[0]), torch.device(device):
            output = checkpointing.checkpoint(segment, x, use_reentrant=False)
        output.float().sum().backward()
        case.equal(f"devices of what is made, in forward and again, by default on {device}", found, [device] * 2)


@contract("AMP-BACKWARD-054")
def test_state_of_nested_recomputations(case: Case, target: Target, rng: torch.Generator) -> None:
    x = torch.randn(2, 4, generator=rng).to(target.device).requires_grad_()
    recorded: list[tuple[bool, torch.dtype, bool]] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        recorded.append(seen_state(target))
        return x.sin()

    wrong = []
    for ahead, outside, inside in itertools.product(states(case.supported(target)), KINDS, KINDS):
        recorded.clear()
        nested = functools.partial(checkpointing.checkpoint, inner, use_reentrant=inside)
        with ahead.open(target):
            promised = seen_state(target)
            output = checkpointing.checkpoint(nested, x, use_reentrant=outside)
        output.sum().backward()
        if len(recorded) < 2 or set(recorded) != {promised}:
            wrong.append(f"forward {ahead}, outer reentrant {outside}, inner reentrant {inside}: {recorded}")
    x.grad = None
    case.equal("inner recomputations in another state than forward", wrong[:3], [])


class Layers(torch.nn.Module):
    """Two layers with dropout and a disabled region between them that record the dtypes of intermediates."""

    def __init__(self, target: Target, rng: torch.Generator, island: torch.dtype | None, dropped: float = 0.4) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.target, self.island, self.dropped = target, island, dropped
        self.recorded: list[list[torch.dtype]] = []
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
        self.to(target.device)

    def forward(self, x: torch.Tensor, factor: float = 1.0, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        # A recomputation stops early; the dtypes up to there are recorded.
        self.recorded.append(recorded := [])
        hidden = functional.dropout(functional.relu(self.first(x)), self.dropped)
        recorded.append(hidden.dtype)
        enabled = self.island is not None
        with self.target.autocast(self.island or torch.bfloat16, enabled=enabled):
            given = hidden if enabled else hidden.float()
            middle = functional.linear(given, torch.eye(24, device=given.device))
        recorded.append(middle.dtype)
        result: torch.Tensor = self.second(middle) * factor
        recorded.append(result.dtype)
        return result if shift is None else result + shift


Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def stepped(layers: Layers | Several, x: torch.Tensor, dtype: torch.dtype, run: Run) -> dict[str, torch.Tensor]:
    """Return output and gradients of a step from a fixed random state."""
    seed_torch(11)
    with layers.target.autocast(dtype):
        output = run(layers, x)
        loss = functional.mse_loss(output, torch.zeros_like(output), reduction="sum")
    # A training loop may generate random numbers between forward and backward.
    torch.rand(3, device=x.device)
    loss.backward()
    return {"output": output.detach(), **gradients({"x": x, **dict(layers.named_parameters())})}


def through(**options: Any) -> Run:
    def run(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpointing.checkpoint(layers, x, **options)
        return result

    return run


def apart(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names under which dtype or bits differ."""
    return [
        name
        for name in sorted({*seen, *expected})
        if name not in seen
        or name not in expected
        or seen[name].dtype != expected[name].dtype
        or not torch.equal(seen[name], expected[name])
    ]


def inputs(target: Target, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(8, 16, generator=rng).to(target.device).requires_grad_()


@contract("AMP-BACKWARD-055")
def test_contexts_of_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    entered: list[tuple[str, tuple[bool, torch.dtype, bool]]] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        entered.append((name, seen_state(target)))
        try:
            yield
        finally:  # The recomputation ends with an exception as soon as it has what it needs.
            entered.append((f"left {name}", seen_state(target)))

    for dtype in case.supported(target):
        layers, x = Layers(target, rng, None), inputs(target, rng)
        expected = stepped(layers, x, dtype, plain)
        entered.clear()
        both = functools.partial(lambda: (noted("forward"), noted("recomputation")))
        seen = stepped(layers, x, dtype, through(use_reentrant=False, context_fn=both))
        case.equal(f"{dtype}: what differs", apart(seen, expected), [])
        case.equal(
            f"{dtype}: contexts entered and left, and the autocast state in them",
            entered,
            [
                (name, (True, dtype, True))
                for name in ("forward", "left forward", "recomputation", "left recomputation")
            ],
        )


@contract("AMP-BACKWARD-055")
def test_contexts_of_a_checkpoint_are_the_inner_ones(case: Case, target: Target) -> None:
    """Regions of their own: the function runs in them, whatever is open around the checkpoint."""
    seen: list[bool] = []

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.append(seen_state(target)[0])
        return torch.tanh(x * x)

    for dtype in case.supported(target):
        for enabled in (False, True):
            x = torch.ones(3, device=target.device, requires_grad=True)
            seen.clear()
            own = functools.partial(torch.autocast, target.device_type, dtype=dtype, enabled=enabled)
            with target.autocast(dtype, enabled=not enabled):
                made = checkpointing.checkpoint(
                    part,
                    x,
                    use_reentrant=False,
                    context_fn=lambda own=own: (own(), own()),
                )
            made.sum().backward()
            case.equal(f"{dtype}: region on in the function and in its recomputation", seen, [enabled] * 2)


@contract("AMP-BACKWARD-056")
def test_selective_checkpointing(case: Case, target: Target, rng: torch.Generator) -> None:
    policy = checkpointing.CheckpointPolicy
    # A device may have a kernel of linear; elsewhere it is one of these products.
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)

    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.MUST_SAVE if op in products else policy.PREFER_RECOMPUTE

    ways = {
        "products kept": functools.partial(checkpointing.create_selective_checkpoint_contexts, keep_products),
        "products kept, as a list": functools.partial(
            checkpointing.create_selective_checkpoint_contexts, list(products)
        ),
        "nothing kept": functools.partial(checkpointing.create_selective_checkpoint_contexts, []),
    }
    for dtype in case.supported(target):
        layers, x = Layers(target, rng, None), inputs(target, rng)
        expected = stepped(layers, x, dtype, plain)
        counts = {}
        for name, contexts in ways.items():
            run = through(use_reentrant=False, context_fn=contexts)
            with OpTrace() as trace:
                seen = stepped(layers, x, dtype, run)
            case.equal(f"{dtype}, {name}: what differs", apart(seen, expected), [])
            counts[name] = len(trace.matrix_products)
        # Three products forward, and two back for each but the one with a constant, which has one.
        kept = {name: count for name, count in counts.items() if name != "nothing kept"}
        case.equal(f"{dtype}: matrix products that ran", kept, dict.fromkeys(kept, 8))
        case.at_least(f"{dtype}: matrix products that ran where nothing is kept", counts["nothing kept"], 9)


class Several(torch.nn.Module):
    """Products among ops of float32 results, in forward and in what backward needs of them."""

    def __init__(self, target: Target, rng: torch.Generator) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16)
        self.target = target
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
        self.to(target.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first((x * 0.1).exp())
        hidden = functional.softmax(self.norm(hidden.float()).tanh(), -1)
        result: torch.Tensor = self.second(hidden).sin() + x.cos()
        return result


@contract("AMP-BACKWARD-056")
def test_every_op_is_saved_in_turn(case: Case, target: Target, rng: torch.Generator) -> None:
    policy = checkpointing.CheckpointPolicy
    draws = random.Random(case.seed)
    for dtype in case.supported(target):
        layers, x = Several(target, rng), inputs(target, rng)
        names: list[str] = []

        def note(ctx: Any, op: Any, *args: Any, names: list[str] = names, **kwargs: Any) -> Any:
            names.append(str(op))
            return policy.MUST_SAVE

        def contexts(decide: Callable[..., Any]) -> Run:
            made = functools.partial(checkpointing.create_selective_checkpoint_contexts, decide)
            return through(use_reentrant=False, context_fn=made)

        expected = stepped(layers, x, dtype, plain)
        case.equal(f"{dtype}, all kept: what differs", apart(stepped(layers, x, dtype, contexts(note)), expected), [])
        every = sorted(set(names))
        drawn = [set(draws.sample(every, len(every) // 2)) for _ in range(4)]
        for kept in [*({name} for name in every), *drawn]:

            def decide(ctx: Any, op: Any, *args: Any, kept: set[str] = kept, **kwargs: Any) -> Any:
                return policy.MUST_SAVE if str(op) in kept else policy.PREFER_RECOMPUTE

            seen = stepped(layers, x, dtype, contexts(decide))
            case.equal(f"{dtype}, {sorted(kept)} kept: what differs", apart(seen, expected), [])
        case.at_least(f"{dtype}: ops that were asked for", len(every), 8)


class Answers:
    """Policies of selective checkpoints whose answers differ between calls of one op; their methods take an op."""

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)
        self.calls = 0
        self.calls_of: collections.Counter[Any] = collections.Counter()

    def every_second_op(self, op: Any, recomputed: bool) -> bool:
        self.calls += 1
        return self.calls % 2 == 0

    def every_third_call_of_an_op(self, op: Any, recomputed: bool) -> bool:
        self.calls_of[op] += 1
        return self.calls_of[op] % 3 == 1

    def the_second_call_of_an_op(self, op: Any, recomputed: bool) -> bool:
        self.calls_of[op] += 1
        return self.calls_of[op] == 2

    def random_ops(self, op: Any, recomputed: bool) -> bool:
        return self.draws.random() < 0.5

    def forward_alone(self, op: Any, recomputed: bool) -> bool:
        return not recomputed

    def counted_for_each_pass(self, op: Any, recomputed: bool) -> bool:
        """The pattern of PyTorch's examples: forward and recomputation have counts of their own."""
        self.calls_of[op, recomputed] += 1
        return self.calls_of[op, recomputed] % 2 == 1


@contract("AMP-BACKWARD-056")
@pytest.mark.parametrize(
    "answer",
    [
        "every_second_op",
        "every_third_call_of_an_op",
        deep("standard", "the_second_call_of_an_op"),
        deep("standard", "random_ops"),
        "forward_alone",
        deep("standard", "counted_for_each_pass"),
    ],
)
def test_policies_with_changing_answers(case: Case, answer: str, target: Target, rng: torch.Generator) -> None:
    policy = checkpointing.CheckpointPolicy
    for dtype in case.supported(target):
        layers, x = Several(target, rng), inputs(target, rng)
        layers.norm = torch.nn.LayerNorm(8, elementwise_affine=False)

        def repeated(part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return plain(part, plain(part, x) * 0.5)

        expected = stepped(layers, x, dtype, repeated)
        asked: list[tuple[bool, bool]] = []
        decide = getattr(Answers(case.seed), answer)

        def note(ctx: Any, op: Any, *args: Any, asked: Any = asked, decide: Any = decide, **kwargs: Any) -> Any:
            asked.append((ctx.is_recompute, decide(op, ctx.is_recompute)))
            return policy.MUST_SAVE if asked[-1][1] else policy.PREFER_RECOMPUTE

        made = functools.partial(checkpointing.create_selective_checkpoint_contexts, note)

        def run(part: torch.nn.Module, x: torch.Tensor, made: Any = made, repeated: Run = repeated) -> torch.Tensor:
            result: torch.Tensor = checkpoint(
                functools.partial(repeated, part), x, use_reentrant=False, context_fn=made
            )
            return result

        try:
            differs = apart(stepped(layers, x, dtype, run), expected)
        except RuntimeError as error:
            differs = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
            gradients({"x": x, **dict(layers.named_parameters())})
        case.equal(f"{dtype}: output and gradients that differ", differs, [])
        ahead = [saved for recomputed, saved in asked if not recomputed]
        case.at_least(f"{dtype}: ops that were asked for in forward", len(ahead), 16)
        kinds = [True] if answer == "forward_alone" else [False, True]
        case.equal(f"{dtype}: answers in forward", sorted(set(ahead)), kinds)


@contract("AMP-BACKWARD-057")
def test_regions_inside_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    compared = 0
    for dtype in case.supported(target):
        for island in (None, dtype):
            layers, x = Layers(target, rng, island), inputs(target, rng)
            expected = stepped(layers, x, dtype, plain)
            for reentrant in KINDS:
                layers.recorded.clear()
                seen = stepped(layers, x, dtype, through(use_reentrant=reentrant))
                case.equal(f"{dtype}, reentrant {reentrant}: what differs", apart(seen, expected), [])
                case.equal(f"{dtype}, reentrant {reentrant}: forwards", len(layers.recorded), 2)
                promised = [dtype, island or torch.float32, dtype]
                case.equal(f"{dtype}, reentrant {reentrant}: types in forward", layers.recorded[0], promised)
                again = layers.recorded[1]
                case.equal(f"{dtype}, reentrant {reentrant}: types in the recomputation", again, promised[: len(again)])
                case.at_least(f"{dtype}, reentrant {reentrant}: intermediates recomputed", len(again), 2)
                compared += len(seen)
    case.note("outputs and gradients compared", compared)


@contract("AMP-BACKWARD-058")
def test_checkpoint_sequential(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        parts = [Layers(target, rng, None) for _ in range(4)]
        model, x = torch.nn.Sequential(*parts), inputs(target, rng)

        def step(run: Callable[[], torch.Tensor], model: torch.nn.Module = model, x: torch.Tensor = x) -> Any:
            seed_torch(11)
            with target.autocast(dtype):  # noqa: B023
                output = run()
            output.float().square().sum().backward()
            return {"output": output.detach(), **gradients({"x": x, **dict(model.named_parameters())})}

        expected = step(functools.partial(model, x))
        for segments, reentrant in itertools.product((1, 2, 3, 4), KINDS):
            for part in parts:
                part.recorded.clear()
            run = functools.partial(checkpointing.checkpoint_sequential, model, segments, x, use_reentrant=reentrant)
            case.equal(
                f"{dtype}, {segments} segments, reentrant {reentrant}: what differs", apart(step(run), expected), []
            )
            # The last segment is run as it is.
            counts = [len(part.recorded) for part in parts]
            size = 4 // segments
            promised = [1 if number >= size * (segments - 1) else 2 for number in range(4)]
            case.equal(f"{dtype}, {segments} segments, reentrant {reentrant}: forwards of each part", counts, promised)


@contract("AMP-BACKWARD-059")
def test_random_numbers_around_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    def step(layers: Layers, x: torch.Tensor, dtype: torch.dtype, run: Run) -> dict[str, torch.Tensor]:
        seen = stepped(layers, x, dtype, run)
        # Random numbers after backward do not depend on the recomputation.
        return {**seen, "later": torch.rand(5), "later, on the device": torch.rand(5, device=x.device)}

    for dtype in case.supported(target):
        layers, x = Layers(target, rng, None), inputs(target, rng)
        expected = step(layers, x, dtype, plain)
        for reentrant in KINDS:
            seen = step(layers, x, dtype, through(use_reentrant=reentrant))
            case.equal(f"{dtype}, reentrant {reentrant}: what differs", apart(seen, expected), [])
            other = step(layers, x, dtype, through(use_reentrant=reentrant, preserve_rng_state=False))
            case.true(
                f"control: {dtype}, reentrant {reentrant}: not kept, other elements are dropped",
                "second.weight" in apart(other, expected),
                apart(other, expected),
            )


@contract("AMP-BACKWARD-060")
def test_weight_shared_with_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype, reentrant in itertools.product(case.supported(target), KINDS):
        # Integers, so that the sum of both gradients does not depend on their order.
        weight = torch.randint(-1, 2, (6, 6), generator=rng).float().to(target.device).requires_grad_()
        x = torch.randint(-1, 2, (3, 6), generator=rng).float().to(target.device).requires_grad_()
        found = []
        for kind in (None, reentrant):
            with target.autocast(dtype):
                segment = functools.partial(functional.linear, weight=weight)
                hidden = segment(x) if kind is None else checkpointing.checkpoint(segment, x, use_reentrant=kind)
                output = functional.linear(hidden, weight)
            output.float().sum().backward()
            found.append(gradients({"x": x, "weight": weight}))
        where = f"{dtype}, {'reentrant' if reentrant else 'non-reentrant'}"
        case.equal(f"{where}: gradients that differ from those without", apart(found[1], found[0]), [])


@contract("AMP-BACKWARD-061")
def test_recomputation_in_another_type_is_noticed(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        weight, x = torch.randn(16, 16, generator=rng).to(target.device).requires_grad_(), inputs(target, rng)
        calls: list[bool] = []

        def segment(x: torch.Tensor, calls: list[bool] = calls, weight: torch.Tensor = weight) -> torch.Tensor:
            calls.append(True)
            with target.autocast(dtype, enabled=len(calls) == 1):  # noqa: B023
                return functional.linear(functional.linear(x, weight), weight)

        output = checkpointing.checkpoint(segment, x, use_reentrant=False)
        case.raises(
            f"{dtype}: the second forward runs in float32",
            checkpointing.CheckpointError,
            output.float().sum().backward,
            names=("float32", str(dtype).removeprefix("torch.")),
        )
        case.equal(f"{dtype}: forwards", len(calls), 2)


@contract("AMP-BACKWARD-062")
def test_options_of_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    shift = torch.randn(8, 16, generator=rng).to(target.device)

    def nested(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        inner = functools.partial(checkpointing.checkpoint, layers, use_reentrant=False)
        result: torch.Tensor = checkpointing.checkpoint(inner, x, use_reentrant=False)
        return result

    def with_arguments(reentrant: bool) -> Run:
        def run(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            keywords = {} if reentrant else {"shift": shift}
            result: torch.Tensor = checkpointing.checkpoint(layers, x, 2.0, use_reentrant=reentrant, **keywords)
            return result if not reentrant else result + shift

        return run

    def early(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with checkpointing.set_checkpoint_early_stop(False):
            result: torch.Tensor = checkpointing.checkpoint(layers, x, use_reentrant=False)
            return result

    def argued(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layers(x, 2.0, shift=shift)
        return result

    ways: list[tuple[str, Run, Run]] = [
        ("one in another", nested, plain),
        ("keywords and numbers", with_arguments(False), argued),
        ("numbers, reentrant", with_arguments(True), argued),
        ("no early stop", early, plain),
        ("no determinism check", through(use_reentrant=False, determinism_check="none"), plain),
    ]
    for dtype, (name, run, control) in itertools.product(case.supported(target), ways):
        layers, x = Layers(target, rng, None), inputs(target, rng)
        expected = stepped(layers, x, dtype, control)
        case.equal(f"{dtype}, {name}: what differs", apart(stepped(layers, x, dtype, run), expected), [])


def _combinations() -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yield every combination of options that torch has: its text, whether an early stop is allowed, the options."""
    choices: dict[str, tuple[Any, ...]] = {
        "preserve_rng_state": (True, False),
        "determinism_check": ("default", "none"),
        "early_stop": (True, False),
        "context_fn": (None, lambda: (contextlib.nullcontext(), contextlib.nullcontext())),
    }
    if "early_stop" not in inspect.signature(checkpoint).parameters:
        del choices["early_stop"]
    for reentrant, around, *values in itertools.product(KINDS, (True, False), *choices.values()):
        options = dict(zip(choices, values, strict=True), use_reentrant=reentrant)
        own = options.pop("context_fn")
        if own is not None and reentrant:
            continue  # it is refused there
        text = ", ".join(f"{name}={value}" for name, value in options.items())
        text += f"{', contexts' if own else ''}{'' if around else ', no early stop around'}"
        yield text, around, options if own is None else options | {"context_fn": own}


@contract("AMP-BACKWARD-062")
def test_combinations_of_options(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong: dict[str, Any] = {}
    for dtype in case.supported(target):
        for island in (None, dtype):
            # Without random numbers, so that preserve_rng_state makes no difference.
            layers, x = Layers(target, rng, island, dropped=0.0), inputs(target, rng)
            expected = stepped(layers, x, dtype, plain)
            promised = layers.recorded[0]
            for text, around, options in _combinations():
                layers.recorded.clear()
                with contextlib.nullcontext() if around else checkpointing.set_checkpoint_early_stop(False):
                    try:
                        found: Any = apart(stepped(layers, x, dtype, through(**options)), expected)
                    except RuntimeError as error:
                        found = f"{type(error).__name__}: {str(error)[:80]}"
                        gradients({"x": x, **dict(layers.named_parameters())})
                types = [recorded == promised[: max(2, len(recorded))] for recorded in layers.recorded]
                if found or types != [True, True]:
                    wrong[f"{dtype}, a region of {island} inside, {text}"] = found, list(layers.recorded)
    case.equal("options with other gradients, or types in forward and recomputation", dict(list(wrong.items())[:3]), {})


@contract("AMP-BACKWARD-063")
def test_grad_through_a_checkpoint(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        layers, x = Layers(target, rng, None), inputs(target, rng)
        asked = [x, *layers.parameters()]
        outputs = []
        for run in (plain, through(use_reentrant=False), through(use_reentrant=True)):
            seed_torch(11)
            with target.autocast(dtype), repeatable_convolutions():
                outputs.append(run(layers, x))
        steps = cotangent(outputs[0], rng)
        expected, seen = (dict(enumerate(torch.autograd.grad(output, asked, steps))) for output in outputs[:2])
        case.equal(
            f"{dtype}: gradients that differ",
            apart({str(n): part for n, part in seen.items()}, {str(n): part for n, part in expected.items()}),
            [],
        )
        refused = functools.partial(torch.autograd.grad, outputs[2], asked, steps)
        case.raises(f"{dtype}: the reentrant kind refuses", RuntimeError, refused, names=("use_reentrant|grad",))
        layers.recorded.clear()
        with torch.no_grad(), target.autocast(dtype):
            seed_torch(11)
            output = through(use_reentrant=False)(layers, x)
        case.identical(f"{dtype}: without gradients", output, outputs[0].detach())
        case.equal(f"{dtype}: forwards without gradients", len(layers.recorded), 1)


@contract("AMP-BACKWARD-062")
@pytest.mark.parametrize("reentrant", KINDS, ids=["non-reentrant", "reentrant"])
def test_outputs_of_a_checkpoint(case: Case, target: Target, rng: torch.Generator, reentrant: bool) -> None:
    """A segment returns tensors of several types and others, all or some of which the loss uses."""
    weight = torch.randn(4, 4, generator=rng).to(target.device)
    x = torch.randn(3, 4, generator=rng).to(target.device)

    def segment(x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        low = functional.linear(x, w)
        return low, 2.0, x * 3, None, low.detach(), functional.linear(low, w), (x > 0), w.double().sum(0)

    places = (0, 2, 5, 7)  # of outputs that have a gradient
    for dtype in case.supported(target):
        for used in ((0,), (0, 2), (2, 5), (5, 7), places):
            found = []
            for kind in (None, reentrant):
                leaves = [one.clone().requires_grad_() for one in (x, weight)]
                with target.autocast(dtype):
                    made = segment(*leaves) if kind is None else checkpoint(segment, *leaves, use_reentrant=kind)
                sum((made[place].double() * (place + 1)).sum() for place in used).backward()
                tensors = {f"output {place}": one.detach() for place, one in enumerate(made) if torch.is_tensor(one)}
                found.append({**tensors, **gradients(dict(zip(("x", "weight"), leaves, strict=True)))})
                case.equal(f"{dtype}: outputs that are no tensors", (made[1], made[3]), (2.0, None))
            what = f"{dtype}: what differs where the loss uses outputs {', '.join(map(str, used))}"
            case.equal(what, apart(found[1], found[0]), [])


# What a segment makes last of a product, and returns.
ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in place": lambda h: h.mul_(2),
    "a view": lambda h: h.view(-1),
    "a view in place": lambda h: h.view(-1).mul_(2),
    "a row in place": lambda h: h[0].add_(1),
    "every second column in place": lambda h: h[:, ::2].mul_(2),
    "turned in place": lambda h: h.t().mul_(2),
}


@contract("AMP-BACKWARD-062")
@pytest.mark.parametrize("reentrant", KINDS, ids=["non-reentrant", "reentrant"])
def test_last_ops_of_a_checkpoint(case: Case, target: Target, rng: torch.Generator, reentrant: bool) -> None:
    """A segment ends with a view, a write in place, or both."""
    given = [torch.randn(4, 4, generator=rng).to(target.device) for _ in range(2)]
    for dtype in case.supported(target):
        for name, end in ENDS.items():
            found = []
            for kind in (None, reentrant):
                leaves = [one.clone().requires_grad_() for one in given]

                def segment(x: torch.Tensor, w: torch.Tensor, end: Callable[..., torch.Tensor] = end) -> torch.Tensor:
                    return end(functional.linear(x, w) * 2)

                with target.autocast(dtype):
                    made = segment(*leaves) if kind is None else checkpoint(segment, *leaves, use_reentrant=kind)
                ramp = torch.arange(1.0, made.numel() + 1, device=made.device).view(made.shape)
                (made.double() * ramp).sum().backward()
                found.append({"output": made.detach(), **gradients(dict(zip(("x", "weight"), leaves, strict=True)))})
            case.equal(f"{dtype}: what differs where it ends with {name}", apart(found[1], found[0]), [])


both_kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Segment(torch.nn.Module):
    """Two layers with dropout between them that record the autocast state of every forward."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.device_type = device_type
        self.recorded: list[tuple[bool, torch.dtype, bool, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(functional.relu(self.first(x)), 0.4)
        self.recorded.append(
            (
                torch.is_autocast_enabled(self.device_type),
                torch.get_autocast_dtype(self.device_type),
                torch.is_autocast_cache_enabled(),
                hidden.dtype,
            )
        )
        result: torch.Tensor = self.second(hidden)
        return result


def through_checkpoint(
    segment: Segment,
    x: torch.Tensor,
    target: Target,
    dtype: torch.dtype,
    around: contextlib.AbstractContextManager[None],
    times: int = 1,
    **checkpointing: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return output and gradients of a step from a fixed random state; without keywords, without a checkpoint.

    The segment runs on its own output as many `times`.
    """
    seed_torch(7)
    with target.autocast(dtype, cache_enabled=False):
        output = x
        for _ in range(times):
            output = checkpoint(segment, output, **checkpointing) if checkpointing else segment(output)
        loss = functional.mse_loss(output, torch.zeros_like(output))
    with around:
        loss.backward()
    return output.detach(), gradients({"x": x, **dict(segment.named_parameters())})


def segment_and_input(target: Target, rng: torch.Generator) -> tuple[Segment, torch.Tensor]:
    segment = Segment(target.device_type)
    with torch.no_grad():
        for parameter in segment.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return segment.to(target.device), torch.randn(8, 16, generator=rng).to(target.device).requires_grad_()


@both_kinds
@around_backward
@contract("AMP-BACKWARD-054")
def test_checkpoint(
    case: Case, reentrant: bool, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)
    surrounding = ambient(target, around, amp_dtype)
    output, seen = through_checkpoint(segment, x, target, amp_dtype, surrounding, use_reentrant=reentrant)
    case.equal("forwards of the segment", len(segment.recorded), 2)
    case.equal("state in forward", segment.recorded[0], (True, amp_dtype, False, amp_dtype))
    case.equal("state in the recomputation", segment.recorded[1], segment.recorded[0])
    # Backward ops that run inside another region follow that region, so the control runs inside it as well.
    surrounding = ambient(target, around, amp_dtype)
    plain, expected = through_checkpoint(segment, x, target, amp_dtype, surrounding)
    case.identical("output", output, plain)
    same_gradients(case, "against no checkpoint", seen, expected)


@both_kinds
@contract("AMP-BACKWARD-059")
def test_checkpoint_keeps_dropout(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)

    def step(**checkpointing: bool) -> dict[str, torch.Tensor]:
        return through_checkpoint(segment, x, target, amp_dtype, contextlib.nullcontext(), **checkpointing)[1]

    expected = step()
    kept = step(use_reentrant=reentrant, preserve_rng_state=True)
    lost = step(use_reentrant=reentrant, preserve_rng_state=False)
    same_gradients(case, "random state kept", kept, expected)
    # 192 dropout decisions at 0.4 agree twice with probability 0.52**192.
    wrong = int((lost["second.weight"] != expected["second.weight"]).sum())
    case.at_least("control: elements that differ where it is not kept", wrong, 1)


@both_kinds
@contract("AMP-BACKWARD-059")
def test_dropout_of_a_loop(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Checkpoint one function again and again, each time with a random state of its own."""
    segment, x = segment_and_input(target, rng)
    with torch.no_grad():
        for parameter in segment.parameters():
            parameter.mul_(0.25)  # so that three runs stay in the range of float16

    def step(**checkpointing: bool) -> dict[str, torch.Tensor]:
        return through_checkpoint(segment, x, target, amp_dtype, contextlib.nullcontext(), times=3, **checkpointing)[1]

    same_gradients(case, "three calls", step(use_reentrant=reentrant), step())


@both_kinds
@contract("AMP-BACKWARD-054")
def test_checkpoint_in_a_disabled_subregion(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)
    with target.autocast(amp_dtype):
        with target.autocast(amp_dtype, enabled=False):
            output = checkpoint(segment, x, use_reentrant=reentrant)
        loss = functional.mse_loss(output, torch.zeros_like(output))
        case.equal("dtype of the output", output.dtype, torch.float32)
        loss.backward()
    case.equal("enabled, in forward and recomputation", [recorded[0] for recorded in segment.recorded], [False, False])
    case.equal(
        "dtype, in forward and recomputation", [recorded[3] for recorded in segment.recorded], [torch.float32] * 2
    )


def _saves(*ops: Any, otherwise: str) -> Callable[..., Any]:
    """Return a policy of a selective checkpoint: the outputs of `ops` must be saved."""
    policy = checkpointing.CheckpointPolicy

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return policy.MUST_SAVE if op in ops else getattr(policy, otherwise)

    return decide


ATEN = torch.ops.aten
POLICIES = {
    "products": _saves(ATEN.mm.default, ATEN.addmm.default, otherwise="PREFER_RECOMPUTE"),
    "casts": _saves(ATEN._to_copy.default, otherwise="PREFER_RECOMPUTE"),
    "all": _saves(otherwise="MUST_SAVE"),
    "none": _saves(otherwise="MUST_RECOMPUTE"),
}


@contract("AMP-BACKWARD-072")
@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("weights", ["shared", "own"])
@pytest.mark.parametrize("policy", [*list(POLICIES)[:2], *(deep("standard", name) for name in list(POLICIES)[2:])])
def test_selective_checkpoints_that_share_a_weight(
    case: Case, target: Target, rng: torch.Generator, policy: str, weights: str, cached: bool
) -> None:
    run = through(
        use_reentrant=False,
        context_fn=functools.partial(checkpointing.create_selective_checkpoint_contexts, POLICIES[policy]),
    )
    for dtype in case.supported(target):
        values = [torch.randint(-1, 2, (4, 4), generator=rng).float() for _ in range(3)]
        found = []
        for call in (plain, run):
            first, second = (torch.nn.Linear(4, 4, bias=False, device=target.device) for _ in range(2))
            with torch.no_grad():
                first.weight.copy_(values[0])
                second.weight.copy_(values[1])
            layers = (first, first if weights == "shared" else second)
            x = values[2].to(target.device).requires_grad_()
            error = None
            try:
                with target.autocast(dtype, cache_enabled=cached):
                    output = call(layers[1], call(layers[0], x))
                output.float().sum().backward()
            except RuntimeError as raised:
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
            found.append((error, gradients({"x": x, "first": first.weight, "second": second.weight})))
        case.equal(f"{dtype}: errors without and with checkpoints", [error for error, _ in found], [None, None])
        # Small integers: every order of the sums is exact.
        case.equal(f"{dtype}: gradients that differ", apart(found[1][1], found[0][1]), [])
