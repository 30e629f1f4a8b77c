"""The memory chapter on simulated cards: clean ones pass whole, and what wastes memory fails by the right contract."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.measure.allocator import Allocator
from tests import faults
from tests.faults.breaking import dropped, kernel, replaced
from tests.simulation.card import GIB, H100, T4, Card, Simulation
from tests.simulation.checks import Outcome, cases, machine, run
from tests.simulation.tensors import CUDA

MODULES = tuple(f"memory.{name}" for name in ("test_memory", "test_models", "test_steps", "test_scaler", "test_peaks"))
# Checks of other chapters that count bytes.
BYTES = {
    "cache.test_programs": ("test_leaving_the_region_frees_the_copies", "test_evaluation_leaves_nothing_alive"),
    "optimizer.test_master_weights": ("test_masters_keep_their_bytes",),
}
ROOM = ("AMP-MEMORY-013", "AMP-MEMORY-035", "AMP-MEMORY-037")
"""Contracts that need more memory than a small card has."""

# Faults of torch's Python code, which break it for every device.
SHARED = (
    *("a_tensor_is_leaked_each_step", "losses_keep_their_graphs", "cache_is_off"),
    *("scaler_holds_its_optimizers", "optimizer_state_holds_16_bit_weights", "parameters_become_16_bit"),
    *("checkpoint_stores_everything", "no_grad_records_a_graph", "backward_keeps_the_graph", "cache_switch_is_ignored"),
    *("copies_outlive_the_region", "copies_outlive_an_exception"),
    *("disabled_region_is_enabled", "clipping_keeps_its_norms", "accumulated_gradients_are_kept"),
    *("unscaling_copies_gradients", "failed_losses_are_kept", "backward_keeps_its_seed"),
    *("attention_widens_16_bit", "gelu_widens_16_bit", "gradients_are_copied_while_the_optimizer_works"),
)

Fault = Callable[[Simulation], contextlib.AbstractContextManager[Any]]


def outcomes(
    card: Card, contracts: tuple[str, ...] = (), fault: Fault | None = None, modules: tuple[str, ...] = MODULES
) -> list[Outcome]:
    """Run the chapter, or the cases of some contracts, on a card, broken or not."""
    seen = []
    for module in modules:
        for check, given in cases(module, dtypes=("fp16",)):
            mark = next(mark for mark in check.pytestmark if mark.name == "contract")
            if contracts and mark.args[0] not in contracts:
                continue
            if check.__name__ not in BYTES.get(module, (check.__name__,)):
                continue
            with machine(card) as simulation, fault(simulation) if fault else contextlib.nullcontext():
                seen.append(run(check, given, simulation))
    return seen


@pytest.mark.parametrize(("card", "modules"), [(H100, (*MODULES, *BYTES)), (T4, MODULES[-1:])], ids=["H100", "T4"])
def test_clean_cards_pass(card: Card, modules: tuple[str, ...]) -> None:
    for outcome in outcomes(card, modules=modules):
        assert outcome.verdict == "PASS", outcome


def test_a_card_without_room_says_how_much_it_needs() -> None:
    small = replace(T4, memory_bytes=GIB // 16)
    verdicts = {(seen.verdict, seen.contract) for seen in outcomes(small, ROOM)}
    assert "FAIL" not in {verdict for verdict, _ in verdicts}


@pytest.mark.parametrize("name", SHARED)
def test_faults_of_every_device_fail_on_a_gpu(name: str) -> None:
    fault = faults.load()[name]
    seen = outcomes(H100, fault.contracts, lambda simulation: fault.applied(), (*MODULES, *BYTES))
    assert {outcome.contract for outcome in seen if outcome.verdict == "FAIL"}, [str(outcome) for outcome in seen]


def test_free_bytes_are_what_the_card_has_left() -> None:
    with machine(T4) as simulation:
        allocator = Allocator(torch.cuda, CUDA)
        large = torch.empty(GIB, dtype=torch.uint8, device=CUDA)
        small = torch.empty(GIB // 4, dtype=torch.uint8, device=CUDA)
        del large
        assert simulation.memory.reserved >= small.nbytes + GIB
        assert allocator.free() == T4.memory_bytes - small.nbytes


@contextlib.contextmanager
def _leaking(simulation: Simulation) -> Iterator[None]:
    """The driver keeps a block of each step, which no tensor knows of."""
    right = torch.amp.GradScaler.update
    kept = []

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        kept.append(torch.empty(1024, dtype=torch.uint8, device="meta"))
        simulation.memory.take(kept[-1].untyped_storage())

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@contextlib.contextmanager
def _stuck(simulation: Simulation) -> Iterator[None]:
    """Resetting the peak does nothing."""
    simulation.peaks_are_stuck = True
    torch.empty(3 * GIB, dtype=torch.uint8, device=CUDA)
    yield


@contextlib.contextmanager
def _wide(simulation: Simulation) -> Iterator[None]:
    """The allocator hands out twice what is asked for."""
    right = simulation.memory.take

    def take(storage: torch.UntypedStorage) -> None:
        right(storage)
        if storage.nbytes() >= 1 << 20:
            shadow = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            shadows.append(shadow)
            right(shadow)

    shadows: list[Any] = []
    with replaced(simulation.memory, "take", take):
        yield


@contextlib.contextmanager
def _copied_twice(simulation: Simulation) -> Iterator[None]:
    """Each use of a weight leaves a second 16-bit copy of it, until the region is left."""
    second: list[torch.Tensor] = []
    clear = torch.clear_autocast_cache

    def clearing() -> None:
        second.clear()
        clear()

    def copying(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        second.append(weight.detach().to(dtype))
        return torch.nn.functional.linear(*(None if t is None else t.to(dtype) for t in (x, weight, bias)))

    with kernel("linear", copying, "AutocastCUDA"), replaced(torch, "clear_autocast_cache", clearing):
        yield
    second.clear()


@contextlib.contextmanager
def _state_in_16_bit_too(simulation: Simulation) -> Iterator[None]:
    """step leaves a 16-bit copy of each weight with its optimizer."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = right(self, optimizer, *args, **options)
        for group in optimizer.param_groups:
            optimizer.low = [parameter.detach().half() for parameter in group["params"]]
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


# What is broken, and the contracts of which one has to fail.
CUDA_FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "activations of linear in fp32": (lambda _: dropped("linear", "AutocastCUDA"), ("AMP-MEMORY-001",)),
    "activations of linear in fp32, halves": (lambda _: dropped("linear", "AutocastCUDA"), ("AMP-MEMORY-003",)),
    "activations of conv2d in fp32": (lambda _: dropped("conv2d", "AutocastCUDA"), ("AMP-MEMORY-001",)),
    "softmax in 16 bit": (lambda _: dropped("softmax.int", "AutocastCUDA"), ("AMP-MEMORY-001",)),
    "mse_loss in 16 bit": (lambda _: dropped("mse_loss", "AutocastCUDA"), ("AMP-MEMORY-001",)),
    "nll_loss in 16 bit": (lambda _: dropped("nll_loss", "AutocastCUDA"), ("AMP-MEMORY-015",)),
    "a block of the driver leaks each step": (_leaking, ("AMP-MEMORY-030",)),
    "peaks are not reset": (_stuck, ("AMP-MEMORY-019",)),
    "peaks are not reset, closed form": (_stuck, ("AMP-MEMORY-013",)),
    "activations in fp32, peak": (lambda _: dropped("linear", "AutocastCUDA"), ("AMP-MEMORY-013",)),
    "weights copied twice, peak": (_copied_twice, ("AMP-MEMORY-013",)),
    "weights copied twice, points": (_copied_twice, ("AMP-MEMORY-016",)),
    "optimizer state in 16 bit too": (_state_in_16_bit_too, ("AMP-MEMORY-013",)),
    "blocks of twice the size": (_wide, ("AMP-MEMORY-019",)),
}


@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_faults_of_a_gpu_fail(name: str) -> None:
    fault, contracts = CUDA_FAULTS[name]
    seen = outcomes(H100, contracts, fault)
    assert {outcome.contract for outcome in seen if outcome.verdict == "FAIL"}, [str(outcome) for outcome in seen]


@contextlib.contextmanager
def _cuda_malloc_async(simulation: Simulation) -> Iterator[None]:
    """The driver's own allocator, whose frees are counted late: here never."""
    right = simulation.memory.statistics
    freed_late = {"get_allocator_backend": lambda: "cudaMallocAsync", "memory_allocated": lambda device=None: 1 << 30}
    with contextlib.ExitStack() as stack:
        for name, value in freed_late.items():
            stack.enter_context(replaced(torch.cuda, name, value))
        zeros = ("requested_bytes.all.current", "requested_bytes.all.peak")
        stats = replaced(torch.cuda, "memory_stats", lambda device=None: {**right(), **dict.fromkeys(zeros, 0)})
        stack.enter_context(stats)
        yield


@contextlib.contextmanager
def _uncached(simulation: Simulation) -> Iterator[None]:
    """PYTORCH_NO_CUDA_MEMORY_CACHING=1: every counter stays at zero."""
    zeros = dict.fromkeys(simulation.memory.statistics(), 0)
    with contextlib.ExitStack() as stack:
        for name in ("memory_allocated", "max_memory_allocated"):
            stack.enter_context(replaced(torch.cuda, name, lambda device=None: 0))
        stack.enter_context(replaced(torch.cuda, "memory_stats", lambda device=None: zeros))
        yield


@pytest.mark.parametrize("allocator", [_cuda_malloc_async, _uncached])
def test_allocators_that_do_not_count_tensors_are_unsupported(allocator: Fault) -> None:
    seen = outcomes(H100, (), allocator, MODULES[-1:])

    assert {outcome.verdict for outcome in seen} == {"UNSUPPORTED"}, [str(outcome) for outcome in seen]
