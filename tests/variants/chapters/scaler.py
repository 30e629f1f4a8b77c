"""GradScaler, its kernels and gradient clipping, written otherwise."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp.sharded_grad_scaler  # beside GradScaler's stock class, whose private names it uses

from conformance.self_check.planting import replaced
from tests.variants import Uses, variant
from tests.variants.around import Stock, around, count, has_kernels

Scaler: Any = torch.amp.GradScaler
_MODULES = (torch, torch.amp, torch.amp.grad_scaler)
_OLDER = (torch.cpu.amp.GradScaler, torch.cuda.amp.GradScaler)
_CLIPPING = importlib.import_module("torch.nn.utils.clip_grad")


@contextlib.contextmanager
def _in_place_of_the_scaler(made: Any) -> Iterator[None]:
    """Put a class in the place of GradScaler, as the base of the deprecated classes too."""
    before = [older.__bases__ for older in _OLDER]
    with contextlib.ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(replaced(module, "GradScaler", made))
        for older in _OLDER:
            older.__bases__ = (made,)
        try:
            yield
        finally:
            for older, bases in zip(_OLDER, before, strict=True):
                older.__bases__ = bases


@contextlib.contextmanager
def _warnings_of_the_caller() -> Iterator[None]:
    """Warn from the code that called the function that this stands in, whatever depth the warning has."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for one in caught:
        warnings.warn_explicit(one.message, one.category, *_caller())


def _caller() -> tuple[str, int]:
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith(("tests.variants", "contextlib", "torch.")):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@variant("AMP-SCALE-020", "AMP-SCALE-043", "AMP-SCALE-045", "AMP-SCALE-140", "AMP-SCALE-150", possible=has_kernels)
def unscaling_divides(uses: Uses) -> Iterator[None]:
    """Gradients are divided by the scale in float64 where it is a power of two, not multiplied by its reciprocal.

    torch.amp.GradScaler.unscale_: divides the gradients by the scale factor; for powers of two both are exact.
    """

    def run(stock: Stock, grads: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
        if (
            inverse.item() <= 0
            or torch.frexp(inverse)[0].item() != 0.5
            or not all(g.is_floating_point() for g in grads)
        ):
            stock(grads, found_inf, inverse)
            return
        for grad in grads:
            if not torch.isfinite(grad).all():
                found_inf.fill_(1.0)
            grad.copy_(grad.double() / inverse.double().reciprocal())

    with around(uses, "_amp_foreach_non_finite_check_and_unscale_", "CPU", run):
        yield


@variant("AMP-SCALE-140", "AMP-SCALE-141", "AMP-SCALE-147", "AMP-SCALE-150", "AMP-SCALE-166", possible=has_kernels)
def products_that_overflow_are_found(uses: Uses) -> Iterator[None]:
    """The unscaling kernel looks for inf and NaN in its products too.

    torch.amp.GradScaler: a step is skipped for infs and NaNs, so that the parameters remain uncorrupted.
    """

    def run(stock: Stock, grads: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
        stock(grads, found_inf, inverse)
        if not all(torch.isfinite(grad).all() for grad in grads):
            found_inf.fill_(1.0)

    with around(uses, "_amp_foreach_non_finite_check_and_unscale_", "CPU", run):
        yield


@variant("AMP-SCALE-060", "AMP-SCALE-064", "AMP-SCALE-067", "AMP-SCALE-150", "AMP-SCALE-158", possible=has_kernels)
def scale_updated_in_python_numbers(uses: Uses) -> Iterator[None]:
    """The scale is multiplied as a Python float and rounded to float32 once.

    torch.amp.GradScaler.update: the scale is multiplied by backoff_factor, or by growth_factor.
    """

    def run(
        stock: Stock, scale: Any, tracker: Any, found_inf: Any, growth: float, backoff: float, interval: int
    ) -> torch.Tensor:
        clean = 0 if found_inf.item() else tracker.item() + 1
        factor = backoff if found_inf.item() else growth if clean == interval else 1.0
        changed = torch.tensor(scale.item() * factor, dtype=torch.float64).float()
        if found_inf.item() or torch.isfinite(changed):
            scale.copy_(changed)
        tracker.fill_(0 if clean == interval else clean)
        return scale

    with around(uses, "_amp_update_scale_", "CPU", run):
        yield


@variant("AMP-SCALE-023", "AMP-SCALE-027", "AMP-SCALE-044", "AMP-SCALE-124", "AMP-SCALE-150", "AMP-SCALE-167")
def gradients_unscaled_one_by_one(uses: Uses) -> Iterator[None]:
    """GradScaler unscales each gradient by itself, the last first, without groups of one device and dtype.

    torch.amp.GradScaler.unscale_: divides the optimizer's gradient tensors by the scale factor, in no order.
    """

    def run(self: Any, optimizer: Any, inverse: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool) -> Any:
        uses["_unscale_grads_"] += 1
        flags: dict[torch.device, torch.Tensor] = {}
        factors: dict[torch.device, torch.Tensor] = {}
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        for parameter in reversed(parameters):
            if parameter.grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            if parameter.grad.is_sparse and parameter.grad.dtype == torch.float16:
                parameter.grad = parameter.grad.coalesce()
            values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            if values.device not in flags:
                flags[values.device] = found_inf.to(values.device, copy=True)
                factors[values.device] = inverse.to(values.device)
            given = [values], flags[values.device], factors[values.device]
            with torch.no_grad():
                torch._amp_foreach_non_finite_check_and_unscale_(*given)
        return flags

    with replaced(Scaler, "_unscale_grads_", run):
        yield


_PRIVATE = {
    "_scale": "_factor",
    "_growth_tracker": "_clean",
    "_init_scale": "_first_factor",
    "_init_growth_tracker": "_first_clean",
    "_enabled": "_on",
    "_device": "_where",
    "_growth_factor": "_up",
    "_backoff_factor": "_down",
    "_growth_interval": "_every",
    "_per_optimizer_states": "_by_optimizer",
    "_check_scale_growth_tracker": "_both",
    "_lazy_init_scale_growth_tracker": "_create",
    "_unscale_grads_": "_unscale_all",
    "_maybe_opt_step": "_step_if_finite",
    "_get_growth_tracker": "_count",
}


def _renamed(source: str) -> str:
    """The source of GradScaler with other private names; the key "_growth_tracker" of its state is documented."""
    for old, new in _PRIVATE.items():
        source = re.sub(rf'((?:self\.|def )|(?<!_)state\["){old}\b', rf"\g<1>{new}", source)
    return source


@variant(
    *("AMP-SCALE-007", "AMP-SCALE-008", "AMP-SCALE-068", "AMP-SCALE-090", "AMP-SCALE-091", "AMP-SCALE-092"),
    *("AMP-SCALE-095", "AMP-SCALE-097", "AMP-SCALE-130", "AMP-SCALE-150"),
)
def scaler_of_other_private_names(uses: Uses) -> Iterator[None]:
    """GradScaler has other private names; what is documented, and what optimizers call, has the same.

    torch.amp: names that begin with an underscore are no part of the interface.
    """
    names = dict(vars(torch.amp.grad_scaler))
    source = "from __future__ import annotations\n" + _renamed(inspect.getsource(Scaler))
    exec(compile(source, "<GradScaler of other private names>", "exec"), names)
    made = names["GradScaler"]
    first = made.__init__

    @functools.wraps(first)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        uses["GradScaler"] += 1
        with _warnings_of_the_caller():
            first(self, *args, **kwargs)

    made.__init__ = run
    with _in_place_of_the_scaler(made):
        yield


@variant("AMP-API-010", "AMP-SCALE-002", "AMP-SCALE-003", "AMP-SCALE-006", "AMP-SCALE-090", "AMP-SCALE-150")
def scaler_takes_further_arguments(uses: Uses) -> Iterator[None]:
    """GradScaler is a subclass with a name, a repr, and a state that is an OrderedDict in another order.

    torch.amp.GradScaler.state_dict: returns the state as a dict of five entries; a further optional argument changes
    no call that is documented.
    """

    class GradScaler(Scaler):
        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
            *,
            name: str | None = None,
        ) -> None:
            uses["GradScaler"] += 1
            with _warnings_of_the_caller():
                super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
            self.name = name

        def __repr__(self) -> str:
            return f"GradScaler(name={self.name}, scale={self.get_scale()})"

        def state_dict(self) -> dict[str, Any]:
            return collections.OrderedDict(sorted(super().state_dict().items()))

    for name in ("__doc__", "__module__", "__qualname__"):  # by which it is pickled
        setattr(GradScaler, name, getattr(Scaler, name))
    for name in ("state_dict", "__init__"):
        getattr(GradScaler, name).__doc__ = getattr(Scaler, name).__doc__
    with _in_place_of_the_scaler(GradScaler):
        yield


def _rebuilt(kind: Any, device: str, state: dict[str, Any]) -> Any:
    scaler = kind.__new__(kind)
    Scaler.__init__(scaler, device, enabled=bool(state))
    scaler.load_state_dict(state)
    return scaler


@variant("AMP-SCALE-095", "AMP-SCALE-096", "AMP-SCALE-097")
def scaler_pickled_by_its_state(uses: Uses) -> Iterator[None]:
    """GradScaler is pickled as its class, its device and its state_dict.

    The documentation promises no format of a pickle.
    """

    def run(self: Any, protocol: Any) -> Any:
        uses["pickled"] += 1
        if self._enabled and self._per_optimizer_states:
            raise AssertionError("A GradScaler is pickled at the beginning of an iteration or after update() only.")
        return _rebuilt, (type(self), self._device, self.state_dict())

    with replaced(Scaler, "__reduce_ex__", run):
        yield


@contextlib.contextmanager
def _norms_first_by(
    uses: Uses,
    takes: Callable[[list[torch.Tensor], bool | None], bool],
    combined: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Iterator[None]:
    """Let get_total_norm take the 2-norm of the tensors that `combined` makes of gradients that it `takes`."""
    stock = _CLIPPING._get_total_norm

    @functools.wraps(stock)
    def run(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if float(norm_type) != 2.0 or not takes(given, foreach):
            return stock(given, norm_type, error_if_nonfinite, foreach)
        count(uses, "_get_total_norm")
        with torch.no_grad():
            norms = combined(given)
        return stock(norms, 2.0, error_if_nonfinite, foreach)

    with replaced(_CLIPPING, "_get_total_norm", run), replaced(torch.nn.utils, "get_total_norm", run):
        yield


@variant("AMP-CLIP-001", "AMP-CLIP-002", "AMP-CLIP-012", "AMP-CLIP-032", "AMP-CLIP-074")
def norm_in_float64(uses: Uses) -> Iterator[None]:
    """get_total_norm takes the norm of order 2 in float64 and rounds it once.

    torch.nn.utils.get_total_norm: as if the norms of the individual tensors were concatenated into a single vector.
    """

    def takes(given: list[torch.Tensor], foreach: bool | None) -> bool:
        return foreach is not False and bool(given) and all(map(_plain, given))

    def combined(given: list[torch.Tensor]) -> list[torch.Tensor]:
        norms = torch.stack(torch._foreach_norm(given, 2.0, dtype=torch.float64))
        return [torch.linalg.vector_norm(norms).float()]

    with _norms_first_by(uses, takes, combined):
        yield


@variant("AMP-CLIP-046", "AMP-CLIP-032", "AMP-CLIP-072")
def norms_in_groups_of_three(uses: Uses) -> Iterator[None]:
    """get_total_norm combines the norms of three tensors, and of three of these, in float64, if a gradient has it.

    torch.nn.utils.get_total_norm: as if the norms of the individual tensors were concatenated into a single vector.
    """

    def takes(given: list[torch.Tensor], foreach: bool | None) -> bool:
        strided = all(one.device.type == "cpu" and one.layout == torch.strided for one in given)
        return strided and any(one.dtype == torch.float64 for one in given)

    def combined(given: list[torch.Tensor]) -> list[torch.Tensor]:
        norms = [torch.linalg.vector_norm(one.double()) for one in given]
        while len(norms) > 1:
            groups = [norms[at : at + 3] for at in range(0, len(norms), 3)]
            norms = [torch.linalg.vector_norm(torch.stack(group)) for group in groups]
        return norms

    with _norms_first_by(uses, takes, combined):
        yield


def _plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and (gradient.device.type, gradient.layout, gradient.dtype) == (
        "cpu",
        torch.strided,
        torch.float32,
    )


@variant(
    *("AMP-SCALE-020", "AMP-SCALE-021", "AMP-SCALE-024", "AMP-SCALE-040", "AMP-SCALE-047", "AMP-SCALE-150"),
    *("AMP-SCALE-151", "AMP-SCALE-153", "AMP-SCALE-154", "AMP-SCALE-155", "AMP-SCALE-156", "AMP-SCALE-158"),
    *("AMP-SCALE-159", "AMP-SCALE-170", "AMP-OPTIMIZER-043"),
)
def gradients_are_divided_by_the_scale(uses: Uses) -> Iterator[None]:
    """unscale_ divides each gradient by the scale, in place of multiplying it by a rounded reciprocal.

    torch.amp.GradScaler.unscale_: divides the optimizer's gradient tensors by the scale factor.
    """
    stock = Scaler._unscale_grads_

    def run(scaler: Any, optimizer: Any, inverse: torch.Tensor, found: torch.Tensor, allows_half: bool) -> Any:
        flags = stock(scaler, optimizer, torch.ones_like(inverse), found, allows_half)
        if allows_half:  # a check alone
            return flags
        count(uses, "_unscale_grads_")
        with torch.no_grad():
            for group in optimizer.param_groups:
                for one in group["params"]:
                    if one.grad is not None:
                        gradient = one.grad._values() if one.grad.is_sparse else one.grad
                        gradient.div_(scaler._scale.to(gradient.device))
        return flags

    with replaced(Scaler, "_unscale_grads_", run):
        yield


@variant("AMP-CLIP-012", "AMP-CLIP-015", "AMP-CLIP-081", "AMP-CLIP-094")
def values_by_minimum_and_maximum(uses: Uses) -> Iterator[None]:
    """clip_grad_value_ takes the multi-tensor kernels of minimum and maximum, not those of clamp.

    torch.nn.utils.clip_grad_value_: foreach selects the foreach-based implementation; no kernel is named.
    """
    stock = torch.nn.utils.clip_grad_value_

    @functools.wraps(stock)
    def run(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads = [one.grad for one in given if one.grad is not None]
        if foreach is False or not grads or not all(_plain(one) for one in grads):
            stock(given, clip_value, foreach)
            return
        count(uses, "clip_grad_value_")
        limit = float(clip_value)
        with torch.no_grad():
            torch._foreach_maximum_(grads, -limit)
            torch._foreach_minimum_(grads, limit)

    with replaced(torch.nn.utils, "clip_grad_value_", run), replaced(_CLIPPING, "clip_grad_value_", run):
        yield
