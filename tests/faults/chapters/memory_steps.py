"""Faults in the memory of whole steps: bytes held at some point, for too long, twice, or once in a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run without autocast, as an autocast kernel has to."""

    def work(*args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **options)

    return work


def _low(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    dtype = torch.get_autocast_dtype("cpu")
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


@fault("AMP-MEMORY-014", "AMP-MEMORY-015")
def gelu_runs_in_fp32_inside() -> Iterator[None]:
    """gelu runs in fp32 and hands on 16 bit: what it keeps is twice as large."""
    with kernel("gelu", _outside(lambda x, **o: torch.nn.functional.gelu(x.float(), **o).to(x.dtype)), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-014", "AMP-MEMORY-015")
def attention_keeps_fp32() -> Iterator[None]:
    """Fused attention runs in fp32 and hands on 16 bit."""

    def wide(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        run = torch.nn.functional.scaled_dot_product_attention
        return run(query.float(), key.float(), value.float(), *args, **options).to(query.dtype)

    with kernel("scaled_dot_product_attention", _outside(wide), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-015", "AMP-MEMORY-014")
def batch_norm_keeps_fp32() -> Iterator[None]:
    """batch_norm is put on the fp32 list, on which it is not."""

    def wide(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.batch_norm(x.float(), *args).to(x.dtype)

    with kernel("batch_norm", _outside(wide), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-014")
def tanh_is_composed() -> Iterator[None]:
    """tanh is made of sigmoids in the right dtype, which keeps more tensors than its formula."""
    with kernel("tanh", _outside(lambda x: 2 * torch.sigmoid(2 * x) * torch.ones_like(x) - 1), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-014")
def products_are_widened() -> Iterator[None]:
    """mul, on no list, multiplies in fp32 whatever it is given."""
    with kernel("mul.Tensor", _outside(lambda a, b: a.float() * b.float()), "AutocastCPU"):
        yield


class _Hiding(torch.autograd.Function):
    """A Linear that keeps what it needs as attributes, in fp32, where the hooks of saved tensors see nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.x, ctx.weight, ctx.biased = x.float(), weight, bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        rows, columns = gradient.flatten(0, -2), ctx.x.flatten(0, -2).to(gradient.dtype)
        bias = rows.sum(0) if ctx.biased else None
        return gradient @ ctx.weight, rows.t() @ columns, bias


@fault("AMP-MEMORY-016", "AMP-MEMORY-018")
def linear_hides_an_fp32_input() -> Iterator[None]:
    """linear keeps its input in fp32 where saved-tensor hooks do not look."""

    def hiding(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = _Hiding.apply(*_low(x, weight, bias))
        return result

    with kernel("linear", _outside(hiding), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-016", "AMP-MEMORY-018")
def weights_are_copied_twice() -> Iterator[None]:
    """Each use of a weight makes a second 16-bit copy of it, which lives until the region ends."""
    second: list[torch.Tensor | None] = []
    clear, right = torch.clear_autocast_cache, torch.ops.aten.linear.default

    def clearing() -> None:
        second.clear()
        clear()

    def copying(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        second.extend(_low(weight.detach()))
        result: torch.Tensor = right(*_low(x, weight, bias))
        return result

    with kernel("linear", _outside(copying), "AutocastCPU"), replaced(torch, "clear_autocast_cache", clearing):
        yield
    second.clear()


@fault("AMP-MEMORY-031", "AMP-MEMORY-032")
def copies_of_frozen_weights_stay_for_the_region() -> Iterator[None]:
    """The copies of frozen weights stay until the region ends, though nothing uses them again."""
    held: list[torch.Tensor | None] = []
    clear = torch.clear_autocast_cache

    def clearing() -> None:
        held.clear()
        clear()

    def holding(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        operands = _low(x, weight, bias)
        if not weight.requires_grad:
            held.append(operands[1])
        result: torch.Tensor = torch.nn.functional.linear(*operands)
        return result

    with kernel("linear", _outside(holding), "AutocastCPU"), replaced(torch, "clear_autocast_cache", clearing):
        yield
    held.clear()


@fault("AMP-MEMORY-016", "AMP-MEMORY-034")
def backward_keeps_its_seed() -> Iterator[None]:
    """Each backward keeps the gradient that it starts from: one number a step."""
    right, kept = torch.Tensor.backward, []

    def keeping(self: torch.Tensor, gradient: Any = None, *rest: Any, **options: Any) -> None:
        kept.append(torch.ones_like(self) if gradient is None else gradient)
        right(self, kept[-1], *rest, **options)

    with replaced(torch.Tensor, "backward", keeping):
        yield


@fault("AMP-MEMORY-030", level="standard")
def a_tensor_is_leaked_every_twentieth_step() -> Iterator[None]:
    """update keeps a copy of the scale at each twentieth call."""
    right, kept, calls = torch.amp.GradScaler.update, [], [0]

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        calls[0] += 1
        if self._enabled and calls[0] % 20 == 0:
            kept.append(self._scale.clone())

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-MEMORY-030")
def clipping_keeps_its_norms() -> Iterator[None]:
    """clip_grad_norm_ keeps the norm of each step."""
    right, kept = torch.nn.utils.clip_grad_norm_, []

    def clip(*args: Any, **options: Any) -> Any:
        kept.append(right(*args, **options))
        return kept[-1]

    with replaced(torch.nn.utils, "clip_grad_norm_", clip):
        yield


@fault("AMP-MEMORY-030", "AMP-MEMORY-034")
def accumulated_gradients_are_kept() -> Iterator[None]:
    """Scaling a second loss before update() keeps the graph of it."""
    right = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = right(self, outputs)
        self.__dict__.setdefault("_scaled", []).append(scaled)
        return scaled

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-MEMORY-036")
def unscaling_copies_gradients() -> Iterator[None]:
    """unscale_ multiplies into new tensors and copies them back."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        copies = [gradient.clone() for gradient in gradients]
        right(copies, found, inverse)
        for gradient, copy in zip(gradients, copies, strict=True):
            gradient.copy_(copy)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-MEMORY-036")
def unscaling_makes_masks() -> Iterator[None]:
    """unscale_ looks for infinities by a mask of each gradient."""
    right = torch._amp_foreach_non_finite_check_and_unscale_

    def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
        finite = [torch.isfinite(gradient) for gradient in gradients]
        right(gradients, found, inverse)
        del finite

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale):
        yield


@fault("AMP-MEMORY-038")
def checkpoints_run_again_in_fp32() -> Iterator[None]:
    """A checkpointed segment is run again without autocast, so its gradients have other bits."""
    right = torch.utils.checkpoint._get_autocast_kwargs

    def without(device_type: str = "cuda") -> Any:
        device, cpu = right(device_type)
        return (None if device is None else device | {"enabled": False}), cpu | {"enabled": False}

    with replaced(torch.utils.checkpoint, "_get_autocast_kwargs", without):
        yield


@fault("AMP-MEMORY-038", "AMP-MEMORY-012")
def checkpoints_outlive_the_region_in_copies() -> Iterator[None]:
    """A region in which a checkpoint was made keeps the copies of its weights: the cache is not cleared."""
    right, seen = torch.utils.checkpoint.checkpoint, [False]
    clear = torch.clear_autocast_cache

    def noting(*args: Any, **options: Any) -> Any:
        seen[0] = True
        return right(*args, **options)

    def clearing() -> None:
        if not seen[0]:
            clear()
        seen[0] = False

    checkpointing = replaced(torch.utils.checkpoint, "checkpoint", noting)
    with checkpointing, replaced(torch, "clear_autocast_cache", clearing):
        yield
    clear()


@fault("AMP-MEMORY-035")
def regions_stay_on_after_out_of_memory() -> Iterator[None]:
    """A region that is left by a RuntimeError stays on."""
    leave = torch.autocast.__exit__

    def leaving(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        result = leave(self, kind, value, trace)
        if isinstance(value, RuntimeError):
            torch.set_autocast_enabled(self.device, True)
        return result

    with replaced(torch.autocast, "__exit__", leaving):
        yield


@fault("AMP-MEMORY-035")
def failed_losses_are_kept() -> Iterator[None]:
    """scale keeps its last loss until the next one or until update(): a failed step keeps its graph."""
    right, update = torch.amp.GradScaler.scale, torch.amp.GradScaler.update

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        self._last_loss = right(self, outputs)
        return self._last_loss

    def updating(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        update(self, new_scale)
        self._last_loss = None

    with replaced(torch.amp.GradScaler, "scale", scale), replaced(torch.amp.GradScaler, "update", updating):
        yield


@fault("AMP-MEMORY-017")
def backward_of_gelu_works_in_float64() -> Iterator[None]:
    """gelu's derivative takes several tensors of float64: the peak of a step rises, what is kept does not."""

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return torch.nn.functional.gelu(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            x = ctx.saved_tensors[0].double()
            density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
            chance = (1 + torch.erf(x / 2**0.5)) / 2
            return (gradients[0].double() * (chance + x * density)).to(gradients[0].dtype)

    with kernel("gelu", _outside(lambda x, **options: Wide.apply(x)), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-017")
def gradients_are_copied_while_the_optimizer_works() -> Iterator[None]:
    """step keeps a copy of every gradient until the optimizer is done: only the peak of a whole step shows it."""
    right = torch.amp.GradScaler._maybe_opt_step

    def maybe(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        copies = [p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        result = right(self, optimizer, *args, **options)
        del copies
        return result

    with replaced(torch.amp.GradScaler, "_maybe_opt_step", maybe):
        yield


@fault("AMP-MEMORY-018", "AMP-MEMORY-006")
def linear_runs_in_fp32() -> Iterator[None]:
    """linear is on no list: AMP saves nothing where it must."""
    with dropped("linear", "AutocastCPU"):
        yield


@fault("AMP-MEMORY-032", "AMP-CACHE-015")
def copies_made_without_gradients_stay() -> Iterator[None]:
    """Leaving a region under no_grad does not clear the cache."""
    with edited(
        torch.autocast.__exit__,
        "torch.clear_autocast_cache()",
        "torch.is_grad_enabled() and torch.clear_autocast_cache()",
    ):
        yield
    torch.clear_autocast_cache()


def _leaking(owner: Any, name: str, keep: Callable[..., Any]) -> Iterator[None]:
    """`name` keeps, for ever, what `keep` returns of its arguments."""
    right, kept = getattr(owner, name), []

    def wrapped(*args: Any, **options: Any) -> Any:
        kept.append(keep(*args, **options))
        return right(*args, **options)

    with replaced(owner, name, wrapped):
        yield


@fault("AMP-MEMORY-052")
def state_dict_keeps_a_tensor() -> Iterator[None]:
    """Each state_dict leaves a tensor."""
    yield from _leaking(torch.amp.GradScaler, "state_dict", lambda scaler: torch.empty(64))


@fault("AMP-MEMORY-052")
def lists_of_losses_are_kept() -> Iterator[None]:
    """scale keeps the losses that come in a list."""
    yield from _leaking(
        torch.amp.GradScaler, "scale", lambda scaler, outputs: None if torch.is_tensor(outputs) else outputs
    )


@fault("AMP-MEMORY-052")
def update_notes_numbers() -> Iterator[None]:
    """update notes the time of each call: no tensor, one number a step."""
    yield from _leaking(torch.amp.GradScaler, "update", lambda scaler, new_scale=None: 1e9 * id(object()))


@fault("AMP-MEMORY-052")
def regions_register_themselves() -> Iterator[None]:
    """Each region that is entered is kept."""
    yield from _leaking(torch.autocast, "__enter__", lambda region: region)


@fault("AMP-MEMORY-052")
def decorators_keep_their_arguments() -> Iterator[None]:
    """A decorated function keeps the arguments of its last call."""
    right = torch.autocast.__call__

    def keeping(self: torch.autocast, function: Callable[..., Any]) -> Any:
        decorated = right(self, function)

        def call(*args: Any, **options: Any) -> Any:
            vars(call)["last"] = args
            return decorated(*args, **options)

        return call

    with replaced(torch.autocast, "__call__", keeping):
        yield


@fault("AMP-MEMORY-052")
def custom_functions_keep_their_inputs() -> Iterator[None]:
    """custom_fwd keeps the inputs on the context, for as long as the graph lives."""
    right = torch.amp.custom_fwd

    def keeping(forward: Any = None, **options: Any) -> Any:
        decorated = right(forward, **options)
        if forward is None:
            return decorated

        def call(ctx: Any, *args: Any) -> Any:
            ctx.inputs = args
            return decorated(ctx, *args)

        return call

    with replaced(torch.amp, "custom_fwd", keeping):
        yield
