"""Check random and enumerated sequences of GradScaler calls against a model of its documented rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import partial

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...scaler import enumeration as orders
from ...scaler.differential import Factory
from ...scaler.optimizers import FUSED, PLAIN, SGD, Fused
from ...scaler.state_machine import EXTREMES, Search, search
from ...workloads.third_party_optimizers import Ordinary, SelfScaling, give, owning, parameters_of
from .support import started


def scalers(case: Case, target: Target) -> Factory:
    """Return a factory of scalers; end the case if the device lacks a type.

    The reciprocal is computed in fp64, and the gradients are of each floating type.
    """
    case.require_arithmetic(target, torch.float64, torch.float16, torch.bfloat16)
    return lambda **settings: torch.amp.GradScaler(target.device_type, **settings)


def expect_agreement(case: Case, found: Search) -> None:
    """Expect that no sequence differs from the model; the shortest that does becomes the case's snippet."""
    case.note("sequences of calls", found.histories)
    case.note("calls compared with the model", found.steps)
    case.note("calls by rule", [f"{name}: {count}" for name, count in sorted(found.rules.items())])
    case.note("distinct states reached", found.states)
    mismatch = found.mismatch
    if mismatch is not None:
        made = 'lambda **settings: torch.amp.GradScaler(torch.device("$device").type, **settings)'
        case.reproduce(mismatch.script(made, "$device"))
        calls = f"{len(mismatch.calls)} calls, the last of them {mismatch.program[-1]}"
        seen = "; ".join(map(str, mismatch.differences))
        case.true(f"the scaler agrees with the model after {calls}", False, seen)
    case.equal("sequences of calls that differ from the model", 0, 0)


def lacks(target: Target) -> frozenset[str]:
    """Return the capabilities that are not judged here.

    AMP-SCALE-024 reports a kernel without bf16 gradients, AMP-SCALE-087 what step() does without gradients.
    """
    gradient, flag = (torch.zeros((), dtype=dtype, device=target.device) for dtype in (torch.bfloat16, torch.float32))
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], flag, torch.ones_like(flag))
    except NotImplementedError:
        return frozenset(["bf16_gradients", "no_gradients"])
    return frozenset(["no_gradients"])


def expect_histories(case: Case, target: Target, histories: Iterable[orders.History]) -> None:
    expect_agreement(case, orders.play(scalers(case, target), target.device, histories, lacks(target)))


def random_search(case: Case, target: Target) -> partial[Search]:
    """Return a search of random sequences: the same in every run below full depth, and from the case's seed there.

    AMP-SCALE-151 judges what a refused unscale_ does to the gradients.
    """
    return partial(
        search,
        scalers(case, target),
        target.device,
        length=case.samples(quick=20, standard=20, full=40),
        seed=case.seed if case.level == "full" else 0,
        without=lacks(target) | {"intact_gradients"},
    )


@contract("AMP-SCALE-150")
def test_histories(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    count = case.samples(quick=16, standard=80, full=800)
    expect_agreement(case, random_search(case, target)(histories=count))


@contract("AMP-SCALE-151")
def test_refused_calls(case: Case, target: Target) -> None:
    # At level quick the iteration is finished and no other one follows.
    rest = orders.REST[:2] if case.level == "quick" else orders.REST
    expect_histories(case, target, orders.refusals(case.samples(quick=1, standard=1, full=2), rest))


@contract("AMP-SCALE-152")
def test_disabled_histories(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    count = case.samples(quick=5, standard=20, full=150)
    expect_agreement(case, random_search(case, target)(histories=count, enabled=False))


@contract("AMP-SCALE-152")
def test_disabled_refuses_nothing(case: Case, target: Target) -> None:
    expect_histories(case, target, orders.without_scaling())


@contract("AMP-SCALE-153")
def test_orders_of_calls(case: Case, target: Target) -> None:
    which, length, turns = {
        "quick": ((PLAIN, FUSED), 3, 1),
        "standard": ((PLAIN, SGD, FUSED), 3, 2),
        "full": ((PLAIN, SGD, FUSED), 4, 5),
    }[case.level]
    expect_histories(case, target, orders.orders(which, length, turns))


@contract("AMP-SCALE-153")
def test_any_of_many(case: Case, target: Target) -> None:
    # Every subset of five optimizers, ordinary and self-scaling in turn, has a non-finite gradient.
    kinds = (Ordinary, SelfScaling, Ordinary, Ordinary, SelfScaling)
    wrong = []
    for bad in itertools.product((False, True), repeat=len(kinds)):
        optimizers = [owning(torch.ones(2, device=target.device), kind=kind) for kind in kinds]
        scaler = started(target, init_scale=4.0, growth_interval=1)
        for optimizer, dirty in zip(optimizers, bad, strict=True):
            give(optimizer, math.inf if dirty else 4.0)
            scaler.step(optimizer)
        scaler.update()
        stepped = [parameters_of(one)[0].tolist() == [-1.0, -1.0] for one in optimizers]
        expected = [not dirty for dirty in bad], 2.0 if any(bad) else 8.0
        if (stepped, scaler.get_scale()) != expected:
            wrong.append(f"inf in {bad}: stepped {stepped}, scale {scaler.get_scale()}")
    case.equal("iterations of five optimizers that stepped or updated otherwise", wrong, [])


@contract("AMP-SCALE-154")
def test_bad_numbers_in_mixed_gradients(case: Case, target: Target) -> None:
    layouts = ("duplicates",) if case.level == "quick" else ("dense", "strided", "duplicates")
    expect_histories(case, target, orders.bad_numbers(layouts))


@contract("AMP-SCALE-155")
def test_empty_gradients(case: Case, target: Target) -> None:
    expect_histories(case, target, orders.empty_gradients())


@contract("AMP-SCALE-156")
def test_gradients_after_a_skip(case: Case, target: Target) -> None:
    expect_histories(case, target, orders.skipped_steps())


@contract("AMP-SCALE-157")
def test_flags_handed_to_several(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type, init_scale=4.0, growth_interval=100)
    scaler.scale(torch.ones((), device=target.device))
    wrong = []
    patterns = list(itertools.product((False, True), repeat=4))
    optimizers = [Fused([torch.zeros(2, device=target.device, requires_grad=True)]) for _ in range(2)]
    for pattern in patterns:
        bad, explicit = pattern[:2], pattern[2:]
        before = scaler.get_scale()
        for optimizer, dirty, unscaled in zip(optimizers, bad, explicit, strict=True):
            parameter = optimizer.param_groups[0]["params"][0]
            parameter.grad = torch.tensor([1.0, math.inf if dirty else 2.0], device=target.device)
            if unscaled:
                scaler.unscale_(optimizer)
        seen = []
        for optimizer in optimizers:
            scaler.step(optimizer)
            seen.append(optimizer.calls[-1])
        scaler.update()
        expected = [
            f"step(){{}} with scale {None if unscaled else before} and flag {float(dirty)}"
            for dirty, unscaled in zip(bad, explicit, strict=True)
        ]
        after = before / 2 if any(bad) else before
        if (seen, scaler.get_scale()) != (expected, after):
            wrong.append(f"bad {bad}, unscaled before {explicit}: {seen}, scale {scaler.get_scale()}")
    case.note("iterations of two optimizers compared", len(patterns))
    case.equal("iterations in which an optimizer received the flag or scale of another", wrong, [])


@contract("AMP-SCALE-158")
def test_histories_at_the_ends_of_fp32(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    count = case.samples(quick=6, standard=30, full=300)
    scales = (*EXTREMES, 2.0**-140, 2.0**120)
    expect_agreement(case, random_search(case, target)(histories=count, scales=scales))


@contract("AMP-SCALE-158")
def test_growth_and_backoff_at_the_ends(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    expect_histories(case, target, orders.ends())


@contract("AMP-SCALE-159")
def test_outputs_in_containers(case: Case, target: Target) -> None:
    case.require_subnormals(target)
    expect_histories(case, target, orders.outputs())


@contract("AMP-SCALE-170")
def test_patterns_of_iterations(case: Case, target: Target) -> None:
    expect_histories(case, target, orders.patterns(case.samples(quick=5, standard=7, full=11)))
