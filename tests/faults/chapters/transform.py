"""Transforms that lose the region, change a type, a value, a container or an error, or leave state behind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from tests.faults import fault
from tests.faults.breaking import dropped, replaced

Function = Callable[..., Any]


def _without(function: Function, device_type: str = "cpu") -> Function:
    """Return the function run with autocast off; on a device that this machine lacks by its flag alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_autocast_enabled(device_type)
        torch.set_autocast_enabled(device_type, False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device_type, before)

    return run


def _losing(transform: Function, device_type: str = "cpu") -> Function:
    """Return a transform that runs its function with autocast off."""
    return lambda function, *args, **kwargs: transform(_without(function, device_type), *args, **kwargs)


def _mapped(transform: Function, change: Callable[[Tensor], Tensor]) -> Function:
    """Return a transform of which every float tensor that the transformed function returns is changed."""

    def changed(function: Function, *options: Any, **named: Any) -> Function:
        transformed = transform(function, *options, **named)
        return lambda *args, **kwargs: _change(transformed(*args, **kwargs), change)

    return changed


def _change(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map(lambda x: change(x) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


@fault("AMP-TRANSFORM-006", "AMP-TRANSFORM-010", "AMP-TRANSFORM-003")
def vmap_runs_without_autocast() -> Iterator[None]:
    """vmap runs its function with autocast off on the CPU."""
    with replaced(torch.func, "vmap", _losing(torch.func.vmap)):
        yield


@fault("AMP-TRANSFORM-003", level="standard")
def vmap_loses_the_rules_of_cuda() -> Iterator[None]:
    """vmap runs its function with autocast off on CUDA, and only there."""
    with replaced(torch.func, "vmap", _losing(torch.func.vmap, "cuda")):
        yield


@fault("AMP-TRANSFORM-003", level="standard")
def vmap_loses_the_rules_of_mps() -> Iterator[None]:
    """vmap runs its function with autocast off on MPS, and only there."""
    with replaced(torch.func, "vmap", _losing(torch.func.vmap, "mps")):
        yield


@fault("AMP-TRANSFORM-013")
def vmap_accepts_a_refused_op() -> Iterator[None]:
    """Under vmap the op that CUDA regions refuse is computed."""
    with replaced(torch.func, "vmap", _losing(torch.func.vmap, "cuda")):
        yield


@fault("AMP-TRANSFORM-015")
def products_of_a_rule_for_vmap_are_float32() -> Iterator[None]:
    """bmm, which the own rule for vmap of a custom function calls, is on no list."""
    with dropped("bmm", "AutocastCPU"):
        yield


@fault("AMP-TRANSFORM-006", level="standard")
def chunks_of_vmap_lose_the_region() -> Iterator[None]:
    """vmap with chunk_size runs with autocast off."""
    vmap = torch.func.vmap

    def chunked(function: Function, *args: Any, **kwargs: Any) -> Any:
        return vmap(_without(function) if kwargs.get("chunk_size") else function, *args, **kwargs)

    with replaced(torch.func, "vmap", chunked):
        yield


@fault("AMP-TRANSFORM-003", level="standard")
def vmap_of_the_last_input_is_wide() -> Iterator[None]:
    """vmap over an input other than the first loses autocast."""
    vmap = torch.func.vmap

    def partly(function: Function, in_dims: Any = 0, *args: Any, **kwargs: Any) -> Any:
        late = isinstance(in_dims, tuple) and in_dims[0] is None
        return vmap(_without(function) if late else function, in_dims, *args, **kwargs)

    with replaced(torch.func, "vmap", partly):
        yield


@fault("AMP-TRANSFORM-006", level="standard")
def batches_of_another_dimension_are_wide() -> Iterator[None]:
    """vmap widens 16-bit inputs whose batch is not their first dimension."""
    from torch._functorch import vmap as module

    make = module._create_batched_inputs

    def wide(dims: Any, inputs: Any, level: int, spec: Any) -> Any:
        pairs = zip(dims, inputs, strict=True)
        return make(dims, [one.float() if dim not in (None, 0) else one for dim, one in pairs], level, spec)

    with replaced(module, "_create_batched_inputs", wide):
        yield


@fault("AMP-TRANSFORM-007")
def vmap_draws_one_mask_for_all_samples() -> Iterator[None]:
    """With randomness="different" vmap draws the numbers of one sample."""
    vmap = torch.func.vmap

    def alike(function: Function, *args: Any, randomness: str = "error", **kwargs: Any) -> Any:
        return vmap(function, *args, randomness="same" if randomness == "different" else randomness, **kwargs)

    with replaced(torch.func, "vmap", alike):
        yield


@fault("AMP-TRANSFORM-007")
def vmap_admits_random_ops() -> Iterator[None]:
    """With randomness="error" vmap draws random numbers."""
    vmap = torch.func.vmap

    def admitting(function: Function, *args: Any, randomness: str = "error", **kwargs: Any) -> Any:
        return vmap(function, *args, randomness="different" if randomness == "error" else randomness, **kwargs)

    with replaced(torch.func, "vmap", admitting):
        yield


@fault("AMP-TRANSFORM-001", "AMP-TRANSFORM-010")
def grad_runs_without_autocast() -> Iterator[None]:
    """torch.func.grad runs its function with autocast off."""
    with replaced(torch.func, "grad", _losing(torch.func.grad)):
        yield


@fault("AMP-TRANSFORM-001")
def backward_of_grad_is_rounded() -> Iterator[None]:
    """torch.func.grad returns gradients of float32 inputs in bfloat16."""
    with replaced(torch.func, "grad", _mapped(torch.func.grad, lambda x: x.bfloat16())):
        yield


@fault("AMP-TRANSFORM-001")
def gradients_of_grad_pass_through_bfloat16() -> Iterator[None]:
    """torch.func.grad rounds its gradients to bfloat16 and returns them in their dtype."""
    with replaced(torch.func, "grad", _mapped(torch.func.grad, lambda x: x.bfloat16().to(x.dtype))):
        yield


@fault("AMP-TRANSFORM-001")
def jacobians_pass_through_float16() -> Iterator[None]:
    """jacrev rounds its rows to float16 and returns them in their dtype."""
    with replaced(torch.func, "jacrev", _mapped(torch.func.jacrev, lambda x: x.half().to(x.dtype))):
        yield


@fault("AMP-TRANSFORM-001")
def batched_backward_passes_through_bfloat16() -> Iterator[None]:
    """Gradients with is_grads_batched are rounded to bfloat16 and returned in their dtype."""
    mapped = torch._vmap_internals._vmap

    def rounded(function: Function, *args: Any, **kwargs: Any) -> Function:
        return mapped(lambda *given: _change(function(*given), lambda x: x.bfloat16().to(x.dtype)), *args, **kwargs)

    with replaced(torch._vmap_internals, "_vmap", rounded):
        yield


@fault("AMP-TRANSFORM-006")
def results_of_vmap_pass_through_float16() -> Iterator[None]:
    """vmap rounds its results to float16 and returns them in their dtype."""
    with replaced(torch.func, "vmap", _mapped(torch.func.vmap, lambda x: x.half().to(x.dtype))):
        yield


@fault("AMP-TRANSFORM-001")
def jacobian_is_off_by_a_rounding() -> Iterator[None]:
    """jacrev's values are 2^-8 too large, as if they were rounded in bfloat16."""
    with replaced(torch.func, "jacrev", _mapped(torch.func.jacrev, lambda x: x * (1 + 2**-8))):
        yield


@fault("AMP-TRANSFORM-001")
def old_vjp_runs_without_autocast() -> Iterator[None]:
    """torch.autograd.functional.vjp runs its function with autocast off."""
    functional = torch.autograd.functional
    with replaced(functional, "vjp", _losing(functional.vjp)):
        yield


@fault("AMP-TRANSFORM-001")
def batched_backward_is_in_float32() -> Iterator[None]:
    """Products of float32 matrices in a batched backward are not cast, and their operands are widened."""
    grad = torch.autograd.grad

    def wide(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = grad(outputs, inputs, *args, **kwargs)
        return _change(found, lambda x: x.double()) if kwargs.get("is_grads_batched") else found

    with replaced(torch.autograd, "grad", wide):
        yield


@fault("AMP-TRANSFORM-001", "AMP-TRANSFORM-005")
def tangents_are_float32() -> Iterator[None]:
    """A dual number of a 16-bit primal has a float32 tangent."""
    unpack = forward_ad.unpack_dual

    def widened(tensor: Tensor, **options: Any) -> Any:
        found = unpack(tensor, **options)
        return found if found.tangent is None else type(found)(found.primal, found.tangent.float())

    with replaced(forward_ad, "unpack_dual", widened):
        yield


@fault("AMP-TRANSFORM-005", level="standard")
def tangents_of_jvp_are_rounded() -> Iterator[None]:
    """torch.func.jvp rounds its tangents to bfloat16 and returns them in their dtype."""
    jvp = torch.func.jvp

    def rounded(*args: Any, **kwargs: Any) -> Any:
        outputs, tangents = jvp(*args, **kwargs)
        return outputs, _change(tangents, lambda x: x.bfloat16().to(x.dtype))

    with replaced(torch.func, "jvp", rounded):
        yield


@fault("AMP-TRANSFORM-001", level="standard")
def jacfwd_is_float32() -> Iterator[None]:
    """jacfwd returns tangents of a 16-bit output in float32."""
    with replaced(torch.func, "jacfwd", _mapped(torch.func.jacfwd, lambda x: x.float())):
        yield


@fault("AMP-TRANSFORM-001", level="standard")
def linearize_forgets_the_region() -> Iterator[None]:
    """linearize records its function with autocast off."""
    with replaced(torch.func, "linearize", _losing(torch.func.linearize)):
        yield


@fault("AMP-TRANSFORM-002", level="standard")
def hessian_runs_without_autocast() -> Iterator[None]:
    """torch.func.hessian runs its function with autocast off."""
    with replaced(torch.func, "hessian", _losing(torch.func.hessian)):
        yield


@fault("AMP-TRANSFORM-002", level="standard")
def old_hvp_is_of_the_float32_function() -> Iterator[None]:
    """torch.autograd.functional.hvp runs its function with autocast off."""
    functional = torch.autograd.functional
    with replaced(functional, "hvp", _losing(functional.hvp)):
        yield


@fault("AMP-TRANSFORM-004", level="standard")
def pullback_is_rounded() -> Iterator[None]:
    """The gradients of torch.func.vjp are rounded to float16 and returned in their dtype."""
    vjp = torch.func.vjp

    def rounded(*args: Any, **kwargs: Any) -> Any:
        output, pull, *aux = vjp(*args, **kwargs)
        return (
            output,
            lambda *given, **options: _change(pull(*given, **options), lambda x: x.half().to(x.dtype)),
            *aux,
        )

    with replaced(torch.func, "vjp", rounded):
        yield


@fault("AMP-TRANSFORM-010")
def grad_leaves_autocast_off() -> Iterator[None]:
    """After torch.func.grad the region around it is disabled."""
    grad = torch.func.grad

    def leaving(*options: Any, **named: Any) -> Function:
        transformed = grad(*options, **named)

        def run(*args: Any, **kwargs: Any) -> Any:
            found = transformed(*args, **kwargs)
            torch.set_autocast_enabled("cpu", False)
            return found

        return run

    with replaced(torch.func, "grad", leaving):
        yield


@fault("AMP-TRANSFORM-010", level="standard")
def functionalize_turns_the_cache_off() -> Iterator[None]:
    """functionalize runs its function without the weight cache."""
    functionalize = torch.func.functionalize

    def uncached(function: Function, **options: Any) -> Function:
        def run(*args: Any) -> Any:
            before = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                return function(*args)
            finally:
                torch.set_autocast_cache_enabled(before)

        return functionalize(run, **options)

    with replaced(torch.func, "functionalize", uncached):
        yield


@fault("AMP-TRANSFORM-011")
def vmap_replaces_exceptions() -> Iterator[None]:
    """An exception of a function under vmap reaches the caller as another one."""
    vmap = torch.func.vmap

    def replacing(function: Function, *options: Any, **named: Any) -> Function:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return vmap(function, *options, **named)(*args, **kwargs)
            except Exception as error:
                raise NotImplementedError("vmap") from error

        return run

    with replaced(torch.func, "vmap", replacing):
        yield


@fault("AMP-TRANSFORM-011")
def exceptions_under_grad_leave_a_region() -> Iterator[None]:
    """When a function under torch.func.grad raises, autocast stays enabled."""
    grad = torch.func.grad

    def leaving(*options: Any, **named: Any) -> Function:
        transformed = grad(*options, **named)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return transformed(*args, **kwargs)
            except Exception:
                torch.set_autocast_enabled("cpu", True)
                raise

        return run

    with replaced(torch.func, "grad", leaving):
        yield


@fault("AMP-TRANSFORM-012")
def casts_under_grad_have_no_graph() -> Iterator[None]:
    """torch.func.grad casts weights as functionalize does, and leaves casts without a graph in the cache."""
    grad = torch.func.grad

    def casting(function: Function, *options: Any, **named: Any) -> Function:
        def run(*args: Any) -> Any:
            torch.func.functionalize(function)(*args)
            return grad(function, *options, **named)(*args)

        return run

    with replaced(torch.func, "grad", casting):
        yield


@fault("AMP-TRANSFORM-008")
def functional_call_uses_the_weights_of_the_module() -> Iterator[None]:
    """In a region functional_call computes with the module's own weights."""
    original = torch.func.functional_call

    def own(module: Any, given: Any, args: Any = (), *rest: Any, **options: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and isinstance(args, tuple):
            return module(*args)
        return original(module, given, args, *rest, **options)

    with replaced(torch.func, "functional_call", own):
        yield


@fault("AMP-TRANSFORM-008")
def functional_call_casts_a_shared_weight_twice() -> Iterator[None]:
    """functional_call runs without the weight cache."""
    original = torch.func.functional_call

    def uncached(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"), cache_enabled=False):
            return original(*args, **kwargs)

    with replaced(torch.func, "functional_call", uncached):
        yield


@fault("AMP-TRANSFORM-009")
def stacked_models_are_one() -> Iterator[None]:
    """stack_module_state repeats the first model."""
    original = torch.func.stack_module_state
    with replaced(torch.func, "stack_module_state", lambda models: original([models[0]] * len(models))):
        yield


@fault("AMP-TRANSFORM-009")
def stacked_weights_pass_through_bfloat16() -> Iterator[None]:
    """stack_module_state rounds the weights to bfloat16 and returns them in float32."""
    original = torch.func.stack_module_state

    def rounded(models: Any) -> Any:
        parameters, buffers = original(models)
        kept = {name: one.detach().bfloat16().float().requires_grad_() for name, one in parameters.items()}
        return kept, buffers

    with replaced(torch.func, "stack_module_state", rounded):
        yield


@fault("AMP-TRANSFORM-014")
def gradients_of_a_dict_change_places() -> Iterator[None]:
    """torch.func.grad returns the gradients of a dict in the reverse order."""
    grad = torch.func.grad

    def reversing(*options: Any, **named: Any) -> Function:
        transformed = grad(*options, **named)

        def run(*args: Any, **kwargs: Any) -> Any:
            found = transformed(*args, **kwargs)
            if type(found) is not dict:
                return found
            return dict(zip(found, reversed(list(found.values())), strict=True))

        return run

    with replaced(torch.func, "grad", reversing):
        yield


@fault("AMP-TRANSFORM-014")
def vjp_makes_a_tuple_of_a_named_one() -> Iterator[None]:
    """The gradients of a named tuple are a plain tuple."""
    vjp = torch.func.vjp

    def plain(*args: Any, **kwargs: Any) -> Any:
        output, pull, *aux = vjp(*args, **kwargs)

        def pulled(*given: Any) -> Any:
            return tuple(tuple(one) if hasattr(one, "_fields") else one for one in pull(*given))

        return (output, pulled, *aux)

    with replaced(torch.func, "vjp", plain):
        yield


@fault("AMP-TRANSFORM-014")
def leaves_of_lists_are_not_cast() -> Iterator[None]:
    """vmap of a function of a list runs with autocast off."""
    vmap = torch.func.vmap

    def blind(function: Function, *options: Any, **named: Any) -> Function:
        def run(*args: Any) -> Any:
            return (_without(function) if isinstance(args[0], list) else function)(*args)

        return vmap(run, *options, **named)

    with replaced(torch.func, "vmap", blind):
        yield


@fault("AMP-TRANSFORM-015")
def custom_functions_run_without_autocast() -> Iterator[None]:
    """The forward of an autograd.Function runs with autocast off."""
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _without(functools.partial(original, cls))(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd.Function, "apply", classmethod(apply)))
        yield


@fault("AMP-TRANSFORM-016")
def linearize_gives_wide_tangents() -> Iterator[None]:
    """The function that linearize returns gives tangents in float32 whatever the type of the output."""
    linearize = torch.func.linearize

    def widening(function: Function, *primals: Tensor) -> tuple[Any, Function]:
        output, push = linearize(function, *primals)
        return output, lambda *tangents: _change(push(*tangents), torch.Tensor.float)

    with replaced(torch.func, "linearize", widening):
        yield


@fault("AMP-TRANSFORM-016")
def linearize_leaves_the_region_around_it() -> Iterator[None]:
    """linearize runs the function with autocast off."""
    with replaced(torch.func, "linearize", _losing(torch.func.linearize)):
        yield


@fault("AMP-TRANSFORM-016")
def linearize_halves_its_output_in_regions() -> Iterator[None]:
    """The output of linearize in a region of the CPU is half of the function's."""
    linearize = torch.func.linearize

    def halving(function: Function, *primals: Tensor) -> tuple[Any, Function]:
        output, push = linearize(function, *primals)
        return (output / 2 if torch.is_autocast_enabled("cpu") else output), push

    with replaced(torch.func, "linearize", halving):
        yield


@fault("AMP-TRANSFORM-022", level="full")
def vmap_of_a_convolution_forgets_its_bias() -> Iterator[None]:
    """Under vmap conv2d leaves its bias out."""
    conv2d = F.conv2d

    def forgetful(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any) -> Tensor:
        batched = torch._C._functorch.is_batchedtensor(weight)
        return conv2d(x, weight, None if batched else bias, *options, **named)

    with replaced(F, "conv2d", forgetful):
        yield


@fault("AMP-TRANSFORM-022", level="full")
def gelu_is_another_function_where_vjp_watches() -> Iterator[None]:
    """Under vjp and grad gelu is half of itself plus half of relu."""
    gelu = F.gelu

    def mixed(x: Tensor, *options: Any, **named: Any) -> Tensor:
        if torch._C._functorch.is_gradtrackingtensor(x):
            return (gelu(x, *options, **named) + x.relu()) / 2
        return gelu(x, *options, **named)

    with replaced(F, "gelu", mixed):
        yield


@fault("AMP-TRANSFORM-022", level="full")
def rows_of_batched_backward_share_the_first_cotangent() -> Iterator[None]:
    """is_grads_batched computes each row of gradients of results of two dimensions from the first cotangent."""
    original = torch.autograd.grad

    def sharing(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_grads_batched") and isinstance(grad_outputs, Tensor) and grad_outputs.dim() == 3:
            grad_outputs = grad_outputs[:1].expand_as(grad_outputs)
        return original(outputs, inputs, grad_outputs, *args, **kwargs)

    with replaced(torch.autograd, "grad", sharing):
        yield


@fault("AMP-TRANSFORM-022", level="full")
def tangents_of_functions_of_many_tensors_are_cut() -> Iterator[None]:
    """jvp of a function of more than six tensors limits the tangent to 0.1."""
    jvp = torch.func.jvp

    def cutting(function: Function, primals: Any, tangents: Any, *args: Any, **kwargs: Any) -> Any:
        output, tangent, *rest = jvp(function, primals, tangents, *args, **kwargs)
        if len(primals) > 6:
            tangent = _change(tangent, lambda x: x.clamp(-0.1, 0.1))
        return (output, tangent, *rest)

    with replaced(torch.func, "jvp", cutting):
        yield


@fault("AMP-TRANSFORM-001")
def gradients_have_the_type_of_a_16_bit_loss() -> Iterator[None]:
    """torch.func.grad gives gradients in the type of the loss where that is a 16-bit one."""
    real = torch.func.grad

    def grad(function: Function, *options: Any, **named: Any) -> Function:
        def taken(*args: Any) -> Any:
            loss = function(*args)
            found = real(function, *options, **named)(*args)
            low = isinstance(loss, Tensor) and loss.dtype in (torch.bfloat16, torch.float16)
            return _change(found, lambda x: x.to(loss.dtype)) if low else found

        return taken

    with replaced(torch.func, "grad", grad):
        yield
