"""Load a user's workload named `module:function` and validate it by the protocol before anything is judged.

The function takes the torch.device to build on and returns a dict: `model` (a torch.nn.Module), `optimizer` (a
torch.optim.Optimizer over its parameters, or several), `loss` (a callable of output and target that gives a scalar
tensor), `batches` (pairs of inputs and target; a tuple of inputs is passed by position, a dict by keyword) and, as the
user's loop has them, the keys of OPTIONAL. It is called anew for each run, with the generators of torch, of Python's
`random` and of numpy seeded before.
See docs/own-workloads.md.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import itertools
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..measure.generators import seed_torch
from ..measure.pending import run_pending
from .training import Workload, train_step

Function = Callable[[torch.device], object]

REQUIRED = ("model", "optimizer", "loss", "batches")
OPTIONAL = ("clip", "accumulate", "scheduler", "after_step", "scaler", "autocast")
SCALER_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
AUTOCAST_SETTINGS = ("dtype", "cache_enabled")
MOST_BATCHES = 64
"""As many batches are taken; a data loader may have any number."""
TRIED = 0.1
"""The share of the time limit in which batches are tried before anything is judged; only those tried are used."""
_SLOW_START = 2.0
"""A first step that takes so many times as long as the second is timed again, in a run of its own."""
_SAME_LOSS = 0.01
"""Two losses of the same weights and batch differ by less, relative, whatever the order of the sums."""


# What stands between the suite and the user's code in a traceback: the suite, torch and Python itself.
_NOT_THE_USERS = (
    str(Path(__file__).parent.parent),
    str(Path(torch.__file__).parent),
    str(Path(importlib.__file__).parent),
    "<frozen ",
)


class OwnError(ValueError):
    """The user's workload cannot be used; the message is one line that says why."""


class Called(torch.nn.Module):
    """A model that takes its inputs as one argument: a tensor, a tuple by position, a dict by keyword."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        # Not a named tuple, such as a PackedSequence: that is one input.
        return self.model(*inputs) if type(inputs) in (tuple, list) else self.model(inputs)


@dataclass(frozen=True)
class Own:
    """What the user's function built on one device."""

    device: torch.device
    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    loss: Callable[[Any, Any], torch.Tensor]
    batches: list[tuple[Any, Any]]
    clip: float | None = None
    accumulate: int = 1
    after: Callable[[], None] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of GradScaler."""
    autocast: Mapping[str, Any] = field(default_factory=dict)
    """The settings of torch.autocast but its dtype."""
    dtype: torch.dtype | None = None
    """The only autocast dtype of the workload, where it has one."""

    def workload(self) -> Workload:
        """Return the workload in the form that the suite's loops train."""
        return Workload(
            Called(self.model),
            self.optimizers[0],
            self.loss,
            self.batches,
            self.clip,
            self.optimizers[1:],
            self.accumulate,
            self.after,
        )

    def loop(self) -> dict[str, Any]:
        """Return what the loop does besides the documented one's steps, as arguments of measure.nonfinite.trace."""
        return {
            "clip": self.clip,
            "others": self.optimizers[1:],
            "accumulate": self.accumulate,
            "after": self.after,
            "scaler": self.settings,
            "autocast": self.autocast,
        }

    def region(self, dtype: torch.dtype | None) -> AbstractContextManager[object]:
        """Return an autocast region of `dtype` with the user's settings; one of fp32 is no region."""
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype, **self.autocast)

    def scaler(self, dtype: torch.dtype | None, **settings: Any) -> torch.amp.GradScaler:
        """Return a GradScaler with the user's settings and, before those, `settings`; disabled but for fp16."""
        return torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16, **{**self.settings, **settings})


@dataclass(frozen=True)
class Pace:
    """Seconds of a call of the user's function, of the first step after it and of a later step."""

    build: float
    first: float
    step: float

    def run(self, steps: int) -> float:
        """Return the seconds of one run of `steps` steps, from the call of the function on."""
        return self.build + self.first + max(0, steps - 1) * self.step


@dataclass(frozen=True)
class Builder:
    """Builds the user's workload, the same each time for the same device and seed.

    What was measured of it on the way is kept: paces by device and dtype (None: fp32), how many batches were tried, and
    what a region raises.
    """

    name: str
    function: Function
    paces: dict[tuple[torch.device, torch.dtype | None], Pace] = field(default_factory=dict)
    tried: dict[torch.device, int] = field(default_factory=dict)
    only: dict[torch.device, torch.dtype | None] = field(default_factory=dict)
    _raised: dict[tuple[torch.device, torch.dtype], str] = field(default_factory=dict)

    def build(self, device: torch.device, seed: int = 0) -> Own:
        """Seed all generators, and call the function; raises OwnError where it breaks the protocol."""
        seed_all(seed)
        return build(self.function, device, self.tried.get(device, MOST_BATCHES))

    def raises(self, device: torch.device, dtype: torch.dtype, seconds: float = math.inf) -> str:
        """Try two steps in a region of `dtype`, once a run; return what they raise in one line, or nothing.

        A first step that was slow is not timed again where the trial has taken `seconds`.
        """
        if (device, dtype) not in self._raised:
            self._raised[device, dtype] = self._tried_in_region(device, dtype, time.monotonic() + seconds)
        return self._raised[device, dtype]

    def _tried_in_region(self, device: torch.device, dtype: torch.dtype, until: float) -> str:
        # What is loaded once makes the first steps of a process slow; what each run pays for shows the second time.
        for last in (False, True):
            seconds, own = self._timed_build(device)
            work, scaler, taken = own.workload(), own.scaler(dtype), []
            for number in range(2):
                began = time.monotonic()
                try:
                    train_step(work, number, functools.partial(own.region, dtype), scaler).item()
                except Exception as error:
                    return f"the model raises in the region, which AMP-REGION-100 judges: {told(error)}"
                taken.append(time.monotonic() - began)
            self.paces[device, dtype] = Pace(seconds, *taken)
            if last or taken[0] < _SLOW_START * taken[1] or time.monotonic() > until:
                break
        return ""

    def _timed_build(self, device: torch.device) -> tuple[float, Own]:
        began = time.monotonic()
        own = self.build(device)
        return time.monotonic() - began, own

    def repeats(self, device: torch.device, seed: int, other: int) -> bool:
        """Return whether two seeds give the same weights and the same batches."""
        ours, theirs = self.build(device, seed), self.build(device, other)
        return _same(list(ours.model.parameters()), list(theirs.model.parameters())) and _same(
            ours.batches, theirs.batches
        )


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, of Python and, where it is loaded, of numpy."""
    random.seed(seed)
    seed_torch(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def load(name: str, folder: Path | None = None) -> Function:
    """Import what `module:function` names, from `folder` (the current one) or the path; raises OwnError.

    The module may be a file as well: `models/mine.py:build`.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise OwnError("name it as module:function or file.py:function")
    module = _module(place, Path.cwd() if folder is None else folder)
    found = getattr(module, function, None)
    if found is None:
        near = difflib.get_close_matches(function, vars(module), n=1)
        hint = f"; did you mean {near[0]}" if near else ""
        raise OwnError(f"{place} has no {function}{hint}")
    if not callable(found):
        raise OwnError(f"{function} is a {type(found).__name__}, not a function of the device")
    made: Function = found
    return made


def _module(place: str, folder: Path) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _file(folder / place)
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        return importlib.import_module(place)
    # What the user's module raises, SystemExit among it, is theirs; only the user's own interrupt goes on.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnError(f"{place} cannot be imported: {told(error)}") from None


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # Under a name of its own: a file may be called as a module that torch needs.
    name = f"workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def build(function: Function, device: torch.device, most: int = MOST_BATCHES) -> Own:
    """Call the user's function and hold what it returns to the protocol; raises OwnError."""
    try:
        given = function(device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnError(f"the function raised {told(error)}") from None
    if not isinstance(given, Mapping):
        keys = ", ".join(REQUIRED)
        raise OwnError(f"the function returned a {type(given).__name__}; it must return a dict with {keys}")
    if missing := [key for key in REQUIRED if key not in given]:
        raise OwnError(f"the function's dict lacks {', '.join(missing)}")
    if unknown := [key for key in given if key not in (*REQUIRED, *OPTIONAL)]:
        known = ", ".join((*REQUIRED, *OPTIONAL))
        raise OwnError(f"the function's dict has an unknown key {unknown[0]!r}; there are {known}")
    model, loss, clip = given["model"], given["loss"], given.get("clip")
    if not isinstance(model, torch.nn.Module):
        raise OwnError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    optimizers = _several(given["optimizer"])
    for optimizer in optimizers or (None,):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OwnError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not callable(loss):
        raise OwnError(f"loss is a {type(loss).__name__}, not a function of output and target")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0):
        raise OwnError(f"clip is {clip!r}, not a positive number")
    accumulate = given.get("accumulate", 1)
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise OwnError(f"accumulate is {accumulate!r}, not a number of batches")
    _check_parameters(model, optimizers, device)
    autocast = _settings(given, "autocast", AUTOCAST_SETTINGS)
    return Own(
        device,
        model,
        optimizers,
        loss,
        list(_batches(given["batches"], device, most)),
        None if clip is None else float(clip),
        accumulate,
        _after(given),
        _scaler_settings(given),
        {name: value for name, value in autocast.items() if name != "dtype"},
        _own_dtype(autocast),
    )


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _settings(given: Mapping[str, Any], key: str, known: tuple[str, ...]) -> dict[str, Any]:
    settings = given.get(key, {})
    if not isinstance(settings, Mapping):
        raise OwnError(f"{key} is a {type(settings).__name__}; give its settings as a dict with {', '.join(known)}")
    if unknown := [name for name in settings if name not in known]:
        raise OwnError(f"{key} has an unknown setting {unknown[0]!r}; there are {', '.join(known)}")
    return dict(settings)


def _scaler_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = _settings(given, "scaler", SCALER_SETTINGS)
    bad = [name for name, value in settings.items() if isinstance(value, bool) or not isinstance(value, (int, float))]
    if bad or not all(0 < value < math.inf for value in settings.values()):
        name = bad[0] if bad else next(name for name, value in settings.items() if not 0 < value < math.inf)
        raise OwnError(f"scaler: {name} is {settings[name]!r}, not a positive number")
    if settings.get("growth_factor", 2.0) <= 1 or settings.get("backoff_factor", 0.5) >= 1:
        raise OwnError("scaler: growth_factor must be above 1 and backoff_factor below")
    return settings


def _own_dtype(settings: Mapping[str, Any]) -> torch.dtype | None:
    if not isinstance(settings.get("cache_enabled", True), bool):
        raise OwnError(f"autocast: cache_enabled is {settings['cache_enabled']!r}, not True or False")
    dtype: torch.dtype | None = settings.get("dtype")
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise OwnError(f"autocast: dtype is {dtype!r}, not torch.float16 or torch.bfloat16")
    return dtype


def _after(given: Mapping[str, Any]) -> Callable[[], None] | None:
    """Return one function for what the user's loop calls after each step: schedulers, and a function of their own."""
    schedulers, after = _several(given.get("scheduler", ())), given.get("after_step")
    if given.get("scheduler", ()) is None:
        schedulers = ()
    for scheduler in schedulers:
        if not callable(getattr(scheduler, "step", None)):
            raise OwnError(f"scheduler is a {type(scheduler).__name__}, which has no step()")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise OwnError("scheduler is a ReduceLROnPlateau, whose step() needs a metric: call it in after_step")
    if after is not None and not callable(after):
        raise OwnError(f"after_step is a {type(after).__name__}, not a function")
    if not schedulers and after is None:
        return None

    def behind() -> None:
        for scheduler in schedulers:
            scheduler.step()
        if after is not None:
            after()

    return behind


def _check_parameters(
    model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device
) -> None:
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained:
        raise OwnError("the model has no parameters that require a gradient")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise OwnError(f"{name} of the model is not initialised: pass a batch through its lazy modules first")
        if not _is_on(tensor, device):
            raise OwnError(f"{name} of the model is on {tensor.device}, not on {device}, which the function was given")
    for name, weight in trained.items():
        if weight.dtype != torch.float32:
            raise OwnError(
                f"{name} of the model is {_short(weight.dtype)}; AMP trains float32 weights (frozen ones may be 16 bit)"
            )
    for number, optimizer in enumerate(optimizers):
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        if not any(id(weight) in stepped for weight in trained.values()):
            which = f"optimizer {number}" if number else "the optimizer"
            raise OwnError(f"{which} steps none of the model's parameters that require a gradient")


def _batches(given: Any, device: torch.device, most: int) -> Iterator[tuple[Any, Any]]:
    if not isinstance(given, Iterable):
        raise OwnError(f"batches is a {type(given).__name__}, not pairs of inputs and target")
    number = -1
    for number, batch in enumerate(_drawn(given, most)):
        if not isinstance(batch, (tuple, list)):
            raise OwnError(f"batch {number} is a {type(batch).__name__}, not a pair of inputs and target")
        if len(batch) != 2:
            raise OwnError(f"batch {number} has {len(batch)} parts, not two: inputs and target")
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor) and not _is_on(tensor, device):
                raise OwnError(
                    f"a tensor of batch {number} is on {tensor.device}, not on {device}, which the function was given"
                )
        yield batch[0], batch[1]
    if number < 0:
        raise OwnError("batches is empty")


def _drawn(given: Iterable[Any], most: int) -> Iterator[Any]:
    """Yield the first batches; what drawing them raises is the user's."""
    try:
        yield from itertools.islice(given, most)
    except (OwnError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise OwnError(f"drawing the batches raised {told(error)}") from None


def probe(builder: Builder, device: torch.device, seconds: float = math.inf) -> None:
    """Build thrice and train one pass over the batches in fp32; raises OwnError for what no AMP could train.

    The builds must agree, as runs are compared that start alike, and share nothing; the loss must be a finite scalar,
    and so its gradients. The pass ends after two batches at the soonest where it has taken `seconds`; later builds then
    have as many batches as were tried. The pace in fp32 is noted on the way.
    """
    first = builder.build(device)
    second = builder.build(device)
    _agree(first, second)
    builder.only[device] = first.dtype
    taken: list[float] = []
    before = _loss(first, 0)
    for number in range(len(first.batches)):
        began = time.monotonic()
        _step(first, number)
        taken.append(time.monotonic() - began)
        if number and sum(taken) > seconds:
            break
    builder.tried[device] = len(taken)
    if first.after is not None:
        try:
            first.after()
        except Exception as error:
            raise OwnError(f"what is called after each step raised {told(error)}") from None
    build_seconds, third = builder._timed_build(device)
    # With a forward pass more: a compiled model is compiled in the first one of each run.
    began = time.monotonic()
    again = _loss(third, 0)
    _step(third, 0)
    taken.append(time.monotonic() - began)
    later = min(taken[1:])
    builder.paces[device, None] = Pace(build_seconds, taken[-1] * first.accumulate, later * first.accumulate)
    if abs(again - before) > _SAME_LOSS * max(abs(again), abs(before)):
        raise OwnError(
            f"two calls with the same seed give other losses with batch 0 ({before:.6g}, and {again:.6g} after a pass "
            f"of training): the model or its loss keeps state outside of the module, or has a generator of its own; "
            f"make all of it anew in each call"
        )


def _agree(first: Own, second: Own) -> None:
    """Hold two builds from one seed to the same weights and batches, in storages of their own; raises OwnError."""
    for (name, ours), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=False):
        if ours is theirs or (
            ours.numel() and ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        ):
            raise OwnError(f"two calls give models that share weights ({name}); build a new model in each call")
        if not _same(ours, theirs):
            raise OwnError(
                f"two calls with the same seed give other weights ({name}); draw them from torch's global generator, "
                f"which is seeded before each call"
            )
    if not _same(first.batches, second.batches):
        raise OwnError(
            "two calls with the same seed give other batches; draw and shuffle with torch's global generator, which "
            "is seeded before each call"
        )


def _where(number: int) -> str:
    return f"batch {number}, in fp32 and before AMP has any part in it"


def _forward(own: Own, number: int) -> torch.Tensor:
    """Return the loss in fp32, on the batch of that number; raises OwnError where it is none that can be trained."""
    work = own.workload()
    inputs, target = work.batch(number)
    # Of dropout: the same each time.
    seed_all(number)
    try:
        loss = work.loss(work.model(inputs), target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnError(f"the forward pass raised {told(error)} (with {_where(number)})") from None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        tensor = isinstance(loss, torch.Tensor)
        seen = f"has the shape {tuple(loss.shape)}" if tensor else f"is a {type(loss).__name__}"
        what = "has no gradient" if tensor and loss.numel() == 1 else seen
        several = isinstance(loss, (Mapping, tuple, list))
        hint = ": return the weighted sum of its terms" if several else ""
        raise OwnError(f"the loss {what}; it must be one number that depends on the model's parameters{hint}")
    if not bool(loss.isfinite()):
        raise OwnError(f"the loss is {loss.item()} with {_where(number)}")
    return loss


def _loss(own: Own, number: int) -> float:
    return float(_forward(own, number).detach())


def _step(own: Own, number: int) -> None:
    """One step in fp32, on the batch of that number."""
    for optimizer in own.optimizers:
        optimizer.zero_grad()
    loss = _forward(own, number)
    try:
        loss.backward()
    except RuntimeError as error:
        raise OwnError(f"the backward pass raised {told(error)} (with {_where(number)})") from None
    run_pending(loss.device.type)
    for name, weight in own.model.named_parameters():
        if weight.grad is not None and not bool(_dense(weight.grad).isfinite().all()):
            raise OwnError(f"the gradient of {name} is not finite with {_where(number)}")
    if own.clip is not None:
        torch.nn.utils.clip_grad_norm_(own.model.parameters(), own.clip)
    for place, optimizer in enumerate(own.optimizers):
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            which = f"optimizer {place}" if len(own.optimizers) > 1 else "the optimizer"
            raise OwnError(f"{which} has no gradient to step by with {_where(number)}: GradScaler refuses such a step")
        try:
            optimizer.step()
        except Exception as error:
            raise OwnError(f"optimizer.step() raised {told(error)} (with {_where(number)})") from None
    run_pending(loss.device.type)


def _same(ours: Any, theirs: Any) -> bool:
    pairs = list(itertools.zip_longest(tree_leaves(ours), tree_leaves(theirs)))
    return all(not isinstance(a, torch.Tensor) or (isinstance(b, torch.Tensor) and _equal(a, b)) for a, b in pairs)


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether both hold the same numbers, NaN counting as one."""
    return ours.shape == theirs.shape and torch.equal(_dense(ours).nan_to_num(), _dense(theirs).nan_to_num())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index or 0) == (tensor.device.index or 0)


def told(error: BaseException) -> str:
    """Return an exception in one line, with the line of the user's own code that raised or called what raised."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    first = f", caused by {type(cause).__name__}: {cause}".splitlines()[0] if cause is not None else ""
    return f"{said}{first}{place(error)}"


def place(error: BaseException) -> str:
    """Return ` (FILE, line N)` of the user's own code that raised or called what raised; empty where none did."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not any(part in file for part in _NOT_THE_USERS)]
    own = [place for place in own if "site-packages" not in place[0]] or own  # a library that the user's code called
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
