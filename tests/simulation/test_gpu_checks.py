"""The checks that need a GPU, run on a stand-in for torch.cuda: each holds on stock torch and fails on a broken one."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.chapters.optimizer.optimizer_configs import configs
from conformance.harness import catalogue
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation
from conformance.harness.targets import Target, one_device_only, resolve
from tests.faults.breaking import edited, replaced
from tests.simulation.cuda_fake import FakeCuda, Graph, cuda  # noqa: F401  (a fixture)
from tests.simulation.emulated.faults import rates_in_tensors_are_halved

Scaler = torch.amp.GradScaler
CPU = resolve("cpu")
FUSED = {kind.optimizer: kind for kind in configs(implementations=("fused",)) if kind.first}


def module(chapter: str) -> Any:
    """The module of GPU checks of a chapter."""
    return importlib.import_module(f"conformance.chapters.{chapter}.test_gpu")


def run(check: Callable[..., None], **given: Any) -> Case:
    """Run a check as the plugin would, on the CPU with the stand-in."""
    mark = next(mark for mark in check.pytestmark if mark.name == "contract")  # type: ignore[attr-defined]
    contract = catalogue.load().contracts[mark.args[0]]
    case = Case(contract, level="quick", seed=0, substitutions={"device": "cuda", "amp_dtype": "torch.float16"})
    rng = torch.Generator().manual_seed(zlib.crc32(contract.id.encode()))
    offered = {"target": CPU, "amp_dtype": torch.bfloat16, "rng": rng, **given}
    wanted = set(inspect.signature(check).parameters) - {"case"}
    check(case, **{name: value for name, value in offered.items() if name in wanted})
    assert case.evidence
    assert all(each.holds for each in case.evidence)
    return case


# The flags of precision that this torch has, with the function of which the products are.
_MATMUL = torch.backends.cuda.matmul
FLAGS = {
    name: (owner, flag, function)
    for name, owner, flag, function in (
        ("tf32-products", _MATMUL, "allow_tf32", "matmul"),
        ("tf32-convolutions", torch.backends.cudnn, "allow_tf32", "conv2d"),
        ("fp16-accumulation", _MATMUL, "allow_fp16_accumulation", "mm"),
        ("fp16-reduction", _MATMUL, "allow_fp16_reduced_precision_reduction", "mm"),
        ("bf16-reduction", _MATMUL, "allow_bf16_reduced_precision_reduction", "mm"),
    )
    if hasattr(owner, flag)
}

# The checks, by chapter, name and parameters.
CHECKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nothing waits, one": ("scale", "test_nothing_waits", {"count": 1}),
    "nothing waits, two": ("scale", "test_nothing_waits", {"count": 2}),
    "an ordinary step waits": ("scale", "test_an_ordinary_step_waits", {}),
    "captured backward": ("scale", "test_captured_backward", {}),
    "captured iteration": ("scale", "test_captured_iteration", {}),
    "streams": ("scale", "test_streams", {}),
    "two devices": ("scale", "test_two_devices", {"self_scaling": False}),
    "two devices, self-scaling": ("scale", "test_two_devices", {"self_scaling": True}),
    "fused step, Adam": ("optimizer", "test_fused_step_waits_for_nothing", {"kind": FUSED["Adam"]}),
    "fused step, SGD": ("optimizer", "test_fused_step_waits_for_nothing", {"kind": FUSED["SGD"]}),
    "captured step, Adam": ("optimizer", "test_captured_step", {"kind": FUSED["Adam"]}),
    "captured step, SGD": ("optimizer", "test_captured_step", {"kind": FUSED["SGD"]}),
    "fused steps of two devices": ("optimizer", "test_two_devices", {"kind": FUSED["Adam"], "bad_indices": (0, 2)}),
    "rate in a tensor": (
        "optimizer",
        "test_rate_in_a_tensor_on_two_devices",
        {"kind": FUSED["SGD"], "place": "cpu"},
    ),
    "capturable skip": ("optimizer", "test_capturable_skip", {"kind": FUSED["AdamW"]}),
    "cast inside a graph": ("cache", "test_replays_cast_again", {"place": "inside"}),
    "cast inside a graph, cached": ("cache", "test_replays_cast_again", {"place": "inside-cached"}),
    "cast by a region around": ("cache", "test_replays_cast_again", {"place": "around"}),
    "graphed callable": ("cache", "test_graphed_callables", {}),
    "one pool": ("cache", "test_private_pools", {"shared": True}),
    "two pools": ("cache", "test_private_pools", {"shared": False}),
    "casts over streams": ("cache", "test_casts_over_streams", {}),
    "copies on one stream": ("cast", "test_copies_that_do_not_wait", {"ahead": False}),
    "copies on another stream": ("cast", "test_copies_that_do_not_wait", {"ahead": True}),
    **{f"flag {name}": ("numerics", "test_flags_of_precision", {"name": name}) for name in FLAGS},
    "TF32 is overridden": ("numerics", "test_tf32_is_overridden", {"override": "0"}),
    "captured dropout": ("region", "test_captured_dropout", {"private": False}),
    "captured dropout, own generator": ("region", "test_captured_dropout", {"private": True}),
}


def run_named(name: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Run one of the checks; two devices are the CPU twice."""
    chapter, check, given = CHECKS[name]
    found = module(chapter)
    if check.endswith("two_devices"):
        monkeypatch.setattr(found, "second", lambda target: torch.device("cpu"))
    return run(getattr(found, check), **given)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", CHECKS)
def test_check_holds_on_stock_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_named(name, monkeypatch)


@pytest.mark.parametrize(("count", "absent"), [(1, "one cuda device only; this needs two"), (2, None)])
def test_one_device_is_not_asked_for_two(count: int, absent: str | None) -> None:
    with replaced(torch.cuda, "device_count", lambda: count):
        assert one_device_only(Target("cuda:0", "cuda", 0, is_fake=False)) == absent


Breakage = Callable[[FakeCuda], contextlib.AbstractContextManager[Any]]


def _edited(function: Any, old: str, new: str) -> Breakage:
    return lambda fake: edited(function, old, new)


def _forgets(*operations: str) -> Breakage:
    return lambda fake: replaced(fake.graph, "left_out", operations)


@contextlib.contextmanager
def _streams_see_another_scale(fake: FakeCuda) -> Iterator[None]:
    """Work on a side stream begins before the work it waits for has ended: the scale there is an old one."""
    original = Scaler.scale
    depth = 0

    @contextlib.contextmanager
    def stream(made: Any) -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1

    def scale_(self: Any, outputs: Any) -> Any:
        return original(self, outputs) * (2.0 if depth else 1.0)

    with replaced(torch.cuda, "stream", stream), replaced(Scaler, "scale", scale_):
        yield


def _ignores_the_flag(name: str) -> Breakage:
    """A fused kernel steps whatever was found."""
    original = getattr(torch, name)

    def ignoring(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "found_inf": None})

    return lambda fake: replaced(torch, name, ignoring)


@contextlib.contextmanager
def _scale_is_read(fake: FakeCuda) -> Iterator[None]:
    original = Scaler.scale

    def scale_(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        self._scale.item()
        return scaled

    with replaced(Scaler, "scale", scale_):
        yield


@contextlib.contextmanager
def _scale_is_frozen(fake: FakeCuda) -> Iterator[None]:
    """The scale enters the graph as the number that it is at capture."""

    def scale_(self: Any, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._init_scale

    with replaced(Scaler, "scale", scale_):
        yield


@contextlib.contextmanager
def _cache_survives_regions(fake: FakeCuda) -> Iterator[None]:
    clear = torch.clear_autocast_cache
    with replaced(torch, "clear_autocast_cache", lambda: None):
        try:
            yield
        finally:
            clear()


@contextlib.contextmanager
def _cache_cannot_be_turned_off(fake: FakeCuda) -> Iterator[None]:
    right = torch.set_autocast_cache_enabled
    with replaced(torch, "set_autocast_cache_enabled", lambda enabled: right(True)):
        yield


@contextlib.contextmanager
def _a_pool_gives_memory_twice(fake: FakeCuda) -> Iterator[None]:
    """A graph in the pool of another overwrites what that one made."""
    right = fake.graph.replay

    def replay(self: Graph) -> None:
        for each in [] if self.shared is None else self.shared.results:
            each.detach().zero_()
        right(self)

    with replaced(fake.graph, "replay", replay):
        yield


@contextlib.contextmanager
def _memory_of_graphs_is_given_away(fake: FakeCuda) -> Iterator[None]:
    """What is allocated after a replay lies in the graph's memory."""
    right, full = fake.graph.replay, torch.full
    replayed: list[Graph] = []

    def replay(self: Graph) -> None:
        replayed.append(self)
        right(self)

    def allocated(size: Any, value: Any, **kwargs: Any) -> torch.Tensor:
        for each in replayed[-1].results if replayed else []:
            each.detach().fill_(value)
        return full(size, value, **kwargs)

    with replaced(fake.graph, "replay", replay), replaced(torch, "full", allocated):
        yield


@contextlib.contextmanager
def _replays_leave_the_generator(fake: FakeCuda) -> Iterator[None]:
    """A replay draws from the generators and does not advance them."""
    right = fake.graph.replay

    def replay(self: Graph) -> None:
        with torch.random.fork_rng(devices=[]):
            right(self)

    with replaced(fake.graph, "replay", replay):
        yield


@contextlib.contextmanager
def _streams_see_an_older_cast(fake: FakeCuda) -> Iterator[None]:
    """The second stream that is entered multiplies before the first has written the cast."""
    right, streams = torch.mm, 0

    @contextlib.contextmanager
    def stream(made: Any) -> Iterator[None]:
        nonlocal streams
        streams += 1

        def mm(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return right(left, other if streams % 2 else other * 0)

        with replaced(torch, "mm", mm):
            yield

    with replaced(torch.cuda, "stream", stream):
        yield


def _copies(late: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]) -> Breakage:
    """A copy that does not wait gives what `late` makes of its source and those of the copies before it."""

    @contextlib.contextmanager
    def broken(fake: FakeCuda) -> Iterator[None]:
        right = torch.Tensor.to
        before: list[torch.Tensor] = []

        def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not kwargs.get("non_blocking"):
                return right(self, *args, **kwargs)
            before.append(self)
            return late(self, before)

        with replaced(torch.Tensor, "to", to):
            yield

    return broken


def _flag_sticks(owner: Any, flag: str, op: str) -> Breakage:
    """An operation is as coarse as while the flag is on from the first time that it is."""

    @contextlib.contextmanager
    def broken(fake: FakeCuda) -> Iterator[None]:
        right, been = getattr(torch.nn.functional if op == "conv2d" else torch, op), False

        def coarse(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            nonlocal been
            been = been or getattr(owner, flag)
            result = right(left, other)
            return result.bfloat16().to(result.dtype) * (1 - 2.0**-6) if been else result

        with replaced(torch.nn.functional if op == "conv2d" else torch, op, coarse):
            yield

    return broken


@contextlib.contextmanager
def _a_child_has_tf32(fake: FakeCuda) -> Iterator[None]:
    """A process that is started multiplies in TF32 whatever its environment says."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(
            "import torch\nright = torch.matmul\n"
            "torch.matmul = lambda left, other: right(left.bfloat16().float(), other)\n"
        )
        with mock.patch.dict(os.environ, PYTHONPATH=folder):
            yield


_PROTOCOL = 'if getattr(optimizer, "_step_supports_amp_scaling", False):'
_VERDICT = 'if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):'
_FLAG = "optimizer.found_inf = found_inf  # type: ignore[attr-defined]"
FAULTS: dict[str, tuple[str, Breakage]] = {
    "scale reads": ("nothing waits, one", _scale_is_read),
    "unscale_ reads": (
        "nothing waits, one",
        _edited(Scaler.unscale_, "self._scale.double()", "torch.tensor(self._scale.item()).double()"),
    ),
    "update reads": (
        "nothing waits, two",
        _edited(
            Scaler.update,
            "found_inf_combined = found_infs[0]",
            "found_inf_combined = found_infs[0] * 1\n        float(found_infs[0])",
        ),
    ),
    "new scale is read": (
        "nothing waits, one",
        _edited(Scaler.update, "self._scale.copy_(new_scale)", "self._scale.fill_(new_scale.item())"),
    ),
    "unscale_ is lost": (
        "nothing waits, two",
        _edited(
            Scaler.unscale_, "optimizer, inv_scale, found_inf, False", "optimizer, inv_scale * 0 + 1, found_inf, False"
        ),
    ),
    "step does not ask": ("an ordinary step waits", _edited(Scaler._maybe_opt_step, _VERDICT, "if True:")),
    "scale is frozen": ("captured backward", _scale_is_frozen),
    "graph forgets the scaling": ("captured backward", _forgets("mul")),
    "graph forgets the update": ("captured iteration", _forgets("_amp_update_scale_")),
    "graph forgets the check": ("captured iteration", _forgets("_amp_foreach_non_finite_check_and_unscale_")),
    "graph forgets the step": ("captured iteration", _forgets("_fused_sgd_")),
    "capture reads the flag": ("captured iteration", _edited(Scaler.step, _PROTOCOL, "if False:")),
    "streams see another scale": ("streams", _streams_see_another_scale),
    "fused step reads the flag": (
        "fused step, SGD",
        _edited(Scaler.step, _FLAG, "optimizer.found_inf = found_inf * found_inf.item()"),
    ),
    "fused step goes the ordinary way": ("fused step, Adam", _edited(Scaler.step, _PROTOCOL, "if False:")),
    "fused step ignores the flag": ("fused step, Adam", _ignores_the_flag("_fused_adam_")),
    "captured step ignores the flag": ("captured step, Adam", _forgets("_amp_foreach_non_finite_check_and_unscale_")),
    "captured step counts on the host": ("captured step, Adam", _forgets("_foreach_add_")),
    "captured step is lost": ("captured step, SGD", _forgets("_fused_sgd_")),
    "capturable skip steps": ("capturable skip", _ignores_the_flag("_fused_adamw_")),
    "fused steps of two devices ignore the flag": ("fused steps of two devices", _ignores_the_flag("_fused_adam_")),
    "rates in tensors are halved": ("rate in a tensor", lambda fake: rates_in_tensors_are_halved()),
    "one device's flag": ("two devices", _edited(Scaler._maybe_opt_step, _VERDICT, "if True:")),
    "the flag is lost": (
        "two devices, self-scaling",
        _edited(Scaler.step, _FLAG, "optimizer.found_inf = found_inf * 0"),
    ),
    "graph keeps the casts of its capture": ("cast inside a graph", _forgets("_to_copy")),
    "cache survives the captured region": ("cast inside a graph, cached", _cache_survives_regions),
    "cache is on where it was turned off": ("cast by a region around", _cache_cannot_be_turned_off),
    "graphed callable keeps its casts": ("graphed callable", _forgets("_to_copy")),
    "a pool gives memory twice": ("one pool", _a_pool_gives_memory_twice),
    "memory of graphs is given away": ("two pools", _memory_of_graphs_is_given_away),
    "cast of an earlier region": ("casts over streams", _cache_survives_regions),
    "a stream does not wait for the cast": ("casts over streams", _streams_see_an_older_cast),
    "the cast reads before the copy": ("copies on one stream", _copies(lambda host, before: torch.zeros_like(host))),
    "memory of a copy is given to the next": ("copies on another stream", _copies(lambda host, before: before[0])),
    **{f"{name} stays": (f"flag {name}", _flag_sticks(*flag)) for name, flag in FLAGS.items()},
    "TF32 in spite of the override": ("TF32 is overridden", _a_child_has_tf32),
    "replays draw what was captured": ("captured dropout", _forgets("bernoulli_")),
    "replays leave the generator": ("captured dropout", _replays_leave_the_generator),
    "an own generator is frozen": ("captured dropout, own generator", _forgets("bernoulli_")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_fails_on_a_broken_torch(name: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    which, breakage = FAULTS[name]
    with breakage(cuda), pytest.raises((ContractViolation, RuntimeError)):
        try:
            run_named(which, monkeypatch)
        finally:
            cuda.set_sync_debug_mode("default")


def test_every_check_of_the_gpu_modules_fails_once() -> None:
    """A check that only a GPU can run must be seen failing here."""
    failing = {CHECKS[which][:2] for which, _ in FAULTS.values()}
    needing = {
        (chapter, name)
        for chapter in ("scale", "optimizer", "cache", "region", "cast", "numerics")
        for name, check in vars(module(chapter)).items()
        if name.startswith("test_")
        for mark in check.pytestmark
        if mark.name == "contract" and set(mark.kwargs["on"]) <= {"cuda", "accelerator"}
    }

    assert needing - failing == set()


class _Ampere(Target):
    """The CPU under the capability of a device with TF32."""

    @property
    def probe(self) -> Mapping[str, Any]:
        return {**CPU.probe, "capability": "9.0"}


@pytest.mark.usefixtures("cuda")
def test_tf32_that_is_allowed_is_seen_on_a_device_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check, target = module("numerics").test_flags_of_precision, _Ampere("cpu", "cpu", None, is_fake=False)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    right = torch.matmul

    def product(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return right(left.bfloat16().float() if torch.backends.cuda.matmul.allow_tf32 else left, other)

    with pytest.raises(ContractViolation, match="changes while it is on: 0"):
        run(check, target=target, name="tf32-products")
    monkeypatch.setattr(torch, "matmul", product)
    run(check, target=target, name="tf32-products")
