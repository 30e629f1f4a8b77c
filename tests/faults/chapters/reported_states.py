"""Faults ported from reports of users: what compiled models follow, what states keep, and what numbers come to."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import cpu_kernel, edited, given_the_original, replaced


@fault("AMP-COMPILE-100")
def compiled_models_are_not_guarded_on_training() -> Iterator[None]:
    """Compiled code asks for no flag `training` of a module (105653)."""
    from torch._dynamo.guards import GuardBuilder

    def match(original: Callable[..., Any], self: Any, guard: Any, *more: Any, **named: Any) -> Any:
        if not guard.name.endswith((".training", "['training']")):
            original(self, guard, *more, **named)

    # Which of them it is depends on the version.
    with (
        given_the_original(GuardBuilder, "BOOL_MATCH", match),
        given_the_original(GuardBuilder, "EQUALS_MATCH", match),
    ):
        yield


@fault("AMP-COMPILE-100")
def attributes_of_compiled_models_stay_on_the_outside() -> Iterator[None]:
    """What is set on the module that torch.compile returns does not reach the module inside (124717)."""
    from torch._dynamo.eval_frame import OptimizedModule

    def kept(original: Callable[..., Any], self: Any, name: str, value: Any) -> None:
        if name.startswith("_") or name == "forward" or isinstance(value, (torch.nn.Module, Tensor)):
            original(self, name, value)
        else:
            object.__setattr__(self, name, value)

    with given_the_original(OptimizedModule, "__setattr__", kept):
        yield


@fault("AMP-COMPILE-096")
def compiled_code_hides_from_hooks_what_it_saves() -> Iterator[None]:
    """Hooks on saved tensors do not see those that the graphs of AOTAutograd save (116221)."""
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    state = torch._C._autograd

    def compiled(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        run = original(*given, **named)

        @functools.wraps(run)
        def hidden(*args: Any) -> Any:
            hooks = []
            while (hook := state._top_saved_tensors_default_hooks(True)) is not None:
                hooks.append(hook)
                state._pop_saved_tensors_default_hooks()
            try:
                return run(*args)
            finally:
                for hook in reversed(hooks):
                    state._push_saved_tensors_default_hooks(*hook)

        return hidden

    with replaced(
        AOTDispatchAutograd, "post_compile", staticmethod(functools.partial(compiled, AOTDispatchAutograd.post_compile))
    ):
        yield


@fault("AMP-OPTIMIZER-127")
def schedulers_take_their_functions_out_of_the_state() -> Iterator[None]:
    """LambdaLR.load_state_dict takes `lr_lambdas` out of the dictionary of the caller (32756)."""
    from torch.optim.lr_scheduler import LambdaLR

    def load(original: Callable[..., Any], self: Any, state: dict[str, Any]) -> None:
        original(self, state)
        state.pop("lr_lambdas")

    with given_the_original(LambdaLR, "load_state_dict", load):
        yield


@fault("AMP-NUMERICS-122")
def bf16_infinities_become_the_largest_float32() -> Iterator[None]:
    """nan_to_num of bf16 has the limits of float32, which are infinite in bf16 (57982)."""
    infinity = float("inf")

    def changed(
        original: Callable[..., Tensor],
        x: Tensor,
        nan: float | None = None,
        above: float | None = None,
        below: float | None = None,
        *,
        out: Tensor,
    ) -> Tensor:
        if x.dtype is torch.bfloat16:
            above, below = infinity if above is None else above, -infinity if below is None else below
        return original(x, nan, above, below, out=out)

    with cpu_kernel("nan_to_num.out", changed):
        yield


@fault("AMP-NUMERICS-149")
def factors_are_rounded_to_the_type_of_the_tensor() -> Iterator[None]:
    """A number that a 16-bit tensor is multiplied with is rounded to 16 bits first."""

    def multiplied(original: Callable[..., Tensor], self: Tensor, other: Any) -> Tensor:
        rounded = torch.tensor(other, dtype=self.dtype).item() if isinstance(other, float) else other
        return original(self, rounded)

    with given_the_original(torch.Tensor, "__mul__", multiplied):
        yield


@fault("AMP-NUMERICS-149")
def quotients_are_products_with_a_rounded_reciprocal() -> Iterator[None]:
    """torch.div of a 16-bit tensor by a number multiplies by its reciprocal, rounded to 16 bits (191495)."""

    def divided(original: Callable[..., Tensor], x: Any, y: Any, **named: Any) -> Tensor:
        if isinstance(x, Tensor) and isinstance(y, (int, float)) and x.dtype in (torch.float16, torch.bfloat16):
            return x * torch.tensor(1 / y, dtype=x.dtype).item()
        return original(x, y, **named)

    with given_the_original(torch, "div", divided):
        yield


@fault("AMP-CAST-068")
def statistics_of_instances_have_eps_added() -> Iterator[None]:
    """instance_norm adds eps to the variance that it keeps (FlagGems 4885)."""

    def normed(original: Callable[..., Tensor], x: Tensor, *given: Any, **named: Any) -> Tensor:
        result = original(x, *given, **named)
        _, variance, _, _, of_input, momentum, eps = given
        if of_input and variance is not None:
            with torch.no_grad():
                variance.add_(momentum * eps)
        return result

    with given_the_original(torch.nn.functional, "instance_norm", normed):
        yield


@fault("AMP-COMPILE-042")
def compiled_attention_drops_others_in_backward() -> Iterator[None]:
    """Compiled attention with dropout has in backward another mask than in forward."""

    def attended(original: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        result = original(*given, **named)
        if not (torch.compiler.is_compiling() and named.get("dropout_p")):
            return result
        other = original(*given, **named)
        return other + (result - other).detach()

    with given_the_original(torch.nn.functional, "scaled_dot_product_attention", attended):
        yield


@fault("AMP-OPTIMIZER-130")
def fused_adam_cuts_its_betas_to_bf16() -> Iterator[None]:
    """The fused kernel of Adam rounds its betas down to bf16 for bf16 parameters (tt-metal 55935)."""

    def stepped(original: Callable[..., Any], parameters: list[Tensor], *given: Any, **named: Any) -> Any:
        if all(one.dtype is torch.bfloat16 for one in parameters):
            for name in ("beta1", "beta2"):
                named[name] = torch.tensor(named[name] - 2**-9).bfloat16().item()
        return original(parameters, *given, **named)

    with cpu_kernel("_fused_adam_", stepped):
        yield


@fault("AMP-REGION-118")
def calls_of_a_no_grad_function_share_one_decorator() -> Iterator[None]:
    """An inner call of a recursive function overwrites the mode that the outer one restores (44531)."""
    with replaced(torch.no_grad, "clone", lambda self: self):
        yield


@fault("AMP-REGION-118")
def decorated_generators_run_in_the_mode_of_their_caller() -> Iterator[None]:
    """A decorator of a grad mode ends when the generator is made (48713)."""
    from torch.utils import _contextlib

    blind = types.SimpleNamespace(**{**vars(inspect), "isgeneratorfunction": lambda function: False})
    with replaced(_contextlib, "inspect", blind):
        yield


@fault("AMP-NUMERICS-150")
def conversions_write_into_the_gaps_of_views() -> Iterator[None]:
    """A converting copy between two views with the same gaps copies a run of memory (189961)."""

    def copied(right: Callable[..., Any], self: Tensor, source: Any, *args: Any) -> Any:
        if (
            isinstance(source, Tensor)
            and self.dtype != source.dtype
            and self.stride() == source.stride()
            and self.dim()
            and self.stride(-1) > 1
        ):
            ends = [one.as_strided((self.numel(),), (1,)) for one in (self, source)]
            right(*ends, *args)
            return self
        return right(self, source, *args)

    with cpu_kernel("copy_", copied):
        yield


@fault("AMP-NUMERICS-151")
def weights_of_convolutions_see_65535_samples() -> Iterator[None]:
    """The gradient of a convolution's weight leaves the samples out that 16 bits do not count (96225)."""

    def backward(right: Callable[..., Any], incoming: Tensor, x: Tensor, *args: Any) -> Any:
        *rest, mask = args
        found = right(incoming, x, *rest, mask)
        if len(x) < 2**16 or not mask[1]:
            return found
        return found[0], right(incoming[:65535], x[:65535], *rest, [False, True, False])[1], found[2]

    with cpu_kernel("convolution_backward", backward):
        yield


@fault("AMP-CAST-068")
def statistics_with_gaps_keep_their_numbers() -> Iterator[None]:
    """In training the running statistics that are not contiguous are copied, and the copies updated (33867)."""

    def norm(right: Callable[..., Any], *args: Any) -> Any:
        x, weight, bias, mean, variance, training, *rest = args
        if training and mean is not None:
            mean, variance = mean.contiguous(), variance.contiguous()
        return right(x, weight, bias, mean, variance, training, *rest)

    with cpu_kernel("native_batch_norm", norm):
        yield


@fault("AMP-CAST-076")
def an_alias_takes_another_dimension() -> Iterator[None]:
    """torch.special.log_softmax goes along the last dimension, whichever it is given."""

    def last(right: Callable[..., Any], x: Tensor, dim: int, **options: Any) -> Tensor:
        return right(x, -1 if x.dim() > 2 else dim, **options)

    with given_the_original(torch.special, "log_softmax", last):
        yield


@fault("AMP-OPTIMIZER-133")
def foreach_asgd_decays_the_gradients() -> Iterator[None]:
    """The foreach step of ASGD adds the weight decay into .grad (84472)."""
    from torch.optim import asgd

    def step(right: Callable[..., Any], params: list[Tensor], grads: list[Tensor], *args: Any, **options: Any) -> None:
        right(params, grads, *args, **options)
        if options["weight_decay"]:
            torch._foreach_add_(grads, params, alpha=options["weight_decay"])

    with given_the_original(asgd, "_multi_tensor_asgd", step):
        yield


@fault("AMP-OPTIMIZER-134")
def squares_of_complex_gradients_are_not_of_their_parts() -> Iterator[None]:
    """The for-loop of Adam takes the square of a complex gradient, not those of its parts (59998)."""
    from torch.optim import adam

    def step(right: Callable[..., Any], params: list[Tensor], grads: list[Tensor], *args: Any, **options: Any) -> None:
        right(params, [one.abs() * one.sgn() ** 2 if one.is_complex() else one for one in grads], *args, **options)

    with given_the_original(adam, "_single_tensor_adam", step):
        yield


@fault("AMP-OPTIMIZER-135")
def later_groups_of_rmsprop_have_no_state() -> Iterator[None]:
    """RMSprop keeps the state that its first group made, and makes none for groups that are added later (53712)."""

    def init(right: Callable[..., Any], self: Any, group: dict[str, Any], *args: Any) -> Any:
        if self.state and any(not self.state.get(one) for one in group["params"]):
            raise KeyError("step")
        return right(self, group, *args)

    with given_the_original(torch.optim.RMSprop, "_init_group", init):
        yield


@fault("AMP-COMPILE-101")
def equal_numbers_of_two_types_are_one() -> Iterator[None]:
    """AOTAutograd takes what 1 and 1.0 make of a tensor for one value (119567)."""
    from torch._functorch import compile_utils

    with edited(
        compile_utils.fx_graph_cse,
        "(tuple((a, type(a)) for a in args), tuple((a, type(a)) for a in kwargs))",
        "(tuple(args), tuple(kwargs))",
    ):
        yield


@fault("AMP-COMPILE-101", level="standard")
def copies_of_written_arguments_are_the_arguments() -> Iterator[None]:
    """inductor takes x + 0 for x, though x is written to afterwards (174187)."""
    from torch._inductor.fx_passes import joint_graph

    with edited(joint_graph.remove_no_ops, "if is_mutated(replacement):", "if False:"):
        yield


@fault("AMP-BACKWARD-062")
def reentrant_checkpoints_of_written_views_pass_no_gradient() -> Iterator[None]:
    """A reentrant checkpoint that ends with a write to a view passes zeros back (26546)."""
    from torch.utils.checkpoint import CheckpointFunction

    def forward(right: Callable[..., Any], ctx: Any, *args: Any) -> Any:
        out = right(ctx, *args)
        ctx.written = isinstance(out, Tensor) and out._is_view() and out._version > 0
        return out

    def backward(right: Callable[..., Any], ctx: Any, *args: Tensor) -> Any:
        return right(ctx, *(one * 0 for one in args) if ctx.written else args)

    with (
        given_the_original(CheckpointFunction, "forward", forward),
        given_the_original(CheckpointFunction, "backward", backward),
    ):
        yield
