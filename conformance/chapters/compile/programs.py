"""Programs of autocast regions that are compiled, exported and traced, each a function of float32 tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from ...oracles.numbers.formats import OTHER

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def _nothing() -> None:
    return None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def _exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.float(), b)


class Amp:
    """The device type and 16-bit type of a program's regions; a program calls `pause` between its parts.

    `other` is the type of inner regions, by default the other 16-bit type.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        pause: Callable[[], None] = _nothing,
        cache: bool | None = None,
        other: torch.dtype | None = None,
    ) -> None:
        self.kind = device_type
        self.dtype = dtype
        self.other = OTHER[dtype] if other is None else other
        self.pause = pause
        self.cache = cache
        # Regions of XPU open without its hardware; they change nothing on another device.
        self.elsewhere = "cpu" if device_type == "xpu" else "xpu"
        # Functions that were decorated before a program is compiled.
        self.product = torch.autocast(device_type, dtype=dtype, cache_enabled=cache)(_product)
        self.exact_product = torch.autocast(device_type, enabled=False)(_exact_product)


@dataclass(frozen=True)
class Program:
    """A function of `Amp` and of tensors of these shapes.

    `frozen` are the positions of arguments that get no gradient. A `switching` program switches gradients off itself.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...] = ()
    switching: bool = False

    def leaves(self, device: torch.device, generator: torch.Generator) -> Tensors:
        """Return the arguments: leaves with gradients, but for those that are frozen."""
        drawn = [(torch.randn(shape, generator=generator) / 2).to(device) for shape in self.shapes]
        return tuple(leaf.requires_grad_(index not in self.frozen) for index, leaf in enumerate(drawn))


def one(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.linear(x, w).relu()
        amp.pause()
        y = torch.mm(h, v)
    return y, torch.mm(x, w)


def nested(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Regions in one another, and all of them in one of another device type."""
    elsewhere = torch.autocast(amp.elsewhere, dtype=torch.bfloat16)
    with elsewhere, torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        a = torch.mm(x, w)
        # The cache serves a weight's cast of one type to a region of another (AMP-CACHE-020).
        with torch.autocast(amp.kind, dtype=amp.other, cache_enabled=False):
            b = torch.mm(a, w)
            amp.pause()
            with torch.autocast(amp.kind, enabled=False):
                c = torch.mm(b.float(), v)
                amp.pause()
            d = torch.mm(c, v)
        e = torch.mm(d, x)
    return a, b, c, d, e, torch.mm(x, v)


def island(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A float32 part in a region, which must stay float32 in backward too."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.linear(x, w)
        with torch.autocast(amp.kind, enabled=False):
            amp.pause()
            h = torch.mm(torch.tanh(h.float()), v)
            h = functional.layer_norm(h, h.shape[-1:])
        return (torch.mm(h, w),)


def siblings(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        a = torch.mm(x, w)
    amp.pause()
    b = torch.mm(x, v)
    with torch.autocast(amp.kind, dtype=amp.other, cache_enabled=False):
        c = torch.mm(x, v)
    with torch.autocast(amp.elsewhere, dtype=torch.bfloat16):
        d = torch.mm(w, v)
    with torch.autocast(amp.kind, dtype=amp.dtype, enabled=False, cache_enabled=amp.cache):
        return a, b, c, d, torch.mm(w, x)


def float32_ops(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Ops of each policy on 16-bit results: float32, the widest type, and those without a policy."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        low = torch.mm(x, w)
        loss = functional.mse_loss(low, v)
        amp.pause()
        normal = functional.layer_norm(low, low.shape[-1:])
        return (
            loss,
            functional.softmax(low, -1),
            functional.log_softmax(low, -1).exp(),
            normal,
            functional.gelu(low),
            low.sum(),
            low.pow(2).mean(),
            low.norm(),
            torch.cat([low, v]),
            torch.stack([low, v]),
            low + v,
            low * 0.3,
        )


def classifier(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    labels = torch.arange(x.shape[0], device=x.device) % v.shape[0]
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.gelu(functional.linear(x, w))
        amp.pause()
        logits = functional.linear(functional.dropout(h, 0.0), v)
        return functional.cross_entropy(logits, labels), logits


def attention(amp: Amp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        scores = torch.matmul(q, k.transpose(-1, -2))
        amp.pause()
        return torch.matmul(functional.softmax(scores, -1), v), torch.baddbmm(q, q, k.transpose(-1, -2))


def tied(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A weight that is used three times, once with the region left and entered again."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.linear(functional.linear(x, w), w)
    amp.pause()
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        return (functional.linear(h, w) + v,)


def convolution(amp: Amp, x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Tensors:
    """A convolution and a batch normalization that writes its running statistics."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.conv2d(x, w, padding=1)
        amp.pause()
        h = functional.batch_norm(h, mean, variance, training=True)
        return functional.avg_pool2d(functional.relu(h), 2), h.flatten(1).sum(1)


def ineligible(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """What autocast leaves alone: float64, integers, operations in place."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        double = torch.mm(x.double(), w.double())
        count = torch.cat([(8 * x.detach()).int(), w.detach().int()]).cumsum(0)
        amp.pause()
        h = torch.mm(x, w).float()
        h = h.clone().addmm_(x, v)
        return double, count, h.mul_(0.5)


def evaluation(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A forward without gradients and one with gradients on the same weight."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        with torch.no_grad():
            teacher = functional.linear(x, w)
        amp.pause()
        return functional.linear(x, w) - teacher, torch.mm(teacher, v)


def getters(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Branches and casts on what torch's getters return."""
    found = [x.sum()]
    for enabled in (True, False):
        with torch.autocast(amp.kind, dtype=amp.other, enabled=enabled, cache_enabled=amp.cache):
            amp.pause()
            if torch.is_autocast_enabled(amp.kind):
                found.append(v.to(torch.get_autocast_dtype(amp.kind)) * 3)
            else:
                found.append(torch.mm(x, w))
            found.append(w * 2 if torch.is_autocast_cache_enabled() else w * 3)
    found.append(x * 5 if torch.is_autocast_enabled(amp.kind) else x * 7)
    found.append(v.to(torch.get_autocast_dtype(amp.kind)))
    return tuple(found)


def decorated(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Regions as decorators of a function and of a method."""

    @torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache)
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b)

    @torch.autocast(amp.kind, enabled=False)
    def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a.float(), b)

    low = product(x, w)
    amp.pause()
    return low, exact(low, v), torch.mm(w, v)


def decorated_before(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Functions with regions as decorators, which are not part of what is compiled."""
    low = amp.product(x, w)
    amp.pause()
    return low, amp.exact_product(low, v), torch.mm(w, v)


class _Layer(torch.nn.Module):
    """A layer that opens a region in `forward` and a disabled one in another method."""

    def __init__(self, amp: Amp) -> None:
        super().__init__()
        self.amp = amp

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=self.amp.kind, dtype=self.amp.dtype, cache_enabled=self.amp.cache):
            return self.scaled(functional.linear(x, w))

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.amp.kind, enabled=False):
            return h.float() * 0.3


def module(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    layer = _Layer(amp)
    h = layer(x, w)
    amp.pause()
    return (torch.mm(layer(h, w), v),)


def composites(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Ops that ATen writes with others, of which some are listed and some are not."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        a = torch.einsum("ij,kj->ik", x, w)
        amp.pause()
        b = torch.tensordot(x, v, 1)
        c = torch.linalg.multi_dot([x, w, v])
        return a, b, c, torch.chain_matmul(x, w, v), functional.cosine_similarity(x, w)


def mixed_losses(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Losses of a 16-bit result and a float32 goal, in a disabled part of a region; some have no backward of that."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        low = torch.mm(x, w)
        with torch.autocast(amp.kind, enabled=False):
            amp.pause()
            goal, kept = v.detach().sign(), low.detach()
            losses = (functional.huber_loss, functional.soft_margin_loss, functional.smooth_l1_loss, functional.l1_loss)
            return (*(loss(kept, goal) for loss in losses), functional.mse_loss(kept, goal), low.sum() + v.sum())


def fused(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A product, and ops of each policy on its result: two kernels of inductor where operands have 16 bits."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.gelu(functional.linear(x, w)) * 0.3
        amp.pause()
        return functional.softmax(h, -1), functional.mse_loss(h, v), h


def plain(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """No region of its own: for programs that run in one around them."""
    h = functional.linear(x, w).relu()
    amp.pause()
    return torch.mm(h, v), functional.softmax(h, -1), functional.mse_loss(h, v)


def _program(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Program:
    return Program(function.__name__, function, shapes or ((4, 4),) * 3, **options)


PROGRAMS: Mapping[str, Program] = {
    each.name: each
    for each in (
        _program(one),
        _program(nested),
        _program(island),
        _program(siblings),
        _program(float32_ops),
        _program(classifier),
        _program(attention, *((2, 4, 4),) * 3),
        _program(tied),
        _program(convolution, (2, 3, 4, 4), (3, 3, 3, 3), (3,), (3,), frozen=(2, 3)),
        _program(ineligible),
        _program(evaluation, switching=True),
        _program(getters),
        _program(decorated),
        _program(decorated_before),
        _program(module),
        _program(composites),
        _program(mixed_losses),
        _program(fused),
    )
}
"""Programs that open their regions themselves, by name."""

AMBIENT: Mapping[str, Program] = {
    f"{each.__name__}_inside": Program(f"{each.__name__}_inside", each, ((4, 4),) * 3)
    for each in (plain, one, island, siblings, getters, decorated)
}
"""Programs that are called inside a region of the 16-bit type, by name."""


def together(programs: list[Program]) -> Program:
    """Return one program that runs all of them, each on its own tensors."""
    shapes = tuple(shape for each in programs for shape in each.shapes)
    offsets = [sum(len(each.shapes) for each in programs[:number]) for number in range(len(programs))]
    frozen = tuple(
        offset + position for each, offset in zip(programs, offsets, strict=True) for position in each.frozen
    )

    def function(amp: Amp, *leaves: torch.Tensor) -> Tensors:
        found: list[torch.Tensor] = []
        for each, offset in zip(programs, offsets, strict=True):
            found.extend(each.function(amp, *leaves[offset : offset + len(each.shapes)]))
        return tuple(found)

    return Program("together", function, shapes, frozen)


# Random programs

_Tree: TypeAlias = tuple[Any, ...]


def drawn(seed: int) -> Program:
    """Return a random program: a tree of regions, some in others, with an op before, in and after each."""
    chosen = random.Random(seed)

    def tree(depth: int) -> _Tree:
        parts: list[Any] = []
        for _ in range(chosen.randint(1, 3)):
            if depth and chosen.random() < 0.6:
                setting = (chosen.randrange(3), chosen.random() < 0.7, chosen.choice((True, False)))
                parts.append((setting, tree(depth - 1)))
            parts.append((chosen.choice(_OPS), chosen.randrange(3), chosen.randrange(3)))
        return tuple(parts)

    made = tree(3)
    while _depth(made) < 2:
        made = tree(3)

    def function(amp: Amp, *leaves: torch.Tensor) -> Tensors:
        found = list(leaves)
        _walk(amp, made, found)
        return tuple(found[len(leaves) :])

    return Program(f"drawn-{seed}", function, ((4, 4),) * 3)


_OPS = ("mm", "linear", "softmax", "mse_loss", "cat", "add", "relu")


def _depth(tree: _Tree) -> int:
    """Return how many regions lie in one another."""
    return max((1 + _depth(part[1]) for part in tree if len(part) == 2), default=0)


def _walk(amp: Amp, tree: _Tree, found: list[torch.Tensor]) -> None:
    for part in tree:
        if len(part) == 2:
            (kind, enabled, cache), inner = part
            dtype = (amp.dtype, amp.other, torch.bfloat16)[kind]
            where = amp.elsewhere if kind == 2 else amp.kind
            with torch.autocast(where, dtype=dtype, enabled=enabled, cache_enabled=cache and kind != 1 and amp.cache):
                _walk(amp, inner, found)
            amp.pause()
        else:
            name, left, right = part
            found.append(_called(name, found[-1 - left % len(found)].float(), found[right % len(found)].float()))


def _called(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if name == "mm":
        return torch.mm(a, b)
    if name == "linear":
        return functional.linear(a, b).tanh()
    if name == "softmax":
        return functional.softmax(torch.mm(a, b), -1)
    if name == "mse_loss":
        return functional.mse_loss(a, b) * a
    if name == "cat":
        return torch.cat([a, b])[:4]
    return a + b if name == "add" else torch.relu(a)
