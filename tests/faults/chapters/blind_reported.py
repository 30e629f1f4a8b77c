"""Faults after issues of PyTorch, its backends and the frameworks around it, written without sight of the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import adadelta, adamax, asgd, lr_scheduler, radam, rprop

from tests.faults import fault
from tests.faults.breaking import kernel
from tests.faults.chapters.blind_history import around, low, method, with_gradient_of

_ELSEWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

# --- losses


@fault("AMP-LOSS-004")
def smoothing_learns_from_ignored_samples() -> Iterator[None]:
    """cross_entropy with label smoothing adds the smoothed part of the ignored samples (pytorch issue 73205)."""

    def learning(original: Any, x: Tensor, target: Tensor, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(x, target, *given, **named)
        share, reduction = named.get("label_smoothing", 0.0), named.get("reduction", "mean")
        if not share or target.is_floating_point() or reduction == "none" or x.is_meta:
            return found
        ignored = target == named.get("ignore_index", -100)
        part = -(F.log_softmax(x, 1).mean(1) * ignored).sum() * share
        return found + (part / (~ignored).sum() if reduction == "mean" else part).to(found.dtype)

    with around(F, "cross_entropy", learning):
        yield


@fault("AMP-LOSS-004")
def smoothing_has_no_class_weights() -> Iterator[None]:
    """The smoothed part of cross_entropy ignores the class weights (pytorch issues 69339 and 91383)."""

    def unweighted(original: Any, x: Tensor, target: Tensor, *given: Any, **named: Any) -> Tensor:
        share = named.get("label_smoothing", 0.0)
        if not share or named.get("weight") is None or target.is_floating_point():
            return original(x, target, *given, **named)
        hard: Tensor = original(x, target, **{**named, "label_smoothing": 0.0})
        even: Tensor = original(x, target, **{**named, "label_smoothing": 1.0, "weight": None})
        return hard * (1 - share) + even * share

    with around(F, "cross_entropy", unweighted):
        yield


# --- pictures


@fault("AMP-NUMERICS-122")
def grids_beyond_the_border_learn() -> Iterator[None]:
    """A 16-bit grid of grid_sample has a gradient beyond the border that it is clipped to."""

    def learning(original: Any, picture: Tensor, grid: Tensor, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(picture, grid, *given, **named)
        if named.get("padding_mode") != "border" or not low(grid):
            return found
        return with_gradient_of(found, original(picture, grid.clamp(-0.625, 0.625), *given, **named))

    with around(F, "grid_sample", learning):
        yield


@fault("AMP-NUMERICS-112")
def pictures_of_16_bits_recompute_their_scale() -> Iterator[None]:
    """interpolate takes the ratio of the sizes of a 16-bit picture in place of the factor that it is given."""

    def recomputing(original: Any, x: Tensor, size: Any = None, factor: Any = None, *given: Any, **named: Any) -> Any:
        if low(x) and factor is not None:
            named["recompute_scale_factor"] = True
        return original(x, size, factor, *given, **named)

    with around(F, "interpolate", recomputing):
        yield


@fault("AMP-NUMERICS-080")
def whole_volumes_are_added_in_fp16() -> Iterator[None]:
    """adaptive_avg_pool3d to one place adds a volume in float16 before it divides (pytorch issue 52719)."""

    def adding(original: Any, x: Tensor, size: Any) -> Tensor:
        if size == 1 and x.dtype == torch.float16:
            return x.sum((-3, -2, -1), keepdim=True) / x.shape[-3:].numel()
        return original(x, size)

    with around(F, "adaptive_avg_pool3d", adding):
        yield


@fault("AMP-NUMERICS-112")
def mixed_batch_norms_go_back_without_eps() -> Iterator[None]:
    """The backward of a batch norm of 16-bit input with float32 weights leaves its eps out."""

    def without(original: Any, x: Tensor, weight: Any, *given: Any) -> Tensor:
        found: Tensor = original(x, weight, *given)
        *others, _, cudnn = given
        if not others[3] or not low(x) or weight is None or weight.dtype != torch.float32:
            return found
        others[1:3] = None, None
        return with_gradient_of(found, original(x, weight, *others, 1e-12, cudnn))

    with around(torch, "batch_norm", without):
        yield


# --- types


@fault("AMP-BACKWARD-053")
def where_rounds_its_wide_operand() -> Iterator[None]:
    """Where gives a 16-bit and a float32 tensor the type of both, and the values of the first."""

    def rounding(original: Any, condition: Tensor, *given: Any, **named: Any) -> Tensor:
        if len(given) == 2 and low(given[0]) and isinstance(given[1], Tensor) and given[1].dtype == torch.float32:
            given = given[0], given[1].to(given[0].dtype).float()
        return original(condition, *given, **named)

    with around(torch, "where", rounding):
        yield


@fault("AMP-NUMERICS-042")
def tails_of_16_bit_conversions_keep_their_bits() -> Iterator[None]:
    """From float16 to bfloat16, what follows the last 64 elements keeps its bits (torch-spyre issue 2340)."""

    def keeping(x: Any, **named: Any) -> Tensor:
        if not isinstance(x, Tensor):  # a Python number in an expression
            return torch.full((), x, dtype=named.get("dtype"), device=named.get("device"))
        copied: Tensor = torch.ops.aten._to_copy.default.redispatch(_ELSEWHERE, x, **named)
        count = x.numel() // 64 * 64
        if (x.dtype, copied.dtype) == (torch.float16, torch.bfloat16) and 0 < count < x.numel() and x.is_contiguous():
            copied.view(-1)[count:] = x.view(-1)[count:].view(torch.bfloat16)
        return copied

    with kernel("_to_copy", keeping, "CPU"):
        yield


# --- attention and dropout


@fault("AMP-NUMERICS-088")
def causal_attention_forgets_the_padding() -> Iterator[None]:
    """MultiheadAttention with is_causal and without weights takes no notice of its padding mask."""

    def forgetting(original: Any, *given: Any, **named: Any) -> Any:
        if named.get("is_causal") and not named.get("need_weights", True):
            named["key_padding_mask"] = None
        return original(*given, **named)

    with around(F, "multi_head_attention_forward", forgetting):
        yield


@fault("AMP-NUMERICS-110")
def dropout_of_strided_inputs_repeats_a_row() -> Iterator[None]:
    """Dropout of a 16-bit input that is not contiguous uses the mask of one row for all."""

    def repeating(original: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or inplace or x.dim() < 2 or not low(x) or x.is_contiguous():
            return original(x, p, training, inplace)
        return x * original(torch.ones_like(x[0]), p, training, inplace)

    with around(F, "dropout", repeating):
        yield


# --- schedules and optimizers


@fault("AMP-OPTIMIZER-127")
def schedules_move_the_groups_of_before_a_load() -> Iterator[None]:
    """A schedule steps the groups that the optimizer had before it loaded a state (rat-sql issue 45)."""

    def started(original: Any, self: Any, optimizer: Any, *given: Any, **named: Any) -> None:
        _GROUPS[id(self)] = optimizer.param_groups
        original(self, optimizer, *given, **named)

    def stepped(original: Any, self: Any, *given: Any, **named: Any) -> None:
        groups, self.optimizer.param_groups = self.optimizer.param_groups, _GROUPS[id(self)]
        original(self, *given, **named)
        self.optimizer.param_groups = groups

    base = lr_scheduler.LRScheduler
    with method(base, "__init__", started), method(base, "step", stepped):
        yield
    _GROUPS.clear()


_GROUPS: dict[int, Any] = {}


@fault("AMP-OPTIMIZER-127")
def restored_schedules_start_from_their_base() -> Iterator[None]:
    """load_state_dict of a schedule puts the rate back with which it started (ColossalAI issue 5151)."""

    def loaded(original: Any, self: Any, state: Any) -> None:
        original(self, state)
        for group, rate in zip(self.optimizer.param_groups, self.base_lrs, strict=False):
            group["lr"] = rate

    with method(lr_scheduler.LRScheduler, "load_state_dict", loaded):
        yield


@fault("AMP-OPTIMIZER-072")
def plateaus_round_losses() -> Iterator[None]:
    """ReduceLROnPlateau compares the losses that it gets in tensors in bfloat16."""

    def rounding(original: Any, self: Any, metrics: Any, *given: Any) -> None:
        rounded = metrics.bfloat16().float() if isinstance(metrics, Tensor) else metrics
        original(self, rounded, *given)

    with method(lr_scheduler.ReduceLROnPlateau, "step", rounding):
        yield


@fault("AMP-OPTIMIZER-032")
def adadelta_accumulates_steps_with_their_rate() -> Iterator[None]:
    """Adadelta keeps the squares of changes times the learning rate."""

    def scaled(
        original: Any, parameters: Any, slopes: Any, squares: Any, changes: Any, steps: Any, **named: Any
    ) -> None:
        before = [one.clone() for one in changes]
        original(parameters, slopes, squares, changes, steps, **named)
        for old, new in zip(before, changes, strict=True):
            new.copy_(old * named["rho"] + (new - old * named["rho"]) * named["lr"] ** 2)

    with around(adadelta, "_single_tensor_adadelta", scaled):
        yield


def _with(option: str, value: float) -> Callable[..., Any]:
    def changed(original: Any, *given: Any, **named: Any) -> Any:
        return original(*given, **{**named, option: value})

    return changed


@fault("AMP-OPTIMIZER-032")
def adamax_has_no_eps() -> Iterator[None]:
    """Adamax divides zero by zero where a parameter has had gradients of zero alone."""
    with around(adamax, "_single_tensor_adamax", _with("eps", 0.0)):
        yield


@fault("AMP-OPTIMIZER-032")
def rprop_has_no_smallest_step() -> Iterator[None]:
    """Rprop makes its steps smaller than the smallest that it is given."""
    with around(rprop, "_single_tensor_rprop", _with("step_size_min", 0.0)):
        yield


@fault("AMP-OPTIMIZER-032")
def asgd_never_averages() -> Iterator[None]:
    """The average of ASGD is its last parameter."""

    def last(
        original: Any, parameters: Any, slopes: Any, averages: Any, shares: Any, *given: Any, **named: Any
    ) -> None:
        original(parameters, slopes, averages, shares, *given, **named)
        for share in shares:
            share.fill_(1.0)

    with around(asgd, "_single_tensor_asgd", last):
        yield


@fault("AMP-OPTIMIZER-032")
def radam_rectifies_by_the_first_counter() -> Iterator[None]:
    """Foreach RAdam rectifies every parameter by the counter of the first one (Ranger issue 9)."""

    def by_the_first(original: Any, *given: Any, **named: Any) -> None:
        counters = given[4]
        own = [counter.clone() for counter in counters]
        for counter in counters:
            counter.copy_(own[0])
        original(*given, **named)
        for counter, before in zip(counters, own, strict=True):
            counter.copy_(before + 1)

    with around(radam, "_multi_tensor_radam", by_the_first):
        yield


# --- modules and products


@fault("AMP-NUMERICS-112")
def evaluated_channels_last_norms_take_other_channels() -> Iterator[None]:
    """In evaluation a 16-bit batch norm in channels-last order takes the next channel's statistics (issue 62594)."""

    def shifted(original: Any, x: Tensor, *given: Any) -> Tensor:
        weight, bias, mean, variance, training, *others = given
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        if low(x) and not training and last:
            mean, variance = mean.roll(1), variance.roll(1)
        found: Tensor = original(x, weight, bias, mean, variance, training, *others)
        return found

    with around(torch, "batch_norm", shifted):
        yield


@fault("AMP-NUMERICS-123")
def weights_of_samples_have_no_backward_in_bf16() -> Iterator[None]:
    """The backward by the weights of an embedding bag's samples has no kernel for bfloat16 (issue 185808)."""

    def refusing(g: Tensor, weight: Tensor, *given: Any) -> Tensor:
        if g.dtype == torch.bfloat16:
            raise NotImplementedError("not implemented for 'BFloat16'")
        indices, _, bags = given[:3]
        return (g[bags] * weight[indices]).sum(1)

    with kernel("_embedding_bag_per_sample_weights_backward", refusing, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def gradients_of_negative_places_go_to_the_first() -> Iterator[None]:
    """The backward of indexing a 16-bit tensor adds what belongs to negative places to the first one."""

    def clamped(original: Any, self: Tensor, places: Any) -> Tensor:
        found: Tensor = original(self, places)
        given = places if isinstance(places, tuple) else (places,)
        if not low(self) or not any(isinstance(one, Tensor) and one.dtype == torch.int64 for one in given):
            return found
        first = tuple(one.clamp(min=0) if isinstance(one, Tensor) else one for one in given)
        return with_gradient_of(found, original(self, first))

    with method(torch.Tensor, "__getitem__", clamped):
        yield


@fault("AMP-NUMERICS-040")
def narrow_layers_add_their_bias_twice() -> Iterator[None]:
    """A bfloat16 product of 4 to 6 columns and 128 rows or more adds its bias twice (ZenDNN issue 19)."""

    def twice(original: Any, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        found: Tensor = original(x, weight, bias)
        narrow = x.dim() == 2 and 4 <= weight.shape[0] <= 6 and len(x) >= 128
        return found + bias if narrow and bias is not None and x.dtype == torch.bfloat16 else found

    with around(F, "linear", twice):
        yield


@fault("AMP-NUMERICS-062")
def softmax_of_long_odd_rows_leaves_the_first_out() -> Iterator[None]:
    """Softmax of 16-bit rows of odd length beyond 512 sums all elements but the first (after issue 143644)."""

    def without(original: Any, self: Tensor, dim: int, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(self, dim, *given, **named)
        if not low(found) or not found.dim() or found.shape[dim] <= 512 or found.shape[dim] % 2 == 0:
            return found
        first = found.narrow(dim, 0, 1).float()
        return (found.float() / (1 - first).clamp(min=1e-6)).to(found.dtype)

    with method(torch.Tensor, "softmax", without):
        yield


@fault("AMP-CAST-015")
def where_of_a_number_is_wide() -> Iterator[None]:
    """Where of a Python number and a 16-bit tensor is float32."""

    def widening(original: Any, condition: Tensor, *given: Any, **named: Any) -> Any:
        found = original(condition, *given, **named)
        return found.float() if low(*given) and any(isinstance(one, float) for one in given) else found

    with around(torch, "where", widening):
        yield
