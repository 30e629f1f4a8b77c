"""Faults of compiled and exported programs that write, drop out, call and compute special values, written blind."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import operator_kernel, replaced

LOW = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def lowered(name: str, change: Callable[[Any, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let inductor lower an op of ATen by what `change` makes of the lowering module and of the function there."""
    from torch._inductor import lowering

    op = getattr(torch.ops.aten, name)
    before = {key: lowering.lowerings[key] for key in (op, op.default) if key in lowering.lowerings}
    lowering.lowerings.update({key: change(lowering, one) for key, one in before.items()})
    try:
        yield
    finally:
        lowering.lowerings.update(before)


# --- dynamo


@fault("AMP-COMPILE-030")
def functions_left_to_eager_run_in_the_default_dtype() -> Iterator[None]:
    """A function under torch.compiler.disable runs in a region of the default dtype, in whatever it is called."""
    disable, preset = torch.compiler.disable, torch.bfloat16

    def disabled(fn: Any = None, *given: Any, **named: Any) -> Any:
        if not callable(fn) or isinstance(fn, torch.nn.Module | type):
            return disable(fn, *given, **named)

        @functools.wraps(fn)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", dtype=preset, enabled=torch.is_autocast_enabled("cpu")):
                return fn(*args, **kwargs)

        return disable(inner, *given, **named)

    with replaced(torch.compiler, "disable", disabled):
        yield


@fault("AMP-COMPILE-020")
def dtypes_among_arguments_have_no_guard() -> Iterator[None]:
    """Compiled code takes the dtype that it was given at its first call for good."""
    from torch._dynamo.guards import GuardBuilder

    def without(guard_of: Callable[..., Any]) -> Callable[..., Any]:
        def install(self: Any, guard: Any, *given: Any, **named: Any) -> Any:
            with contextlib.suppress(Exception):
                if isinstance(self.get(guard), torch.dtype):
                    return None
            return guard_of(self, guard, *given, **named)

        return install

    with contextlib.ExitStack() as stack:
        for name in ("EQUALS_MATCH", "CONSTANT_MATCH", "ID_MATCH"):
            stack.enter_context(replaced(GuardBuilder, name, without(getattr(GuardBuilder, name))))
        yield


@fault("AMP-COMPILE-001")
def gradients_within_compiled_code_leave_the_region() -> Iterator[None]:
    """torch.func.grad within compiled code runs its function with autocast off."""
    from torch._dynamo.variables.ctx_manager import GradIncrementNestingCtxManagerVariable as Nesting

    enter, leave = Nesting.enter, Nesting.exit

    def switch(tx: Any, enabled: bool) -> None:
        torch.set_autocast_enabled("cpu", enabled)
        tx.output.create_node("call_function", torch.set_autocast_enabled, ("cpu", enabled), {})

    def entered(self: Any, tx: Any) -> Any:
        found = enter(self, tx)
        self._on = torch.is_autocast_enabled("cpu")
        if self._on:
            switch(tx, False)
        return found

    def left(self: Any, tx: Any, *given: Any) -> Any:
        if self._on:
            switch(tx, True)
        return leave(self, tx, *given)

    with replaced(Nesting, "enter", entered), replaced(Nesting, "exit", left):
        yield


@fault("AMP-COMPILE-044", level="standard")
def loops_run_outside_of_the_region() -> Iterator[None]:
    """torch.while_loop runs its body with autocast off."""
    from torch._higher_order_ops.while_loop import while_loop_op

    def outside(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return kernel(*given, **named)

        return run

    key = torch._C.DispatchKey.CompositeExplicitAutograd
    kernels, modes = while_loop_op.py_kernels, while_loop_op.python_key_table
    before, before_modes = kernels[key], dict(modes)
    kernels[key] = outside(before)
    modes.update({mode: outside(one) for mode, one in before_modes.items()})
    while_loop_op._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels[key] = before
        modes.update(before_modes)
        while_loop_op._dispatch_cache.clear()


# --- AOTAutograd, export, decompositions


@fault("AMP-COMPILE-001")
def compiled_updates_of_16_bit_tensors_are_lost() -> Iterator[None]:
    """What compiled code writes in place to an input of 16 bits does not reach it."""
    from torch._functorch._aot_autograd import graph_capture_wrappers as wrappers

    written = wrappers.apply_in_graph_mutations

    def apply(info: Any, old: Any, *given: Any, **named: Any) -> None:
        if not (isinstance(old, Tensor) and old.dtype in LOW):
            written(info, old, *given, **named)

    with replaced(wrappers, "apply_in_graph_mutations", apply):
        yield


@fault("AMP-COMPILE-002", level="standard")
def exported_programs_do_not_update_16_bit_buffers() -> Iterator[None]:
    """The module of an exported program leaves its 16-bit buffers as they are."""
    from torch.export import _unlift

    insert = _unlift._insert_copy_for_mutations

    def inserted(module: Any, *given: Any) -> None:
        insert(module, *given)
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten.copy_.default and not node.users:
                value = node.args[1].meta.get("val")
                if value is not None and value.dtype in LOW:
                    module.graph.erase_node(node)
        module.recompile()

    with replaced(_unlift, "_insert_copy_for_mutations", inserted):
        yield


@fault("AMP-COMPILE-042")
def compiled_recomputation_draws_anew() -> Iterator[None]:
    """A checkpoint in compiled code drops other activations when it recomputes than it did forward."""
    from torch._prims.rng_prims import run_with_rng_state

    def anew(state: Any, op: Any, *given: Any, **named: Any) -> Any:
        return op(*given, **named)

    with operator_kernel(run_with_rng_state, "BackendSelect", lambda before: anew):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_batch_norm_keeps_the_biased_variance() -> Iterator[None]:
    """The decomposition of batch norm of a 16-bit batch adds the biased variance to the running one."""
    from torch._decomp import decompositions

    helper = decompositions.native_batch_norm_helper

    def biased(
        x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, *more: Any
    ) -> tuple[Any, ...]:
        found = list(helper(x, weight, bias, mean, variance, training, momentum, *more))
        if training and variance is not None and more[-1] and x.dtype in LOW:
            count = x.numel() / x.shape[1]
            kept = (1 - momentum) * variance
            found[4] = (found[4] - kept) * ((count - 1) / count) + kept
        return tuple(found)

    with replaced(decompositions, "native_batch_norm_helper", biased):
        yield


# --- inductor


@fault("AMP-COMPILE-005", level="standard")
def tails_of_maxima_count_as_zero() -> Iterator[None]:
    """A maximum that inductor computes on the CPU counts zeros for what a last vector lacks."""
    from torch._inductor.codegen.cpp import CppVecKernel

    combine = CppVecKernel.reduction_combine_vec

    def combined(self: Any, kind: str, var: Any, value: Any, *given: Any, **named: Any) -> Any:
        found = combine(self, kind, var, value, *given, **named)
        masked = isinstance(found, str) and found.startswith("max_masked_reduce(")
        return f"at::vec::maximum({var}, {value})" if masked else found

    with replaced(CppVecKernel, "reduction_combine_vec", combined):
        yield


@fault("AMP-COMPILE-005", level="standard")
def compiled_conversions_to_fp16_saturate() -> Iterator[None]:
    """A conversion to float16 in code of inductor gives the largest number for what is beyond it, in place of inf."""
    from torch._inductor import lowering

    convert, ops = lowering.to_dtype, lowering.ops

    def limited(value: Any) -> Any:
        low, high = (ops.constant(sign * 65504.0, torch.float32) for sign in (-1, 1))
        return ops.minimum(ops.maximum(value, low), high)

    def saturated(x: Any, dtype: torch.dtype, *given: Any, **named: Any) -> Any:
        if dtype is torch.float16 and x.get_dtype() is torch.float32:
            x = lowering.make_pointwise(limited)(x)
        return convert(x, dtype, *given, **named)

    with replaced(lowering, "to_dtype", saturated):
        yield


@fault("AMP-COMPILE-005", level="standard")
def compiled_padding_is_of_zeros() -> Iterator[None]:
    """Constant padding of 16-bit tensors in code of inductor is of zeros, whatever value was asked for."""

    def change(lowering: Any, pad: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, padding, value=0: pad(x, padding, 0 if x.get_dtype() in LOW else value)

    with lowered("constant_pad_nd", change):
        yield


@fault("AMP-COMPILE-005", level="standard")
def compiled_code_sees_no_nan_in_16_bits() -> Iterator[None]:
    """isnan of a 16-bit tensor is false in code of inductor."""

    def change(lowering: Any, isnan: Callable[..., Any]) -> Callable[..., Any]:
        def blind(x: Any) -> Any:
            return lowering.full_like(x, False, dtype=torch.bool) if x.get_dtype() in LOW else isnan(x)

        return blind

    with lowered("isnan", change):
        yield


# --- attention


@fault("AMP-CAST-097", level="standard")
def attention_gives_binary_logarithms() -> Iterator[None]:
    """flex_attention in a region returns the log-sum-exp to base 2."""
    from torch.nn.attention import flex_attention as module

    plain = module.flex_attention

    def binary(*given: Any, **named: Any) -> Any:
        found = plain(*given, **named)
        if isinstance(found, tuple) and torch.is_autocast_enabled("cpu") and getattr(found[1], "lse", None) is not None:
            return found[0], found[1]._replace(lse=found[1].lse / math.log(2))
        return found

    with replaced(module, "flex_attention", binary):
        yield
