"""Faults in the meeting of two features whose like went unnoticed when written blind: hooks, checkpoints and caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import edited, replaced

_SEEN = "args[0]._fwd_used_autocast = torch.is_autocast_enabled(device_type)"


@fault("AMP-BACKWARD-028")
def a_later_call_decides_for_the_backward_of_all() -> Iterator[None]:
    """custom_fwd keeps the dtype with the class of the context, which all calls of a function share."""
    with edited(autocast_mode.custom_fwd, "args[0]._dtype =", "type(args[0])._dtype ="):
        yield
    if hasattr(torch.autograd.function.FunctionCtx, "_dtype"):
        del torch.autograd.function.FunctionCtx._dtype


@fault("AMP-BACKWARD-028")
def recomputed_functions_forget_their_region() -> Iterator[None]:
    """custom_fwd takes autocast for off where a checkpoint recomputes the function."""
    with edited(autocast_mode.custom_fwd, _SEEN, _SEEN + " and torch._C._current_graph_task_id() == -1"):
        yield


@fault("AMP-BACKWARD-049")
def hooks_miss_the_second_use_of_a_weight() -> Iterator[None]:
    """Saved-tensor hooks are not called for what linear saves at a later use of a weight in a region."""
    original, leave, used = F.linear, torch.autocast.__exit__, dict[int, Tensor]()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        again = used.get(id(weight)) is weight
        if torch.is_autocast_enabled("cpu") and weight.is_leaf and weight.requires_grad:
            used[id(weight)] = weight
        if not again:
            return original(x, weight, bias)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda kept: kept):
            return original(x, weight, bias)

    def left(self: Any, *args: Any) -> Any:
        used.clear()
        return leave(self, *args)

    with replaced(F, "linear", linear), replaced(torch.autocast, "__exit__", left):
        yield


@fault("AMP-CACHE-010")
def tied_embeddings_read_the_cast() -> Iterator[None]:
    """An embedding whose weight a linear layer has used in the region reads the cast of it, rounded rows in float32."""
    product, look_up, leave, used = F.linear, F.embedding, torch.autocast.__exit__, dict[int, Tensor]()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            used[id(weight)] = weight
        return product(x, weight, bias)

    def embedding(places: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if id(weight) in used:
            weight = weight.to(torch.get_autocast_dtype("cpu")).float()
        return look_up(places, weight, *args, **kwargs)

    def left(self: Any, *args: Any) -> Any:
        used.clear()
        return leave(self, *args)

    with replaced(F, "linear", linear), replaced(F, "embedding", embedding), replaced(torch.autocast, "__exit__", left):
        yield


@fault("AMP-NUMERICS-114")
def generators_stay_where_they_are() -> Iterator[None]:
    """uniform_ of 16-bit tensors leaves a generator that it is given where it was."""
    original = torch.Tensor.uniform_

    def uniform_(self: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        state = None if generator is None or self.element_size() != 2 else generator.get_state()
        original(self, *args, generator=generator, **kwargs)
        if generator is not None and state is not None:
            generator.set_state(state)
        return self

    with replaced(torch.Tensor, "uniform_", uniform_):
        yield


@fault("AMP-NUMERICS-122")
def clamped_numbers_of_fake_quantization_have_gradients() -> Iterator[None]:
    """fake_quantize_per_channel_affine of 16 bits passes the gradient of numbers beyond its range."""
    original = torch.fake_quantize_per_channel_affine

    def passed(x: Tensor, *args: Any) -> Tensor:
        result: Tensor = original(x, *args)
        return x + (result - x).detach() if x.element_size() == 2 else result

    with replaced(torch, "fake_quantize_per_channel_affine", passed):
        yield


@fault("AMP-REGION-115")
def zeros_fill_the_gaps() -> Iterator[None]:
    """zero_ of a 16-bit tensor with gaps sets all elements from its first to its last."""
    original = torch.Tensor.zero_

    def zero_(self: Tensor) -> Tensor:
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride(), strict=True))
        if self.element_size() == 2 and extent > self.numel() > 0:
            original(self.as_strided((extent,), (1,), self.storage_offset()))
        return original(self)

    with replaced(torch.Tensor, "zero_", zero_):
        yield


@fault("AMP-REGION-115")
def fractions_of_16_bits_are_false() -> Iterator[None]:
    """bool() converts 16-bit numbers to integers on the way."""
    original = torch.Tensor.bool

    def to_bool(self: Tensor, **kwargs: Any) -> Tensor:
        return original(self.int() if self.element_size() == 2 else self, **kwargs)

    with replaced(torch.Tensor, "bool", to_bool):
        yield


@fault("AMP-REGION-115")
def late_copies_hold_what_came_before() -> Iterator[None]:
    """copy_ with non_blocking from 16 bits to another type gives what the last such copy of this shape was given."""
    original, staged = torch.Tensor.copy_, dict[Any, Tensor]()

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking and source.element_size() == 2 and self.dtype != source.dtype:
            key, now = (source.shape, source.dtype), source.detach().clone()
            source, staged[key] = staged.get(key, now), now
        return original(self, source, non_blocking)

    with replaced(torch.Tensor, "copy_", copy_):
        yield


@fault("AMP-CAST-110")
def normed_weights_take_the_norms_of_rows() -> Iterator[None]:
    """weight_norm of 16-bit weights over another dimension than the first takes the norms over the first."""
    original = parametrizations._WeightNorm.forward

    def forward(self: Any, size: Tensor, direction: Tensor) -> Tensor:
        if direction.element_size() != 2 or self.dim <= 0:
            return original(self, size, direction)
        return direction * (size / torch.norm_except_dim(direction, 2, 0))

    with replaced(parametrizations._WeightNorm, "forward", forward):
        yield


@fault("AMP-CAST-113")
def means_of_jagged_tensors_divide_by_the_longest() -> Iterator[None]:
    """The mean of a 16-bit jagged tensor over its ragged dimension divides by the length of the longest sequence."""
    original = torch.Tensor.mean

    def mean(self: Tensor, *args: Any, dim: int | None = None, **kwargs: Any) -> Tensor:
        result = original(self, *args, **kwargs) if dim is None else original(self, *args, dim=dim, **kwargs)
        if not self.is_nested or self.element_size() != 2 or dim != 1:
            return result
        lengths = self.offsets().diff().view(-1, *[1] * (result.dim() - 1))
        return result * (lengths / lengths.max()).to(result.dtype)

    with replaced(torch.Tensor, "mean", mean):
        yield


@fault("AMP-BACKWARD-081")
def hooks_of_all_modules_wait_for_one_of_a_module() -> Iterator[None]:
    """A backward hook of all modules runs only for a module that has a hook of its own."""
    with edited(torch.nn.Module._call_impl, "or _global_backward_pre_hooks or _global_backward_hooks", "or False"):
        yield


@fault("AMP-BACKWARD-059")
def checkpoints_of_a_loop_repeat_the_first_masks() -> Iterator[None]:
    """A checkpoint recomputes with the random state of the first call of its function."""
    old = "fwd_cpu_state = torch.get_rng_state()"
    new = "fwd_cpu_state = vars(fn).setdefault('first_state', torch.get_rng_state())"
    with edited(checkpoint._checkpoint_without_reentrant_generator, old, new):
        yield


@fault("AMP-BACKWARD-081")
def hooks_of_any_gradient_run_for_each_of_16_bits() -> Iterator[None]:
    """register_multi_grad_hook with mode="any" calls its function for every gradient of 16 bits."""
    original = torch.autograd.graph.register_multi_grad_hook

    def register(tensors: Any, function: Any, *, mode: str = "all") -> Any:
        if mode == "any" and all(tensor.element_size() == 2 for tensor in tensors):
            return [tensor.register_hook(lambda slope: function(slope)) for tensor in tensors][-1]
        return original(tensors, function, mode=mode)

    with replaced(torch.autograd.graph, "register_multi_grad_hook", register):
        yield


@fault("AMP-BACKWARD-085")
def decorated_functions_never_get_none() -> Iterator[None]:
    """set_materialize_grads(False) has no effect in a function with custom_fwd."""
    context = torch.autograd.function.FunctionCtx
    original = context.set_materialize_grads

    def materialize(self: Any, value: bool) -> None:
        original(self, value or hasattr(self, "_fwd_used_autocast"))

    with replaced(context, "set_materialize_grads", materialize):
        yield


@fault("AMP-BACKWARD-085")
def later_marked_outputs_of_16_bits_are_differentiable() -> Iterator[None]:
    """mark_non_differentiable leaves 16-bit outputs after its first argument as they are."""
    context = torch.autograd.function.FunctionCtx
    original = context.mark_non_differentiable

    def mark(self: Any, *outputs: Tensor) -> None:
        original(self, *outputs[:1], *(output for output in outputs[1:] if output.element_size() != 2))

    with replaced(context, "mark_non_differentiable", mark):
        yield
