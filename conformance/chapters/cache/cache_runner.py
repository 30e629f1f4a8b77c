"""Run a program on torch and on the weight-cache model; report the first difference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...oracles.trace.ops import Conversion, OpTrace, identity
from .cache_model import FLOATS, MODES, UPDATES, CacheModel, Setting, Step, Use, WeightSpec, called

SIDE = 4  # of the square weights


class CachePlayer:
    """Run programs on tensors of `device`; `region` opens a region of the model's settings.

    Fake tensors cannot be used without their hardware: autograd queries the driver for the stream of a leaf.
    """

    def __init__(
        self,
        device: torch.device,
        region: Callable[[Setting], AbstractContextManager[Any]],
        kinds: Sequence[WeightSpec],
    ) -> None:
        self.kinds = kinds
        self.uses = 0
        self.casts = 0
        self.device = device
        self._region = region
        numbers = torch.arange(float(3 * SIDE)).reshape(3, SIDE) % 7 - 3
        # Small integers: products, sums and gradients of them are exact in every type.
        self._features = {dtype: numbers.to(device=device, dtype=dtype) for dtype in FLOATS}
        self._square = {
            dtype: (torch.arange(float(SIDE * SIDE)).reshape(SIDE, SIDE) % 5 - 2).to(device=device, dtype=dtype)
            for dtype in FLOATS
        }
        # Of the sum of linear's result by its weight: in each row the sums of the features.
        self.slopes = {dtype: features.sum(0).expand(SIDE, SIDE) for dtype, features in self._features.items()}

    def mismatch(self, steps: Sequence[Step]) -> str | None:
        """Run the steps; return the first difference of torch from the model, or None."""
        return _Play(self, steps).run()

    def script(self, steps: Sequence[Step]) -> str:
        """Return the legal steps as Python, each use with its predicted casts."""
        model, used = CacheModel(self.kinds), sorted({step.weight for step in steps})
        lines = [
            "import torch",
            "from torch.nn.functional import linear, mse_loss",
            *(self._spelt(number) for number in used),
        ]
        for step in steps:
            if not model.legal(step):
                continue
            if step.op in ("leave", "raise") and lines[-1].endswith(":"):
                lines.append("    " * model.depth + "pass")
            indent = "    " * model.depth
            partner = model.partner(step)
            use = model.take(step)
            casts = "" if use is None else f"  # casts {_listed(use.casts)}"
            lines += [f"{indent}{line}{casts}" for line in step.lines(self.device.type, partner)]
        return "\n".join([*lines, "    " * model.depth + "pass"] if lines[-1].endswith(":") else lines)

    def _spelt(self, number: int) -> str:
        kind = self.kinds[number]
        tensor = f"torch.ones(4, 4, device={self.device.type!r}, dtype={kind.dtype})"
        if kind.view:
            tensor = tensor.replace("(4, 4", "(8, 4") + ".narrow(0, 0, 4)"
        if kind.parameter:
            return f"w{number} = torch.nn.Parameter({tensor}, {kind.requires_grad})"
        return f"w{number} = {tensor}.requires_grad_({kind.requires_grad})"

    def made(self, number: int) -> torch.Tensor:
        """Create the weight of that number, different from the others."""
        kind = self.kinds[number]
        values = (self._square[torch.float32] + number).to(kind.dtype)
        if kind.view:
            values = torch.cat([values, values]).narrow(0, 0, SIDE)
        if kind.parameter:
            return torch.nn.Parameter(values, kind.requires_grad)
        return values.requires_grad_(kind.requires_grad)

    def other(self, function: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the other argument of a function: (3, 4) for linear, else of the weight's shape."""
        return (self._features if function == "linear" else self._square)[dtype]


@dataclass(frozen=True)
class Place:
    """A step of a program, with the dtype of the other tensor that it uses, and its name in messages."""

    number: int
    step: Step
    device_type: str
    partner: torch.dtype

    def __str__(self) -> str:
        return f"at step {self.number}, {self.step.describe(self.device_type, self.partner)}"


class _Play:
    def __init__(self, player: CachePlayer, steps: Sequence[Step]) -> None:
        self._player = player
        self._steps = steps
        self._model = CacheModel(player.kinds)
        self._weights = [player.made(number) for number in range(len(player.kinds))]
        self._contents = {
            (weight.identity, 0): tensor.detach().clone()
            for weight, tensor in zip(self._model.weights, self._weights, strict=True)
        }
        self._open: list[AbstractContextManager[Any]] = []
        self._outputs: list[tuple[Place, Use, int, torch.Tensor, torch.Tensor]] = []
        self._trace = OpTrace()
        self._casts: list[Conversion] = []  # of the weights and their partners, those that something may still hold

    def run(self) -> str | None:
        with self._trace:
            try:
                found = self._all() or self._closed()
            finally:
                # Before the trace ends: inference mode restores the modes of its entry.
                while self._open:
                    self._open.pop().__exit__(None, None, None)
        return found or self._wrong_value()

    def _all(self) -> str | None:
        for number, step in enumerate(self._steps):
            if not self._model.legal(step):
                continue
            place = Place(number, step, self._player.device.type, self._model.partner(step))
            if found := self._take(place):
                return f"{place}: {found}"
        return None

    def _closed(self) -> str | None:
        while self._open:
            self._open.pop().__exit__(None, None, None)
            self._model.take(Step("leave"))
        found = self._held()
        return f"after the last region: {found}" if found else None

    def _take(self, place: Place) -> str | None:
        step = place.step
        if step.op == "use":
            use = self._model.take(step)
            assert use is not None
            return self._use(place, use, self._player.other(step.function, place.partner)) or self._held()
        self._do(step)
        self._model.take(step)
        weight = self._model.weights[step.weight]
        if step.op in ("update", "retype", "replace"):
            with torch.inference_mode(False):
                content = self._weights[step.weight].detach().clone()
            self._contents[weight.identity, weight.content] = content
        return self._held()

    def _held(self) -> str | None:
        """Return a difference of the casts that are alive from those in the model's cache, or None."""
        self._casts = [cast for cast in self._casts if cast.result() is not None]
        held, promised = [cast.target for cast in self._casts], [kept.dtype for kept in self._model.kept.values()]
        if held == promised or sorted(map(str, held)) == sorted(map(str, promised)):
            return None
        return f"casts to {held} are held, not to {promised}"

    def _use(self, place: Place, use: Use, other: torch.Tensor) -> str | None:
        step = place.step
        weight = self._weights[step.weight]
        formed = {
            "itself": lambda: weight,
            "t()": weight.t,
            "view(4, 4)": lambda: weight.view(SIDE, SIDE),
            "* 1": lambda: weight * 1,
            "detach()": weight.detach,
        }[step.form]()
        names = {identity(formed): called(step.weight, step.form), identity(other): "x"}
        self._trace.ops.clear()
        try:
            output = _CALLS[step.function](other, formed)
        except RuntimeError as error:
            return f"it raises {error}"
        casts = [cast for cast in self._trace.conversions if cast.tensor in names]
        self._casts += casts
        seen = tuple(sorted(((names[cast.tensor], cast.target) for cast in casts), key=str))
        self._player.uses += 1
        self._player.casts += len(seen)
        if seen != use.casts:
            return f"it casts {_listed(seen)}, not {_listed(use.casts)}"
        if output.requires_grad != use.requires_grad:
            return f"requires_grad of its result is {output.requires_grad}, not {use.requires_grad}"
        if output.dtype != use.dtype:
            return f"its result is in {output.dtype}, not in {use.dtype}"
        with torch.inference_mode(False):
            owner = self._model.weights[step.weight].identity
            self._outputs.append((place, use, owner, output.detach().clone(), other))
        if output.requires_grad and step.function == "linear":
            return self._wrong_gradient(step, weight, output, self._player.slopes[other.dtype])
        return None

    def _wrong_gradient(
        self, step: Step, weight: torch.Tensor, output: torch.Tensor, slope: torch.Tensor
    ) -> str | None:
        output.backward(torch.ones_like(output))
        gradient, weight.grad = weight.grad, None
        promised = (slope.t() if step.form == "t()" else slope).to(weight.dtype)
        if gradient is None:
            return "the gradient does not reach the weight"
        if gradient.dtype == promised.dtype and torch.equal(gradient, promised):
            return None
        return f"the gradient is {gradient.tolist()} in {gradient.dtype}, not {promised.tolist()}"

    def _wrong_value(self) -> str | None:
        """Compare each result with that of manual casts, after all regions have ended."""
        for place, use, owner, output, other in self._outputs:
            content = self._contents[owner, use.content].to(use.dtype)
            transposed = content.t() if place.step.form == "t()" else content
            manual = _CALLS[place.step.function](other.to(use.dtype), transposed)
            if output.dtype != manual.dtype or not torch.equal(output, manual):
                return f"{place}: the result is {output.tolist()}, not {manual.tolist()}"
        return None

    def _do(self, step: Step) -> None:
        if step.op == "enter":
            self._push(self._player._region(step.setting))
        elif step.op == "mode":
            self._push(getattr(torch, MODES[step.choice % len(MODES)])())
        elif step.op == "leave":
            self._open.pop().__exit__(None, None, None)
        elif step.op == "raise":
            error = ValueError()
            with contextlib.suppress(ValueError):
                self._open.pop().__exit__(ValueError, error, None)
        elif step.op == "clear":
            torch.clear_autocast_cache()
        else:
            with torch.inference_mode(False), torch.no_grad():
                self._change(step, self._weights[step.weight])

    def _push(self, block: AbstractContextManager[Any]) -> None:
        block.__enter__()
        self._open.append(block)

    def _change(self, step: Step, weight: torch.Tensor) -> None:
        if step.op == "freeze":
            weight.requires_grad_(bool(step.choice % 2))
        elif step.op == "retype":
            weight.data = weight.data.to(FLOATS[step.choice % len(FLOATS)])
        elif step.op == "replace":
            self._weights[step.weight] = self._player.made(step.weight)
        else:
            _UPDATES[UPDATES[step.choice % len(UPDATES)]](weight)


def _listed(casts: Sequence[tuple[str, torch.dtype]]) -> str:
    return ", ".join(f"{name} to {str(dtype).removeprefix('torch.')}" for name, dtype in casts) or "nothing"


def _step_of_an_optimizer(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def _new_data(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


_UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda weight: weight.add_(1),
    "copy_": lambda weight: weight.copy_(weight.flip(0)),
    "data": _new_data,
    "optimizer": _step_of_an_optimizer,
}
_CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda other, weight: torch.nn.functional.linear(other, weight),
    "mse_loss": lambda other, weight: torch.nn.functional.mse_loss(weight, other),
    "cat": lambda other, weight: torch.cat([weight, other]),
    "tensordot": lambda other, weight: torch.tensordot(weight, other, 1),
}
