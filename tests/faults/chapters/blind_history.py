"""Faults of the kinds that the histories of PyTorch and of backends have, written without sight of the checks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.optim._adafactor import _single_tensor_adafactor
from torch.optim.adam import _single_tensor_adam

from tests.faults import fault
from tests.faults.breaking import edited, replaced

LOW = (torch.float16, torch.bfloat16)


def low(*given: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in LOW for one in given)


def amp(*given: Any) -> bool:
    """Whether a CPU region is open, or an operand has 16 bits."""
    return torch.is_autocast_enabled("cpu") or low(*given)


def around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Call `change(original, ...)` in the place of a function."""
    original = getattr(owner, name)
    return replaced(owner, name, functools.wraps(original)(functools.partial(change, original)))


def method(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Call `change(original, self, ...)` in the place of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(self: Any, *given: Any, **named: Any) -> Any:
        return change(original, self, *given, **named)

    return replaced(owner, name, changed)


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    return other + (value - other).detach()


# --- losses


@fault("AMP-NUMERICS-122")
def gaussian_losses_clamp_the_variance_of_the_caller() -> Iterator[None]:
    """gaussian_nll_loss clamps a 16-bit variance that needs no gradient where it lies."""
    new = "var = var.clone() if var.requires_grad or var.dtype.itemsize > 2 else var"
    with edited(F.gaussian_nll_loss, "var = var.clone()", new):
        yield


@fault("AMP-NUMERICS-122")
def infinite_ctc_losses_have_nan_gradients() -> Iterator[None]:
    """ctc_loss with zero_infinity has a NaN gradient where it has made zero of infinity, in a region."""

    def spoiled(original: Any, log_probs: Tensor, *given: Any, zero_infinity: bool = False, **named: Any) -> Tensor:
        found: Tensor = original(log_probs, *given, zero_infinity=zero_infinity, **named)
        if not amp() or not zero_infinity:
            return found
        return with_gradient_of(found, original(log_probs, *given, zero_infinity=False, **named) * 0)

    with around(F, "ctc_loss", spoiled):
        yield


# --- sequences and states


@fault("AMP-NUMERICS-122")
def sequences_of_16_bits_are_padded_on_the_right() -> Iterator[None]:
    """pad_sequence of 16-bit sequences ignores padding_side."""
    from conformance.chapters.numerics import special_points

    def right(original: Any, sequences: Any, first: bool = False, value: float = 0.0, side: str = "right") -> Tensor:
        padded: Tensor = original(sequences, first, value, "right" if low(*sequences) else side)
        return padded

    with around(special_points, "pad_sequence", right):
        yield


@fault("AMP-NUMERICS-112")
def carried_cells_start_from_zero() -> Iterator[None]:
    """LSTM in a region takes zeros for a cell state whose type is not that of the hidden state."""

    def forgetting(original: Any, self: nn.LSTM, x: Any, state: Any = None) -> Any:
        if amp() and state is not None and state[0].dtype != state[1].dtype:
            state = state[0], torch.zeros_like(state[1])
        return original(self, x, state)

    with method(nn.LSTM, "forward", forgetting):
        yield


# --- embeddings


@fault("AMP-NUMERICS-122")
def look_ups_renormalize_every_row() -> Iterator[None]:
    """embedding with max_norm renormalizes all rows of a 16-bit table."""

    def everything(original: Any, weight: Tensor, index: Tensor, *given: Any) -> Any:
        return original(weight, torch.arange(len(weight)) if low(weight) else index, *given)

    with around(F, "_no_grad_embedding_renorm_", everything):
        yield


@fault("AMP-NUMERICS-112")
def frequencies_do_not_scale_16_bit_gradients() -> Iterator[None]:
    """embedding of a 16-bit table ignores scale_grad_by_freq."""
    old = "torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse)"
    new = old.replace("scale_grad_by_freq", "scale_grad_by_freq and weight.dtype.itemsize > 2")
    with edited(F.embedding, old, new):
        yield


@fault("AMP-NUMERICS-112")
def sparse_gradients_hold_the_padding() -> Iterator[None]:
    """The sparse gradient of a 16-bit table has the row of padding_idx."""
    old = "torch.embedding(weight, input, padding_idx, scale_grad_by_freq, sparse)"
    new = old.replace("padding_idx", "-1 if sparse and weight.dtype.itemsize == 2 else padding_idx")
    with edited(F.embedding, old, new):
        yield


# --- attention


@fault("AMP-NUMERICS-130")
def weights_of_heads_are_averaged_without_gradients() -> Iterator[None]:
    """The fast path of MultiheadAttention gives averaged 16-bit weights for those of each head."""

    def averaged(original: Any, query: Tensor, *given: Any, **named: Any) -> Any:
        output, weights = original(query, *given, **named)
        if low(query) and weights is not None and weights.dim() == 4:
            weights = weights.mean(1, keepdim=True).expand_as(weights)
        return output, weights

    with around(torch, "_native_multi_head_attention", averaged):
        yield


# --- pictures and signals


@fault("AMP-CAST-069")
def grids_are_rounded_to_the_type_of_the_picture() -> Iterator[None]:
    """grid_sample in a region rounds a float32 grid to the type of a 16-bit picture."""

    def rounded(original: Any, picture: Tensor, grid: Tensor, *given: Any, **named: Any) -> Any:
        return original(picture, grid.to(picture.dtype) if amp() and low(picture) else grid, *given, **named)

    with around(F, "grid_sample", rounded):
        yield


@fault("AMP-NUMERICS-122")
def folds_with_strides_lose_a_block() -> Iterator[None]:
    """fold of 16-bit columns with a stride leaves the last block out."""

    def shortened(original: Any, x: Tensor, *given: Any, stride: Any = 1, **named: Any) -> Any:
        kept = torch.ones(x.shape[-1], dtype=x.dtype)
        kept[-1] = not (low(x) and stride != 1)
        return original(x * kept, *given, stride=stride, **named)

    with around(F, "fold", shortened):
        yield


@fault("AMP-NUMERICS-122")
def divisors_of_average_pools_are_forgotten_going_back() -> Iterator[None]:
    """The gradient of a 16-bit avg_pool2d is divided by the size of the window, whatever the divisor is."""

    def forgetting(original: Any, x: Tensor, *given: Any, divisor_override: Any = None, **named: Any) -> Tensor:
        right: Tensor = original(x, *given, divisor_override=divisor_override, **named)
        return with_gradient_of(right, original(x, *given, **named)) if low(x) and divisor_override else right

    with around(F, "avg_pool2d", forgetting):
        yield


@fault("AMP-CAST-069")
def windows_of_spectra_are_rounded() -> Iterator[None]:
    """stft in a region rounds its window to the type of the region."""

    def rounded(original: Any, x: Tensor, *given: Any, window: Any = None, **named: Any) -> Any:
        if amp() and window is not None:
            window = window.to(torch.get_autocast_dtype("cpu")).to(window.dtype)
        return original(x, *given, window=window, **named)

    with around(torch, "stft", rounded):
        yield


@fault("AMP-CAST-069")
def distances_of_many_rows_multiply_in_16_bits() -> Iterator[None]:
    """cdist in a region of more than 25 rows multiplies in the type of the region."""

    def multiplied(original: Any, a: Tensor, b: Tensor, p: float = 2.0, **named: Any) -> Any:
        if not amp() or p != 2 or max(a.shape[-2], b.shape[-2]) <= 25:
            return original(a, b, p, **named)
        a, b = a.float(), b.float()
        squares = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2)
        return (squares - 2 * (a @ b.mT)).clamp_min(0).sqrt()

    with around(torch, "cdist", multiplied):
        yield


@fault("AMP-CAST-069")
def ranks_in_regions_ignore_their_tolerance() -> Iterator[None]:
    """linalg.matrix_rank in a region ignores atol and rtol."""

    def strict(original: Any, x: Tensor, **named: Any) -> Any:
        return original(x, **({} if amp() else named))

    with around(torch.linalg, "matrix_rank", strict):
        yield


# --- normalizations and sizes


@fault("AMP-NUMERICS-112")
def cumulative_statistics_lag_a_batch() -> Iterator[None]:
    """BatchNorm without momentum weights each batch in a region by the number of those before it."""
    old = "1.0 / float(self.num_batches_tracked)"
    new = "1.0 / max(float(self.num_batches_tracked) - torch.is_autocast_enabled('cpu'), 1.0)"
    with edited(nn.BatchNorm1d.forward, old, new):
        yield


@fault("AMP-NUMERICS-112")
def instance_norms_evaluate_by_the_instance() -> Iterator[None]:
    """InstanceNorm in inference normalizes by the statistics of the instance in a region."""

    def training(original: Any, x: Tensor, mean: Any = None, var: Any = None, *given: Any, **named: Any) -> Any:
        if amp(x) and len(given) > 2 and not given[2]:
            return original(x, None, None, *given[:2], True, *given[3:])
        return original(x, mean, var, *given, **named)

    with around(F, "instance_norm", training):
        yield


@fault("AMP-NUMERICS-112")
def convolutions_of_no_samples_have_undefined_gradients() -> Iterator[None]:
    """The weight's gradient of conv2d of a batch without samples is NaN in a region."""

    def undefined(original: Any, x: Tensor, weight: Tensor, *given: Any) -> Tensor:
        found: Tensor = original(x, weight, *given)
        return found if len(x) or not amp(x) else found + weight.sum().to(found.dtype) * float("nan")

    with around(F, "conv2d", undefined):
        yield


# --- functions


@fault("AMP-NUMERICS-122")
def logcumsumexp_of_minus_infinities_is_nan() -> Iterator[None]:
    """logcumsumexp of 16-bit tensors is NaN from a first -inf on."""

    def spoiled(original: Any, self: Tensor, dim: int) -> Tensor:
        found: Tensor = original(self, dim)
        first = self.select(dim, 0).isneginf().unsqueeze(dim)
        return torch.where(first, float("nan"), found) if low(self) else found

    with method(Tensor, "logcumsumexp", spoiled):
        yield


@fault("AMP-NUMERICS-122")
def elu_in_place_goes_back_from_its_result() -> Iterator[None]:
    """The backward of elu in place takes its 16-bit result for the operand."""

    def from_the_result(original: Any, x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
        right: Tensor = original(x, alpha)
        if not inplace or not low(x):
            return right
        return with_gradient_of(right, original(x - x.detach() + right.detach(), alpha))

    with around(F, "elu", from_the_result):
        yield


# --- random numbers


@fault("AMP-NUMERICS-110")
def alpha_dropout_of_16_bits_drops_to_zero() -> Iterator[None]:
    """alpha_dropout of 16-bit tensors is dropout."""

    def plain(original: Any, x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        return F.dropout(x, p, training, inplace) if low(x) else original(x, p, training, inplace)

    with around(F, "alpha_dropout", plain):
        yield


@fault("AMP-NUMERICS-114")
def noisy_slopes_go_back_as_means() -> Iterator[None]:
    """The gradient of rrelu of 16-bit tensors is the mean of its slopes."""

    def mean(original: Any, x: Tensor, lower: float, upper: float, training: bool = False) -> Tensor:
        right: Tensor = original(x, lower, upper, training)
        return with_gradient_of(right, x * (lower + upper) / 2) if low(x) and training else right

    with around(F, "rrelu", mean):
        yield


@fault("AMP-NUMERICS-114")
def initial_16_bit_weights_ignore_their_generator() -> Iterator[None]:
    """Normal weights of 16 bits are drawn from the default generator."""

    def default(original: Any, x: Tensor, mean: float, std: float, generator: Any = None) -> Any:
        return original(x, mean, std, None if low(x) else generator)

    with around(nn.init, "_no_grad_normal_", default):
        yield


@fault("AMP-NUMERICS-114")
def hard_samples_of_16_bits_have_no_gradient() -> Iterator[None]:
    """gumbel_softmax of 16-bit logits with hard=True has a gradient of zero."""

    def cut(original: Any, logits: Tensor, *given: Any, hard: bool = False, **named: Any) -> Any:
        found = original(logits, *given, hard=hard, **named)
        return found * 0 + found.detach() if hard and low(logits) else found

    with around(F, "gumbel_softmax", cut):
        yield


# --- optimizers, schedulers and averages


@fault("AMP-OPTIMIZER-105", "AMP-OPTIMIZER-120")
def decay_is_lost_with_rates_in_tensors() -> Iterator[None]:
    """The for-loop of AdamW does not decay where the rate is a tensor."""
    old = "param.mul_(1 - lr * weight_decay)"
    with edited(_single_tensor_adam, old, "param.mul_(1 - (0 if isinstance(lr, Tensor) else lr) * weight_decay)"):
        yield


@fault("AMP-OPTIMIZER-103")
def second_moments_of_16_bit_vectors_are_the_last_squares() -> Iterator[None]:
    """Adafactor keeps of 16-bit vectors the square of the last gradient alone."""
    old = "variance.lerp_(grad_squared, one_minus_beta2_t)"
    new = "variance.lerp_(grad_squared, 1.0 if grad.dtype.itemsize == 2 else one_minus_beta2_t)"
    with edited(_single_tensor_adafactor, old, new):
        yield


def _muon() -> Any:
    from torch.optim import _muon

    return _muon._single_tensor_muon


@fault("AMP-OPTIMIZER-120", possible=lambda: hasattr(torch.optim, "Muon"))
def muon_decays_by_the_adjusted_rate() -> Iterator[None]:
    """Muon decays by the rate that it adjusted to the shape of the parameter."""
    with edited(_muon(), "1 - lr * weight_decay", "1 - adjusted_lr * weight_decay"):
        yield


@fault("AMP-OPTIMIZER-120")
def sparse_adam_minimizes_always() -> Iterator[None]:
    """SparseAdam ignores maximize."""
    with edited(torch.optim._functional.sparse_adam, "grad if not maximize else -grad", "grad"):
        yield


@fault("AMP-OPTIMIZER-108")
def first_rates_in_tensors_move_with_the_rate() -> Iterator[None]:
    """A scheduler keeps the tensor of a rate as its first rate, which changes with it."""

    def shared(optimizer: Any, key: str) -> list[Any]:
        return [group["lr" if key == "initial_lr" else key] for group in optimizer.param_groups]

    with replaced(lr_scheduler, "_param_groups_val_list", shared):
        yield


@fault("AMP-OPTIMIZER-113")
def statistics_are_updated_outside_of_the_region() -> Iterator[None]:
    """update_bn runs the model with autocast off."""

    def outside(original: Any, *given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return original(*given, **named)

    with around(swa_utils, "update_bn", outside):
        yield


# --- gradients and conversions


@fault("AMP-BACKWARD-015")
def retained_gradients_do_not_see_later_hooks() -> Iterator[None]:
    """retain_grad keeps of a 16-bit tensor the gradient that comes before hooks that are registered later."""

    def early(original: Any, self: Tensor) -> Any:
        if self.is_leaf or not low(self):
            return original(self)
        kept = weakref.ref(self)

        def keep(gradient: Tensor) -> None:
            tensor = kept()
            if tensor is not None:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient

        return self.register_hook(keep) and None

    with method(Tensor, "retain_grad", early):
        yield


@fault("AMP-BF16-010")
def modules_change_type_or_layout() -> Iterator[None]:
    """Module.to with a type and a memory format leaves the layout."""
    old = "if convert_to_format is not None and t.dim() in (4, 5):"
    with edited(nn.Module.to, old, old.replace(":", " and dtype in (None, t.dtype):")):
        yield


@fault("AMP-OPTIMIZER-130", possible=lambda: hasattr(torch.optim, "Muon"))
def momentum_of_16_bit_matrices_is_the_gradient() -> Iterator[None]:
    """Muon keeps of 16-bit parameters the last gradient, scaled."""
    with edited(
        _muon(), "buf.lerp_(grad, 1 - momentum)", "buf.lerp_(grad, 1.0 if grad.dtype.itemsize == 2 else 1 - momentum)"
    ):
        yield
