"""Compilers that lose the autocast state of a graph that is compiled again, and widths of what a graph computes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import edited, replaced


def _unguarded(condition: str) -> contextlib.AbstractContextManager[None]:
    """Leave the guard on the autocast state out of graphs with an argument, `each`, that meets a condition."""
    from torch._dynamo import guards

    guarded = "    self.guard_manager.root.add_global_state_guard("
    nodes = "output_graph.graph.find_nodes(op='placeholder')"
    values = f"    values = [node.meta.get('example_value') for node in {nodes}]\n"
    return edited(
        guards.GuardBuilder.GLOBAL_STATE,
        guarded,
        f"{values}    if any({condition} for each in values):\n        return\n{guarded}",
    )


@fault("AMP-COMPILE-071")
def graphs_of_any_size_are_not_guarded() -> Iterator[None]:
    """The graph that is compiled for each number of rows has no guard on the autocast state."""
    with _unguarded("isinstance(each, torch.SymInt)"):
        yield


@fault("AMP-COMPILE-071")
def the_second_graph_is_not_guarded() -> Iterator[None]:
    """The graph that is compiled because an input requires a gradient has no guard on the autocast state."""
    with _unguarded("getattr(each, 'requires_grad', False) and not isinstance(each, torch.nn.Parameter)"):
        yield


@fault("AMP-COMPILE-020")
def resumed_code_is_not_guarded() -> Iterator[None]:
    """The graph behind a graph break has no guard on the autocast state."""
    from torch._dynamo import guards

    guarded = "    self.guard_manager.root.add_global_state_guard("
    resumed = "self.f_code.co_name.startswith('torch_dynamo_resume_in_')"
    with edited(guards.GuardBuilder.GLOBAL_STATE, guarded, f"    if {resumed}:\n        return\n{guarded}"):
        yield


def _of_numbers_guarded_by(kept: Callable[[float], bool]) -> contextlib.AbstractContextManager[None]:
    """Guard a Python number that a graph takes as a constant only if it is one that is `kept`."""
    from torch._dynamo import guards

    guarded = guards.GuardBuilder.CONSTANT_MATCH

    def guard_some(self: Any, guard: Any) -> None:
        value = self.get(guard.name if isinstance(guard.name, str) else guard.name())
        if type(value) not in (int, float) or kept(value):
            guarded(self, guard)

    return replaced(guards.GuardBuilder, "CONSTANT_MATCH", guard_some)


@fault("AMP-COMPILE-076")
def compiled_numbers_stay_as_they_were() -> Iterator[None]:
    """A compiled program has no guard on Python floats: it goes on with those of its first call."""
    with _of_numbers_guarded_by(lambda value: isinstance(value, int)):
        yield


@fault("AMP-COMPILE-076", level="standard")
def compiled_integers_stay_as_they_were() -> Iterator[None]:
    """A compiled program has no guard on Python integers: it goes on with those of its first call."""
    with _of_numbers_guarded_by(lambda value: isinstance(value, float)):
        yield


@fault("AMP-COMPILE-001", level="standard")
def compiled_generators_run_where_they_are_made() -> Iterator[None]:
    """The body of a generator runs when it is made, outside of the region in which it is advanced."""
    with torch._dynamo.config.patch(enable_faithful_generator_behavior=False):
        yield


@fault("AMP-COMPILE-072")
def compiled_custom_bwd_takes_the_default_type() -> Iterator[None]:
    """custom_bwd in compiled code enters autocast with the type that the device has by default."""

    def custom_bwd(method: Any = None, *, device_type: str) -> Any:
        if method is None:
            return functools.partial(custom_bwd, device_type=device_type)

        @functools.wraps(method)
        def decorated(ctx: Any, *given: Any, **named: Any) -> Any:
            dtype = None if torch.compiler.is_compiling() else ctx._dtype
            with torch.autocast(device_type, enabled=ctx._fwd_used_autocast, dtype=dtype):
                return method(ctx, *given, **named)

        return decorated

    with replaced(torch.amp, "custom_bwd", custom_bwd), replaced(autocast_mode, "custom_bwd", custom_bwd):
        yield


@fault("AMP-COMPILE-006")
def compiled_code_saves_large_tensors_in_bf16() -> Iterator[None]:
    """AOTAutograd saves float32 tensors of more than 40000 elements for backward in bf16."""
    context = torch.autograd.function.FunctionCtx
    plain = context.save_for_backward

    def save(self: Any, *tensors: Any) -> None:
        plain(self, *(_rounded(each) if "Compiled" in type(self).__name__ else each for each in tensors))

    with replaced(context, "save_for_backward", save):
        yield


def _rounded(tensor: Any) -> Any:
    large = isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32 and tensor.numel() > 40000
    return tensor.to(torch.bfloat16).float() if large else tensor


@fault("AMP-COMPILE-073")
def decomposed_embedding_adds_in_its_type() -> Iterator[None]:
    """The decomposition of the backward of an embedding adds to 16 bits."""
    from torch._decomp import decompositions

    with edited(
        decompositions.embedding_dense_backward,
        "    grad_output = grad_output.to(computation_dtype)\n    indices =",
        "    indices =",
    ):
        yield


@fault("AMP-COMPILE-005", level="full")
def inductor_forgets_regions_after_a_break() -> Iterator[None]:
    """Regions are off in what inductor compiles of a function after its first graph break."""
    from torch._guards import CompileContext
    from torch._inductor import compile_fx

    plain = compile_fx.compile_fx

    def compiled(gm: torch.fx.GraphModule, *given: Any, **named: Any) -> Any:
        compiling = CompileContext.current_compile_id()
        if compiling is not None and compiling.frame_id:
            for node in gm.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast):
                node.args = (*node.args[:2], False, *node.args[3:])
            gm.recompile()
        return plain(gm, *given, **named)

    with replaced(compile_fx, "compile_fx", compiled):
        yield


@fault("AMP-COMPILE-074", level="standard")
def inductor_adds_a_residual_in_bf16() -> Iterator[None]:
    """inductor rounds the float32 tensor that a 16-bit mm is added to, as an addmm of 16 bits would."""
    from torch._inductor import compile_fx

    aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
    plain = compile_fx.post_grad_passes

    def passes(gm: torch.fx.GraphModule, *given: Any, **named: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            for ours, other in (node.args, reversed(node.args)):
                product = ours.args[0] if getattr(ours, "target", None) is convert else ours
                if getattr(product, "target", None) is not aten.mm.default or not isinstance(other, torch.fx.Node):
                    continue
                with gm.graph.inserting_before(node):
                    low = gm.graph.call_function(convert, (other, product.meta["val"].dtype))
                    low.meta["val"] = other.meta["val"].to(product.meta["val"].dtype)
                    whole = gm.graph.call_function(aten.addmm.default, (low, *product.args))
                    whole.meta["val"] = product.meta["val"]
                    wide = gm.graph.call_function(convert, (whole, torch.float32))
                    wide.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(wide)
                break
        return plain(gm, *given, **named)

    with replaced(compile_fx, "post_grad_passes", passes):
        yield


def _marked(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Let what nested_compile_region marks be another function than the one that it is given."""
    original = torch.compiler.nested_compile_region
    return replaced(torch.compiler, "nested_compile_region", lambda function: original(change(function)))


@fault("AMP-COMPILE-080")
def marked_functions_run_outside_of_regions() -> Iterator[None]:
    """A function that is compiled once for all its calls runs as if there were no region."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*given: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return function(*given)

        return alone

    with _marked(change):
        yield


@fault("AMP-COMPILE-080")
def marked_functions_record_no_gradients() -> Iterator[None]:
    """A function that is compiled once for all its calls passes no gradient back."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*given).detach()

    with _marked(change):
        yield


@fault("AMP-COMPILE-080", level="standard")
def marked_functions_take_the_usual_type() -> Iterator[None]:
    """A function that is compiled once for all its calls runs in autocast's default type in each region."""

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def usual(*given: Any) -> Any:
            if not torch.is_autocast_enabled("cpu"):
                return function(*given)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*given)

        return usual

    with _marked(change):
        yield


@fault("AMP-COMPILE-082", level="standard")
def captured_gradients_keep_the_type_that_they_came_in() -> Iterator[None]:
    """Compiled autograd casts no gradient to the type of what it is the gradient of."""
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    with replaced(AutogradCompilerInstance, "validate_outputs", lambda self, name, outputs, *_: outputs):
        yield


@fault("AMP-COMPILE-082", level="standard")
def captured_gradients_are_those_of_the_last_use() -> Iterator[None]:
    """Compiled autograd keeps of the gradients of a tensor that is used twice the one that comes last."""
    from torch._dynamo.compiled_autograd import AutogradCompilerInstance

    with replaced(AutogradCompilerInstance, "accumulate", lambda self, before, last: last):
        yield
