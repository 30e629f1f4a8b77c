"""Faults in what autocast keeps, frees and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced


@fault("AMP-MEMORY-001", "AMP-MEMORY-003")
def linear_keeps_fp32() -> Iterator[None]:
    """linear is taken off the lower-precision list: its activations are kept in fp32."""
    with dropped("linear", "AutocastCPU"):
        yield


@fault("AMP-MEMORY-001", "AMP-MEMORY-003")
def convolution_keeps_fp32() -> Iterator[None]:
    """conv2d is taken off the lower-precision list."""
    with dropped("conv2d", "AutocastCPU"):
        yield


@fault("AMP-MEMORY-001", "AMP-MEMORY-003")
def relu_widens_what_it_keeps() -> Iterator[None]:
    """relu casts its input to fp32 and keeps an fp32 result."""
    with kernel("relu", lambda x: torch.clamp_min(x.float(), 0.0), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-001")
def softmax_keeps_fp32_and_a_copy() -> Iterator[None]:
    """softmax runs in fp32 on the CPU, whose list does not have it, so the probabilities are kept twice."""

    def wide(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.softmax(x.float(), dim)

    with kernel("softmax.int", wide, "AutocastCPU"):
        yield


@fault("AMP-MEMORY-001")
def cross_entropy_keeps_16_bit() -> Iterator[None]:
    """cross_entropy is taken off the fp32 list: the log probabilities are kept in 16 bit."""
    with (
        dropped("cross_entropy_loss", "AutocastCPU"),
        dropped("nll_loss_nd", "AutocastCPU"),
        dropped("nll_loss", "AutocastCPU"),
    ):
        yield


@fault("AMP-MEMORY-002")
def disabled_region_is_enabled() -> Iterator[None]:
    """autocast ignores enabled=False."""
    right = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        right(self, device_type, dtype=dtype, cache_enabled=cache_enabled)

    with replaced(torch.autocast, "__init__", init):
        yield


@fault("AMP-MEMORY-005")
def weights_are_copied_at_each_use() -> Iterator[None]:
    """linear casts its weight itself, past the cache."""

    def copying(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            operands = [None if t is None else t.to(dtype) for t in (x, weight, bias)]
            return torch.nn.functional.linear(*operands)

    with kernel("linear", copying, "AutocastCPU"):
        yield


@fault("AMP-MEMORY-005")
def cache_is_off() -> Iterator[None]:
    """Every region runs without the weight cache."""
    right = torch.set_autocast_cache_enabled
    with replaced(torch, "set_autocast_cache_enabled", lambda enabled: right(False)):
        yield


@fault("AMP-MEMORY-005")
def cache_switch_is_ignored() -> Iterator[None]:
    """cache_enabled=False leaves the cache on."""
    right = torch.set_autocast_cache_enabled
    with replaced(torch, "set_autocast_cache_enabled", lambda enabled: right(True)):
        yield


@fault("AMP-CACHE-015")
def copies_outlive_the_region() -> Iterator[None]:
    """Leaving the outermost region does not clear the cache."""
    with edited(torch.autocast.__exit__, "torch.clear_autocast_cache()", "pass"):
        yield


@fault("AMP-CACHE-015")
def copies_outlive_an_exception() -> Iterator[None]:
    """A region that is left by an exception does not clear the cache."""
    right = torch.clear_autocast_cache
    leave = torch.autocast.__exit__

    def leaving(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        with replaced(torch, "clear_autocast_cache", (lambda: None) if kind is not None else right):
            return leave(self, kind, value, trace)

    with replaced(torch.autocast, "__exit__", leaving):
        yield
    right()


@fault("AMP-CACHE-002")
def inner_regions_free_the_copies() -> Iterator[None]:
    """Leaving an inner region clears the cache of the outer one."""
    leave = torch.autocast.__exit__

    def leaving(self: Any, *error: Any) -> Any:
        torch.clear_autocast_cache()
        return leave(self, *error)

    with replaced(torch.autocast, "__exit__", leaving):
        yield


@fault("AMP-MEMORY-009")
def backward_keeps_the_graph() -> Iterator[None]:
    """backward retains the graph unless told otherwise."""
    right = torch.Tensor.backward

    def retaining(
        self: torch.Tensor, gradient: Any = None, retain_graph: Any = None, *rest: Any, **options: Any
    ) -> None:
        right(self, gradient, True, *rest, **options)

    with replaced(torch.Tensor, "backward", retaining):
        yield


@fault("AMP-MEMORY-030")
def a_tensor_is_leaked_each_step() -> Iterator[None]:
    """update keeps a copy of the scale of every step."""
    right, kept = torch.amp.GradScaler.update, []

    def update(self: torch.amp.GradScaler, new_scale: Any = None) -> None:
        right(self, new_scale)
        if self._enabled:
            kept.append(self._scale.clone())

    with replaced(torch.amp.GradScaler, "update", update):
        yield


@fault("AMP-MEMORY-030")
def losses_keep_their_graphs() -> Iterator[None]:
    """scale keeps each scaled loss, and with it the graph."""
    right, kept = torch.amp.GradScaler.scale, []

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        kept.append(right(self, outputs))
        return kept[-1]

    with replaced(torch.amp.GradScaler, "scale", scale):
        yield


@fault("AMP-MEMORY-030", "AMP-MEMORY-011")
def skipped_gradients_are_kept() -> Iterator[None]:
    """A skipped step keeps the gradients that overflowed."""
    right, kept = torch.amp.GradScaler._maybe_opt_step, []

    def maybe(self: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **options: Any) -> Any:
        if sum(found.item() for found in state["found_inf_per_device"].values()):
            kept.append([p.grad for group in optimizer.param_groups for p in group["params"]])
        return right(self, optimizer, state, *args, **options)

    with replaced(torch.amp.GradScaler, "_maybe_opt_step", maybe):
        yield


@fault("AMP-MEMORY-011")
def scaler_holds_its_optimizers() -> Iterator[None]:
    """step keeps every optimizer that it was given."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        self.__dict__.setdefault("_optimizers", []).append(optimizer)
        return right(self, optimizer, *args, **options)

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-OPTIMIZER-034")
def optimizer_state_holds_16_bit_weights() -> Iterator[None]:
    """step leaves a 16-bit copy of each weight in the optimizer's state."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = right(self, optimizer, *args, **options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["low"] = parameter.detach().bfloat16()
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-OPTIMIZER-034")
def parameters_become_16_bit() -> Iterator[None]:
    """step turns the weights, their gradients and the moments into bfloat16."""
    right = torch.amp.GradScaler.step

    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **options: Any) -> Any:
        result = right(self, optimizer, *args, **options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
                parameter.data = parameter.data.bfloat16()
        return result

    with replaced(torch.amp.GradScaler, "step", step):
        yield


@fault("AMP-MEMORY-012")
def checkpoint_stores_everything() -> Iterator[None]:
    """checkpoint runs its function and keeps all activations."""

    def plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return function(*args)

    with replaced(torch.utils.checkpoint, "checkpoint", plain):
        yield


@fault("AMP-MEMORY-007")
def no_grad_records_a_graph() -> Iterator[None]:
    """Entering a region switches gradients on."""
    right = torch.autocast.__enter__

    def entering(self: Any) -> Any:
        torch._C._set_grad_enabled(True)
        return right(self)

    with replaced(torch.autocast, "__enter__", entering):
        yield


@fault("AMP-MEMORY-050")
def step_keeps_gradients_for_a_rollback() -> Iterator[None]:
    """step clones the gradients and lets go of them in update."""
    right = torch.amp.GradScaler.step
    kept: list[torch.Tensor] = []

    def step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        kept[:] = [weight.grad.clone() for weight in weights if weight.grad is not None]
        return right(self, optimizer, *args, **kwargs)

    with replaced(torch.amp.GradScaler, "step", step):
        yield


class _Recomputing(torch.autograd.Function):
    """Runs an operation in 16 bit, keeps its operands in fp32, and runs it again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.dtype = run, torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(*(operand.float() for operand in operands))
        with torch.autocast("cpu", enabled=False):
            return run(*(operand.to(ctx.dtype) for operand in operands))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        low = [operand.to(ctx.dtype).requires_grad_() for operand in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.run(*low)
        found = torch.autograd.grad(result, low, gradients)
        return None, *(gradient.float() for gradient in found)


def _recomputing(op: str, run: Callable[..., torch.Tensor]) -> Iterator[None]:
    with kernel(op, lambda *operands: _Recomputing.apply(run, *operands), "AutocastCPU"):
        yield


@fault("AMP-MEMORY-051", "AMP-SPEED-052")
def prelu_keeps_fp32() -> Iterator[None]:
    """prelu keeps its operands in fp32 and computes them again."""
    yield from _recomputing("prelu", torch.prelu)


@fault("AMP-MEMORY-051", "AMP-SPEED-052")
def tbc_convolutions_keep_fp32() -> Iterator[None]:
    """conv_tbc keeps its operands in fp32 and computes them again."""
    yield from _recomputing("conv_tbc", torch.conv_tbc)


@fault("AMP-MEMORY-051")
def vecdot_hides_a_copy() -> Iterator[None]:
    """linalg_vecdot leaves fp32 copies of its operands in the metadata of its node, where no hook looks."""

    def hiding(x: torch.Tensor, y: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            result = torch.linalg.vecdot(x.to(dtype), y.to(dtype), dim=dim)
        if result.grad_fn is not None:
            result.grad_fn.metadata["operands"] = x.detach().clone(), y.detach().clone()
        return result

    with kernel("linalg_vecdot", hiding, "AutocastCPU"):
        yield
