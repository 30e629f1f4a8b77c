"""Faults ported from defects of other versions and backends, written blind."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from tests.faults import fault
from tests.faults.breaking import cpu_kernel, given_the_original, replaced


@fault("AMP-NUMERICS-110")
def gradients_of_lstms_ignore_dropout_between_layers() -> Iterator[None]:
    """Backward of an LSTM in training is that of one without dropout between its layers, as on MPS (190056)."""
    original = torch.nn.LSTM.forward

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        seen, state = original(self, input, hx)
        if not self.training or not self.dropout or isinstance(input, PackedSequence) or not torch.is_grad_enabled():
            return seen, state
        dropout, self.dropout = self.dropout, 0.0
        try:
            whole, _ = original(self, input, hx)
        finally:
            self.dropout = dropout
        return seen.detach() + (whole - whole.detach()), state

    with replaced(torch.nn.LSTM, "forward", forward):
        yield


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * float("nan")


@fault("AMP-NUMERICS-083", level="standard")
def channels_last_statistics_count_in_fp16() -> Iterator[None]:
    """Backward of batch_norm is NaN for fp16 images, channels last, of more than 65,504 elements a channel (147303)."""
    original = functional.batch_norm

    def batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        if last and input.dtype is torch.float16 and input.requires_grad and input.numel() // input.shape[1] > 65504:
            input = _Lost.apply(input)
        return original(input, *args, **kwargs)

    with replaced(functional, "batch_norm", batch_norm):
        yield


@fault("AMP-NUMERICS-134")
def softmax_of_columns_takes_no_maximum_off() -> Iterator[None]:
    """Softmax of bf16 along another dimension than the last divides by exponentials that overflow (62897)."""

    def softmax(original: Callable[..., Tensor], x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if x.dtype is torch.bfloat16 and not half_to_float and dim % max(x.dim(), 1) != x.dim() - 1:
            powers = x.float().exp()
            return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)
        return original(x, dim, half_to_float)

    with cpu_kernel("_softmax", softmax):
        yield


@fault("AMP-CAST-110")
def spectral_norm_goes_on_in_evaluation() -> Iterator[None]:
    """spectral_norm iterates in evaluation too, so that each call changes its vectors (8208)."""
    from torch.nn.utils.parametrizations import _SpectralNorm

    original = _SpectralNorm.forward

    def forward(self: Any, weight: Tensor) -> Tensor:
        if weight.ndim > 1 and not self.training:
            self._power_method(self._reshape_weight_to_matrix(weight), self.n_power_iterations)
        return original(self, weight)

    with replaced(_SpectralNorm, "forward", forward):
        yield


def _with_arguments(
    owner: Any, name: str, change: Callable[[dict[str, Any]], object]
) -> contextlib.AbstractContextManager[None]:
    """Let a function take its arguments, by name, as `change` leaves them."""

    def changed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        change(given.arguments)
        return original(*given.args, **given.kwargs)

    return given_the_original(owner, name, changed)


@fault("AMP-COMPILE-097")
def compiled_gradients_have_no_graph() -> Iterator[None]:
    """A compiled backward that needs only what forward saved returns gradients without a graph (181581)."""
    from torch._functorch._aot_autograd import runtime_wrappers

    def detached(given: dict[str, Any]) -> None:
        given["inputs_require_grad"] = False

    with _with_arguments(runtime_wrappers, "_codegen_compiled_backward", detached):
        yield


@fault("AMP-DISTRIBUTED-009")
def one_shard_ignores_the_divide_factor() -> Iterator[None]:
    """fully_shard does not divide gradients in float32 and bf16 where the group has one rank (167178)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def undivided(given: dict[str, Any]) -> None:
        group = given["reduce_scatter_group"]
        if (group is None or group.size() == 1) and given["reduce_dtype"] is not torch.float16:
            given["gradient_divide_factor"] = None

    with _with_arguments(_fsdp_param_group, "foreach_reduce", undivided):
        yield


@fault("AMP-NUMERICS-142")
def padded_mean_pools_of_channels_last_are_shifted() -> Iterator[None]:
    """The gradient of a padded avg_pool2d of channels last is off by the padding (188344)."""

    def backward(original: Callable[..., Tensor], slope: Tensor, x: Tensor, *options: Any) -> Tensor:
        found, padding = original(slope, x, *options), options[2]
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return (
            found.roll(tuple(padding) * (3 - len(padding)), (2, 3)) if x.dim() == 4 and last and any(padding) else found
        )

    with cpu_kernel("avg_pool2d_backward", backward):
        yield


@fault("AMP-NUMERICS-016")
def products_without_onednn_are_summed_in_bf16() -> Iterator[None]:
    """A product of bf16 matrices adds in bf16 where oneDNN is switched off (83863)."""

    def mm(original: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        if left.dtype is torch.bfloat16 and not torch.backends.mkldnn.enabled:
            terms = (left[:, :, None] * right[None]).unbind(1)
            return sum(terms[1:], terms[0])
        return original(left, right)

    with cpu_kernel("mm", mm):
        yield


@fault("AMP-COMPILE-040")
def compiled_functions_of_one_tensor_lose_a_gradient() -> Iterator[None]:
    """A compiled custom function that is given one tensor twice passes on the gradient of one place (181146)."""
    from torch._dynamo.variables import higher_order_ops

    original = higher_order_ops.AutogradFunctionApplyVariable.rewire_bwd_graph_outputs

    def rewired(*args: Any, **kwargs: Any) -> Any:
        with replaced(higher_order_ops, "_get_fake_value", lambda given: object()):  # which finds what is there twice
            return original(*args, **kwargs)

    with replaced(higher_order_ops.AutogradFunctionApplyVariable, "rewire_bwd_graph_outputs", rewired):
        yield


@fault("AMP-COMPILE-092")
def compiled_writes_are_hidden_from_autograd() -> Iterator[None]:
    """A write to an argument stays in the graph where no result has a gradient, which then misses it (113584)."""
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

    original = ViewAndMutationMeta.__post_init__

    def finished(self: Any) -> None:
        for one in self.input_info if not any(result.requires_grad for result in self.output_info) else ():
            if one.keep_input_mutations and one.mutates_data and not one.mutates_metadata and one.requires_grad:
                object.__setattr__(one, "mutations_under_no_grad_or_inference_mode", True)
                vars(one).pop("mutation_type", None)
        original(self)

    with replaced(ViewAndMutationMeta, "__post_init__", finished):
        yield


def _copied(part: Any) -> Any:
    return {name: _copied(one) for name, one in part.items()} if type(part) is dict else part


@fault("AMP-DISTRIBUTED-034")
def checkpoints_load_numbers_into_copies() -> Iterator[None]:
    """A distributed checkpoint loads numbers into copies of the dictionaries that it was given (129079)."""
    from torch.distributed.checkpoint import default_planner

    original = default_planner._init_state_dict

    def begin(state: dict[str, Any]) -> None:
        original(state)
        for name in state:
            state[name] = _copied(state[name])

    with replaced(default_planner, "_init_state_dict", begin):
        yield


class _Kept(torch.autograd.Function):
    """A product over all elements whose gradient is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.detach().clone().cumprod(0)[-1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x)


@fault("AMP-NUMERICS-117")
def products_of_two_zeros_have_no_second_derivative() -> Iterator[None]:
    """The gradient of prod() over a vector with two zeros cannot be differentiated (106789)."""
    original = torch.Tensor.prod

    def prod(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and self.requires_grad and self.dim() == 1 and int((self == 0).sum()) > 1:
            return _Kept.apply(self)
        return original(self, *args, **kwargs)

    with replaced(torch.Tensor, "prod", prod):
        yield


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, goal: Tensor, reduction: int, log_target: bool) -> Tensor:
        ctx.save_for_backward(x, goal)
        ctx.count = x.numel() if reduction == 1 else 1
        return torch.ops.aten.kl_div(x.detach(), goal.detach(), reduction, log_target=log_target)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, goal = ctx.saved_tensors
        return -goal.detach() * slope / ctx.count, (goal.log() + 1 - x) * slope / ctx.count, None, None


@fault("AMP-NUMERICS-117")
def divergences_lose_their_mixed_second_derivative() -> Iterator[None]:
    """The gradient of kl_div by its input takes the target for a constant (65466)."""
    original = torch.kl_div

    def kl_div(x: Tensor, goal: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
        plain = forward_ad._current_level < 0 and x.shape == goal.shape
        if plain and x.requires_grad and goal.requires_grad and not log_target:
            return _Divergence.apply(x, goal, reduction, log_target)
        return original(x, goal, reduction, log_target=log_target)

    with replaced(torch, "kl_div", kl_div):
        yield


@fault("AMP-NUMERICS-088")
def masks_of_samples_without_gradients_are_the_first_one() -> Iterator[None]:
    """Attention without gradients takes the first sample's mask for all, in the sizes of one kernel of MPS (184180)."""
    original = functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        of_samples = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.size(0) > 1 == attn_mask.size(1)
        small = query.size(-2) <= 8 and query.size(-1) in (64, 96, 128) and query.size(1) > 1
        learned = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        first = of_samples and small and not learned
        return original(query, key, value, attn_mask[:1] if first else attn_mask, *args, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", attention):
        yield
