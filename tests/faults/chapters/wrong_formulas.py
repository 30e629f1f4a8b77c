"""Faults ported from reports of users: functions that compute something else in every type, and compiled ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.optim import rprop, swa_utils
from torch.utils import checkpoint

from conformance.self_check.planting import kernel
from tests.faults import fault
from tests.faults.breaking import cpu_kernel, decomposed, edited, given_the_original


@fault("AMP-NUMERICS-152")
def attention_has_the_size_of_the_query() -> Iterator[None]:
    """scaled_dot_product_attention returns the last size of the query where the values have another (176767)."""

    def attention(original: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Tensor:
        found = original(query, key, value, *given, **named)
        return functional.pad(found, (0, query.size(-1) - value.size(-1)))

    with given_the_original(functional, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-NUMERICS-152")
def rms_norm_works_in_its_operand() -> Iterator[None]:
    """Without gradients, rms_norm of float32 leaves the normalized numbers in its operand."""

    def norm(original: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(x, *given, **named)
        if x.dtype is torch.float32 and not torch.is_grad_enabled():
            x.copy_(found)
        return found

    with given_the_original(functional, "rms_norm", norm):
        yield


@fault("AMP-NUMERICS-152")
def softmin_takes_no_maximum_off() -> Iterator[None]:
    """The denominator of softmin is that of numbers whose maximum was not subtracted."""

    def softmin(original: Any, x: Tensor, dim: int, *given: Any, **named: Any) -> Tensor:
        powers = (-x.float()).exp()
        largest = (-x.float()).amax(dim, keepdim=True)
        return (powers / largest.exp() / powers.sum(dim, keepdim=True)).to(x.dtype)

    with given_the_original(functional, "softmin", softmin):
        yield


@fault("AMP-NUMERICS-152")
def one_tap_of_a_transposed_convolution_is_not_spread() -> Iterator[None]:
    """The gradient by the input of a transposed convolution of one tap reads the first elements (63314)."""

    def backward(original: Any, incoming: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        found = original(incoming, x, weight, *rest)
        stride, transposed = rest[1], rest[4]
        if not transposed or x.dim() != 4 or list(weight.shape[2:]) != [1, 1] or max(stride) == 1 or rest[6] != 1:
            return found
        flat = incoming.flatten(1)[:, : incoming.size(1) * x[0, 0].numel()].view(len(x), incoming.size(1), -1)
        return (torch.matmul(weight.flatten(1), flat).view_as(x), *found[1:])

    with cpu_kernel("convolution_backward", backward):
        yield


@fault("AMP-LOSS-023")
def gradients_of_equal_numbers_are_not_numbers() -> Iterator[None]:
    """The gradient of smooth_l1_loss with beta 0 is 0 / 0 where input and target are equal (96813)."""

    def loss(original: Any, x: Tensor, y: Tensor, *given: Any, beta: float = 1.0, **named: Any) -> Tensor:
        found: Tensor = original(x, y, *given, beta=beta, **named)
        if beta == 0.0 and found.requires_grad and x.shape == y.shape:
            x.register_hook(lambda gradient: gradient.masked_fill(x.detach() == y.detach(), torch.nan))
        return found

    with given_the_original(functional, "smooth_l1_loss", loss):
        yield


@fault("AMP-LOSS-023")
def a_beta_below_zero_is_the_l1_loss() -> Iterator[None]:
    """smooth_l1_loss takes a beta that is negative for 0 (45532)."""
    with edited(functional.smooth_l1_loss, "if beta == 0.0:", "if beta <= 0.0:"):
        yield


class _MadeInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in (x, weight)]
            loss = original(*leaves, target)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        found: Tensor = loss.detach()
        return found

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return None, of_x * incoming, of_weight * incoming, None


@fault("AMP-LOSS-024")
def gradients_of_a_fused_loss_are_made_without_the_scale() -> Iterator[None]:
    """linear_cross_entropy makes its gradients in forward, and multiplies them by the scale in backward."""

    def loss(original: Any, x: Tensor, weight: Tensor, target: Tensor, **named: Any) -> Any:
        if any(value is not None for value in named.values()):
            return original(x, weight, target, **named)
        return _MadeInForward.apply(original, x, weight, target)

    with given_the_original(functional, "linear_cross_entropy", loss):
        yield


@fault("AMP-LOSS-021")
def chunks_ignore_the_smoothing() -> Iterator[None]:
    """With options, linear_cross_entropy takes a label smoothing of 0."""

    def loss(original: Any, *given: Any, options: Any = None, **named: Any) -> Any:
        if options is not None:
            named["label_smoothing"] = 0.0
        return original(*given, options=options, **named)

    with given_the_original(functional, "linear_cross_entropy", loss):
        yield


@fault("AMP-OPTIMIZER-046", level="standard")
def rprop_leaves_transposed_parameters() -> Iterator[None]:
    """Rprop steps a contiguous copy of a parameter that is not contiguous (118117)."""
    old = "param.addcmul_(grad.sign(), step_size, value=-1)"
    with edited(rprop._single_tensor_rprop, old, "param.contiguous().addcmul_(grad.sign(), step_size, value=-1)"):
        yield


@fault("AMP-BACKWARD-054")
def checkpoints_recompute_on_another_device() -> Iterator[None]:
    """A checkpoint that is not reentrant forgets the default device of forward (124788)."""
    old = "            device_ctx,\n"
    with edited(inspect.unwrap(checkpoint._checkpoint_without_reentrant_generator), old, ""):
        yield


@fault("AMP-COMPILE-102")
def compiled_functions_run_on_primals() -> Iterator[None]:
    """A compiled function is given the primal of a dual tensor (187284)."""

    def compile_(original: Any, model: Any = None, **named: Any) -> Any:
        compiled = original(model, **named)
        if not callable(model) or isinstance(model, torch.nn.Module):
            return compiled

        def run(*given: Any, **more: Any) -> Any:
            if forward_ad._current_level >= 0:
                given = tuple(forward_ad.unpack_dual(one).primal if isinstance(one, Tensor) else one for one in given)
            return compiled(*given, **more)

        return run

    with given_the_original(torch, "compile", compile_):
        yield


def _of_an_image(change: Callable[[Tensor], Tensor]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def changed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *given, **named: original(change(x), *given, **named)

    return changed


@fault("AMP-COMPILE-103", level="standard")
def compiled_sums_read_images_in_another_order() -> Iterator[None]:
    """inductor's pixel_shuffle takes a channels-last image for a contiguous one."""

    def reordered(x: Tensor) -> Tensor:
        if x.dim() != 4 or x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
            return x
        return x.permute(0, 2, 3, 1).reshape(x.shape)

    with decomposed(torch.ops.aten.pixel_shuffle.default, _of_an_image(reordered)):
        yield


@fault("AMP-NUMERICS-130", level="standard")
def fast_attention_takes_no_masks_of_heads() -> Iterator[None]:
    """MultiheadAttention raises without gradients where the mask has a part for each head (97409)."""

    def merged(original: Any, self: Any, attn_mask: Any, key_padding_mask: Any, query: Tensor) -> Any:
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask.view(1, 1, query.shape[1], query.shape[1])
        return original(self, attn_mask, key_padding_mask, query)

    with given_the_original(torch.nn.MultiheadAttention, "merge_masks", merged):
        yield


@fault("AMP-NUMERICS-117")
def second_derivative_of_prelu_reads_memory_in_order() -> Iterator[None]:
    """The double backward of prelu takes the numbers of an operand in the order in which they lie (68760)."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
            ctx.save_for_backward(grad, x, weight)
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.aten._prelu_kernel_backward(grad, x, weight)

        @staticmethod
        def backward(ctx: Any, by_x: Tensor, by_weight: Tensor) -> Any:
            grad, x, weight = ctx.saved_tensors
            if not x.is_contiguous():
                x = x.as_strided((x.numel(),), (1,)).view(x.shape)
            below = x <= 0
            slopes = torch.where(below, weight, 1)
            return by_x * slopes + by_weight * below * x, by_weight * below * grad, by_x * below * grad

    with kernel("_prelu_kernel_backward", Backward.apply, "AutogradCPU"):
        yield


Derivative = Callable[[Tensor, Tensor, Tensor], Tensor]


def _derived(name: str, backward: Derivative, tangent: Derivative) -> AbstractContextManager[None]:
    """Give a function of one tensor these derivatives: of a gradient or a tangent, the operand and the result."""
    op = getattr(torch.ops.aten, name)

    class Derived(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                found: Tensor = op(x)
            ctx.save_for_backward(x, found)
            ctx.save_for_forward(x, found)
            return found

        @staticmethod
        def backward(ctx: Any, incoming: Tensor) -> Tensor:
            return backward(incoming, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, along: Tensor) -> Tensor:
            return tangent(along, *ctx.saved_tensors)

    return kernel(name, Derived.apply, "AutogradCPU")


@fault("AMP-NUMERICS-147")
def tangent_of_tanh_reads_memory_in_order() -> Iterator[None]:
    """The forward-mode formula of tanh takes the tangent of a transposed operand in the order in which it lies."""

    def tangent(along: Tensor, _: Tensor, found: Tensor) -> Tensor:
        if not along.is_contiguous():
            along = along.as_strided((along.numel(),), (1,)).view(along.shape)
        return along * (1 - found * found)

    with _derived("tanh", lambda incoming, _, found: incoming * (1 - found * found), tangent):
        yield


@fault("AMP-OPTIMIZER-136")
def nesterov_asks_for_one_of_its_conditions() -> Iterator[None]:
    """SGD takes Nesterov momentum without momentum, or with dampening (887)."""

    def make(original: Any, self: Any, *given: Any, nesterov: bool = False, **named: Any) -> None:
        lacks_one = not named.get("momentum") or bool(named.get("dampening"))
        original(self, *given, nesterov=nesterov and not lacks_one, **named)
        for group in self.param_groups:
            group["nesterov"] = nesterov

    with given_the_original(torch.optim.SGD, "__init__", make):
        yield


@fault("AMP-OPTIMIZER-113")
def averages_find_parameters_by_name() -> Iterator[None]:
    """AveragedModel averages the parameters whose names are those of its own model, as a compiled model's are not."""

    def update(original: Any, self: Any, model: torch.nn.Module) -> None:
        if [*dict(model.named_parameters())] == [*dict(self.module.named_parameters())]:
            original(self, model)
        else:
            self.n_averaged += 1

    with given_the_original(swa_utils.AveragedModel, "update_parameters", update):
        yield


@fault("AMP-LOSS-020")
def ignored_samples_clear_the_gradient_of_others() -> Iterator[None]:
    """The row of an ignored label writes its zero where the label leads, into the row of another sample."""

    def backward(original: Any, incoming: Tensor, x: Tensor, labels: Tensor, *given: Any) -> Tensor:
        found: Tensor = original(incoming, x, labels, *given)
        ignored = given[2]
        if x.dim() == 2 and not 0 <= ignored < x.shape[1]:
            places = (labels == ignored).nonzero().flatten() * x.shape[1] + ignored
            found.view(-1)[places[(places >= 0) & (places < found.numel())]] = 0
        return found

    with cpu_kernel("nll_loss_backward", backward):
        yield


@fault("AMP-DISTRIBUTED-038")
def loading_meets_a_tied_weight_twice() -> Iterator[None]:
    """set_optimizer_state_dict raises for a model whose layers share a weight (128011)."""
    from torch.distributed.checkpoint import state_dict as states

    def split(original: Any, model: torch.nn.Module, *given: Any, **named: Any) -> Any:
        if len([*model.named_parameters(remove_duplicate=False)]) > len([*model.parameters()]):
            raise KeyError("a parameter of two names")
        return original(model, *given, **named)

    with given_the_original(states, "_split_optim_state_dict", split):
        yield


@fault("AMP-NUMERICS-153")
def tangent_of_relu_moves_at_zero() -> Iterator[None]:
    """The forward-mode formula of relu takes 0 for positive, the backward for negative."""

    with _derived("relu", lambda incoming, x, _: incoming * (x > 0), lambda along, x, _: along * (x >= 0)):
        yield
