"""The loss scalers of frameworks agree with GradScaler but for what their adapters leave out; `tox -e scalers`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.scaler import adapters, drive, state_machine
from conformance.scaler.adapters import ADAPTERS, OneCall

FRAMEWORKS = [name for name in ADAPTERS if name != "fsdp"]
few = functools.partial(drive, histories=6, length=8)


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without distributed or without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_sharded_scaler_agrees_in_the_rest(group: Any) -> None:
    adapter = ADAPTERS["fsdp"]
    drive(functools.partial(adapter.factory, group), without=adapter.without, histories=100).check()


@pytest.mark.parametrize("name", ADAPTERS["fsdp"].without)
def test_sharded_scaler_departs_in_each(group: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "SHRINK_CALLS", 0)  # that it differs is enough, in a history of any length
    adapter = ADAPTERS["fsdp"]
    driven = drive(functools.partial(adapter.factory, group), without=set(adapter.without) - {name}, histories=10)

    assert driven.mismatch is not None


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_agrees_in_the_rest(name: str) -> None:
    adapter = ADAPTERS[name]
    pytest.importorskip(adapter.package)

    driven = drive(adapter.factory, without=adapter.without, histories=20)

    driven.check()
    print(name, driven)
    assert driven.steps > 2000


@pytest.mark.parametrize(("name", "capability"), [(name, one) for name in FRAMEWORKS for one in ADAPTERS[name].without])
def test_framework_departs_in_each(name: str, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ADAPTERS[name]
    pytest.importorskip(adapter.package)
    monkeypatch.setattr(state_machine, "SHRINK_CALLS", 0)

    driven = few(adapter.factory, without=set(adapter.without) - {capability})

    assert driven.mismatch is not None
    print(name, capability, driven.mismatch)


def _plain(scaler: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = scaler.step(optimizer, *args, **kwargs)
    scaler.update()
    return result


def test_plain_call_agrees_in_everything() -> None:
    few(functools.partial(OneCall, _plain)).check()


def _twice(scaler: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scaler.update()
    return _plain(scaler, optimizer, args, kwargs)


def _steps_always(scaler: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scaler.update()
    return optimizer.step(*args, **kwargs)


def _zeroes(scaler: Any, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _plain(scaler, optimizer, args, kwargs)
    optimizer.zero_grad()
    return result


@pytest.mark.parametrize("call", [_twice, _steps_always, _zeroes])
def test_framework_that_does_it_wrong_departs(call: Callable[..., Any]) -> None:
    driven = few(functools.partial(OneCall, call))

    assert driven.mismatch is not None
    if call is _twice:
        assert "updates the scale 2 times, not once" in str(driven.mismatch)


def _halves(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    for group in optimizer.param_groups:
        for parameter in (one for one in group["params"] if one.grad is not None):
            parameter.grad.mul_(0.5)


def test_unscaling_of_the_framework_is_driven() -> None:
    assert few(functools.partial(OneCall, _plain, unscale=_halves)).mismatch is not None


def _two_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]


def _step_both(scaler: torch.amp.GradScaler, step: Callable[[torch.optim.Optimizer], Any]) -> int:
    """Take one iteration of two optimizers, each by `step`; return the growth tracker."""
    scaler.scale(torch.zeros(1))
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in _two_parameters()]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        step(optimizer)
    return int(scaler.state_dict()["_growth_tracker"])


def test_two_optimizers_count_as_two_iterations_where_a_step_updates() -> None:
    optimizers = pytest.importorskip("accelerate.optimizer")
    importlib.import_module("accelerate").Accelerator(cpu=True)
    plugins, utils = pytest.importorskip("lightning.fabric.plugins"), pytest.importorskip("timm.utils")
    scalers = [torch.amp.GradScaler("cpu") for _ in range(4)]
    native = utils.NativeScaler("cpu")
    native._scaler = scalers[3]

    def documented(optimizer: torch.optim.Optimizer) -> None:
        scalers[0].step(optimizer)

    seen = [
        _step_both(scalers[0], documented),
        _step_both(scalers[1], lambda one: optimizers.AcceleratedOptimizer(one, False, scalers[1]).step()),
        _step_both(scalers[2], plugins.MixedPrecision("16-mixed", "cpu", scalers[2]).optimizer_step),
        _step_both(scalers[3], lambda one: native(torch.zeros((), requires_grad=True), one)),
    ]

    scalers[0].update()
    assert scalers[0].state_dict()["_growth_tracker"] == 1
    assert seen[1:] == [2, 2, 2]


def test_plug_in_of_the_trainer_refuses_what_was_unscaled() -> None:
    plugins = pytest.importorskip("lightning.pytorch.plugins")
    (parameter, _), scaler = _two_parameters(), torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.unscale_(optimizer)

    with pytest.raises(RuntimeError, match="already been called"):
        plugins.MixedPrecision("16-mixed", "cpu", scaler).optimizer_step(optimizer, None, lambda: 0.0)


def test_accelerate_says_whether_it_skipped() -> None:
    optimizers = pytest.importorskip("accelerate.optimizer")
    importlib.import_module("accelerate").Accelerator(cpu=True)
    for value, skipped in ((1.0, False), (torch.inf, True)):
        scaler = torch.amp.GradScaler("cpu")
        (parameter, _), _ = _two_parameters(), scaler.scale(torch.zeros(1))
        parameter.grad = torch.full((1,), value)
        wrapped = optimizers.AcceleratedOptimizer(torch.optim.SGD([parameter], lr=0.1), False, scaler)
        wrapped.step()
        assert wrapped.step_was_skipped is skipped


def test_trainer_of_transformers_steps_the_optimizer_of_accelerate(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    optimizers = pytest.importorskip("accelerate.optimizer")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = torch.nn.Linear(2, 2)
    trainer = transformers.Trainer(model=model, args=arguments)

    prepared = trainer.accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

    assert isinstance(prepared, optimizers.AcceleratedOptimizer)


def test_no_framework_is_imported_before_it_is_driven(root: Any) -> None:
    import subprocess
    import sys

    code = (
        "import sys, conformance.scaler.adapters\n"
        "print([n for n in ('accelerate', 'lightning', 'timm', 'transformers') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert set(ADAPTERS) == {"accelerate", "fabric", "lightning", "timm", "fsdp"}
    assert adapters.ADAPTERS is ADAPTERS
