"""Find the first inf or NaN of a training run: its module and op, forward or backward, and the inputs.

Every op below autograd and autocast is seen, in the threads of backward too (a dispatch mode goes with them), and one
number is read from each result: the largest magnitude, which is NaN where one element is. A non-finite result is
traced to the op that made it of finite operands. What a program puts there on purpose, such as the -inf of an
attention mask, is no cause unless NaN comes of it.

torch.autograd.detect_anomaly does something else: it stops at the first node of backward that returns NaN (not inf,
which is how fp16 overflows, and nothing in forward), prints the forward call's traceback, and says nothing of values.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .storages import storage_of

_LABEL = "conformance module"
_UNWRITTEN = ("empty", "new_empty", "resize_", "set_", "_efficientzerotensor")
FP16 = "float16"
_SCALAR_OPS = ("add", "sub", "rsub", "mul", "div", "pow")


@dataclass(frozen=True)
class Operand:
    """What a tensor held: its dtype and shape, and the smallest and largest magnitude of its finite elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    smallest: float
    largest: float
    finite: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        """Look at a tensor; the smallest and largest of none are 0."""
        sizes = _magnitudes(tensor)
        kept = sizes[torch.isfinite(sizes)]
        low, high = (float(kept.min()), float(kept.max())) if kept.numel() else (0.0, 0.0)
        return cls(tensor.dtype, tuple(tensor.shape), low, high, kept.numel() == sizes.numel())

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        bad = "" if self.finite else ", not all finite"
        return f"{name}{list(self.shape)} of {self.smallest:.4g} to {self.largest:.4g}{bad}"


@dataclass(frozen=True)
class Cause:
    """Where a non-finite value came from.

    `how` is "made" (by the op, of finite operands), "given" (it was in the batch or a weight before any op ran) or
    "meant" (a constant of the program). `phase` is forward, loss, scaling, backward or step. `module` is the path of
    the innermost module, the class's name for the model itself and "" outside it; `node` the autograd node in
    backward. `kind` is inf or NaN.
    """

    how: str
    phase: str
    module: str
    kind: str
    op: str
    node: str
    result: str
    operands: tuple[Operand, ...]
    numbers: tuple[float, ...]
    bad: int
    elements: int
    iteration: int
    scale: float | None

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "outside the model"
        when = f"iteration {self.iteration}, {self.phase}"
        scale = "" if self.scale is None else f", at a loss scale of {self.scale:g}"
        if self.how == "given":
            return f"{when}: {self.kind} was in {self.op} already ({self.bad} of {self.elements} elements{scale})"
        node = f" in {self.node}" if self.node else ""
        operands = "; ".join([*map(str, self.operands), *(f"{number:g}" for number in self.numbers)]) or "no operand"
        overflows = self.kind == "inf" and self.result.startswith(FP16)
        limit = f"; {FP16} ends at {torch.finfo(torch.float16).max:g}" if overflows else ""
        words = f"{when}, {place}: {self.op}{node} makes {self.kind} in {self.bad} of {self.elements} elements"
        return f"{words} of {self.result} from {operands}{scale}{limit}"


@dataclass(frozen=True)
class Peak:
    """The largest finite magnitude that a float16 result had, and where."""

    value: float
    op: str
    module: str
    phase: str
    iteration: int

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "outside the model"
        share = self.value / torch.finfo(torch.float16).max
        where = f"{self.op}, {self.phase}, {place}, iteration {self.iteration}"
        return f"{self.value:.4g}, {share:.2g} of what float16 holds ({where})"


class Trace(TorchDispatchMode):
    """Watches, while it is entered, every op; `cause(tensor)` says where what is non-finite in a tensor came from."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.iteration, self.phase = 0, "forward"
        self.scale: float | None = None
        self.peak: Peak | None = None
        self._causes: dict[int, Cause] = {}
        self._modules: list[str] = []
        self._hooks: list[Any] = []
        self._model = model
        self._earliest: Cause | None = None

    def __enter__(self) -> Trace:
        for name, module in self._model.named_modules():
            named = name or type(module).__name__
            self._hooks.append(module.register_forward_pre_hook(self._entering(named)))
            self._hooks.append(module.register_forward_hook(self._left(named), always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def hand(self, what: str, tensors: Any) -> None:
        """Say what tensors are called that the run is given: a batch, a weight. What is bad in them is their own."""
        leaves = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        for number, tensor in enumerate(leaves):
            if _floating(tensor) and not math.isfinite(_largest(tensor)):
                named = what if len(leaves) == 1 else f"{what}, tensor {number}"
                self._note(tensor, self._cause("given", named, (), tensor))

    def cause(self, *tensors: torch.Tensor | None) -> Cause | None:
        """Return where the first of these that is not finite got its non-finite values; None where all are finite."""
        for tensor in tensors:
            if tensor is not None and _floating(tensor) and not math.isfinite(_largest(tensor)):
                found = self._causes.get(_storage(tensor))
                return found or self._cause("given", "a tensor that no traced op wrote", (), tensor)
        return None

    def earliest(self) -> Cause | None:
        """Return the first non-finite value that an op made or that was given, whatever became of it."""
        return self._earliest

    # What is seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Looked at only if the result is bad; what an op writes in place would be gone by then.
        read = args, {name: value for name, value in kwargs.items() if name not in _outputs(func)}
        before = [leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor) and _floating(leaf)]
        looked = [Operand.of(leaf) for leaf in before] if func._schema.is_mutable else None
        results = func(*args, **kwargs)
        if not func.overloadpacket.__name__.startswith(_UNWRITTEN):
            written = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
            written += [leaf for leaf in before if looked is not None and leaf not in _same(written)]
            self._look(func, args, kwargs, before, looked, written)
        return results

    def _look(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        before: list[torch.Tensor],
        looked: list[Operand] | None,
        written: Sequence[torch.Tensor],
    ) -> None:
        read = {_storage(tensor) for tensor in before}
        for tensor in written:
            if not _floating(tensor):
                continue
            largest = _largest(tensor)
            if math.isfinite(largest):
                self._peaked(func, tensor, largest)
                if looked is not None or _storage(tensor) not in read:
                    self._causes.pop(_storage(tensor), None)
                continue
            operands = [Operand.of(leaf) for leaf in before] if looked is None else looked
            self._note(tensor, self._origin(func, (args, kwargs), before, operands, tensor))

    def _origin(
        self,
        func: Any,
        arguments: Any,
        before: list[torch.Tensor],
        operands: list[Operand],
        result: torch.Tensor,
    ) -> Cause:
        """Return whether the op made the non-finite values, or passes them on."""
        name = func.overloadpacket.__name__
        numbers = tuple(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, float))
        second = arguments[0][1] if len(arguments[0]) > 1 else None
        if name in _SCALAR_OPS and isinstance(second, int):
            numbers = (float(second), *numbers)
        made = self._cause("made", name, tuple(operands), result, numbers)
        inherited = [
            self._causes.get(_storage(leaf))
            for leaf, operand in zip(before, operands, strict=True)
            if not operand.finite
        ]
        if not inherited:
            return made if all(map(math.isfinite, numbers)) else replace(made, how="meant")
        known = [cause for cause in inherited if cause is not None]
        if hard := [cause for cause in known if cause.how != "meant"]:
            return hard[0]
        # Only constants of the program went in: what they are is no cause, a NaN that comes of them is.
        was_nan = any(bool(torch.isnan(leaf).any()) for leaf in before)
        if made.kind == "NaN" and not was_nan:
            return made
        return known[0] if known else replace(made, how="meant")

    def _cause(
        self,
        how: str,
        op: str,
        operands: tuple[Operand, ...],
        result: torch.Tensor,
        numbers: tuple[float, ...] = (),
    ) -> Cause:
        node = _node()
        bad = ~torch.isfinite(result.detach())
        kind = "NaN" if bool(torch.isnan(result.detach()).any()) else "inf"
        if node is not None:
            # A module that runs in backward is being computed again, for a checkpoint.
            phase, module = "backward", self._modules[-1] if self._modules else node.metadata.get(_LABEL, "")
        else:
            phase, module = self.phase, self._modules[-1] if self._modules else ""
        return Cause(
            how=how,
            phase=phase,
            module=module,
            kind=kind,
            op=op,
            node="" if node is None else node.name(),
            result=f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}",
            operands=operands,
            numbers=numbers,
            bad=int(bad.sum()),
            elements=bad.numel(),
            iteration=self.iteration,
            scale=self.scale,
        )

    def _note(self, tensor: torch.Tensor, cause: Cause) -> None:
        self._causes[_storage(tensor)] = cause
        if self._earliest is None and cause.how != "meant":
            self._earliest = cause

    def _peaked(self, func: Any, tensor: torch.Tensor, largest: float) -> None:
        if tensor.dtype is not torch.float16 or (self.peak and largest <= self.peak.value):
            return
        node = _node()
        module = (self._modules[-1] if self._modules else "") if node is None else node.metadata.get(_LABEL, "")
        phase = self.phase if node is None else "backward"
        self.peak = Peak(largest, func.overloadpacket.__name__, module, phase, self.iteration)

    # Modules: by hooks in forward; each autograd node is marked with the module that made it, for backward.

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, inputs: self._modules.append(name)

    def _left(self, name: str) -> Callable[..., None]:
        def left(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            stop = {node for node in map(_grad_fn, tree_leaves(inputs)) if node is not None}
            _mark([node for node in map(_grad_fn, tree_leaves(outputs)) if node is not None], stop, name)
            if self._modules:
                self._modules.pop()

        return left


def _same(tensors: Sequence[torch.Tensor]) -> _Identities:
    return _Identities(tensors)


@dataclass(frozen=True)
class _Identities:
    """Membership by identity: tensors compare by element."""

    tensors: Sequence[torch.Tensor]

    def __contains__(self, tensor: object) -> bool:
        return any(tensor is other for other in self.tensors)


def _grad_fn(leaf: Any) -> Any:
    return leaf.grad_fn if isinstance(leaf, torch.Tensor) else None


def _mark(nodes: list[Any], stop: set[Any], name: str) -> None:
    """Give the nodes between outputs and inputs the module's name, where an inner module has not marked them."""
    seen = set(stop)
    while nodes:
        node = nodes.pop()
        if node in seen or _LABEL in node.metadata:
            continue
        seen.add(node)
        node.metadata[_LABEL] = name
        nodes += [following for following, _ in node.next_functions if following is not None]


def _node() -> Any:
    return torch._C._current_autograd_node()


def _floating(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0 and tensor.layout is torch.strided


def _magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    # fp8 has no abs; its numbers are exact in fp32.
    tensor = tensor.detach()
    return (tensor.float() if tensor.element_size() == 1 else tensor).abs()


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; NaN where one element is."""
    # Below the functionalization of torch_xla, amax without dimensions returns its input.
    return float(_magnitudes(tensor).max())


@functools.cache
def _outputs(func: Any) -> frozenset[str]:
    """Return the names of the arguments that an op only writes (`out=`): what is in them before is no operand."""
    return frozenset(
        argument.name
        for argument in func._schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
    )


def _storage(tensor: torch.Tensor) -> int:
    if torch._is_functional_tensor(tensor):  # below the functionalization of torch_xla, ops get what this one wraps
        torch._sync(tensor)
        tensor = torch._from_functional_tensor(tensor)
    return storage_of(tensor)


# --- runs -------------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What a traced run came to: the losses, the loss scales before each iteration and after the last, and causes."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    peak: Peak | None = None
    bad_weight: str = ""
    """The first weight that a step left non-finite."""

    @property
    def first(self) -> Cause | None:
        """What made the first non-finite loss or gradient."""
        return self.causes[0] if self.causes else None

    @property
    def collapsed(self) -> bool:
        """Whether the loss scale fell below 1, which no overflow of a gradient alone asks for."""
        return bool(self.scales) and min(self.scales) < 1

    @property
    def spoiled(self) -> bool:
        """Whether the run is lost: a loss or weight is not finite, the scale collapsed, or every step was skipped."""
        every = bool(self.skipped) and len(self.skipped) == len(self.losses) > 1
        return bool(self.bad_weight) or self.collapsed or every or not all(map(math.isfinite, self.losses))


@dataclass(frozen=True)
class _Loop:
    """How a step is taken: what is called in which order, and with which settings."""

    model: torch.nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    loss: Callable[[Any, Any], torch.Tensor]
    scaler: torch.amp.GradScaler
    region: Callable[[], contextlib.AbstractContextManager[object]]
    clip: float | None
    after: Callable[[], object] | None


def trace(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], torch.Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    dtype: torch.dtype,
    steps: int | None = None,
    scale: float | None = 65536.0,
    clip: float | None = None,
    others: Iterable[torch.optim.Optimizer] = (),
    accumulate: int = 1,
    after: Callable[[], object] | None = None,
    scaler: Mapping[str, Any] | None = None,
    autocast: Mapping[str, Any] | None = None,
) -> Account:
    """Train as the documented loop does, autocast in `dtype` and a GradScaler that starts at `scale`, and watch.

    Without a scale there is no scaler. Inputs may be a tensor, a tuple (by position) or a dict (by keyword). Ends
    after `steps` iterations (default: one for each batch), or with a weight that is not finite. `others` are further
    optimizers; each iteration takes `accumulate` batches and ends with a call of `after`; `scaler` and `autocast` are
    further arguments of GradScaler and of torch.autocast.
    """
    device = next(model.parameters()).device.type
    settings = {"init_scale": scale or 1.0, "enabled": scale is not None}
    loop = _Loop(
        model,
        (optimizer, *others),
        loss,
        torch.amp.GradScaler(device, **{**(scaler or {}), **settings}),
        lambda: torch.autocast(device, dtype=dtype, **(autocast or {})),
        clip,
        after,
    )
    account, given = Account(), list(batches)
    with Trace(model) as watch:
        for name, weight in model.named_parameters():
            watch.hand(f"the weight {name}", weight.detach())
        for number in range(len(given) if steps is None else steps):
            first = number * accumulate
            taken = [given[place % len(given)] for place in range(first, first + accumulate)]
            watch.iteration, watch.scale = number, None if scale is None else float(loop.scaler.get_scale())
            _iteration(watch, account, loop, taken)
            if account.bad_weight:
                break
        account.peak = watch.peak
    if scale is not None:
        account.scales.append(float(loop.scaler.get_scale()))
    return account


def _iteration(watch: Trace, account: Account, loop: _Loop, batches: Sequence[tuple[Any, Any]]) -> None:
    if watch.scale is not None:
        account.scales.append(watch.scale)
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    named = list(loop.model.named_parameters())
    values: list[float] = []
    found: Cause | None = None
    for batch in batches:
        value, cause = _backward(watch, loop, batch, len(batches), [weight for _, weight in named])
        values.append(value)
        found = found or cause
    watch.phase = "step"
    if loop.clip is not None:
        for optimizer in loop.optimizers:
            loop.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), loop.clip)
    for optimizer in loop.optimizers:
        loop.scaler.step(optimizer)
    loop.scaler.update()
    if loop.after is not None:
        loop.after()
    account.losses.append(sum(values))
    if found is not None:
        account.causes.append(found)
    if watch.scale is not None and loop.scaler.get_scale() < watch.scale:
        account.skipped.append(watch.iteration)
    for name, weight in named:
        if (cause := watch.cause(weight.detach())) is not None and not account.bad_weight:
            account.bad_weight = name
            account.causes += [] if found is not None else [cause]


def _backward(
    watch: Trace, loop: _Loop, batch: tuple[Any, Any], shares: int, weights: Sequence[torch.nn.Parameter]
) -> tuple[float, Cause | None]:
    """Run one batch forward and backward; return its part of the loss and the cause of what is not finite."""
    watch.phase = "forward"
    watch.hand("the batch's inputs", batch[0])
    watch.hand("the batch's target", batch[1])
    with loop.region():
        output = called(loop.model, batch[0])
        watch.phase = "loss"
        value = loop.loss(output, batch[1])
        value = value / shares if shares > 1 else value
    watch.phase = "scaling"
    scaled = loop.scaler.scale(value)
    watch.phase = "backward"
    scaled.backward()
    found = watch.cause(value.detach(), scaled.detach(), *(weight.grad for weight in weights))
    return float(value.detach()), found


def called(model: torch.nn.Module, inputs: Any) -> Any:
    """Call a model with inputs by keyword (a dict), by position (a tuple or list) or alone."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    # Not a named tuple, such as a PackedSequence: that is one input.
    return model(*inputs) if type(inputs) in (tuple, list) else model(inputs)


@contextlib.contextmanager
def diagnosed(model: torch.nn.Module, say: Callable[[str], None]) -> Iterator[Trace]:
    """Watch what runs inside and, when it raises, `say` what made the first non-finite value that was seen to arise.

    For a check that compares results: `with diagnosed(model, lambda words: case.note("first non-finite", words)):`.
    """
    with Trace(model) as watch:
        try:
            yield watch
        except Exception:
            if (found := watch.earliest()) is not None:
                say(str(found))
            raise
