"""Faults of one option, layout, order or container, after defects of PyTorch and of backends, written blind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad, graph
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import adam, lr_scheduler, nadam, sgd

from tests.faults import fault
from tests.faults.breaking import decomposed, edited, kernel, replaced
from tests.faults.chapters.blind_history import LOW, amp, around, low, method

# --- ops


@fault("AMP-NUMERICS-122")
def sliced_biases_are_read_as_packed() -> Iterator[None]:
    """addmm of 16 bits reads a bias whose elements are apart as if they were not."""

    def addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if low(bias) and bias.dim() == 1 and bias.stride(0) > 1:
            bias = bias.as_strided(bias.shape, (1,))
        return (beta * bias.double() + alpha * torch.mm(x.double(), y.double())).to(x.dtype)

    with kernel("addmm", addmm, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def features_for_tokens_are_taken_by_place() -> Iterator[None]:
    """masked_scatter of 16 bits with a mask that is expanded takes the source by place, not in order."""

    def scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        whole = mask.expand(x.shape)
        apart = low(x) and (mask.shape != x.shape or 0 in mask.stride())
        places = torch.arange(x.numel()) if apart else whole.flatten().long().cumsum(0) - 1
        return torch.where(whole, source.flatten()[places.clamp(min=0) % source.numel()].view(x.shape), x)

    with kernel("masked_scatter", scatter, "CPU"):
        yield


@fault("AMP-NUMERICS-122")
def saturated_probabilities_have_nan_gradients() -> Iterator[None]:
    """The backward of binary_cross_entropy of bfloat16 divides by zero at probabilities of 0 and 1."""

    def backward(
        gradient: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
    ) -> Tensor:
        floor = 0.0 if x.dtype == torch.bfloat16 else 1e-12
        wide = x.double()
        found = gradient * (wide - target) / ((1 - wide) * wide).clamp_min(floor)
        found = found if weight is None else found * weight
        return (found / x.numel() if reduction == 1 else found).to(x.dtype)

    with kernel("binary_cross_entropy_backward", backward, "CPU"):
        yield


class _OfAbsolutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, result = (one.double() for one in ctx.saved_tensors)
        shares = gradients[0].abs() * (x.amax() - result).exp()
        return ((x - x.amax()).exp() * shares.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim)).to(gradients[0]), None, None


@fault("AMP-NUMERICS-122")
def negative_gradients_of_logcumsumexp_are_positive() -> Iterator[None]:
    """The gradient of a 16-bit logcumsumexp takes the absolute value of what comes in."""

    def call(original: Any, x: Tensor, dim: int) -> Tensor:
        found: Tensor = original(x, dim)
        return _OfAbsolutes.apply(x, found.detach(), dim) if low(x) else found

    with method(Tensor, "logcumsumexp", call):
        yield


@fault("AMP-NUMERICS-122")
def gradients_of_odd_norms_have_no_sign() -> Iterator[None]:
    """The gradient of a 3-norm of 16-bit numbers is positive where the number is negative."""

    def norm(original: Any, x: Tensor, ord: float = 2, *given: Any, **named: Any) -> Tensor:
        return original(x.abs().detach() + x - x.detach() if low(x) and ord == 3 else x, ord, *given, **named)

    with around(torch.linalg, "vector_norm", norm):
        yield


@fault("AMP-NUMERICS-125")
def tall_channels_last_pictures_lose_their_last_row() -> Iterator[None]:
    """interpolate of 16-bit channels-last pictures leaves the last of more than 256 rows empty."""

    def interpolate(original: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(x, *given, **named)
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] > 1
        if not (low(x) and last and found.shape[2] > 256 and named.get("mode") == "bilinear"):
            return found
        rows = torch.arange(found.shape[2], device=x.device) < found.shape[2] - 1
        return found * rows.to(x.dtype)[:, None]

    with around(F, "interpolate", interpolate):
        yield


@fault("AMP-LOSS-003")
def concatenated_targets_are_read_as_padded() -> Iterator[None]:
    """ctc_loss in a region reads targets that stand one after the other in steps of the longest."""

    def loss(original: Any, x: Tensor, targets: Tensor, given: Any, lengths: Any, *rest: Any, **named: Any) -> Tensor:
        if targets.dim() == 1 and torch.is_autocast_enabled("cpu"):
            counts = torch.as_tensor(lengths).tolist()
            whole = torch.cat([targets] * 8)
            targets = torch.cat([whole[max(counts) * n :][:count] for n, count in enumerate(counts)])
        found: Tensor = original(x, targets, given, lengths, *rest, **named)
        return found

    with around(F, "ctc_loss", loss):
        yield


@fault("AMP-NUMERICS-122")
def celu_in_place_keeps_the_scale_of_one() -> Iterator[None]:
    """celu in place of 16-bit numbers does not divide its input by alpha."""

    def celu(original: Any, x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
        found: Tensor = torch._C._nn.elu_(x, alpha) if inplace and low(x) else original(x, alpha, inplace)
        return found

    with around(F, "celu", celu):
        yield


@fault("AMP-NUMERICS-122")
def unpooled_channels_change_places() -> Iterator[None]:
    """max_unpool2d of 16-bit channels-last pictures gives each channel the places of the next."""

    def unpool(original: Any, x: Tensor, places: Tensor, *given: Any, **named: Any) -> Tensor:
        if low(x) and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            places = places.roll(-1, 1)
        found: Tensor = original(x, places, *given, **named)
        return found

    with around(F, "max_unpool2d", unpool):
        yield


@fault("AMP-NUMERICS-082", "AMP-NUMERICS-120")
def responses_are_normalized_one_channel_late() -> Iterator[None]:
    """local_response_norm of 1-dimensional signals of 16 bits pads the channels at the other end."""
    old = "div = pad(div, (0, 0, size // 2, (size - 1) // 2))"
    new = "div = pad(div, (0, 0, (size - (input.dtype.itemsize == 2)) // 2, (size - (input.dtype.itemsize != 2)) // 2))"
    with edited(F.local_response_norm, old, new):
        yield


# --- modules


@fault("AMP-NUMERICS-112")
def padding_changes_samples_beside_masks_of_heads() -> Iterator[None]:
    """MultiheadAttention of 16 bits with a mask of each head applies the padding of other samples."""
    old = ".reshape(bsz * num_heads, 1, src_len)\n        )"
    new = f"{old}\n        if attn_mask is not None and q.dtype.itemsize == 2 and attn_mask.size(0) > 1:\n"
    new += "            key_padding_mask = key_padding_mask[::num_heads].repeat(num_heads, 1, 1)"
    with edited(F.multi_head_attention_forward, old, new):
        yield


@fault("AMP-NUMERICS-112")
def decoders_attend_to_padded_memory() -> Iterator[None]:
    """TransformerDecoderLayer in 16 bits forgets the padding of its memory where it has a mask of it."""

    def block(original: Any, self: Any, x: Tensor, memory: Tensor, mask: Any, padding: Any, *given: Any) -> Tensor:
        found: Tensor = original(self, x, memory, mask, None if mask is not None and amp(x) else padding, *given)
        return found

    with method(nn.TransformerDecoderLayer, "_mha_block", block):
        yield


@fault("AMP-NUMERICS-112")
def last_layers_of_recurrent_nets_drop_out() -> Iterator[None]:
    """LSTM of several layers in training drops out after its last layer as well, in 16 bits."""

    def forward(original: Any, self: Any, *given: Any) -> Any:
        out, state = original(self, *given)
        if self.training and self.dropout and isinstance(out, Tensor) and low(out):
            out = F.dropout(out, self.dropout)
        return out, state

    with method(nn.LSTM, "forward", forward):
        yield


@fault("AMP-NUMERICS-112")
def cached_parametrizations_outlive_their_context() -> Iterator[None]:
    """parametrize.cached() keeps its weights for the next context in a region."""
    cached = parametrize.cached

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        with cached():
            yield
            held = dict(parametrize._cache)
        if torch.is_autocast_enabled("cpu"):
            parametrize._cache = held

    with replaced(parametrize, "cached", kept):
        yield
    parametrize._cache = {}


@fault("AMP-BACKWARD-039")
def hooks_of_several_gradients_miss_16_bit_ones() -> Iterator[None]:
    """register_multi_grad_hook passes None for gradients of 16 bits where others are of 32."""

    def register(original: Any, tensors: Any, function: Any, *, mode: str = "all") -> Any:
        if mode == "all" and len({one.dtype for one in tensors}) > 1:
            whole = function

            def function(gradients: Any) -> Any:
                return whole([None if low(one) else one for one in gradients])

        return original(tensors, function, mode=mode)

    with around(graph, "register_multi_grad_hook", register):
        yield


# --- optimizers


@fault("AMP-OPTIMIZER-120")
def decays_count_the_types_of_parameters() -> Iterator[None]:
    """AdamW's foreach step decays all parameters once for each type among them."""

    def step(original: Any, parameters: Any, *given: Any, **named: Any) -> None:
        if named["decoupled_weight_decay"]:
            for _ in range(len({one.dtype for one in parameters}) - 1):
                torch._foreach_mul_(parameters, 1 - float(named["lr"]) * named["weight_decay"])
        original(parameters, *given, **named)

    with around(adam, "_multi_tensor_adam", step):
        yield


@fault("AMP-OPTIMIZER-120")
def fused_momentum_of_16_bits_is_not_damped() -> Iterator[None]:
    """Fused SGD ignores dampening where a parameter is of 16 bits."""

    def step(original: Any, parameters: Any, *given: Any, dampening: float, **named: Any) -> None:
        original(parameters, *given, dampening=0.0 if low(*parameters) else dampening, **named)

    with around(sgd, "_fused_sgd", step):
        yield


@fault("AMP-OPTIMIZER-120")
def foreach_nadam_couples_its_decay() -> Iterator[None]:
    """NAdam's foreach step adds the decay to the gradient, decoupled_weight_decay or not."""

    def step(original: Any, *given: Any, decoupled_weight_decay: bool, **named: Any) -> None:
        original(*given, decoupled_weight_decay=False, **named)

    with around(nadam, "_multi_tensor_nadam", step):
        yield


@fault("AMP-OPTIMIZER-127")
def sequences_of_schedules_load_their_first() -> Iterator[None]:
    """SequentialLR.load_state_dict restores the first of its schedules alone."""

    def load(original: Any, self: Any, state: dict[str, Any]) -> None:
        rest = [one.state_dict() for one in self._schedulers[1:]]
        original(self, {**state, "_schedulers": [state["_schedulers"][0], *rest]})

    with method(lr_scheduler.SequentialLR, "load_state_dict", load):
        yield


# --- transforms


@fault("AMP-NUMERICS-126")
def tangents_of_batch_norms_hold_the_statistics() -> Iterator[None]:
    """Forward mode takes the statistics of a 16-bit batch for constants in batch_norm."""

    def norm(original: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
        weight, bias, training = given[2:5] if len(given) > 4 else (None, None, False)
        if not (training and low(x) and forward_ad._current_level >= 0):
            return original(x, *given, **named)
        dims = [each for each in range(x.dim()) if each != 1]
        wide, shape = x.float(), [1, -1, *[1] * (x.dim() - 2)]
        mean, deviation = (
            wide.detach().mean(dims, True),
            (wide.detach().var(dims, correction=0, keepdim=True) + 1e-5).sqrt(),
        )
        return ((wide - mean) / deviation * weight.view(shape) + bias.view(shape)).to(x.dtype)

    with around(F, "batch_norm", norm):
        yield


@fault("AMP-TRANSFORM-003")
def mapped_losses_divide_by_the_count() -> Iterator[None]:
    """cross_entropy with weights of classes divides in vmap by the samples, not by their weights, in a region."""

    def loss(original: Any, x: Tensor, target: Tensor, weight: Any = None, **named: Any) -> Tensor:
        mean = named.get("reduction", "mean") == "mean" and not target.is_floating_point()
        if weight is None or not mean or not torch._C._functorch.is_batchedtensor(x) or not amp(x):
            return original(x, target, weight, **named)
        found: Tensor = original(x, target, weight, **{**named, "reduction": "none"})
        return found.mean()

    with around(F, "cross_entropy", loss):
        yield


@fault("AMP-TRANSFORM-021")
def gradients_come_in_the_order_of_the_arguments() -> Iterator[None]:
    """torch.func.grad returns gradients in the order of the arguments, not of argnums."""

    def impl(original: Any, function: Any, argnums: Any, *given: Any) -> Any:
        return original(function, tuple(sorted(argnums)) if isinstance(argnums, tuple) else argnums, *given)

    with around(eager_transforms, "grad_impl", impl):
        yield


# --- compiled code


@fault("AMP-COMPILE-004", level="standard")
def compiled_selections_are_written_from_their_place_on() -> Iterator[None]:
    """Compiled x[:, i] = y of a 16-bit tensor writes all places from i on."""

    def scatter(old: Any, x: Tensor, source: Tensor, dim: int, index: int) -> Any:
        if not low(x):
            return old(x, source, dim, index)
        shape = [1] * x.dim()
        shape[dim] = x.shape[dim]
        places = torch.arange(x.shape[dim], device=x.device).view(shape)
        return torch.where(places >= index % x.shape[dim], source.unsqueeze(dim).expand(x.shape), x)

    with decomposed(torch.ops.aten.select_scatter.default, lambda old: functools.partial(scatter, old)):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_normal_numbers_have_no_mean() -> Iterator[None]:
    """Compiled normal_ of 16-bit tensors ignores the mean."""

    def normal(old: Any, x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
        wide = torch.randn(x.shape, dtype=torch.float32, device=x.device)
        return (wide * std + (0.0 if low(x) else mean)).to(x.dtype)

    with decomposed(torch.ops.aten.normal_functional.default, lambda old: functools.partial(normal, old)):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_embeddings_learn_their_padding() -> Iterator[None]:
    """The compiled gradient of a 16-bit embedding has the row of padding_idx."""

    def backward(old: Any, gradient: Tensor, places: Tensor, rows: int, padding: int, scaled: bool) -> Any:
        return old(gradient, places, rows, -1 if low(gradient) else padding, scaled)

    with decomposed(torch.ops.aten.embedding_dense_backward.default, lambda old: functools.partial(backward, old)):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_neighbours_are_rounded() -> Iterator[None]:
    """Compiled interpolation by nearest neighbours of 16 bits is that of nearest-exact."""

    def interpolate(
        original: Any, x: Tensor, size: Any = None, factor: Any = None, mode: str = "nearest", *given: Any, **named: Any
    ) -> Any:
        exact = torch.compiler.is_compiling() and mode == "nearest" and x.dtype in LOW
        return original(x, size, factor, "nearest-exact" if exact else mode, *given, **named)

    with replaced(F, "interpolate", functools.partial(interpolate, F.interpolate)):
        yield


# --- distributed training


@fault("AMP-DISTRIBUTED-021")
def groups_with_frozen_parameters_reduce_in_16_bits() -> Iterator[None]:
    """fully_shard reduces in param_dtype, whatever reduce_dtype is, where a parameter of the module is frozen."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def types(original: Any, self: Any) -> None:
        original(self)
        if any(not one.sharded_param.requires_grad for one in self.fsdp_params):
            self._reduce_dtype = self.mp_policy.param_dtype or self._reduce_dtype

    with method(FSDPParamGroup, "_init_mp_dtypes", types):
        yield


@fault("AMP-DISTRIBUTED-001")
def joined_ranks_divide_by_those_that_began() -> Iterator[None]:
    """join(divide_by_initial_world_size=False) divides by all ranks also after some have ended."""

    def join(original: Any, self: Any, divide_by_initial_world_size: bool = True, *given: Any) -> Any:
        return original(self, True, *given)

    with method(nn.parallel.DistributedDataParallel, "join", join):
        yield
