"""Optimizers, modules and functions of a training loop, written or wrapped otherwise."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from conformance.self_check.planting import replaced
from tests.variants import Uses, variant
from tests.variants.around import wrapped

_ADAM = importlib.import_module("torch.optim.adam")


@variant("AMP-OPTIMIZER-001", "AMP-OPTIMIZER-013", "AMP-OPTIMIZER-140", "AMP-RECIPE-001")
def adam_in_another_order(uses: Uses) -> Iterator[None]:
    """Adam divides both moments by their corrections, not the step size, and visits the last parameter first.

    torch.optim.Adam gives this very formula; torch's own code is a rearrangement of it.
    """
    stock = _ADAM._single_tensor_adam
    numbers = ("beta1", "beta2", "lr", "weight_decay")
    others = ("has_complex", "capturable", "differentiable", "amsgrad")

    @functools.wraps(stock)
    def run(
        params: Any, grads: Any, firsts: Any, seconds: Any, largest: Any, steps: Any, *scaled: Any, **given: Any
    ) -> None:
        plain = all(isinstance(given[name], (int, float)) for name in numbers)
        if not plain or any(given[name] for name in others) or any(one.dtype != torch.float32 for one in params):
            stock(params, grads, firsts, seconds, largest, steps, *scaled, **given)
            return
        uses["_single_tensor_adam"] += 1
        beta1, beta2, lr, decay = (given[name] for name in numbers)
        for param, grad, first, second, step in reversed(list(zip(params, grads, firsts, seconds, steps, strict=True))):
            step += 1
            slope = -grad if given["maximize"] else grad
            if decay and given.get("decoupled_weight_decay"):
                param.sub_(param * (lr * decay))
            elif decay:
                slope = slope + decay * param
            first.mul_(beta1).add_(slope * (1 - beta1))
            second.mul_(beta2).add_(slope * ((1 - beta2) * slope))
            corrected = first / (1 - beta1 ** step.item()), second / (1 - beta2 ** step.item())
            param.sub_(lr * corrected[0] / (corrected[1].sqrt() + given["eps"]))

    with replaced(_ADAM, "_single_tensor_adam", run):
        yield


@variant("AMP-OPTIMIZER-001", "AMP-OPTIMIZER-013", "AMP-SCALE-150", "AMP-RECIPE-001")
def optimizers_are_subclasses(uses: Uses) -> Iterator[None]:
    """torch.optim.SGD, Adam and AdamW are subclasses of torch's, as tools that instrument optimizers make them.

    torch.optim.Optimizer is the base of optimizers and may be subclassed.
    """

    def subclass(base: Any) -> Any:
        class Instrumented(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                uses[base.__name__] += 1
                super().__init__(*args, **kwargs)

        Instrumented.__signature__ = inspect.signature(base)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(Instrumented, name, getattr(base, name))
        return Instrumented

    with contextlib.ExitStack() as stack:
        for name in ("SGD", "Adam", "AdamW"):
            stack.enter_context(replaced(torch.optim, name, subclass(getattr(torch.optim, name))))
        yield


@variant("AMP-LOSS-001", "AMP-CAST-036", "AMP-CAST-060", "AMP-NUMERICS-064")
def functions_are_wrapped(uses: Uses) -> Iterator[None]:
    """The Python functions of torch.nn.functional are wrapped by functools.wraps.

    Tracing and profiling tools do so; the results are those of the functions.
    """
    losses = ("cross_entropy", "mse_loss", "nll_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "kl_div")
    layers = ("layer_norm", "batch_norm", "group_norm", "dropout", "softmax", "log_softmax", "embedding")
    with wrapped(uses, torch.nn.functional, *losses, *layers):
        yield


@variant("AMP-CAST-060", "AMP-REGION-003", "AMP-TRANSFORM-008", "AMP-BF16-001")
def forwards_are_wrapped(uses: Uses) -> Iterator[None]:
    """The forward of linear layers, convolutions, norms and embeddings is wrapped by functools.wraps.

    Tracing and profiling tools do so; the results are those of the methods.
    """
    with contextlib.ExitStack() as stack:
        for layer in (torch.nn.Linear, torch.nn.Conv2d, torch.nn.LayerNorm, torch.nn.Embedding):
            stack.enter_context(wrapped(uses, layer, "forward"))
        yield
