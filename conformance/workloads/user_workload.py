"""Load a user's workload named `module:function` and validate it by the protocol before anything is judged.

The function takes the torch.device to build on and returns a dict: `model` (a torch.nn.Module), `optimizer` (a
torch.optim.Optimizer over its parameters), `loss` (a callable of output and target that gives a scalar tensor),
`batches` (pairs of inputs and target; a tuple of inputs is passed by position, a dict by keyword) and, if gradients
are clipped, `clip` (their largest norm). It is called anew for each run, with the generators of torch and of Python's
`random` seeded before.
See docs/own-workloads.md.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .training import Workload

Function = Callable[[torch.device], object]

REQUIRED = ("model", "optimizer", "loss", "batches")
MOST_BATCHES = 64
"""As many batches are taken; a data loader may have any number."""


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

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor]
    batches: list[tuple[Any, Any]]
    clip: float | None

    def workload(self) -> Workload:
        """Return the workload in the form that the suite's loops train."""
        return Workload(Called(self.model), self.optimizer, self.loss, self.batches, self.clip)


@dataclass(frozen=True)
class Builder:
    """Builds the user's workload, the same each time for the same device and seed."""

    name: str
    function: Function

    def build(self, device: torch.device, seed: int = 0) -> Own:
        """Seed torch's generators and Python's, and call the function; raises OwnError where it breaks the protocol."""
        torch.manual_seed(seed)
        random.seed(seed)
        return build(self.function, device)

    def raises(self, device: torch.device, region: Callable[[], AbstractContextManager[object]]) -> str:
        """Try the first batch in `region`, forward and backward; return what it raises in one line, or nothing."""
        work = self.build(device).workload()
        inputs, target = work.batch(0)
        try:
            with region():
                loss = work.loss(work.model(inputs), target)
            loss.backward()
        except Exception as error:
            return f"the model raises in the region, which AMP-REGION-100 judges: {_told(error)}"
        return ""


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
        raise OwnError(f"{place} cannot be imported: {_told(error)}") from None


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


def build(function: Function, device: torch.device) -> Own:
    """Call the user's function and hold what it returns to the protocol; raises OwnError."""
    try:
        given = function(device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnError(f"the function raised {_told(error)}") from None
    if not isinstance(given, Mapping):
        keys = ", ".join(REQUIRED)
        raise OwnError(f"the function returned a {type(given).__name__}; it must return a dict with {keys}")
    if missing := [key for key in REQUIRED if key not in given]:
        raise OwnError(f"the function's dict lacks {', '.join(missing)}")
    if unknown := [key for key in given if key not in (*REQUIRED, "clip")]:
        raise OwnError(f"the function's dict has an unknown key {unknown[0]!r}; there are {', '.join(REQUIRED)}, clip")
    model, optimizer, loss, clip = given["model"], given["optimizer"], given["loss"], given.get("clip")
    if not isinstance(model, torch.nn.Module):
        raise OwnError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OwnError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not callable(loss):
        raise OwnError(f"loss is a {type(loss).__name__}, not a function of output and target")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0):
        raise OwnError(f"clip is {clip!r}, not a positive number")
    _check_parameters(model, optimizer, device)
    return Own(model, optimizer, loss, list(_batches(given["batches"], device)), None if clip is None else float(clip))


def _check_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
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
            raise OwnError(f"{name} of the model is {_short(weight.dtype)}; AMP trains float32 weights")
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if not any(id(weight) in stepped for weight in trained.values()):
        raise OwnError("the optimizer steps none of the model's parameters")


def _batches(given: Any, device: torch.device) -> Iterator[tuple[Any, Any]]:
    if not isinstance(given, Iterable):
        raise OwnError(f"batches is a {type(given).__name__}, not pairs of inputs and target")
    number = -1
    for number, batch in enumerate(_drawn(given)):
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


def _drawn(given: Iterable[Any]) -> Iterator[Any]:
    """Yield the first batches; what drawing them raises is the user's."""
    try:
        yield from itertools.islice(given, MOST_BATCHES)
    except (OwnError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise OwnError(f"drawing the batches raised {_told(error)}") from None


def probe(builder: Builder, device: torch.device) -> None:
    """Build twice and train one pass over the batches in fp32; raises OwnError for what no AMP could train.

    Both builds must agree, as runs are compared that start alike, and share nothing; the loss must be a finite scalar,
    and so its gradients.
    """
    first, second = builder.build(device), builder.build(device)
    for (name, ours), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=False):
        if ours is theirs or ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr():
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
    for number in range(len(first.batches)):
        _step(first, number)


def _step(own: Own, number: int) -> None:
    """One step in fp32, on the batch of that number."""
    work = own.workload()
    inputs, target = work.batch(number)
    where = f"batch {number}, in fp32 and before AMP has any part in it"
    work.optimizer.zero_grad()
    try:
        loss = work.loss(work.model(inputs), target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise OwnError(f"the forward pass raised {_told(error)} (with {where})") from None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        seen = f"has the shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"is a {type(loss).__name__}"
        what = "has no gradient" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else seen
        raise OwnError(f"the loss {what}; it must be one number that depends on the model's parameters")
    if not bool(loss.isfinite()):
        raise OwnError(f"the loss is {loss.item()} with {where}")
    try:
        loss.backward()
    except RuntimeError as error:
        raise OwnError(f"the backward pass raised {_told(error)} (with {where})") from None
    for name, weight in own.model.named_parameters():
        if weight.grad is not None and not bool(_dense(weight.grad).isfinite().all()):
            raise OwnError(f"the gradient of {name} is not finite with {where}")
    if own.clip is not None:
        torch.nn.utils.clip_grad_norm_(own.model.parameters(), own.clip)
    try:
        work.optimizer.step()
    except Exception as error:
        raise OwnError(f"optimizer.step() raised {_told(error)} (with {where})") from None


def _same(ours: Any, theirs: Any) -> bool:
    pairs = list(itertools.zip_longest(tree_leaves(ours), tree_leaves(theirs)))
    return all(not isinstance(a, torch.Tensor) or (isinstance(b, torch.Tensor) and _equal(a, b)) for a, b in pairs)


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether both hold the same numbers, NaN counting as one."""
    return torch.equal(_dense(ours).nan_to_num(), _dense(theirs).nan_to_num())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index or 0) == (tensor.device.index or 0)


def _told(error: BaseException) -> str:
    """Return an exception in one line, with the line of the user's own code that raised or called what raised."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    first = f", caused by {type(cause).__name__}: {cause}".splitlines()[0] if cause is not None else ""
    return f"{said}{first}{_place(error)}"


def _place(error: BaseException) -> str:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if not any(part in file for part in _NOT_THE_USERS)]
    own = [place for place in own if "site-packages" not in place[0]] or own  # a library that the user's code called
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
