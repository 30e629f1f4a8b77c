"""Adapters that let `drive` reach the loss scalers of frameworks, in which step() and update() are one call.

Each framework steps its own objects around a torch.amp.GradScaler. An adapter is a function of a few lines that makes
these objects and calls them; nothing of a framework is imported before. See docs/scalers.md.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

Step: TypeAlias = Callable[[Any, torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a scaler, an optimizer and the arguments of step(); makes the framework's call, and returns what that does."""
Unscale: TypeAlias = Callable[[Any, torch.optim.Optimizer], Any]
"""Takes a scaler and an optimizer, and unscales the gradients in the way of the framework."""


class OneCall(torch.amp.GradScaler):
    """A scaler whose step() is a framework's call that steps and updates, or also scales and runs backward.

    The call sees the scaler through a view in which scale() returns the loss as it is, since a history has scaled it
    already, and update() is counted and left to the history. Raises RuntimeError where the call does not update exactly
    once.
    """

    def __init__(self, call: Step, device: str = "cpu", unscale: Unscale | None = None, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._call, self._unscale, self._within = call, unscale, False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as the framework does; within step(), which unscales what is not yet, as GradScaler does."""
        plain = super().unscale_
        if self._within or self._unscale is None:
            plain(optimizer)
        else:
            self._unscale(SimpleNamespace(unscale_=plain), optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the framework's call."""
        view = View(super().step, super().unscale_)
        self._within = True
        try:
            result = self._call(view, optimizer, args, kwargs)
        finally:
            self._within = False
        if view.updates != 1:
            raise RuntimeError(f"the call of the framework updates the scale {view.updates} times, not once")
        return result


class View:
    """The scaler that a framework's call sees."""

    def __init__(self, step: Callable[..., Any], unscale_: Callable[..., Any]) -> None:
        self.step, self.unscale_, self.updates = step, unscale_, 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: the history has scaled it."""
        return loss

    def update(self) -> None:
        """Count the call."""
        self.updates += 1


@functools.cache
def _accelerator() -> Any:
    """Return an Accelerator: its optimizers read settings that all of them share."""
    return importlib.import_module("accelerate").Accelerator(cpu=True)


def _accelerate(scaler: Any, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _accelerator()
    wrapping = importlib.import_module("accelerate.optimizer").AcceleratedOptimizer
    return wrapping(optimizer, device_placement=False, scaler=scaler).step(*args, **kwargs)


def _fabric_plugin(scaler: Any) -> Any:
    return importlib.import_module("lightning.fabric.plugins").MixedPrecision("16-mixed", "cpu", scaler)


def _fabric(scaler: Any, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _fabric_plugin(scaler).optimizer_step(optimizer, *args, **kwargs)


def _fabric_unscale(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    _fabric_plugin(scaler).unscale_gradients(optimizer)


@functools.cache
def _lightning_module() -> Any:
    """Return a module with a trainer, whose hooks the plug-in calls before it steps."""
    lightning = importlib.import_module("lightning.pytorch")
    trainer = lightning.Trainer(accelerator="cpu", devices=1, barebones=True)
    module = lightning.LightningModule()
    module.trainer = trainer
    trainer.strategy.connect(module)
    return module


def _lightning(scaler: Any, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plugin = importlib.import_module("lightning.pytorch.plugins").MixedPrecision("16-mixed", "cpu", scaler)
    # The plug-in unscales before its hooks, which GradScaler refuses to do twice. A history may have unscaled: what is
    # not unscaled yet is when GradScaler steps.
    scaler.unscale_ = lambda optimizer: None
    # The closure of a training step that ran backward returns something.
    return plugin.optimizer_step(optimizer, _lightning_module(), lambda: 0.0, *args, **kwargs)


def _timm(scaler: Any, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    native = importlib.import_module("timm.utils").NativeScaler("cpu")
    native._scaler = scaler
    # The history has made the gradients: backward of this loss adds nothing to them.
    return native(torch.zeros((), requires_grad=True), optimizer, *args, **kwargs)


def sharded(group: Any = None, **settings: Any) -> Any:
    """Return FSDP's ShardedGradScaler for tensors on the CPU; `group` is its process group (None: the default one)."""
    module = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")
    groups = {} if group is None else {"process_group": group}
    return module.ShardedGradScaler("cpu", **groups, **settings)


@dataclass(frozen=True)
class Adapter:
    """The loss scaler of a framework: its package, what makes it, and the capabilities that it lacks or changes."""

    package: str
    factory: Callable[..., Any]
    without: tuple[str, ...]


ADAPTERS: Mapping[str, Adapter] = {
    "accelerate": Adapter(
        "accelerate", functools.partial(OneCall, _accelerate), ("arguments", "closure", "return_values")
    ),
    "fabric": Adapter(
        "lightning",
        functools.partial(OneCall, _fabric, unscale=_fabric_unscale),
        ("arguments", "self_scaling"),
    ),
    "lightning": Adapter("lightning", functools.partial(OneCall, _lightning), ("arguments", "closure")),
    "timm": Adapter("timm", functools.partial(OneCall, _timm), ("arguments", "closure", "return_values")),
    "fsdp": Adapter(
        "torch.distributed",
        sharded,
        (
            "copies",
            "extremes",
            "fp16_refusal",
            "narrow_losses",
            "no_gradients",
            "pickles",
            "self_scaling",
        ),
    ),
}
"""By framework; transformers' Trainer steps the optimizer of accelerate."""
