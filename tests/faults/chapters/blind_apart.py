"""Faults of evaluation, kept copies, keywords, layouts of weights, spellings, options and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.blind_routes import _below as below
from tests.faults.chapters.blind_uses import LOW, in_a_region

Scaler = torch.amp.GradScaler


# --- what skips a step


@fault("AMP-SCALE-195")
def overflows_of_exp_skip_the_next_step() -> Iterator[None]:
    """An infinite exp under no_grad sets the flag of the next optimizer that is unscaled."""
    met: list[bool] = []
    exp, unscale = torch.exp, Scaler._unscale_grads_

    def seen(*given: Any, **named: Any) -> Tensor:
        found = exp(*given, **named)
        if not torch.is_grad_enabled() and found.isinf().any():
            met.append(True)
        return found

    def flagged(self: Any, *given: Any, **named: Any) -> dict[torch.device, Tensor]:
        flags = unscale(self, *given, **named)
        while met:
            met.pop()
            for flag in flags.values():
                flag.fill_(1.0)
        return flags

    with replaced(torch, "exp", seen), replaced(Scaler, "_unscale_grads_", flagged):
        yield


@contextlib.contextmanager
def backing_off_after(bad: Callable[[Tensor], bool]) -> Iterator[None]:
    """Let update() back off if scale() was given a bad tensor since the update before."""
    scale, update = Scaler.scale, Scaler.update

    def scaled(self: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor) and bad(outputs):
            self._met = True
        return scale(self, outputs)

    def updated(self: Any, *given: Any, **named: Any) -> None:
        if self.__dict__.pop("_met", False):
            for state in self._per_optimizer_states.values():
                for flag in state["found_inf_per_device"].values():
                    flag.fill_(1.0)
        update(self, *given, **named)

    with replaced(Scaler, "scale", scaled), replaced(Scaler, "update", updated):
        yield


@fault("AMP-SCALE-195")
def scaled_infinities_back_the_scale_off() -> Iterator[None]:
    """update() backs off after a scale() of an infinite output, of whatever gradients."""
    with backing_off_after(lambda outputs: outputs.numel() > 1 and bool(outputs.isinf().any())):
        yield


# --- what is kept


@fault("AMP-MEMORY-051")
def bmm_keeps_its_operands_without_gradients() -> Iterator[None]:
    """bmm in a region keeps the casts of its operands where no gradient is recorded."""
    kept: list[Tensor] = []

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        low = [x.to(torch.get_autocast_dtype("cpu")) for x in (left, right)]
        if not torch.is_grad_enabled():
            kept.extend(low)
        found: Tensor = below(torch.bmm, *low)
        return found

    with kernel("bmm", bmm, "AutocastCPU"):
        yield


@fault("AMP-CACHE-001")
def transposed_weights_of_linear_are_cast_at_each_use() -> Iterator[None]:
    """linear in a region takes no cast from the cache for a weight whose rows are not contiguous."""

    def linear(original: Any, input: Tensor, weight: Tensor, *given: Any, **named: Any) -> Any:
        return original(input, weight if weight.is_contiguous() else weight.view_as(weight), *given, **named)

    with replaced(F, "linear", in_a_region(F.linear, linear)):
        yield


# --- keywords


@fault("AMP-BACKWARD-083")
def checkpoints_detach_what_a_dictionary_holds() -> Iterator[None]:
    """checkpoint in a region passes copies without a graph of 16-bit tensors in dictionaries."""

    def plain(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: x.detach() if isinstance(x, Tensor) and x.dtype in LOW else x for key, x in value.items()}

    def run(original: Any, function: Any, *given: Any, **named: Any) -> Any:
        return original(function, *map(plain, given), **named)

    with replaced(checkpoint, "checkpoint", in_a_region(checkpoint.checkpoint, run)):
        yield


@fault("AMP-BACKWARD-083")
def functional_calls_detach_keywords() -> Iterator[None]:
    """functional_call in a region passes no gradient to tensors that are given by keyword."""

    def run(original: Any, module: Any, state: Any, given: Any = None, named: Any = None, **options: Any) -> Any:
        plain = {key: x.detach() if isinstance(x, Tensor) else x for key, x in (named or {}).items()}
        return original(module, state, given, plain, **options)

    with replaced(torch.func, "functional_call", in_a_region(torch.func.functional_call, run)):
        yield


# --- spellings


@fault("AMP-CAST-027")
def einsum_by_numbers_stays_wide() -> Iterator[None]:
    """einsum with lists of numbers that hold Ellipsis computes in float32 in a region."""

    def einsum(original: Any, *given: Any) -> Any:
        with torch.autocast("cpu", enabled=not any(isinstance(one, list) and Ellipsis in one for one in given)):
            return original(*given)

    with replaced(torch, "einsum", in_a_region(torch.einsum, einsum)):
        yield


@fault("AMP-CAST-027")
def tensordot_of_lists_stays_wide() -> Iterator[None]:
    """tensordot over lists of dimensions computes in float32 in a region."""

    def tensordot(original: Any, a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Any:
        with torch.autocast("cpu", enabled=not isinstance(dims, tuple)):
            return original(a, b, dims)

    with replaced(torch, "tensordot", in_a_region(torch.tensordot, tensordot)):
        yield


# --- options of modules


@fault("AMP-NUMERICS-121")
def convolutions_of_the_same_size_stay_wide() -> Iterator[None]:
    """Convolutions that pad to the same size by reflection compute in float32 in a region."""
    kind = torch.nn.Conv1d

    def convolve(original: Any, self: Any, *given: Any) -> Any:
        with torch.autocast("cpu", enabled=self.padding != "same" or self.padding_mode != "reflect"):
            return original(self, *given)

    with replaced(kind, "_conv_forward", in_a_region(kind._conv_forward, convolve)):
        yield


@fault("AMP-NUMERICS-112")
def attention_with_a_zero_key_has_none_with_a_mask() -> Iterator[None]:
    """MultiheadAttention with add_zero_attn adds no key where a mask is given without weights, in a region."""
    original = F.multi_head_attention_forward

    def attend(_: Any, *given: Any, **named: Any) -> Any:
        if named.get("attn_mask") is not None and not named.get("need_weights", True):
            given = (*given[:9], False, *given[10:])
        return original(*given, **named)

    with replaced(F, "multi_head_attention_forward", in_a_region(original, attend)):
        yield


# --- options of ops


@fault("AMP-CAST-055")
def poisson_losses_of_counts_are_rounded() -> Iterator[None]:
    """poisson_nll_loss of no logarithm rounds its float32 target to the type of its input in a region."""

    def loss(input: Tensor, target: Tensor, log_input: bool, *given: Any) -> Tensor:
        if not log_input and input.dtype in LOW:
            target = target.to(input.dtype)
        found: Tensor = below(torch.poisson_nll_loss, input.float(), target.float(), log_input, *given)
        return found

    with kernel("poisson_nll_loss", loss, "AutocastCPU"):
        yield


@fault("AMP-CAST-055")
def class_probabilities_are_smoothed_in_16_bits() -> Iterator[None]:
    """cross_entropy_loss of probabilities in a region rounds its result to 16 bits."""

    def loss(input: Tensor, target: Tensor, *given: Any) -> Tensor:
        wide = (x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in (input, target, *given))
        found: Tensor = below(torch.ops.aten.cross_entropy_loss, *wide)
        return found.bfloat16().float() if target.is_floating_point() else found

    with kernel("cross_entropy_loss", loss, "AutocastCPU"):
        yield


# --- counters


@fault("AMP-BF16-010")
def averaged_models_count_in_floating_point() -> Iterator[None]:
    """AveragedModel counts its averages in float32, which becomes the type of the model."""
    original = swa_utils.AveragedModel.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.n_averaged = self.n_averaged.float()

    with replaced(swa_utils.AveragedModel, "__init__", init):
        yield


@fault("AMP-BF16-010")
def batch_norms_count_to_256() -> Iterator[None]:
    """A batch norm with 16-bit weights counts its batches in their type."""
    original = torch.nn.BatchNorm2d.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        found: Tensor = original(self, input)
        if self.training and self.weight.dtype in LOW:
            count = self.num_batches_tracked
            count.copy_((count - 1).to(self.weight.dtype) + 1)
        return found

    with replaced(torch.nn.BatchNorm2d, "forward", forward):
        yield
