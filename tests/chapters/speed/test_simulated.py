"""The speed chapter on simulated cards: clean ones pass whole, and each fault fails by the contract about it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.chapters.speed import cache_flush, machine_conditions
from conformance.chapters.speed.experiment import Experiments
from conformance.harness import expectations
from conformance.harness.waivers import today
from tests import faults
from tests.faults.breaking import dropped, kernel, replaced
from tests.simulation.card import (
    GTX_1660,
    H100,
    T4,
    Card,
    Disturbance,
    Simulation,
    bimodal,
    drift,
    jitter,
    outliers,
    slower,
)
from tests.simulation.checks import Outcome, case_of, cases, machine, run

CONTESTS, BY_HAND = "speed.test_speedups", "speed.test_manual_casts"
MATMUL = (CONTESTS, "matmul_against_fp32-bf16")
MLP = (CONTESTS, "training_against_fp32-bf16")
LAYERS = (BY_HAND, "a_region_takes_the_time_of_its_casts-layers-bf16")


def judged(
    case: tuple[str, str], *disturbances: Disturbance, card: Card = H100, level: str = "quick", **more: Any
) -> Outcome:
    check, given = case_of(*case, level)
    with machine(card, *disturbances, seed=more.pop("seed", 0)) as simulation:
        return run(check, given, simulation, level=level, **more)


def reported(outcome: Outcome) -> dict[str, Any]:
    """The figures of a measurement, as the report has them."""
    return next(dict(evidence.measured) for evidence in outcome.evidence if evidence.unit == "speed-up")


Fault = Callable[[Simulation], contextlib.AbstractContextManager[Any]]


def torch_broken(name: str) -> Fault:
    """A fault of the suite's own collection, of those that break torch for every device."""
    return lambda simulation: faults.load()[name].applied()


def disturbed(disturbance: Disturbance) -> Fault:
    def apply(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
        simulation.timeline.disturbances.append(disturbance)
        return contextlib.nullcontext()

    return apply


def everything_in_fp32(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    return replaced(torch, "set_autocast_enabled", lambda *arguments: None)


@contextlib.contextmanager
def products_off_the_list(simulation: Simulation) -> Iterator[None]:
    with dropped("matmul", "AutocastCUDA"), dropped("mm", "AutocastCUDA"):
        yield


def waits_at_the_end_of_a_region(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    leave = torch.autocast.__exit__

    def leaving(self: Any, *error: Any) -> Any:
        torch.cuda.synchronize()
        return leave(self, *error)

    return replaced(torch.autocast, "__exit__", leaving)


def update_waits(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    right = torch.amp.GradScaler.update

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        torch.cuda.synchronize()

    return replaced(torch.amp.GradScaler, "update", update)


def reads_at_the_end_of_a_region(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    leave = torch.autocast.__exit__

    def leaving(self: Any, *error: Any) -> Any:
        torch.ones((), device="cuda:0").item()
        return leave(self, *error)

    return replaced(torch.autocast, "__exit__", leaving)


def region_computes_something_else(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    enter = torch.autocast.__enter__

    def entering(self: Any) -> Any:
        block = torch.empty(1 << 24, device="cuda:0")
        for _ in range(8):
            block.zero_()
        return enter(self)

    return replaced(torch.autocast, "__enter__", entering)


def event_marks_the_launch(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    return replaced(simulation.timeline, "mark", lambda: simulation.timeline.host)


def synchronize_returns_at_once(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    return replaced(torch.cuda, "synchronize", lambda device=None: None)


def elapsed_time_in(unit: float) -> Fault:
    def apply(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
        right = torch.cuda.Event.elapsed_time
        return replaced(torch.cuda.Event, "elapsed_time", lambda self, end: right(self, end) * unit)

    return apply


def clock_stands_still(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    return replaced(torch.cuda.Event, "elapsed_time", lambda self, end: 1.0)


def products_are_not_computed(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    """16-bit products are launched, and done in a thousandth of the time that the card needs."""
    simulation.timeline.disturbances.append(slower(1e-3, lambda kernel: kernel.low and kernel.flops > 0))
    simulation.timeline.disturbances.append(slower(0.1, lambda kernel: kernel.low))
    return contextlib.nullcontext()


def tf32_unnoticed(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
    simulation.tf32_is_stuck = True
    return contextlib.nullcontext()


def fp32_list_grows(op: str) -> Fault:
    """An op of no list casts to fp32, as layer_norm would."""

    def apply(simulation: Simulation) -> contextlib.AbstractContextManager[Any]:
        def wide(x: torch.Tensor) -> torch.Tensor:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return getattr(torch, op)(x.float())

        return kernel(op, wide, "AutocastCUDA")

    return apply


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def linear_by_hand(work: Callable[..., torch.Tensor]) -> Fault:
    """Another kernel of linear for autocast: operands cast, then `work`."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return work(*(None if each is None else each.to(dtype) for each in (x, weight, bias)))

    return lambda simulation: kernel("linear", linear, "AutocastCUDA")


def twice(*operands: Any) -> torch.Tensor:
    torch.nn.functional.linear(*operands)
    return torch.nn.functional.linear(*operands)


def there_and_back(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    low = x.dtype
    return torch.nn.functional.linear(x.float().to(low), weight.float().to(low), bias)


COUNTED = "speed.test_speed"
WAITS = (COUNTED, "the_host_waits_once_a_step-plain-bf16")
AHEAD = (COUNTED, "the_host_runs_ahead-bf16")
CLIPPED = (COUNTED, "the_host_waits_once_a_step-unscaled-and-clipped-bf16")
CASTS = (COUNTED, "casts_follow_the_policy-tied-cache-bf16")
WORK = (COUNTED, "the_work_is_that_of_fp32-mlp-bf16")
LINEAR = (BY_HAND, "a_region_takes_the_time_of_its_casts-linear-bf16")

# Noise of a card that is in order.
NOISES: dict[str, Disturbance] = {
    "drift": drift(0.05, 1.0),
    "bimodal": bimodal(0.3, 0.05),
    "outliers": outliers(10, 10.0, 0.02),
    "jitter": jitter(0.05, seed=7),
}


def test_a_slow_card_is_not_blamed() -> None:
    """With all the time of the chapter for each case; in test_chapters_simulated other cards share it out."""
    measured = Experiments()
    for check, given in (case for module in (CONTESTS, BY_HAND, COUNTED) for case in cases(module, dtypes=("fp16",))):
        if check.__name__.startswith(("test_training", "test_steps")):
            continue
        with machine(GTX_1660) as simulation:
            outcome = run(check, given, simulation, measured=measured)
        assert outcome.verdict in ("PASS", "UNSUPPORTED", "UNTESTABLE"), outcome


@pytest.mark.parametrize("name", NOISES)
def test_noise_decides_nothing_wrongly(name: str) -> None:
    """A class expects what is 10 % below the card's true ratio: it is reached, and missed by a card 30 % slower."""
    true = reported(judged(MATMUL))["ratio"]
    shipped = expectations.load().of("cuda", H100.name, "9.0", today())
    assert shipped is not None
    wanted = {key: dataclasses.replace(one, factor=0.9 * true) for key, one in shipped.expectations.items()}
    expected = expectations.Expectations((dataclasses.replace(shipped, expectations=wanted),), ())

    def verdict(*disturbances: Disturbance, seed: int = 0) -> str:
        return judged(MATMUL, *disturbances, level="standard", expected=expected, seed=seed).verdict

    clean = [verdict(NOISES[name], seed=seed) for seed in range(3)]
    assert "FAIL" not in clean
    assert "PASS" in clean or name in ("bimodal", "jitter")
    for factor in (1.3, 2.0):
        assert verdict(NOISES[name], slower(factor, lambda kernel: kernel.low)) == "FAIL"
    assert verdict(NOISES[name], slower(1.15, lambda kernel: kernel.low)) != "PASS"


def test_casts_by_hand_are_timed_under_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_conditions.Watch, "invalid", lambda self, **_: "the device was slowed down by heat")
    assert judged(LINEAR).verdict == "PASS"  # by its fastest runs
    check, given = case_of(*LINEAR)
    with machine(H100) as simulation, linear_by_hand(twice)(simulation):
        outcome = run(check, given, simulation)
    assert outcome.verdict == "FAIL"  # by the count of its operations, whatever the times


def test_no_arm_finds_its_operands_in_the_cache() -> None:
    middle = (CONTESTS, "operations-matmul-middle-fp32-fp16")
    times = {}
    large, none = (dataclasses.replace(T4, cache_bytes=nbytes) for nbytes in (48 << 20, 1 << 20))
    for name, card in (("cache", large), ("no cache", none)):
        times[name] = reported(judged(middle, card=card, level="full"))["AMP ms"]
    with replaced(cache_flush.Flush, "__call__", lambda self: None):
        times["warm"] = reported(judged(middle, card=large, level="full"))["AMP ms"]
    figures = reported(judged(middle, card=large, level="full"))
    assert (figures["last-level cache, MiB"], figures["cache as reported by"]) == (
        48,
        "L2_cache_size of the device's properties",
    )
    assert times["warm"] < 0.9 * times["cache"]
    assert times["cache"] == pytest.approx(times["no cache"], rel=0.05)


# What is broken, the case that has to notice, and its verdict.
FAULTS: dict[str, tuple[Fault, tuple[str, str], str]] = {
    "everything in fp32": (everything_in_fp32, MATMUL, "FAIL"),
    "matmul and mm off the list": (products_off_the_list, MATMUL, "FAIL"),
    "16-bit products 8 times slower": (disturbed(slower(8, lambda kernel: kernel.low)), MATMUL, "FAIL"),
    "16-bit products as slow as fp32": (disturbed(slower(15, lambda kernel: kernel.low)), MLP, "FAIL"),
    "every use casts the weight": (torch_broken("every_use_casts_the_weight"), CASTS, "FAIL"),
    "linear casts there and back": (linear_by_hand(there_and_back), LINEAR, "FAIL"),
    "linear casts there and back, counted": (linear_by_hand(there_and_back), CASTS, "FAIL"),
    "linear runs twice": (linear_by_hand(twice), LINEAR, "FAIL"),
    "linear runs twice, counted": (linear_by_hand(twice), WORK, "FAIL"),
    "relu in fp32": (fp32_list_grows("relu"), LAYERS, "FAIL"),
    "relu in fp32, counted": (fp32_list_grows("relu"), (COUNTED, "casts_follow_the_policy-conv-cache-bf16"), "FAIL"),
    "a region computes something else": (region_computes_something_else, LINEAR, "FAIL"),
    "a region waits when it is left": (waits_at_the_end_of_a_region, AHEAD, "FAIL"),
    "a region reads a value when it is left, seen by its wait": (reads_at_the_end_of_a_region, AHEAD, "FAIL"),
    "a region reads a value when it is left": (reads_at_the_end_of_a_region, WAITS, "FAIL"),
    "update waits": (update_waits, AHEAD, "FAIL"),
    "scale reads the loss": (torch_broken("scale_reads_the_loss"), WAITS, "FAIL"),
    "update reads the scale": (torch_broken("update_reads_the_scale"), WAITS, "FAIL"),
    "unscale_ reads what it found": (torch_broken("unscale_reads_what_it_found"), CLIPPED, "FAIL"),
    "TF32 is on unnoticed": (tf32_unnoticed, MATMUL, "FAIL"),
    "events mark the launch": (event_marks_the_launch, MATMUL, "ERROR"),
    "synchronize returns at once": (synchronize_returns_at_once, MLP, "ERROR"),
    "the clock stands still": (clock_stands_still, MATMUL, "ERROR"),
    "elapsed_time in seconds": (elapsed_time_in(1e-3), MATMUL, "ERROR"),
    "elapsed_time in microseconds": (elapsed_time_in(1e3), MATMUL, "ERROR"),
    "products are not computed": (products_are_not_computed, MATMUL, "ERROR"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    fault, case, verdict = FAULTS[name]
    check, given = case_of(*case)
    with machine(H100) as simulation, fault(simulation):
        outcome = run(check, given, simulation)
    assert outcome.verdict == verdict, outcome
