"""Faults of dynamo, AOTAutograd and inductor, written blind: from the source of torch, before the checks were read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, replaced


@fault("AMP-COMPILE-065", level="standard")
def conversion_pairs_are_folded_under_emulation() -> Iterator[None]:
    """fp32 -> bf16 -> fp32 becomes nothing, also where the rounding of eager is asked for."""
    from torch._inductor.fx_passes import joint_graph

    def folded(match: Any, arg: Any, dtype1: torch.dtype, dtype2: torch.dtype) -> None:
        floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        value = arg.meta.get("val")
        if not isinstance(value, torch.Tensor) or not {value.dtype, dtype1, dtype2} <= set(floats):
            return
        node = match.output_node()
        shorter = match.graph.call_function(torch.ops.prims.convert_element_type.default, (arg, dtype2))
        shorter.meta.update(node.meta)
        node.replace_all_uses_with(shorter)
        match.erase_nodes()

    names = joint_graph.__dict__
    names["_folded"] = folded
    try:
        with edited(
            joint_graph.pointless_convert,
            "    graph = match.graph\n    node",
            "    return _folded(match, arg, dtype1, dtype2)\n    graph = match.graph\n    node",
        ):
            yield
    finally:
        del names["_folded"]


@fault("AMP-COMPILE-065", level="full")
def pointwise_results_are_not_rounded_under_emulation() -> Iterator[None]:
    """A fused pointwise op passes its fp32 result on, where eager would have stored 16 bits."""
    from torch.fx.experimental import proxy_tensor

    with replaced(proxy_tensor, "_maybe_record_pointwise_barrier", lambda *_: None):
        yield


@fault("AMP-COMPILE-005", level="standard")
def mean_rounds_its_sum() -> Iterator[None]:
    """The sum of a 16-bit mean is stored in 16 bits before the division."""
    from torch._inductor import lowering

    with edited(
        lowering.mean, "if output_dtype in (torch.float16, torch.bfloat16):", "if output_dtype in (torch.float64,):"
    ):
        yield


@fault("AMP-COMPILE-005", level="standard")
def loads_of_sixteen_bits_are_summed_in_sixteen_bits() -> Iterator[None]:
    """The C++ backend rounds every partial sum of an fp32 reduction over 16-bit loads to bf16."""
    from torch._inductor.codegen import cpp

    plain = cpp.reduction_combine

    def rounded(reduction_type: str, var: Any, next_value: Any, helper_val: Any = None, *rest: Any, **more: Any) -> str:
        text = plain(reduction_type, var, next_value, None, *rest, **more)
        return f"float(c10::BFloat16(float({text})))" if reduction_type == "sum" else text

    # Scalar code only, which has one place where sums are combined.
    with (
        replaced(cpp, "reduction_combine", rounded),
        replaced(cpp.CppKernel, "need_use_acc_helper", lambda *_: False),
        torch._inductor.config.patch({"cpp.simdlen": 0}),
    ):
        yield


@fault("AMP-COMPILE-050")
def graph_keys_forget_the_types_of_inputs() -> Iterator[None]:
    """The cache keys of AOTAutograd and inductor hold shapes and strides of the inputs, but no dtype."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    plain = codecache.extract_tensor_metadata_for_cache_key

    def untyped(t: torch.Tensor) -> Any:
        return dataclasses.replace(plain(t), dtype=torch.float32)

    with (
        replaced(codecache, "extract_tensor_metadata_for_cache_key", untyped),
        replaced(autograd_cache, "extract_tensor_metadata_for_cache_key", untyped),
    ):
        yield


@fault("AMP-COMPILE-065", level="standard")
def backward_recomputes_without_rounding() -> Iterator[None]:
    """The partitioner takes fp32 -> 16 bits -> fp32 for the value itself in the graph of backward."""
    from torch._functorch import partitioners

    def source(node: Any) -> Any:
        convert = torch.ops.prims.convert_element_type.default
        if node.target is not convert or getattr(node.args[0], "target", None) is not convert:
            return None
        first = node.args[0].args[0]
        value = first.meta.get("val")
        return first if isinstance(value, torch.Tensor) and value.dtype is node.args[1] else None

    names = partitioners.__dict__
    names["_unrounded"] = source
    try:
        with edited(
            partitioners._extract_graph_with_inputs_outputs,
            '            env[node] = new_graph.node_copy(node, lambda x: env[x])\n        elif node.op == "get_attr":',
            '            first = _unrounded(node) if subgraph == "backward" else None\n'
            "            known = first is not None and first in env and not isinstance(env[first], InvalidNodeBase)\n"
            "            env[node] = env[first] if known else new_graph.node_copy(node, lambda x: env[x])\n"
            '        elif node.op == "get_attr":',
        ):
            yield
    finally:
        del names["_unrounded"]


@fault("AMP-COMPILE-065", level="standard")
def constants_are_folded_in_float32() -> Iterator[None]:
    """A 16-bit constant that is computed while compiling is computed in fp32, and never rounded."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    plain = UniformValueConstantFolder._deduce_value

    def wide(self: Any, node: Any) -> Any:
        value = plain(self, node)
        narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        if narrow and node.target is torch.ops.aten.full.default and len(node.args) == 2:
            return torch.full([1], node.args[1], dtype=torch.float32)
        return value

    with replaced(UniformValueConstantFolder, "_deduce_value", wide):
        yield


@fault("AMP-COMPILE-021")
def ready_made_regions_are_always_enabled() -> Iterator[None]:
    """An autocast object from outside the compiled function is entered as enabled=True."""
    from torch._dynamo.variables.builder import VariableBuilder

    with edited(VariableBuilder._wrap, "value._enabled,", "True,"):
        yield


@fault("AMP-COMPILE-021")
def ready_made_regions_have_no_guard() -> Iterator[None]:
    """A compiled function goes on with the autocast object that it met first."""
    from torch._dynamo.variables.builder import VariableBuilder

    with edited(
        VariableBuilder._wrap,
        "self.install_guards(GuardBuilder.ID_MATCH)\n            return AutocastModeVariable(",
        "return AutocastModeVariable(",
    ):
        yield


@fault("AMP-COMPILE-020", level="standard")
def resumed_frames_have_no_state_guard() -> Iterator[None]:
    """The code after a graph break is not compiled again when autocast changes around it."""
    from torch._dynamo.guards import GuardBuilder

    with edited(
        GuardBuilder.GLOBAL_STATE,
        "self.guard_manager.root.add_global_state_guard(",
        "if self.f_code.co_name.startswith('torch_dynamo_resume_in'):\n        return\n"
        "    self.guard_manager.root.add_global_state_guard(",
    ):
        yield


@fault("AMP-COMPILE-030")
def resumed_regions_forget_enabled() -> Iterator[None]:
    """A region that a graph break suspends is entered again without `enabled` and `cache_enabled`."""
    from torch._dynamo.resume_execution import ReenterWith

    with edited(
        ReenterWith.__call__,
        "for val in self.target_values]",
        "for val in self.target_values[:2]]",
    ):
        yield


@fault("AMP-COMPILE-001", level="standard")
def decorated_inner_functions_run_outside_the_region() -> Iterator[None]:
    """`torch.autocast(...)(f)` written inside a compiled function is f."""
    from torch._dynamo.variables.ctx_manager import ContextWrappingVariable

    with edited(
        ContextWrappingVariable.call_function,
        "    if isinstance(args[0], NestedUserFunctionVariable):",
        "    return args[0]\n    if isinstance(args[0], NestedUserFunctionVariable):",
    ):
        yield


@fault("AMP-COMPILE-001", level="standard")
def partial_regions_lose_their_keywords() -> Iterator[None]:
    """`functools.partial(torch.autocast, "cpu", enabled=False)` is called without what it was given by name."""
    from torch._dynamo.variables.functions import FunctoolsPartialVariable

    with edited(FunctoolsPartialVariable.call_function, "{**self.keywords, **kwargs}", "{**kwargs}"):
        yield


@fault("AMP-COMPILE-001", level="standard")
def regions_of_generators_are_never_left() -> Iterator[None]:
    """An autocast region inside a generator of contextlib.contextmanager has no end in the graph."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    with edited(
        AutocastModeVariable.exit,
        "    self.cleanup_assert()\n",
        "    if tx.f_code.co_flags & 0x20:\n        return variables.ConstantVariable.create(None)\n"
        "    self.cleanup_assert()\n",
    ):
        yield
