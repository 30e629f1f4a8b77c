"""Model autocast's weight cache: the casts that a program makes, their values and their gradients.

The rules are those of `cached_cast` in aten/src/ATen/autocast_mode.cpp and of `__exit__` in torch/amp/autocast_mode.py,
torch 2.11 and later: a cast is kept if it is one of a float32 leaf that requires a gradient and is no view, to the
type of the region, with the cache on and outside of inference mode; everything goes when the outermost region ends.
Up to torch 2.10 casts under no_grad and in inference mode were kept as they were made there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOW = (torch.float16, torch.bfloat16)
# A use takes the weight itself or a tensor computed from it, which is never cached.
FORMS = ("itself", "t()", "view(4, 4)", "* 1", "detach()")
# `linear` runs in the region's type, `mse_loss` in float32, those of WIDEST in the widest of their types: a CPU lists
# `cat`, CUDA and XPU list `tensordot` (fixtures/op_lists.toml).
WIDEST = ("cat", "tensordot")
UPDATES = ("add_", "copy_", "data", "optimizer")
MODES = ("enable_grad", "no_grad", "inference_mode")


@dataclass(frozen=True)
class WeightSpec:
    """The properties of a new weight: a `parameter` is a torch.nn.Parameter, a `view` a leaf in another's memory."""

    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    parameter: bool = False
    view: bool = False


@dataclass(frozen=True)
class Setting:
    """A region's arguments; `elsewhere` is one for another device type, of which only the cache flag matters here."""

    dtype: torch.dtype
    enabled: bool = True
    cache_enabled: bool | None = None
    elsewhere: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a program; fields that its `op` does not need are ignored."""

    op: str
    weight: int = 0
    form: str = "itself"
    function: str = "linear"
    setting: Setting = Setting(torch.bfloat16)
    choice: int = 0

    def lines(self, device: str, partner: torch.dtype | None = None) -> list[str]:
        """Return the step as Python on tensors of `device`, a device type; steps that end a block have no lines.

        `partner` is the type of the other tensor of a use, by default the weight's.
        """
        name = f"w{self.weight}"
        if self.op == "use":
            other = f"torch.ones(4, 4, device={device!r}, dtype={partner or f'{name}.dtype'})"
            used = called(self.weight, self.form)
            spelt = {"cat": f"torch.cat([{used}, {other}])", "tensordot": f"torch.tensordot({used}, {other}, 1)"}
            return [spelt.get(self.function, f"{self.function}({other}, {used})")]
        if self.op == "enter":
            given = self.setting
            where = ("cpu" if device == "xpu" else "xpu") if given.elsewhere else device
            flag = "" if given.cache_enabled is None else f", cache_enabled={given.cache_enabled}"
            return [f"with torch.autocast({where!r}, dtype={given.dtype}, enabled={given.enabled}{flag}):"]
        data = f"{name}.data = {name}.data"
        lines = {
            "mode": [f"with torch.{MODES[self.choice % len(MODES)]}():"],
            "freeze": [f"{name}.requires_grad_({bool(self.choice % 2)})"],
            "update": _UPDATE_LINES[UPDATES[self.choice % len(UPDATES)]],
            "retype": [f"{data}.to({FLOATS[self.choice % len(FLOATS)]})"],
            "replace": [f"{name} = {name}.detach().clone().requires_grad_({name}.requires_grad)"],
            "clear": ["torch.clear_autocast_cache()"],
        }
        return [line.replace("NAME", name) for line in lines.get(self.op, [])]

    def describe(self, device: str, partner: torch.dtype) -> str:
        """Return the step as one line of a message."""
        return "; ".join(self.lines(device, partner)) or f"the block's end ({self.op})"


_UPDATE_LINES = {
    "add_": ["with torch.no_grad(): NAME.add_(1)"],
    "copy_": ["with torch.no_grad(): NAME.copy_(NAME.flip(0))"],
    "data": ["NAME.data = NAME.data + 1"],
    "optimizer": ["NAME.grad = torch.ones_like(NAME)", "torch.optim.SGD([NAME], lr=1.0).step()"],
}


def called(weight: int, form: str) -> str:
    """Return the name of the tensor that a step uses."""
    return f"w{weight}" if form == "itself" else f"w{weight} {form}" if form == "* 1" else f"w{weight}.{form}"


@dataclass
class Weight:
    """The state of a weight; `content` counts its changes, `identity` differs from earlier weights of its name."""

    kind: WeightSpec
    identity: int
    dtype: torch.dtype
    requires_grad: bool
    content: int = 0


@dataclass(frozen=True)
class Kept:
    """A cast in the cache."""

    dtype: torch.dtype
    content: int


@dataclass(frozen=True)
class Use:
    """The result of a use: its casts, the dtypes and content of its operands, and whether it has a gradient."""

    casts: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype
    content: int
    requires_grad: bool


@dataclass(frozen=True)
class _Place:
    """The settings in force in a block."""

    enabled: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_enabled: bool = True
    depth: int = 0
    grad: bool = True
    inference: bool = False


@dataclass
class CacheModel:
    """The cache, the weights, and the blocks that are open."""

    kinds: Sequence[WeightSpec]
    kept: dict[int, Kept] = field(default_factory=dict)
    _places: list[_Place] = field(default_factory=lambda: [_Place()])
    _made: int = 0

    def __post_init__(self) -> None:
        self.weights = [self._new(kind) for kind in self.kinds]

    @property
    def depth(self) -> int:
        """Return the number of open blocks."""
        return len(self._places) - 1

    def take(self, step: Step) -> Use | None:
        """Apply a step that is `legal`; return the result of a use."""
        weight = self.weights[step.weight]
        if step.op == "use":
            return self._use(step, weight)
        if step.op == "enter":
            self._enter(step.setting)
        elif step.op == "mode":
            self._mode(MODES[step.choice % len(MODES)])
        elif step.op in ("leave", "raise"):
            self._leave()
        elif step.op == "freeze":
            weight.requires_grad = bool(step.choice % 2)
        elif step.op == "update":
            weight.content += 1
        elif step.op == "retype":
            weight.dtype = FLOATS[step.choice % len(FLOATS)]
            weight.content += 1
        elif step.op == "replace":
            self.weights[step.weight] = self._new(weight.kind)
        elif step.op == "clear":
            self.kept.clear()
        return None

    def legal(self, step: Step) -> bool:
        """Return whether the step is possible and outside of AMP-CACHE-030: one cast in regions of two dtypes."""
        if step.op in ("leave", "raise"):
            return self.depth > 0
        if step.op != "use" or step.function == "mse_loss":
            return True
        weight, here = self.weights[step.weight], self._places[-1]
        if step.function in WIDEST:
            # The widest of two types is not defined where one is the 16-bit type that is not the region's.
            return weight.dtype not in LOW or weight.dtype is here.dtype or not here.enabled
        kept = self.kept.get(weight.identity)
        return kept is None or kept.dtype == here.dtype or not self._cacheable(step, weight)

    def _new(self, kind: WeightSpec) -> Weight:
        self._made += 1
        return Weight(kind, self._made, kind.dtype, kind.requires_grad)

    def _cacheable(self, step: Step, weight: Weight) -> bool:
        here = self._places[-1]
        return (
            here.enabled
            and here.cache_enabled
            and not here.inference
            and step.form == "itself"
            and weight.requires_grad
            and weight.dtype is torch.float32
            and not weight.kind.view
        )

    def _use(self, step: Step, weight: Weight) -> Use:
        here = self._places[-1]
        grad = here.grad and not here.inference and weight.requires_grad and step.form != "detach()"
        name, other = called(step.weight, step.form), self.partner(step)
        if not here.enabled or weight.dtype is torch.float64:
            return Use((), weight.dtype, weight.content, grad)
        dtype = here.dtype if step.function == "linear" else torch.float32
        casts = [("x", dtype)] if other != dtype else []
        if weight.dtype == dtype:
            return Use(tuple(casts), dtype, weight.content, grad)
        if step.function == "linear" and self._cacheable(step, weight):
            if weight.identity not in self.kept:
                casts.append((name, dtype))
                self.kept[weight.identity] = Kept(dtype, weight.content)
            return Use(tuple(sorted(casts, key=str)), dtype, self.kept[weight.identity].content, grad)
        return Use(tuple(sorted([*casts, (name, dtype)], key=str)), dtype, weight.content, grad)

    def partner(self, step: Step) -> torch.dtype:
        """Return the dtype of the other tensor of a use: the weight's own, but a wider one for WIDEST in a region."""
        weight = self.weights[step.weight]
        wider = step.function in WIDEST and self._places[-1].enabled and weight.dtype in LOW
        return torch.float32 if wider else weight.dtype

    def _enter(self, setting: Setting) -> None:
        here = self._places[-1]
        cache = here.cache_enabled if setting.cache_enabled is None else setting.cache_enabled
        inner = replace(here, cache_enabled=cache, depth=here.depth + 1)
        if not setting.elsewhere:
            inner = replace(inner, enabled=setting.enabled, dtype=setting.dtype)
        self._places.append(inner)

    def _mode(self, name: str) -> None:
        here = self._places[-1]
        inference = here.inference or name == "inference_mode"
        self._places.append(replace(here, grad=name == "enable_grad", inference=inference))

    def _leave(self) -> None:
        left = self._places.pop()
        if left.depth == 1 and self._places[-1].depth == 0:
            self.kept.clear()


# The relative frequency of steps: mostly uses, and regions around them.
_OPS = ("use",) * 12 + ("enter",) * 4 + ("leave",) * 3 + ("freeze", "clear", "raise", "replace", "update", "retype")


def random_steps(
    generator: random.Random,
    weights: int,
    functions: Sequence[str],
    dtypes: Sequence[torch.dtype],
    *,
    modes: bool = False,
    length: int = 24,
) -> list[Step]:
    """Return up to `length` random steps over so many weights: uses in `functions`, regions of `dtypes`, grad modes."""
    ops = _OPS + (("mode",) * 4 if modes else ())
    main = generator.choice(dtypes)

    def step(op: str) -> Step:
        return Step(
            op=op,
            weight=min(generator.randrange(weights), generator.randrange(weights)),  # the first ones more often
            form=generator.choice(("itself",) * 6 + FORMS[1:]),
            function=generator.choice(("linear",) * 5 + tuple(functions)),
            setting=Setting(
                dtype=generator.choice((main,) * 6 + tuple(dtypes)),
                enabled=generator.random() < 0.85,
                cache_enabled=generator.choice((None, None, None, True, False)),
                elsewhere=generator.random() < 0.1,
            ),
            choice=generator.randrange(12),
        )

    return [step("enter"), *(step(generator.choice(ops)) for _ in range(generator.randint(3, length)))]


def simpler(step: Step) -> list[Step]:
    """Return simpler replacements of a step, for shrinking."""
    given = step.setting
    plainer = [replace(given, enabled=True), replace(given, cache_enabled=None), replace(given, elsewhere=False)]
    choices = [replace(step, form="itself"), replace(step, function="linear"), replace(step, weight=0)]
    return [other for other in (*choices, *(replace(step, setting=one) for one in plainer)) if other != step]
