"""Check that state_dict(), load_state_dict(), pickling and copying keep the state of a scaler."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...workloads.third_party_optimizers import give, owning, parameters_of
from .support import DUPLICATES, RESUMED, SETTINGS, in_use, started, track

STATE_KEYS = {
    "scale": float,
    "growth_factor": float,
    "backoff_factor": float,
    "growth_interval": int,
    "_growth_tracker": int,
}


@contract("AMP-SCALE-090")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_state_dict(case: Case, target: Target, use: bool) -> None:
    scaler = torch.amp.GradScaler(target.device_type, **SETTINGS)
    expected = {
        "scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 0,
    }  # fmt: skip
    if use:
        scaler.scale(torch.ones((), device=target.device))
        track(scaler, owning(torch.ones((), device=target.device)), "!..")
        expected |= {"scale": 256.0, "_growth_tracker": 2}
    state = scaler.state_dict()
    case.equal("entries", state, expected)
    types = {name: type(value).__name__ for name, value in state.items()}
    case.equal("types", types, {name: kind.__name__ for name, kind in STATE_KEYS.items()})
    state["scale"], state["_growth_tracker"] = 5.0, 5
    case.equal("state after the returned dict was changed", scaler.state_dict(), expected)


def expect_resumed(case: Case, target: Target, scaler: torch.amp.GradScaler) -> None:
    """Expect that the scaler continues from RESUMED, in its next calls and not only in its getters."""
    case.equal("state_dict()", scaler.state_dict(), RESUMED)
    case.equal("get_scale()", scaler.get_scale(), 96.0)
    case.equal("a loss of 2, scaled", scaler.scale(torch.tensor(2.0, device=target.device)).item(), 192.0)
    case.equal("state after scale()", scaler.state_dict(), RESUMED)
    optimizer = owning(torch.ones((), device=target.device))
    expected = [(96.0, 2), (384.0, 0), (96.0, 0), (96.0, 1), (96.0, 2), (384.0, 0)]
    case.equal("scales and counts from there", track(scaler, optimizer, "..!..."), expected)
    give(optimizer, 384.0)
    scaler.unscale_(optimizer)
    case.equal("a gradient of 384, unscaled", parameters_of(optimizer)[0].grad.item(), 1.0)


@contract("AMP-SCALE-091")
@pytest.mark.parametrize("iterations", ["", "..", "!."], ids=["scaled", "clean", "skipped"])
def test_load_after_use(case: Case, target: Target, iterations: str) -> None:
    scaler = started(target)
    track(scaler, owning(torch.ones((), device=target.device)), iterations)
    state = dict(RESUMED)
    scaler.load_state_dict(state)
    expect_resumed(case, target, scaler)
    case.equal("the state that was loaded, afterwards", state, RESUMED)


@contract("AMP-SCALE-092")
def test_load_before_use(case: Case, target: Target) -> None:
    scaler = torch.amp.GradScaler(target.device_type)
    scaler.load_state_dict(dict(RESUMED))
    expect_resumed(case, target, scaler)


def expect_independence(case: Case, target: Target, uses: tuple[str | None, ...]) -> None:
    """Expect that scalers after every use, of any settings, continue from a loaded state as the saved scaler does."""
    optimizer, wrong, rest = owning(torch.ones((), device=target.device)), {}, "...!........"
    for saved, history in ((9, "......."), (4, "!..."), (2, "..!")):
        settings = {"init_scale": 96.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": saved}
        original = started(target, **settings)
        track(original, optimizer, history)
        state = original.state_dict()
        wanted = state, track(original, optimizer, rest), original.state_dict()
        for interval, use in itertools.product((1, 2, 3, 5, 7, 100), uses):
            own = {**SETTINGS, "growth_interval": interval}
            scaler = torch.amp.GradScaler(target.device_type, **own) if use is None else started(target, **own)
            track(scaler, optimizer, use or "")
            scaler.load_state_dict(dict(state))
            loaded = scaler.state_dict()
            if use is None:
                scaler.scale(torch.ones((), device=target.device))
            seen = loaded, track(scaler, optimizer, rest), scaler.state_dict()
            if seen != wanted:
                name = f"{history} at an interval of {saved}, loaded after {use or 'nothing'} at one of {interval}"
                wrong[name] = f"{seen} in place of {wanted}"
    case.equal("states that a scaler loads or continues otherwise", dict(list(wrong.items())[:2]), {})


@contract("AMP-SCALE-091")
def test_load_whatever_the_use_before(case: Case, target: Target) -> None:
    expect_independence(case, target, ("", ".", "!", "...", ".!.."))


@contract("AMP-SCALE-092")
def test_load_whatever_the_settings_before(case: Case, target: Target) -> None:
    expect_independence(case, target, (None,))


@contract("AMP-SCALE-093")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_load_empty_state(case: Case, target: Target, use: bool) -> None:
    scaler = started(target) if use else torch.amp.GradScaler(target.device_type)
    before = scaler.state_dict()
    case.raises("load_state_dict({})", RuntimeError, lambda: scaler.load_state_dict({}))
    case.equal("state", scaler.state_dict(), before)


@contract("AMP-SCALE-150")
def test_resumed_run(case: Case, target: Target) -> None:
    settings = {"init_scale": 64.0, "growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.75}
    pattern = "..!....!.....!......"
    optimizer = owning(torch.ones((), device=target.device))
    whole = track(started(target, **settings), optimizer, pattern)
    for stop in range(0, len(pattern), case.samples(quick=5, standard=2, full=1)):
        first = started(target, **settings)
        track(first, optimizer, pattern[:stop])
        second = torch.amp.GradScaler(target.device_type)
        second.load_state_dict(first.state_dict())
        second.scale(torch.ones((), device=target.device))
        case.equal(f"scales and counts when resumed at {stop}", track(second, optimizer, pattern[stop:]), whole[stop:])


def expect_duplicate(case: Case, target: Target, name: str, use: bool) -> None:
    original = torch.amp.GradScaler(target.device_type)
    if use:
        # Not with load_state_dict: the initial scale must differ from the current one.
        settings = {"init_scale": 384.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
        original = started(target, **settings)
        track(original, owning(torch.ones((), device=target.device)), "!.")
    else:
        original.load_state_dict(dict(RESUMED))
    case.equal("control: the original's state", original.state_dict(), RESUMED)
    duplicate = DUPLICATES[name](original)
    case.equal("type", type(duplicate) is type(original), True)
    case.equal("enabled", duplicate.is_enabled(), True)
    expect_resumed(case, target, duplicate)
    case.equal("the original's state after the duplicate was used", original.state_dict(), RESUMED)
    if use:
        original.update(48.0)  # raises if the scale tensor does not exist
        case.equal("the original's scale after its next update(48.0)", original.get_scale(), 48.0)


@contract("AMP-SCALE-095")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_pickle(case: Case, target: Target, use: bool) -> None:
    expect_duplicate(case, target, "pickle", use)


@contract("AMP-SCALE-096")
@pytest.mark.parametrize("use", [False, True], ids=["before-use", "after-use"])
def test_deepcopy(case: Case, target: Target, use: bool) -> None:
    expect_duplicate(case, target, "deepcopy", use)


@contract("AMP-SCALE-096")
@pytest.mark.parametrize("duplicate", list(DUPLICATES))
def test_iteration_of_both(case: Case, target: Target, duplicate: str) -> None:
    scaler, optimizer = in_use(target)
    twin = DUPLICATES[duplicate](scaler)
    for each, gradient in ((scaler, 2.0), (twin, 4.0)):
        each.scale(torch.ones((), device=target.device))
        give(optimizer, gradient * each.get_scale())
        each.unscale_(optimizer)
        unscaled = parameters_of(optimizer)[0].grad
        wanted = torch.full_like(unscaled, gradient)
        case.identical(f"a gradient of {gradient}, unscaled by each in one iteration", unscaled, wanted)
    scaler.update()
    twin.update()


@contract("AMP-SCALE-097")
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_pickle_within_an_iteration(case: Case, target: Target, call: str) -> None:
    scaler, optimizer = in_use(target)
    getattr(scaler, call)(optimizer)
    case.raises("pickling", AssertionError, lambda: pickle.dumps(scaler), names=("update|iteration",))
    scaler.update()
    case.equal(
        "control: state of one pickled after update()", DUPLICATES["pickle"](scaler).state_dict(), scaler.state_dict()
    )
