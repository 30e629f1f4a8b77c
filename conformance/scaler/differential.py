"""Run a history of GradScaler calls on a real scaler and on the model; report the first difference."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from .capabilities import MODERATE, Call, lacking
from .model import (
    BF16,
    FP32,
    Gradient,
    GradScalerModel,
    NewScale,
    Output,
    Stage,
    check_and_unscale,
    reciprocal,
    rounded,
    unscalings,
)
from .optimizers import (
    DTYPES,
    FORM_NAMES,
    FUSED,
    KINDS,
    NAMES,
    PATTERN,
    SGD,
    SLOTS,
    Backward,
    Slot,
    as_dense,
    fitting,
    spelled,
    tensor_of,
    with_bad,
)


@dataclass(frozen=True)
class Difference:
    """One property in which the real scaler and the model differ after a call."""

    what: str
    seen: str
    expected: str

    def __str__(self) -> str:
        return f"{self.what}: {self.seen}, expected {self.expected}"


@dataclass(frozen=True)
class Mismatch:
    """The calls up to the first after which the real scaler and the model differ, as a program, and the differences."""

    calls: tuple[Call, ...]
    program: tuple[str, ...]
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        """Return the history as the lines of a program, with the differences as comments."""
        return "\n".join((*self.program, *(f"# {difference}" for difference in self.differences)))

    def script(self, factory: str, device: str = "cpu") -> str:
        """Return the history as a program that needs torch alone; `factory` is an expression that makes a scaler."""
        lines = ["import copy, pickle", "import torch", "from math import inf, nan"]
        lines += [] if device == "cpu" else [f"torch.set_default_device({device!r})"]
        called = "\n".join(self.program)
        for which, name in enumerate(NAMES):
            if f"{name}" in called:
                lines += _PREAMBLES[which]
                shapes = (f"torch.zeros({slot.shape}, dtype={DTYPES[slot.form]})" for slot in SLOTS[which])
                lines += [f"{name}_p = [p.requires_grad_() for p in (", *(f"    {shape}," for shape in shapes), ")]"]
                lines.append(f"{name} = {_CLASSES[which].format(f'{name}_p')}")
        lines += [f"factory = {factory}", *self.program, "print(scaler.get_scale(), scaler.state_dict())"]
        return "\n".join((*lines, *(f"# {difference}" for difference in self.differences)))


_CLASSES = ("Plain({}, {{}})", "torch.optim.SGD({}, lr=1.0)", "Fused({}, {{}})")
_PREAMBLES: tuple[tuple[str, ...], ...] = (
    (
        "class Plain(torch.optim.Optimizer):",
        "    def step(self, *args, **kwargs):",
        "        print('stepped', args, kwargs)",
        "        for p in (p for p in self.param_groups[0]['params'] if p.grad is not None):",
        "            p.data -= p.grad.cpu().to_dense().to(p.device)",
    ),
    (),
    (
        "class Fused(torch.optim.Optimizer):  # self-scaling",
        "    _step_supports_amp_scaling = True",
        "    def step(self, *args, **kwargs):",
        "        print('received', getattr(self, 'grad_scale', None), getattr(self, 'found_inf', None))",
    ),
)


@dataclass
class Expected:
    """The model's state of one optimizer: its parameters, their gradients and layouts, and the calls of its step."""

    parameters: list[tuple[float, ...]]
    gradients: list[Gradient | None]
    layouts: list[str]
    calls: list[str] = field(default_factory=list)

    @property
    def present(self) -> list[Gradient]:
        return [gradient for gradient in self.gradients if gradient is not None]

    def keep(self, gradients: Iterable[Gradient]) -> None:
        """Replace the present gradients by `gradients`, in order."""
        following = iter(gradients)
        self.gradients = [None if gradient is None else next(following) for gradient in self.gradients]

    def subtract(self) -> None:
        # The difference of two numbers of p bits, rounded to fp64 and then to p bits, is correctly rounded if
        # 53 >= 2 p + 2 (Figueroa, "When is double rounding innocuous?", 1995); fp64 is not rounded again.
        for number, (values, gradient) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            if gradient is not None:
                pairs = zip(values, gradient.values, strict=True)
                self.parameters[number] = tuple(rounded(value - change, gradient.form) for value, change in pairs)


Factory: TypeAlias = Callable[..., Any]
"""Takes init_scale, growth_factor, backoff_factor, growth_interval and enabled by name; returns a scaler."""


class World:
    """A real scaler and the model, with three optimizers: an ordinary one, SGD, and a self-scaling one.

    Every method that returns a Twin is a call of a history. Known violations of torch's own documentation are left out
    (docs/divergences.md): gradients that overflow in unscaling, intervals below the current count, and the getters of
    disabled scalers.
    """

    def __init__(
        self, factory: Factory, device: torch.device, settings: dict[str, Any], without: frozenset[str] = frozenset()
    ) -> None:
        self.device = device
        self.without = without
        self.left_out: Counter[str] = Counter()
        self.played = 0
        self.program: list[str] = []
        settings = {name: self._within(name, value) for name, value in settings.items()}
        self.model = GradScalerModel(**settings)
        self.scaler = factory(**settings)
        named = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        self.program.append(f"scaler = factory({named})")
        self.parameters = [
            [torch.zeros(slot.shape, dtype=DTYPES[slot.form], device=device, requires_grad=True) for slot in slots]
            for slots in SLOTS
        ]
        self.optimizers = [
            kind([{"params": parameters[:split]}, {"params": parameters[split:]}])
            for kind, parameters, split in zip(KINDS, self.parameters, (3, 1, 2), strict=True)
        ]
        self.expected = [
            Expected([(0.0,) * slot.size for slot in slots], [None] * len(slots), ["dense"] * len(slots))
            for slots in SLOTS
        ]
        self.without_gradients: set[int] = set()  # the optimizers whose step() raised because they had none
        self.saved: tuple[Any, Any] | None = None
        self.other: tuple[Any, GradScalerModel] | None = None

    # Comparison

    def play(self, call: Call) -> list[Difference]:
        """Run one call and return the differences between the real scaler and the model after it.

        A call that needs a capability which the scaler lacks is skipped and counted; one whose effect is undocumented
        is skipped.
        """
        if self._undocumented(*call[:2]):
            return []
        if (lacks := self._lacks(call)) is not None:
            self.left_out[lacks] += 1
            return []
        self.played += 1
        name, *arguments = call
        real, model = getattr(self, name)(*arguments)
        pairs: list[tuple[str, Any, Any]] = [("the call", _outcome(real), _outcome(model))]
        if "intact_gradients" in self.without and name in ("unscale_", "step") and pairs[0][2] == "raises ValueError":
            self._accept_unscaled(arguments[0])
        seen, expected = self._state_of(self.scaler, real=True), self._state_of(self.model, real=False)
        if not self._tensors_agree():
            seen, expected = seen | self._real_tensors(), expected | self._model_tensors()
        pairs += [(what, seen[what], expected[what]) for what in expected]
        return [Difference(what, _said(one), str(two)) for what, one, two in pairs if one != two]

    def _state_of(self, scaler: Any, *, real: bool) -> dict[str, Any]:
        """Return the state of a scaler, and of the one that it was copied from, if any."""
        state: dict[str, Any] = _scaler_state(scaler, self.model.enabled, self.without)
        if self.other is not None:
            other, model = self.other
            state["the other scaler"] = _scaler_state(other if real else model, model.enabled, self.without)
        return state

    def _tensors_agree(self) -> bool:
        """Return whether every number has the bits of the model and all else is equal, much faster than as text.

        False also if a NaN has another payload: the comparison as text decides then.
        """
        each = zip(self.optimizers, self.parameters, self.expected, SLOTS, strict=True)
        for optimizer, parameters, expected, slots in each:
            if self._calls(optimizer.calls) != self._calls(expected.calls) or _left(optimizer):
                return False
            facts = zip(parameters, expected.parameters, expected.gradients, expected.layouts, slots, strict=True)
            for parameter, values, gradient, layout, slot in facts:
                if not _has_bits(parameter, values, slot.shape) or not _has_gradient(
                    parameter.grad, gradient, layout, slot
                ):
                    return False
        return True

    def _real_tensors(self) -> dict[str, Any]:
        """Return the tensors, calls and attributes of each optimizer."""
        state: dict[str, Any] = {}
        for what, optimizer, parameters in zip(_SEEN, self.optimizers, self.parameters, strict=True):
            state[what[0]] = [repr(parameter.tolist()) for parameter in parameters]
            state[what[1]] = [_gradient(parameter.grad) for parameter in parameters]
            state[what[2]] = self._calls(optimizer.calls)
            state[what[3]] = _left(optimizer)
        return state

    def _model_tensors(self) -> dict[str, Any]:
        """Return the same from the model."""
        state: dict[str, Any] = {}
        for what, expected, slots in zip(_SEEN, self.expected, SLOTS, strict=True):
            parameters = zip(expected.parameters, slots, strict=True)
            gradients = zip(expected.gradients, expected.layouts, slots, strict=True)
            state[what[0]] = [repr(_nested(values, slot.shape)) for values, slot in parameters]
            state[what[1]] = [None if one is None else _of_model(one, layout, slot) for one, layout, slot in gradients]
            state[what[2]] = self._calls(expected.calls)
            state[what[3]] = []
        return state

    def abstract(self) -> tuple[Any, ...]:
        """Return the state of the state machine without the tensors."""
        model = self.model
        stages = tuple((model.stage(which), model.found_inf(which)) for which in range(len(NAMES)))
        settings = (model.enabled, model.growth_factor, model.backoff_factor, model.growth_interval)
        return (model.started, model.get_scale(), model.get_growth_tracker(), settings, stages)

    def _calls(self, calls: list[str]) -> list[str]:
        """Return the calls of an optimizer's step, without their arguments if these are not compared."""
        return calls if "arguments" not in self.without else [f"step{call.rpartition('}')[2]}" for call in calls]

    # Calls

    def backward(self, gradients: Backward) -> Twin:
        if "sparse" in self.without and gradients.layout in ("sparse", "duplicates"):
            gradients = dataclasses.replace(gradients, layout="dense")
        if "fp16_refusal" in self.without:
            gradients = dataclasses.replace(gradients, narrow=False)
        if "bf16_gradients" in self.without:
            narrow = [number for number, slot in enumerate(SLOTS[gradients.which]) if slot.form is BF16]
            gradients = dataclasses.replace(gradients, absent=(*gradients.absent, *narrow))
        which = gradients.which
        values = gradients.gradients()
        self.expected[which].gradients = values
        self.expected[which].layouts = [
            gradients.layout if gradients.layout in fitting(slot) else "dense" for slot in SLOTS[which]
        ]
        self._assign(which)
        return _nothing, _nothing

    def zero_grad(self, which: int) -> Twin:
        self.program.append(f"{NAMES[which]}.zero_grad()")
        self.expected[which].gradients = [None] * len(SLOTS[which])
        self.optimizers[which].zero_grad()
        return _nothing, _nothing

    def change(self, which: int, base: float) -> Twin:
        """Replace the numbers of the present gradients, as clipping does."""
        expected = self.expected[which]
        expected.keep(
            Gradient(tuple(rounded(base * PATTERN[k % 4], old.form) for k in range(len(old.values))), old.form)
            for old in expected.present
        )
        self._assign(which)
        return _nothing, _nothing

    def scale(self, outputs: Any) -> Twin:
        self.program.append(f"scaler.scale({_spelled(outputs)})")
        tensors = _map(outputs, lambda output: _tensor_of(output, self.device))
        return (
            lambda: _map(self.scaler.scale(tensors), _seen_output),
            lambda: _map(self.model.scale(outputs), _expected_output),
        )

    def unscale_(self, which: int) -> Twin:
        self._avoid_overflow(which)
        self.program.append(f"scaler.unscale_({NAMES[which]})")
        expected = self.expected[which]

        def model() -> None:
            expected.keep(self._as_seen(which, self.model.unscale_(which, expected.present)))

        return lambda: self.scaler.unscale_(self.optimizers[which]), model

    def step(self, which: int, arguments: tuple[Any, ...] = (), keywords: tuple[tuple[str, Any], ...] = ()) -> Twin:
        named = dict(keywords)
        if which != FUSED:
            self._avoid_overflow(which)
        words = [NAMES[which], *map(repr, arguments), *(f"{name}={value!r}" for name, value in named.items())]
        self.program.append(f"scaler.step({', '.join(words)})")
        expected = self.expected[which]

        def model() -> Any:
            step = self.model.step(which, expected.present, unscales=which == FUSED, closure="closure" in named)
            expected.keep(self._as_seen(which, step.gradients))
            if not step.ran:
                return None
            received = ""
            flag = 0.0
            if which == FUSED:
                scale, flag = step.received if step.received is not None else (None, None)  # type: ignore[assignment]
                received = f" with scale {scale} and flag {flag}"
            expected.calls.append(f"step{arguments}{named}{received}")
            if not flag:
                expected.subtract()
            return None if which == SGD else len(expected.calls)

        def real() -> Any:
            return self.scaler.step(self.optimizers[which], *arguments, **named)

        if "return_values" in self.without:
            return lambda: real() and None, lambda: model() and None
        return real, model

    def update(self) -> Twin:
        self.program.append("scaler.update()")

        def model() -> None:
            before = self.model.get_scale()
            self.model.update()
            self._accept_narrow_factors(before)

        return self.scaler.update, model

    def update_to(self, scale: float) -> Twin:
        self.program.append(f"scaler.update({scale!r})")
        return lambda: self.scaler.update(scale), lambda: self.model.update(scale)

    def update_to_tensor(self, new_scale: NewScale) -> Twin:
        numbers = new_scale.values[0] if len(new_scale.values) == 1 else new_scale.values
        tensor = torch.tensor(numbers, device=self.device, requires_grad=new_scale.requires_grad)
        wants = ", requires_grad=True" if new_scale.requires_grad else ""
        self.program.append(f"scaler.update(torch.tensor({numbers!r}{wants}))")

        def real() -> None:
            self.scaler.update(tensor)
            # The scale is a copy: a later change of the tensor has no effect.
            tensor.detach().fill_(7.0)

        return real, lambda: self.model.update(new_scale)

    def set_growth_factor(self, factor: float) -> Twin:
        return self._set("growth_factor", factor)

    def set_backoff_factor(self, factor: float) -> Twin:
        return self._set("backoff_factor", factor)

    def set_growth_interval(self, interval: int) -> Twin:
        return self._set("growth_interval", max(interval, self.model.get_growth_tracker() + 1))

    def save(self) -> Twin:
        self.program.append("state = scaler.state_dict()")

        def real() -> None:
            self.saved = (self.scaler.state_dict(), self.model.state_dict())

        return real, _nothing

    def load(self) -> Twin:
        """Load the state that was saved last, if any."""
        if self.saved is None or (self.model.enabled and not self.saved[1]):
            return _nothing, _nothing
        self.program.append("scaler.load_state_dict(state)")
        real, model = self.saved
        return lambda: self.scaler.load_state_dict(dict(real)), lambda: self.model.load_state_dict(dict(model))

    def load_state(self, scale: float, interval: int, tracker: int) -> Twin:
        """Load the state of another scaler."""
        state = {
            "scale": scale, "growth_factor": 4.0, "backoff_factor": 0.25,
            "growth_interval": interval, "_growth_tracker": tracker % interval,
        }  # fmt: skip
        self.program.append(f"scaler.load_state_dict({state})")
        return lambda: self.scaler.load_state_dict(dict(state)), lambda: self.model.load_state_dict(dict(state))

    def load_nothing(self) -> Twin:
        self.program.append("scaler.load_state_dict({})")
        return lambda: self.scaler.load_state_dict({}), lambda: self.model.load_state_dict({})

    def pickle(self) -> Twin:
        self.program.append("other, scaler = scaler, pickle.loads(pickle.dumps(scaler))")
        return self._duplicate(lambda scaler: pickle.loads(pickle.dumps(scaler)))

    def deepcopy(self) -> Twin:
        self.program.append("other, scaler = scaler, copy.deepcopy(scaler)")
        return self._duplicate(copy.deepcopy)

    def switch(self) -> Twin:
        """Continue with the scaler that was copied last, if any, which must be independent."""
        if self.other is not None:
            self.program.append("other, scaler = scaler, other")
            other = (self.scaler, self.model)
            self.scaler, self.model = self.other
            self.other = other
        return _nothing, _nothing

    # Implementation

    def _undocumented(self, name: str, which: Any = None) -> bool:
        """Return whether the effect of a call is undocumented.

        That is a copy within an iteration (only pickling is documented); a self-scaling optimizer without gradients;
        and an optimizer that had no gradients when it was checked in this iteration: gradients that it got since, and
        unscale_ after its step() raised.
        """
        if name not in ("unscale_", "step"):
            return name == "deepcopy" and self.model.within_iteration
        present = bool(self.expected[which].present)
        if which == FUSED and not present:
            return True
        unchecked = self.model.stage(which) is Stage.UNSCALED and self.model.found_inf(which) is None
        refused = unchecked and which in self.without_gradients
        if name == "step" and not present:
            self.without_gradients.add(which)
        elif not unchecked:
            self.without_gradients.discard(which)
        return unchecked and (present or (refused and name == "unscale_"))

    def _lacks(self, call: Call) -> str | None:
        """Return a capability that the scaler lacks and the call needs, its effects included; None if there is none."""
        if not self.without or (lacks := lacking(call, self.without)) is not None:
            return lacks if self.without else None
        name, *arguments = call
        if "no_gradients" in self.without and name in ("unscale_", "step") and not self.expected[arguments[0]].present:
            return "no_gradients"
        if name == "update" and "extremes" in self.without:
            ahead = copy.deepcopy(self.model)
            with contextlib.suppress(AssertionError):
                ahead.update()
            if not MODERATE[0] <= ahead.get_scale() <= MODERATE[1]:
                return "extremes"
        return "errors" if "errors" in self.without and self._refused(name, arguments) else None

    def _refused(self, name: str, arguments: list[Any]) -> bool:
        """Return whether the model would raise."""
        ahead = copy.deepcopy(self.model)
        gradients = self.expected[arguments[0]].present if name in ("unscale_", "step") else []
        attempts: dict[str, Callable[[], Any]] = {
            "scale": lambda: ahead.scale(*arguments),
            "unscale_": lambda: ahead.unscale_(arguments[0], gradients),
            "step": lambda: ahead.step(arguments[0], gradients, unscales=arguments[0] == FUSED),
            "update": ahead.update,
            "update_to": lambda: ahead.update(*arguments),
            "update_to_tensor": lambda: ahead.update(*arguments),
            "load_nothing": lambda: ahead.load_state_dict({}),
            "pickle": ahead.copy,
            "deepcopy": ahead.copy,
        }
        try:
            attempts.get(name, _nothing)()
        except (AssertionError, RuntimeError, ValueError):
            return True
        return False

    def _within(self, name: str, value: Any) -> Any:
        """Return the setting within the scaler's capabilities: moderate scales."""
        if name == "init_scale" and "extremes" in self.without:
            return min(max(value, 2.0**-20), 2.0**20)
        return value

    def _assign(self, which: int) -> None:
        """Set the gradients of the real parameters to those of the model."""
        expected = self.expected[which]
        self.program.append(f"{NAMES[which]}.zero_grad()")
        for number, (slot, gradient, layout, parameter) in enumerate(
            zip(SLOTS[which], expected.gradients, expected.layouts, self.parameters[which], strict=True)
        ):
            parameter.grad = None if gradient is None else tensor_of(gradient, slot, layout, self.device)
            if gradient is not None:
                self.program.append(f"{NAMES[which]}_p[{number}].grad = {spelled(gradient, slot, layout)}")

    def _avoid_overflow(self, which: int) -> None:
        """Insert an inf if a finite gradient overflows in unscaling and nothing else skips the step (AMP-SCALE-030)."""
        model, expected = self.model, self.expected[which]
        if not (model.enabled and model.started) or model.stage(which) is not Stage.READY:
            return
        gradients, found = check_and_unscale(expected.present, 0.0, reciprocal(model.get_scale()))
        if found or all(math.isfinite(value) for gradient in gradients for value in gradient.values):
            return
        expected.gradients = with_bad(expected.gradients, math.inf, 0)
        self._assign(which)

    def _accept_narrow_factors(self, before: float) -> None:
        """Expect the product with a factor that was rounded to fp32, as the scale is: how wide it is, nothing says."""
        for factor in (self.model.growth_factor, self.model.backoff_factor):
            narrow = rounded(before * rounded(factor, FP32), FP32)
            if self.model.get_scale() == rounded(before * factor, FP32) != narrow == _got(self.scaler, "get_scale"):
                self.model.update(narrow)
                return

    def _as_seen(self, which: int, after: list[Gradient]) -> list[Gradient]:
        """Expect the quotients of the present gradients, which are promised, where they are not torch's products."""
        expected = self.expected[which]
        if after == expected.present:
            return after
        scale, following, found = self.model.get_scale(), iter(after), []
        facts = zip(SLOTS[which], expected.gradients, expected.layouts, self.parameters[which], strict=True)
        for slot, gradient, layout, parameter in facts:
            if gradient is not None:
                product = next(following)
                ways = (one for one in unscalings(gradient, scale) if _has_gradient(parameter.grad, one, layout, slot))
                found.append(next(ways, product))
        return found

    def _accept_unscaled(self, which: int) -> None:
        """Expect of each gradient what it is, if a call that was refused for another one's type has unscaled it."""
        expected = self.expected[which]
        facts = zip(SLOTS[which], expected.gradients, expected.layouts, self.parameters[which], strict=True)
        for number, (slot, gradient, layout, parameter) in enumerate(facts):
            if gradient is None or _gradient(parameter.grad) == _of_model(gradient, layout, slot):
                continue
            for one in unscalings(gradient, self.model.get_scale()):
                if _gradient(parameter.grad) == _of_model(one, layout, slot):
                    expected.gradients[number] = one

    def _set(self, name: str, value: float) -> Twin:
        value = self._within(name, value)
        self.program.append(f"scaler.set_{name}({value!r})")
        return lambda: getattr(self.scaler, f"set_{name}")(value), lambda: setattr(self.model, name, value)

    def _duplicate(self, duplicate: Callable[[Any], Any]) -> Twin:
        real_before, model_before = self.scaler, self.model
        # It is undocumented whether the copy of a scaler in use must scale before its other calls.
        again = model_before.enabled and model_before.started
        self.program += ["scaler.scale(torch.tensor(1.0))"] * again

        def real() -> None:
            self.scaler = duplicate(real_before)
            if again:
                self.scaler.scale(torch.ones((), device=self.device))

        def model() -> None:
            self.model = model_before.copy()
            if again:
                self.model.scale(Output(1.0))
            self.other = (real_before, model_before)

        return real, model


Twin: TypeAlias = tuple[Callable[[], Any], Callable[[], Any]]
"""The same call for the real scaler and for the model."""


def mismatch(
    factory: Factory,
    device: torch.device,
    settings: dict[str, Any],
    calls: Iterable[Call],
    without: frozenset[str] = frozenset(),
) -> Mismatch | None:
    """Run a history on a scaler of `factory` and on the model; return the first mismatch, if any."""
    with quiet():
        world = World(factory, device, settings, without)
        played: list[Call] = []
        for call in calls:
            played.append(call)
            if differences := world.play(call):
                return Mismatch(tuple(played), tuple(world.program), tuple(differences))
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of the scaler and of sparse tensors, which other contracts check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _nothing() -> None:
    return None


class _Raised(str):
    """The type of an exception, by which outcomes are compared, with its message, which is shown."""

    message: str


def _raised(name: str, error: Exception) -> _Raised:
    made = _Raised(f"raises {name}")
    made.message = (str(error).strip().splitlines() or [""])[0]
    return made


def _said(outcome: Any) -> str:
    message = getattr(outcome, "message", "")
    return f"{outcome}: {message}" if message else str(outcome)


def _outcome(call: Callable[[], Any]) -> str:
    """Return the result of the call, or the type of its exception, as text, in which NaN equals NaN."""
    try:
        return f"returns {call()!r}"
    except Exception as error:
        for documented in (AssertionError, RuntimeError, ValueError):
            if isinstance(error, documented):
                return _raised(documented.__name__, error)
        return f"raises {type(error).__name__}: {error}"


def _scaler_state(scaler: Any, enabled: bool, without: frozenset[str]) -> dict[str, str]:
    """Return the state of a scaler, the real one or the model."""
    real = not isinstance(scaler, GradScalerModel)
    state = {"get_scale()": _result(lambda: scaler.get_scale())}
    if "is_enabled" not in without:
        state["is_enabled()"] = _result(lambda: scaler.is_enabled()) if real else repr(scaler.enabled)
    if "state" not in without:
        state["state_dict()"] = _result(lambda: _entries(scaler.state_dict()))
    for name in _GETTERS if enabled and "getters" not in without else ():
        state[f"get_{name}()"] = _result(partial(_got, scaler, f"get_{name}" if real else name))
    return state


def _entries(state: Any) -> Any:
    """Return the entries of a state in one order: the documentation promises a dict, not its order or its subclass."""
    return {name: state[name] for name in sorted(state)} if isinstance(state, dict) else state


def _result(ask: Callable[[], Any]) -> str:
    return _outcome(ask).removeprefix("returns ")


_GETTERS = ("growth_factor", "backoff_factor", "growth_interval")


def _got(scaler: Any, name: str) -> Any:
    found = getattr(scaler, name)
    return found() if callable(found) else found


_SEEN = tuple(
    (f"parameters of {name}", f"gradients of {name}", f"calls of {name}.step", f"attributes left on {name}")
    for name in NAMES
)


def _left(optimizer: Any) -> list[str]:
    """Return the attributes that a scaler left on a self-scaling optimizer."""
    return [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]


def _has_bits(tensor: torch.Tensor, values: tuple[float, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has that shape and those numbers, including the signs of zeros."""
    if tensor.shape != shape:
        return False
    numbers = tensor.tolist()
    if len(shape) != 1:
        numbers = [number for row in numbers for number in row] if shape else [numbers]
    return array("d", numbers).tobytes() == array("d", values).tobytes()


def _has_gradient(seen: torch.Tensor | None, expected: Gradient | None, layout: str, slot: Slot) -> bool:
    if seen is None or expected is None:
        return seen is expected
    if seen.is_sparse or layout in ("sparse", "duplicates"):
        return _gradient(seen) == _of_model(expected, layout, slot)
    return FORM_NAMES.get(seen.dtype) == expected.form.name and _has_bits(seen, expected.values, slot.shape)


def _gradient(gradient: torch.Tensor | None) -> str | None:
    if gradient is None:
        return None
    if not gradient.is_sparse:
        return f"{FORM_NAMES.get(gradient.dtype)} {gradient.tolist()!r}"
    # A sparse gradient may be replaced by a coalesced one, so the sums are compared.
    return f"{FORM_NAMES.get(gradient.dtype)} sparse {_sums(as_dense(gradient).tolist())}"


def _of_model(gradient: Gradient, layout: str, slot: Slot) -> str:
    if layout in ("sparse", "duplicates"):
        return f"{gradient.form.name} sparse {_sums(gradient.values)}"
    return f"{gradient.form.name} {_nested(gradient.values, slot.shape)!r}"


def _nested(values: tuple[float, ...], shape: tuple[int, ...]) -> Any:
    """Return the numbers as tolist() does: nested by shape, one number for shape ()."""
    if len(shape) < 2:
        return list(values) if shape else values[0]
    rows = len(values) // shape[0]
    return [_nested(values[start : start + rows], shape[1:]) for start in range(0, len(values), rows)]


def _sums(values: Iterable[float]) -> str:
    """Return sums with zero as text: no zero is negative, and infinity may be NaN (zero times infinity)."""
    return repr(tuple(value + 0.0 if math.isfinite(value) else math.nan for value in values))


def _map(outputs: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_map(output, change) for output in outputs)
    return change(outputs)


def _tensor_of(output: Any, device: torch.device) -> Any:
    if not isinstance(output, Output):
        return output
    return torch.full((1,) * output.dimensions, output.value, dtype=DTYPES[output.form], device=device)


def _seen_output(output: Any) -> str:
    if not isinstance(output, torch.Tensor):
        return repr(output)
    return f"{FORM_NAMES.get(output.dtype)} {output.detach().flatten().tolist()[0]!r} of {output.dim()} dimensions"


def _expected_output(output: Any) -> str:
    if not isinstance(output, Output):
        return repr(output)
    return f"{output.form.name} {output.value!r} of {output.dimensions} dimensions"


def _spelled(outputs: Any) -> str:
    if isinstance(outputs, Output):
        number = f"[{outputs.value!r}]" if outputs.dimensions else repr(outputs.value)
        spelled = "" if outputs.form is FP32 else f", dtype={DTYPES[outputs.form]}"
        return f"torch.tensor({number}{spelled})"
    if isinstance(outputs, list):
        return f"[{', '.join(map(_spelled, outputs))}]"
    if isinstance(outputs, tuple):
        return f"({', '.join(map(_spelled, outputs))},)"
    return repr(outputs)
