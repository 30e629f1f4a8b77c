"""Compilers that lose, change or leak a region of the program that they compile."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode

from tests.faults import fault
from tests.faults.breaking import edited, replaced

OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}


def entered(change: Callable[..., tuple[Any, ...]]) -> Any:
    """Change the device type, dtype, enabled and cache flag of the regions that Dynamo traces."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    original = AutocastModeVariable.enter

    def enter(self: Any, *given: Any) -> Any:
        self.target_values = change(*self.target_values)
        return original(self, *given)

    return replaced(AutocastModeVariable, "enter", enter)


def regions_off() -> Any:
    """Let Dynamo trace each region as a disabled one."""
    return entered(lambda kind, dtype, enabled, cache: (kind, dtype, False, cache))


def without_a_region(call: Any) -> Any:
    """Return the callable, called as if no region of the CPU were around it."""

    def run(*given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return call(*given, **named)

    return run


@contextlib.contextmanager
def around_compiled(around: Callable[[Any], Any]) -> Iterator[None]:
    """Replace what torch.compile returns for a function by what `around` makes of it."""
    original = torch.compile

    def compile(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile, **options)
        return around(original(function, **options))

    with replaced(torch, "compile", compile):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def dynamo_drops_regions() -> Iterator[None]:
    """Dynamo traces each region as a disabled one."""
    with regions_off():
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def dynamo_ignores_enabled() -> Iterator[None]:
    """Dynamo traces each region as an enabled one."""
    with entered(lambda kind, dtype, enabled, cache: (kind, dtype, True, cache)):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def dynamo_ignores_the_dtype() -> Iterator[None]:
    """Dynamo traces each region with the dtype that is in force."""
    with entered(lambda kind, dtype, enabled, cache: (kind, None, enabled, cache)):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def dynamo_swaps_the_dtype() -> Iterator[None]:
    """Dynamo traces each region with the other 16-bit dtype."""
    with entered(lambda kind, dtype, enabled, cache: (kind, OTHER.get(dtype), enabled, cache)):
        yield


@fault("AMP-COMPILE-001")
def dynamo_takes_another_device_type() -> Iterator[None]:
    """Dynamo traces each region as one of XPU."""
    with entered(lambda kind, dtype, enabled, cache: ("xpu", torch.bfloat16, enabled, cache)):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def dynamo_keeps_the_outer_region() -> Iterator[None]:
    """A region inside another one has the settings of the outer one when it is traced."""

    def change(kind: Any, dtype: Any, enabled: Any, cache: Any) -> tuple[Any, ...]:
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind), True, cache
        return kind, dtype, enabled, cache

    with entered(change):
        yield


@fault("AMP-COMPILE-001")
def decorators_open_no_region_when_compiled() -> Iterator[None]:
    """A function that torch.autocast decorated opens no region in compiled code."""
    decorator = torch.amp.autocast_mode.autocast_decorator

    def decorated(region: Any, function: Any) -> Any:
        inside = decorator(region, function)

        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if torch.compiler.is_compiling() else inside(*args, **kwargs)

        return run

    with replaced(torch.amp.autocast_mode, "autocast_decorator", decorated):
        yield


@fault("AMP-COMPILE-030")
def regions_continue_in_another_type_after_a_graph_break() -> Iterator[None]:
    """Code after a graph break opens the region with the other 16-bit dtype."""
    from torch._dynamo import resume_execution

    original = resume_execution.ReenterWith.__init__

    def initialise(self: Any, index: Any, values: Any = None) -> None:
        changed = tuple(OTHER.get(each, each) if isinstance(each, torch.dtype) else each for each in values or ())
        original(self, index, changed)

    with replaced(resume_execution.ReenterWith, "__init__", initialise):
        yield


@fault("AMP-COMPILE-030")
def disabled_regions_are_enabled_after_a_graph_break() -> Iterator[None]:
    """Code after a graph break opens each region enabled."""
    from torch._dynamo import resume_execution

    original = resume_execution.ReenterWith.__init__

    def initialise(self: Any, index: Any, values: Any = None) -> None:
        original(self, index, tuple(True if each is False else each for each in values or ()))

    with replaced(resume_execution.ReenterWith, "__init__", initialise):
        yield


@fault("AMP-COMPILE-064")
def captured_programs_hold_cached_casts() -> Iterator[None]:
    """make_fx captures with the region's cache on, so that a cast of a parameter becomes a constant."""
    from torch.fx.experimental import proxy_tensor

    with replaced(proxy_tensor, "disable_autocast_cache", contextlib.nullcontext):
        yield


@fault("AMP-COMPILE-030", "AMP-COMPILE-031")
def a_compiled_call_leaves_autocast_on() -> Iterator[None]:
    """Compiled code ends with autocast enabled."""

    def around(call: Any) -> Any:
        @functools.wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            finally:
                torch.set_autocast_enabled("cpu", True)

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-031")
def an_error_leaves_autocast_on() -> Iterator[None]:
    """A region that an exception of compiled code leaves stays enabled."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except Exception:
                torch.set_autocast_enabled("cpu", True)
                raise

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-031")
def errors_are_wrapped() -> Iterator[None]:
    """An exception of the program comes out of compiled code as a RuntimeError."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except ArithmeticError as error:
                raise RuntimeError(str(error)) from error

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-031")
def errors_lose_their_message() -> Iterator[None]:
    """An exception of the program comes out of compiled code without its message."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except ArithmeticError as error:
                raise type(error)() from None

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-020", "AMP-COMPILE-032")
def no_guard_on_autocast() -> Iterator[None]:
    """Compiled code has no guard on the global state."""
    from torch._dynamo.guards import GuardBuilder

    with replaced(GuardBuilder, "GLOBAL_STATE", lambda self, guard: None):
        yield


@fault("AMP-COMPILE-020", "AMP-COMPILE-032")
def the_first_state_stays() -> Iterator[None]:
    """Compiled code runs in the autocast state of its first call."""

    def around(call: Any) -> Any:
        first: list[Any] = []

        def run(*given: Any, **named: Any) -> Any:
            if not first:
                first.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            (enabled, dtype), *_ = first
            with torch.autocast("cpu", enabled=enabled, dtype=dtype, cache_enabled=False):
                return call(*given, **named)

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-032")
def another_thread_runs_in_the_first_region() -> Iterator[None]:
    """Compiled code takes the autocast state of the thread that compiled it into others."""
    import threading

    def around(call: Any) -> Any:
        home: list[Any] = []

        def run(*given: Any, **named: Any) -> Any:
            if not home:
                home.append((threading.get_ident(), torch.get_autocast_dtype("cpu")))
            (thread, dtype), *_ = home
            away = threading.get_ident() != thread
            with torch.autocast("cpu", dtype=dtype) if away else contextlib.nullcontext():
                return call(*given, **named)

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-021")
def no_guard_on_a_region_object() -> Iterator[None]:
    """Compiled code has no guard on the identity of objects that it read."""
    from torch._dynamo.guards import GuardBuilder

    with replaced(GuardBuilder, "ID_MATCH", lambda self, guard, *rest, **named: None):
        yield


@fault("AMP-COMPILE-022", level="standard")
def backward_ignores_its_setting() -> Iterator[None]:
    """Backward is traced in the region of the moment, also with backward_pass_autocast off."""
    from torch._functorch._aot_autograd import graph_capture_wrappers

    with replaced(graph_capture_wrappers, "disable_autocast", contextlib.nullcontext):
        yield


@fault("AMP-COMPILE-006", level="standard")
def backward_runs_outside_of_the_region() -> Iterator[None]:
    """The default of backward_pass_autocast is off."""
    from torch._functorch import config

    with config.patch(backward_pass_autocast="off"):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-010")
def backward_is_traced_in_a_region() -> Iterator[None]:
    """AOTAutograd traces each backward in a region of bf16, with forward's outside."""
    from torch._functorch._aot_autograd import graph_capture_wrappers

    original = graph_capture_wrappers.set_partitioner_tag_is_backward

    @contextlib.contextmanager
    def tagged() -> Iterator[None]:
        with original(), torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    with replaced(graph_capture_wrappers, "set_partitioner_tag_is_backward", tagged):
        yield


@fault("AMP-COMPILE-006", level="standard")
def compiled_code_leaves_the_region_around_it() -> Iterator[None]:
    """Compiled code runs as if no region were around it."""
    with around_compiled(without_a_region):
        yield


@fault("AMP-COMPILE-002", level="standard")
def exported_regions_are_off() -> Iterator[None]:
    """An exported program runs the parts of its regions outside of them."""
    from torch._higher_order_ops import wrap

    def call(self: Any, kind: Any, dtype: Any, enabled: Any, cache: Any, function: Any, *given: Any) -> Any:
        return function(*given)

    with replaced(wrap.WrapWithAutocast, "__call__", call):
        yield


@fault("AMP-COMPILE-002", "AMP-COMPILE-003", level="standard")
def exported_disabled_regions_are_lost() -> Iterator[None]:
    """An exported program runs disabled regions in what is around them."""
    from torch._higher_order_ops import wrap

    original = wrap.WrapWithAutocast.__call__

    def call(self: Any, kind: Any, dtype: Any, enabled: Any, cache: Any, function: Any, *given: Any) -> Any:
        return original(self, kind, dtype, enabled, cache, function, *given) if enabled else function(*given)

    with replaced(wrap.WrapWithAutocast, "__call__", call):
        yield


@fault("AMP-COMPILE-002")
def make_fx_records_no_casts() -> Iterator[None]:
    """A region is disabled while make_fx traces."""
    from torch.fx.experimental import proxy_tensor

    original = autocast_mode.autocast.__enter__

    def enter(self: Any) -> Any:
        found = original(self)
        if proxy_tensor.get_proxy_mode() is not None:
            torch.set_autocast_enabled(self.device, False)
        return found

    with replaced(autocast_mode.autocast, "__enter__", enter):
        yield


def _no_cast_of_fakes(original: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    def cast(value: Any, device_type: str, dtype: Any) -> Any:
        if torch.compiler.is_compiling() or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
            return value
        return original(value, device_type, dtype)

    return cast


@fault("AMP-COMPILE-040", level="standard")
def custom_fwd_casts_nothing_when_compiled() -> Iterator[None]:
    """cast_inputs of custom_fwd has no effect in compiled code."""
    with replaced(autocast_mode, "_cast", _no_cast_of_fakes(autocast_mode._cast)):
        yield


@fault("AMP-COMPILE-041", level="standard")
def autocast_rules_of_operators_are_lost() -> Iterator[None]:
    """The autocast rule of a custom operator casts no tensor while a graph is traced."""
    from torch._library import custom_ops

    with replaced(custom_ops, "_cast", _no_cast_of_fakes(custom_ops._cast)):
        yield


@fault("AMP-COMPILE-042", level="standard")
def compiled_checkpoints_run_outside_of_the_region() -> Iterator[None]:
    """A checkpoint in compiled code runs outside of the region around it."""
    from torch._higher_order_ops import wrap

    original = wrap.TagActivationCheckpoint.__call__

    def call(self: Any, *given: Any, **named: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return original(self, *given, **named)

    with replaced(wrap.TagActivationCheckpoint, "__call__", call):
        yield


@fault("AMP-COMPILE-060", level="standard")
def compiled_loss_is_outside_of_the_region() -> Iterator[None]:
    """The region of a compiled loss is disabled."""
    with regions_off():
        yield


@fault("AMP-COMPILE-061", level="full")
def inductor_takes_roots_too_large() -> Iterator[None]:
    """Square roots in code of inductor, of which a step of Adam divides one by another, are larger by a tenth."""
    from torch._inductor import lowering

    root = torch.ops.aten.sqrt.default
    original = lowering.lowerings[root]

    def large(x: Any) -> Any:
        return lowering.lowerings[torch.ops.aten.add.Tensor](original(x), 0.1)

    with mock.patch.dict(lowering.lowerings, {root: large}):
        yield


@fault("AMP-COMPILE-061", level="standard")
def compiled_fused_steps_lose_found_inf() -> Iterator[None]:
    """A compiled step of a fused optimizer does not get found_inf."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            optimizer = getattr(getattr(call, "__wrapped__", call), "__self__", None)
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.found_inf = None
            return call(*given, **named)

        return run

    with around_compiled(around):
        yield


def after_compiled_steps(change: Callable[[Any], None]) -> Any:
    """Let `change` have each optimizer whose step is compiled, after each step."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            returned = call(*given, **named)
            optimizer = getattr(getattr(call, "__wrapped__", call), "__self__", None)
            if isinstance(optimizer, torch.optim.Optimizer):
                change(optimizer)
            return returned

        return run

    return around_compiled(around)


@fault("AMP-COMPILE-066", level="standard")
def compiled_steps_keep_their_state_in_another_type() -> Iterator[None]:
    """A compiled step stores the state of each parameter in float64."""

    def widen(optimizer: Any) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(torch.complex128 if value.is_complex() else torch.float64)

    with after_compiled_steps(widen):
        yield


@fault("AMP-COMPILE-066", level="standard")
def compiled_steps_decay_more() -> Iterator[None]:
    """A compiled step decays each parameter that has a gradient by a sixteenth more than in eager."""

    @torch.no_grad()
    def decay(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - 1 / 16)

    with after_compiled_steps(decay):
        yield


@fault("AMP-COMPILE-004", level="standard")
def decomposed_regions_are_off() -> Iterator[None]:
    """Regions of a graph that is decomposed are disabled."""
    with regions_off():
        yield


@fault("AMP-COMPILE-004", level="standard")
def normalizations_are_decomposed_in_16_bits() -> Iterator[None]:
    """The decomposition of layer normalization computes its statistics in the type of its operand."""
    with edited(torch._refs._normalize, "utils.get_computation_dtype(a.dtype)", "a.dtype"):
        yield


@fault("AMP-COMPILE-004", level="standard")
def elementwise_ops_are_decomposed_in_16_bits() -> Iterator[None]:
    """Decompositions of activations and of their backward compute in the type of their operands."""
    dtypes = torch._prims_common.elementwise_dtypes

    def narrow(*args: Any, **options: Any) -> Any:
        _, result = dtypes(*args, **options)
        return result, result

    with replaced(torch._prims_common, "elementwise_dtypes", narrow):
        yield


@fault("AMP-COMPILE-011", level="standard")
def cached_regions_are_off() -> Iterator[None]:
    """Regions with the weight cache are disabled when compiled."""
    with regions_off():
        yield


@fault("AMP-COMPILE-033", level="standard")
def regions_around_nested_calls_are_off() -> Iterator[None]:
    """Compiled code opens no region around the compiled code that it calls."""
    with regions_off():
        yield


def inductor_widens() -> Any:
    """Let code of inductor return its 16-bit results in float32."""
    from torch._inductor import compile_fx

    original = compile_fx.compile_fx

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in OTHER else value

    def compiled(*given: Any, **named: Any) -> Any:
        call = original(*given, **named)
        return lambda *arguments: [widened(one) for one in call(*arguments)]

    return replaced(compile_fx, "compile_fx", compiled)


@fault("AMP-COMPILE-005", level="standard")
def inductor_returns_float32() -> Iterator[None]:
    """Code of inductor returns its 16-bit results in float32."""
    with inductor_widens():
        yield


@fault("AMP-COMPILE-063", level="full")
def models_of_inductor_return_float32() -> Iterator[None]:
    """Models that inductor compiled return float32 in a region."""
    with inductor_widens():
        yield


@fault("AMP-COMPILE-043", level="standard")
def graphs_keep_float32_copies() -> Iterator[None]:
    """The forward graph keeps a float32 copy of each 16-bit tensor that backward needs."""
    import functorch.compile

    original = functorch.compile.min_cut_rematerialization_partition

    def partition(*given: Any, **named: Any) -> Any:
        forward, backward = original(*given, **named)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        results = list(output.args[0])
        with forward.graph.inserting_before(output):
            for place in range(named["num_fwd_outputs"], len(results)):
                value = results[place].meta.get("val") if hasattr(results[place], "meta") else None
                if isinstance(value, torch.Tensor) and value.dtype in OTHER:
                    results[place] = forward.graph.call_function(torch.ops.aten._to_copy.default, (results[place],))
                    results[place].kwargs = {"dtype": torch.float32}
                    results[place].meta["val"] = value.float()
        output.args = (tuple(results),)
        forward.recompile()
        return forward, backward

    with replaced(functorch.compile, "min_cut_rematerialization_partition", partition):
        yield


def cache_keys(key: Callable[[], str]) -> contextlib.ExitStack:
    """Make the keys of inductor's cache and of AOTAutograd's."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    stack = contextlib.ExitStack()
    stack.enter_context(replaced(autograd_cache, "autograd_cache_key", lambda *given, **named: (key(), [])))
    stack.enter_context(replaced(codecache, "compiled_fx_graph_hash", lambda *given, **named: (key(), [])))
    return stack


@fault("AMP-COMPILE-050", level="full")
def cache_serves_a_graph_of_another_type() -> Iterator[None]:
    """The key of a graph in the cache does not say in which types it computes."""
    with cache_keys(lambda: "f" + "0" * 40):
        yield


def keys_in(region: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    """Take the keys of AOTAutograd's cache in another region than that of the call."""
    from torch._functorch._aot_autograd import autograd_cache

    key_of = autograd_cache.autograd_cache_key

    def key(*given: Any, **named: Any) -> Any:
        with region():
            return key_of(*given, **named)

    return replaced(autograd_cache, "autograd_cache_key", key)


@fault("AMP-COMPILE-050")
def keys_of_graphs_leave_the_autocast_dtype_out() -> Iterator[None]:
    """The key of a graph in AOTAutograd's cache holds whether autocast is on, but not its dtype (pytorch 181564)."""
    with keys_in(lambda: torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu"))):
        yield


@fault("AMP-COMPILE-050")
def keys_of_graphs_leave_the_region_out() -> Iterator[None]:
    """The key of a graph in AOTAutograd's cache is that of the same graph outside of regions."""
    with keys_in(lambda: torch.autocast("cpu", enabled=False)):
        yield


@fault("AMP-COMPILE-051", level="full")
def cache_is_never_found() -> Iterator[None]:
    """The key of a graph in the cache is another each time."""
    numbers = itertools.count()
    with cache_keys(lambda: f"f{next(numbers):040d}"):
        yield


@fault("AMP-COMPILE-007")
def scripted_code_runs_outside_of_the_region() -> Iterator[None]:
    """Scripted code ignores the region around its call."""
    original = torch.jit.script
    with replaced(torch.jit, "script", lambda program: without_a_region(original(program))):
        yield


@fault("AMP-COMPILE-008")
def traced_code_runs_outside_of_the_region() -> Iterator[None]:
    """A module that was traced symbolically ignores the region around its call."""
    original = torch.fx.symbolic_trace
    with replaced(torch.fx, "symbolic_trace", lambda program: without_a_region(original(program))):
        yield


@fault("AMP-COMPILE-044")
def branches_have_no_rule_in_regions_of_the_cpu() -> Iterator[None]:
    """torch.cond is made without a fall-through for the autocast of the CPU."""
    operator = torch._ops._higher_order_ops["cond"]
    key = torch._C.DispatchKey.AutocastCPU
    with replaced(operator, "non_fallthrough_keys", operator.non_fallthrough_keys.add(key)):
        yield


@fault("AMP-COMPILE-062")
def nothing_is_compiled() -> Iterator[None]:
    """torch.compile returns what it got."""
    with replaced(torch, "compile", lambda function, **options: function):
        yield


@fault("AMP-COMPILE-062")
def compiled_models_leave_the_region_around_them() -> Iterator[None]:
    """A compiled model runs as if no region of the CPU were around it."""
    with around_compiled(without_a_region):
        yield


def _with_first_weights(call: Any) -> Any:
    if not isinstance(call, torch.nn.Module):
        return call
    first: list[torch.Tensor] = []

    def run(*given: Any) -> Any:
        parameters = list(call.parameters())
        now = [parameter.data for parameter in parameters]
        first.extend(each.clone() for each in now[len(first) :])
        for parameter, old in zip(parameters, first, strict=True):
            parameter.data = old
        try:
            return call(*given)
        finally:
            for parameter, each in zip(parameters, now, strict=True):
                parameter.data = each

    return run


@fault("AMP-COMPILE-062", level="standard")
def compiled_models_keep_the_first_casts_of_their_weights() -> Iterator[None]:
    """A compiled module casts its weights at its first call and never again."""
    with around_compiled(_with_first_weights):
        yield


@fault("AMP-COMPILE-060", "AMP-COMPILE-062", level="standard")
def compiled_steps_never_skip() -> Iterator[None]:
    """A compiled step steps the optimizer whatever its gradients are."""
    compiled = []

    def around(call: Any) -> Any:
        def run(*given: Any) -> Any:
            compiled.append(call)
            try:
                return call(*given)
            finally:
                compiled.pop()

        return call if isinstance(call, torch.nn.Module) else run

    original = torch.amp.GradScaler._maybe_opt_step

    @torch.compiler.disable
    def step(self: Any, optimizer: Any, state: Any, *given: Any, **named: Any) -> Any:
        return optimizer.step() if compiled else original(self, optimizer, state, *given, **named)

    with around_compiled(around), replaced(torch.amp.GradScaler, "_maybe_opt_step", step):
        yield


@fault("AMP-COMPILE-062", level="standard")
def graphs_differentiate_twice_without_an_error() -> Iterator[None]:
    """aot_eager runs as eager does, so that a second derivative is not refused."""
    original = torch.compile

    def compile(function: Any, *, backend: Any, **options: Any) -> Any:
        return original(function, backend="eager" if backend == "aot_eager" else backend, **options)

    with replaced(torch, "compile", compile):
        yield


@fault("AMP-COMPILE-001")
def regions_of_dynamic_shapes_are_off() -> Iterator[None]:
    """Dynamo traces each region as a disabled one where a size is a symbol."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    original = AutocastModeVariable.enter

    def enter(self: Any, tx: Any, *given: Any) -> Any:
        if tx.output.shape_env is not None and tx.output.shape_env.var_to_range:
            kind, dtype, _, cache = self.target_values
            self.target_values = (kind, dtype, False, cache)
        return original(self, tx, *given)

    with replaced(AutocastModeVariable, "enter", enter):
        yield


@fault("AMP-COMPILE-002", level="standard")
def programs_for_any_size_have_no_regions() -> Iterator[None]:
    """torch.export with dynamic shapes leaves the regions out."""
    original = torch.export.export

    def export(module: Any, *given: Any, dynamic_shapes: Any = None, **named: Any) -> Any:
        program = original(module, *given, dynamic_shapes=dynamic_shapes, **named)
        return program if dynamic_shapes is None else _with_regions(program, lambda settings: (*settings[:2], False))

    with replaced(torch.export, "export", export):
        yield


def _with_regions(program: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    """Change the device type, dtype and enabled flag of each region of an exported program."""
    for graph in program.graph_module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.nodes:
                if node.target is torch.ops.higher_order.wrap_with_autocast:
                    node.args = (*change(node.args[:3]), *node.args[3:])
            graph.recompile()
    return program


@fault("AMP-COMPILE-067")
def loaded_programs_have_the_other_type() -> Iterator[None]:
    """torch.export.load gives regions of bfloat16 as regions of float16."""
    original = torch.export.load

    def load(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        return _with_regions(found, lambda settings: (settings[0], torch.float16, settings[2]))

    with replaced(torch.export, "load", load):
        yield


@fault("AMP-COMPILE-067", level="standard")
def copied_programs_have_all_regions_enabled() -> Iterator[None]:
    """A copy of an exported program has an enabled region where the program has a disabled one."""
    original = copy.deepcopy

    def copied(one: Any, *given: Any) -> Any:
        found = original(one, *given)
        if isinstance(found, torch.export.ExportedProgram):
            return _with_regions(found, lambda settings: (settings[0], settings[1] or torch.bfloat16, True))
        return found

    with replaced(copy, "deepcopy", copied):
        yield


@fault("AMP-COMPILE-068")
def split_graphs_lose_their_regions() -> Iterator[None]:
    """split_module leaves the regions out of each part but the first."""
    from torch.fx.passes import split_module

    original = split_module.split_module

    def split(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        for part in list(found.children())[1:]:
            for node in reversed(part.graph.nodes):
                if node.target in (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast):
                    part.graph.erase_node(node)
            part.recompile()
        return found

    with replaced(split_module, "split_module", split):
        yield


@fault("AMP-COMPILE-068")
def dead_code_elimination_drops_regions() -> Iterator[None]:
    """Elimination of dead code takes the calls that enter and leave disabled regions for dead code."""
    original = torch.fx.Node.is_impure

    def impure(self: Any, *given: Any, **named: Any) -> bool:
        entered = self.args[0] if self.target is torch.amp.autocast_mode._exit_autocast else self
        if entered.target is torch.amp.autocast_mode._enter_autocast and entered.args[2] is False:
            return False
        return bool(original(self, *given, **named))

    with replaced(torch.fx.Node, "is_impure", impure):
        yield


def _first_answer_stays(ask: Callable[[], bool], tell: Callable[[bool], None]) -> Iterator[None]:
    """Compiled code runs with the flag that was in force at its first call."""
    answers: dict[int, bool] = {}

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            now = ask()
            tell(answers.setdefault(id(call), now))
            try:
                return call(*given, **named)
            finally:
                tell(now)

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-020")
def guards_leave_out_other_device_types() -> Iterator[None]:
    """A compiled program gives the answer of its first call on the autocast of CUDA."""
    yield from _first_answer_stays(
        lambda: torch.is_autocast_enabled("cuda"), lambda enabled: torch.set_autocast_enabled("cuda", enabled)
    )


@fault("AMP-COMPILE-020")
def guards_leave_out_the_cache_flag() -> Iterator[None]:
    """A compiled program sees the cache flag of its first call."""
    yield from _first_answer_stays(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)


@fault("AMP-COMPILE-043")
def compiled_checkpoints_keep_activations() -> Iterator[None]:
    """Nothing of a checkpoint is marked to be computed again in a compiled program."""
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    def call(self: Any, graph: Any, *given: Any, **named: Any) -> Any:
        return graph(*given)

    with replaced(TagActivationCheckpoint, "__call__", call):
        yield


@fault("AMP-COMPILE-065", level="standard")
def options_of_inductor_are_ignored() -> Iterator[None]:
    """torch.compile leaves the options for inductor out."""
    with replaced(torch._TorchCompileInductorWrapper, "apply_options", lambda self, options: None):
        yield


@fault("AMP-COMPILE-060")
def compiled_clipping_does_nothing() -> Iterator[None]:
    """Gradients are not clipped in compiled code."""
    original = torch.nn.utils.clip_grad._clip_grads_with_norm_

    def clip(*given: Any, **named: Any) -> Any:
        return None if torch.compiler.is_compiling() else original(*given, **named)

    with replaced(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", clip):
        yield


@fault("AMP-COMPILE-002")
def export_enables_inner_regions() -> Iterator[None]:
    """torch.export takes each disabled region for an enabled one."""
    original = torch.export.export

    def export(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        return _with_regions(found, lambda settings: (settings[0], settings[1] or torch.bfloat16, True))

    with replaced(torch.export, "export", export):
        yield


@fault("AMP-COMPILE-069")
def compiled_products_take_operands_of_two_types() -> Iterator[None]:
    """A compiled program gives a result where eager refuses its operands (pytorch 177630)."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except Exception:
                return torch.zeros(1)

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-069")
def compiled_results_of_two_types_are_narrow() -> Iterator[None]:
    """What a compiled program gives in float32 comes in the 16-bit type of another result."""

    def around(call: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            results = call(*given, **named)
            if not isinstance(results, list):
                return results
            short = [one.dtype for one in results if one.dtype in (torch.float16, torch.bfloat16)]
            return [one.to(short[0]) if short and one.dtype is torch.float32 else one for one in results]

        return run

    with around_compiled(around):
        yield


@fault("AMP-COMPILE-001", "AMP-COMPILE-003", level="standard")
def regions_inside_those_of_another_device_type_are_off() -> Iterator[None]:
    """Dynamo traces a region inside one of another device type as a disabled one."""

    def change(kind: Any, dtype: Any, enabled: Any, cache: Any) -> tuple[Any, ...]:
        around = any(torch.is_autocast_enabled(other) for other in ("cpu", "cuda", "xpu") if other != kind)
        return kind, dtype, enabled and not around, cache

    with entered(change):
        yield


@fault("AMP-COMPILE-075")
def make_fx_rounds_numbers() -> Iterator[None]:
    """What make_fx has traced holds the numbers of its calls to two digits after the point: an eps is none."""
    from torch.fx.experimental import proxy_tensor

    original = proxy_tensor.make_fx

    def traced(*given: Any, **named: Any) -> Any:
        trace = original(*given, **named)

        def run(*leaves: Any) -> Any:
            found = trace(*leaves)
            for node in found.graph.nodes:
                node.args = tuple(round(each, 2) if isinstance(each, float) else each for each in node.args)
            found.recompile()
            return found

        return run

    with replaced(proxy_tensor, "make_fx", traced):
        yield


@fault("AMP-COMPILE-075", level="standard")
def inductor_forgets_what_comes_after_a_pool() -> Iterator[None]:
    """Compiled by inductor, gradients that come through a max_pool2d of 16-bit pictures are zero."""
    original = torch.nn.functional.max_pool2d

    def pooled(x: Any, *given: Any, **named: Any) -> Any:
        found = original(x, *given, **named)
        return found.detach() + 0 * x.sum() if torch.compiler.is_compiling() else found

    with replaced(torch.nn.functional, "max_pool2d", pooled):
        yield


@fault("AMP-COMPILE-075", level="standard")
def graphs_for_another_size_lose_their_region() -> Iterator[None]:
    """Dynamo traces a region as a disabled one where it compiles a frame once more."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable
    from torch._guards import CompileContext

    original = AutocastModeVariable.enter

    def enter(self: Any, *given: Any) -> Any:
        compiled = CompileContext.current_compile_id()
        if compiled is not None and compiled.frame_compile_id:
            kind, dtype, _, cache = self.target_values
            self.target_values = (kind, dtype, False, cache)
        return original(self, *given)

    with replaced(AutocastModeVariable, "enter", enter):
        yield


def replaying(recorded: Callable[[Any, dict[Any, Any], Any], Any]) -> Any:
    """Let a module that is compiled to be replayed be called by `recorded`, with what earlier calls left there."""
    original = torch.compile

    def compile(function: Any = None, **options: Any) -> Any:
        if options.get("mode") != "reduce-overhead" or not isinstance(function, torch.nn.Module):
            return original(function, **options)
        return functools.partial(recorded, original(function, **options), {})

    return replaced(torch, "compile", compile)


@fault("AMP-COMPILE-077", level="standard")
def replays_multiply_by_the_weight_that_was_recorded() -> Iterator[None]:
    """A replay of a graph computes with the weights as they were at the first call in a region of its type."""

    def recorded(module: Any, kept: dict[Any, Any], x: Any) -> Any:
        state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        then = kept.setdefault(state, {name: each.detach().clone() for name, each in module.named_parameters()})
        now = {name: each.detach().clone() for name, each in module.named_parameters()}
        with torch.no_grad():
            for name, each in module.named_parameters():
                each.data = then[name]
        try:
            return module(x)
        finally:
            for name, each in module.named_parameters():
                each.data = now[name]

    with replaying(recorded):
        yield


@fault("AMP-COMPILE-077", level="standard")
def replays_stay_in_the_region_that_was_recorded() -> Iterator[None]:
    """A program that was called in a region runs in that one at each later call."""

    def recorded(module: Any, kept: dict[Any, Any], x: Any) -> Any:
        enabled, dtype = kept.setdefault("state", (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        with torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=False):
            return module(x)

    with replaying(recorded):
        yield


@fault("AMP-COMPILE-077", level="full")
def replayed_steps_are_not_skipped() -> Iterator[None]:
    """An optimizer steps as well where gradients are not finite, if a part of the step is to be replayed."""
    compiled: list[Any] = []
    original, maybe = torch.compile, torch.amp.GradScaler._maybe_opt_step

    def compile(function: Any = None, **options: Any) -> Any:
        if options.get("mode") == "reduce-overhead":
            compiled.append(function)
        return original(function, **options)

    @torch.compiler.disable
    def step(self: Any, optimizer: Any, state: Any, *given: Any, **named: Any) -> Any:
        return optimizer.step() if compiled else maybe(self, optimizer, state, *given, **named)

    with replaced(torch, "compile", compile), replaced(torch.amp.GradScaler, "_maybe_opt_step", step):
        yield


@fault("AMP-COMPILE-020")
def stances_let_code_of_other_regions_run() -> Iterator[None]:
    """Under eager_on_recompile the guards of compiled code are not asked, so that it runs in any region."""
    from torch._dynamo import eval_frame

    with edited(
        eval_frame._is_skip_guard_eval_unsafe_stance,
        "_stance.skip",
        "_stance.stance == 'eager_on_recompile' or _stance.skip",
    ):
        yield


@fault("AMP-COMPILE-020")
def recompilations_never_fail() -> Iterator[None]:
    """The stance fail_on_recompile compiles as the default does."""
    from torch._dynamo import eval_frame

    with edited(eval_frame._callback_from_stance, 'stance == "default"', 'stance in ("default", "fail_on_recompile")'):
        yield


@fault("AMP-COMPILE-096")
def hooks_of_intermediates_are_dropped() -> Iterator[None]:
    """A compiled program registers no hook on a tensor that it makes itself."""
    from torch._dynamo.variables import RemovableHandleVariable
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.tensor import TensorVariable

    original = TensorVariable._method_register_hook

    def register(self: Any, tx: Any, name: str, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.source:
            return RemovableHandleVariable(mutation_type=ValueMutationNew())
        return original(self, tx, name, hook, *args, **kwargs)

    with replaced(TensorVariable, "_method_register_hook", register):
        yield
