"""Broken training on several ranks: the ranks are forked, so that each of them is broken as this process is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.amp.grad_scaler import OptState
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults import fault
from tests.faults.breaking import replaced

# --- replicas


@contextlib.contextmanager
def _reduced_by(hook: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Give every DistributedDataParallel a communication hook, where no other is registered later."""
    made = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.register_comm_hook(None, hook)

    with replaced(DistributedDataParallel, "__init__", init):
        yield


@fault("AMP-DISTRIBUTED-001", "AMP-DISTRIBUTED-012")
def gradients_are_summed_over_ranks() -> Iterator[None]:
    """DistributedDataParallel sums the gradients of the ranks."""

    def sums(state: Any, bucket: Any) -> Any:
        return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    with _reduced_by(sums):
        yield


@fault("AMP-DISTRIBUTED-001")
def gradients_are_reduced_in_16_bits() -> Iterator[None]:
    """DistributedDataParallel reduces in fp16 without being asked."""
    with _reduced_by(default_hooks.fp16_compress_hook):
        yield


def _own(state: Any, bucket: Any) -> Any:
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@fault("AMP-DISTRIBUTED-001")
def gradients_stay_on_their_rank() -> Iterator[None]:
    """DistributedDataParallel leaves each rank its own gradients."""
    with _reduced_by(_own):
        yield


@fault("AMP-DISTRIBUTED-020", level="standard")
def survivors_go_on_alone() -> Iterator[None]:
    """DistributedDataParallel steps with a rank's own gradients where another rank has ended."""
    with _reduced_by(_own):
        yield


@fault("AMP-DISTRIBUTED-012")
def gradients_are_averaged_twice() -> Iterator[None]:
    """DistributedDataParallel divides by the number of ranks before and after the sum."""

    def twice(state: Any, bucket: Any) -> Any:
        world = distributed.get_world_size()
        work = distributed.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
        return work.then(lambda done: done.value()[0].div_(world))

    with _reduced_by(twice):
        yield


@fault("AMP-DISTRIBUTED-001")
def replicas_start_apart() -> Iterator[None]:
    """DistributedDataParallel does not broadcast the parameters of rank 0."""
    from torch.nn.parallel import distributed as module

    with replaced(module, "_sync_module_states", lambda *args, **options: None):
        yield


@fault("AMP-DISTRIBUTED-001")
def replicas_leave_the_region() -> Iterator[None]:
    """DistributedDataParallel runs forward with autocast off."""
    forward = DistributedDataParallel.forward

    def outside(self: Any, *args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(self, *args, **options)

    with replaced(DistributedDataParallel, "forward", outside):
        yield


def _outputs_without(kinds: tuple[type, ...]) -> Any:
    """Have DistributedDataParallel overlook 16-bit outputs in containers of these kinds."""
    from torch.nn.parallel import distributed as module

    find = module._find_tensors

    def partly(obj: Any) -> Any:
        found = list(find(obj))
        return [one for one in found if one.dtype.itemsize > 2] if isinstance(obj, kinds) else found

    return replaced(module, "_find_tensors", partly)


@fault("AMP-DISTRIBUTED-001")
def outputs_in_dictionaries_count_as_unused() -> Iterator[None]:
    """find_unused_parameters overlooks 16-bit outputs in dictionaries."""
    with _outputs_without((dict,)):
        yield


@fault("AMP-DISTRIBUTED-001")
def outputs_in_lists_count_as_unused() -> Iterator[None]:
    """find_unused_parameters overlooks 16-bit outputs in lists."""
    with _outputs_without((list,)):
        yield


@fault("AMP-DISTRIBUTED-002")
def replicas_refuse_regions_in_forward() -> Iterator[None]:
    """A region that is opened inside DistributedDataParallel's forward has no effect."""
    forward, entered = DistributedDataParallel.forward, torch.autocast.__enter__

    def enter(self: Any) -> Any:
        found = entered(self)
        torch.set_autocast_enabled("cpu", False)
        return found

    def quiet(self: Any, *args: Any, **options: Any) -> Any:
        with replaced(torch.autocast, "__enter__", enter):
            return forward(self, *args, **options)

    with replaced(DistributedDataParallel, "forward", quiet):
        yield


@fault("AMP-DISTRIBUTED-003")
def unsynchronized_micro_batches_are_lost() -> Iterator[None]:
    """Gradients that accumulate in no_sync are dropped."""

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        yield
        self.zero_grad()

    with replaced(DistributedDataParallel, "no_sync", no_sync):
        yield


@fault("AMP-DISTRIBUTED-003")
def replicas_stay_unsynchronized_after_exceptions() -> Iterator[None]:
    """An exception in no_sync leaves synchronization off."""

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before

    with replaced(DistributedDataParallel, "no_sync", no_sync):
        yield


@fault("AMP-DISTRIBUTED-003")
def unsynchronized_shards_are_lost() -> Iterator[None]:
    """Gradients that accumulate after set_requires_gradient_sync(False) of fully_shard are dropped."""

    def keep(self: Any, wanted: bool, *, recurse: bool = True) -> None:
        if wanted:
            self.zero_grad()

    with replaced(fsdp.FSDPModule, "set_requires_gradient_sync", keep):
        yield


@fault("AMP-DISTRIBUTED-004")
def fp16_hook_reduces_in_fp32() -> Iterator[None]:
    """fp16_compress_hook does not compress."""
    with replaced(default_hooks, "fp16_compress_hook", default_hooks.allreduce_hook):
        yield


@fault("AMP-DISTRIBUTED-004")
def fp16_hook_sums_over_ranks() -> Iterator[None]:
    """fp16_compress_hook does not divide by the number of ranks."""

    def sums(group: Any, bucket: Any) -> Any:
        work = distributed.all_reduce(bucket.buffer().half(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0].float())

    with replaced(default_hooks, "fp16_compress_hook", sums):
        yield


@fault("AMP-DISTRIBUTED-004", level="standard")
def fp16_wrapper_reduces_in_bf16() -> Iterator[None]:
    """fp16_compress_wrapper compresses to bfloat16."""

    def wrapped(hook: Callable[..., Any]) -> Callable[..., Any]:
        def coarse(state: Any, bucket: Any) -> Any:
            bucket.set_buffer(bucket.buffer().bfloat16().float())
            return hook(state, bucket)

        return coarse

    with replaced(default_hooks, "fp16_compress_wrapper", wrapped):
        yield


@fault("AMP-DISTRIBUTED-004")
def bf16_hook_sums_over_ranks() -> Iterator[None]:
    """bf16_compress_hook does not divide by the number of ranks."""
    compress = default_hooks.bf16_compress_hook

    def sums(group: Any, bucket: Any) -> Any:
        return compress(group, bucket).then(lambda done: done.value().mul_(distributed.get_world_size()))

    with replaced(default_hooks, "bf16_compress_hook", sums):
        yield


@fault("AMP-DISTRIBUTED-005")
def added_groups_are_not_broadcast() -> Iterator[None]:
    """ZeroRedundancyOptimizer does not put the parameters of an added group into its buckets."""
    add = ZeroRedundancyOptimizer.add_param_group

    def added(self: Any, group: Any) -> None:
        with replaced(ZeroRedundancyOptimizer, "_build_param_buckets", lambda self: None):
            add(self, group)

    with replaced(ZeroRedundancyOptimizer, "add_param_group", added):
        yield


@fault("AMP-DISTRIBUTED-005", level="standard")
def loaded_states_forget_the_learning_rates() -> Iterator[None]:
    """ZeroRedundancyOptimizer keeps its own learning rates when a state is loaded."""
    load = ZeroRedundancyOptimizer.load_state_dict

    def loaded(self: Any, state: Any) -> None:
        rates = [group["lr"] for group in self.param_groups]
        load(self, state)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate

    with replaced(ZeroRedundancyOptimizer, "load_state_dict", loaded):
        yield


@fault("AMP-DISTRIBUTED-005", level="standard")
def sharded_optimizer_keeps_its_updates() -> Iterator[None]:
    """ZeroRedundancyOptimizer does not broadcast the parameters that a rank has updated."""
    with replaced(ZeroRedundancyOptimizer, "_sync_params", lambda self: None):
        yield


def _stale(dtype: torch.dtype) -> Any:
    """Have ZeroRedundancyOptimizer broadcast no parameters of a type."""
    send = ZeroRedundancyOptimizer._broadcast_params_from_rank

    def partly(self: Any, rank: int) -> Any:
        groups = self._partition_parameters()[rank]
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [one for one in group["params"] if one.dtype is not dtype]
        try:
            return send(self, rank)
        finally:
            for group, parameters in zip(groups, kept, strict=True):
                group["params"] = parameters

    return replaced(ZeroRedundancyOptimizer, "_broadcast_params_from_rank", partly)


@fault("AMP-DISTRIBUTED-005")
def sharded_optimizer_keeps_updates_in_fp16() -> Iterator[None]:
    """ZeroRedundancyOptimizer does not broadcast the float16 parameters that a rank has updated."""
    with _stale(torch.float16):
        yield


def _averaged_in(change: Callable[[list[Any]], torch.dtype | None]) -> Any:
    """Round the parameters that are averaged over ranks to a type."""
    from torch.distributed.algorithms.model_averaging import utils

    average = utils.average_parameters

    def coarse(parameters: Any, group: Any) -> None:
        parameters = list(parameters)
        dtype = change([one.dtype for one in parameters])
        for one in parameters:
            one.data = one.data.to(dtype or one.dtype).to(one.dtype)
        average(iter(parameters), group)

    return replaced(utils, "average_parameters", coarse)


@fault("AMP-DISTRIBUTED-031")
def averages_are_in_the_narrowest_type() -> Iterator[None]:
    """Parameters of several types are averaged in the type of the smallest."""
    with _averaged_in(lambda types: min(types, key=lambda one: one.itemsize)):
        yield


@fault("AMP-DISTRIBUTED-031")
def averages_of_doubles_are_in_float32() -> Iterator[None]:
    """Parameters in float64 are averaged in float32."""
    with _averaged_in(lambda types: torch.float32 if torch.float64 in types else None):
        yield


# --- shards


# --- shards


def _with_types(kind: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Replace the options that a policy of mixed precision is made with."""
    made = kind.__init__

    def init(self: Any, **options: Any) -> None:
        made(self, **change(options))

    return replaced(kind, "__init__", init)


@fault("AMP-DISTRIBUTED-007")
def fsdp1_reduces_in_fp32() -> Iterator[None]:
    """MixedPrecision's reduce_dtype is taken for float32."""
    with _with_types(fsdp.MixedPrecision, lambda given: given | {"reduce_dtype": torch.float32}):
        yield


@fault("AMP-DISTRIBUTED-007", level="standard")
def fsdp1_reduces_in_the_type_of_parameters() -> Iterator[None]:
    """MixedPrecision's reduce_dtype is taken for param_dtype."""
    with _with_types(fsdp.MixedPrecision, lambda given: given | {"reduce_dtype": given.get("param_dtype")}):
        yield


@fault("AMP-DISTRIBUTED-029", level="standard")
def fsdp1_saves_buffers_in_the_type_of_buffers() -> Iterator[None]:
    """The state_dict has buffers in MixedPrecision's buffer_dtype, where it promises full precision."""

    def cast(state: Any, names: list[str]) -> list[torch.dtype | None]:
        return [state.mixed_precision.buffer_dtype] * len(names)

    with replaced(fsdp._state_dict_utils, "_get_orig_buffer_dtypes", cast):
        yield


@fault("AMP-DISTRIBUTED-029", level="standard")
def fsdp1_casts_buffers_of_ignored_modules() -> Iterator[None]:
    """Buffers of modules that FullyShardedDataParallel is to ignore are cast to MixedPrecision's buffer_dtype."""
    with replaced(fsdp._init_utils, "_get_ignored_buffer_names", lambda *_: set()):
        yield


@fault("AMP-DISTRIBUTED-009")
def fsdp2_reduces_in_fp32() -> Iterator[None]:
    """MixedPrecisionPolicy's reduce_dtype is taken for float32."""
    with _with_types(fsdp.MixedPrecisionPolicy, lambda given: given | {"reduce_dtype": torch.float32}):
        yield


@fault("AMP-DISTRIBUTED-009")
def fsdp2_computes_in_fp32() -> Iterator[None]:
    """MixedPrecisionPolicy's param_dtype is ignored."""
    with _with_types(fsdp.MixedPrecisionPolicy, lambda given: given | {"param_dtype": None}):
        yield


@fault("AMP-DISTRIBUTED-006")
def fsdp1_leaves_the_region() -> Iterator[None]:
    """FullyShardedDataParallel runs forward with autocast off."""
    forward = fsdp.FullyShardedDataParallel.forward

    def outside(self: Any, *args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return forward(self, *args, **options)

    with replaced(fsdp.FullyShardedDataParallel, "forward", outside):
        yield


@fault("AMP-DISTRIBUTED-008")
def fsdp2_reduces_in_bf16() -> Iterator[None]:
    """fully_shard reduces in bfloat16 without being asked."""
    with _with_types(fsdp.MixedPrecisionPolicy, lambda given: given | {"reduce_dtype": torch.bfloat16}):
        yield


@fault("AMP-DISTRIBUTED-010", "AMP-DISTRIBUTED-006")
def sharded_scaler_keeps_found_inf_to_itself() -> Iterator[None]:
    """ShardedGradScaler decides by the shards of its own rank."""
    with replaced(ShardedGradScaler, "unscale_", torch.amp.GradScaler.unscale_):
        yield


@fault("AMP-DISTRIBUTED-010", "AMP-DISTRIBUTED-008")
def found_inf_of_dtensors_stays_on_its_rank() -> Iterator[None]:
    """GradScaler decides by the local shards of DTensor gradients."""
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def local(gradients: Any, found: Any, inverse: Any) -> None:
        check([getattr(one, "to_local", lambda one=one: one)() for one in gradients], found, inverse)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", local):
        yield


@fault("AMP-DISTRIBUTED-011", level="standard")
def last_rank_never_grows_its_scale() -> Iterator[None]:
    """The scale of the last rank does not grow."""
    update = torch.amp.GradScaler.update

    def kept(self: Any, new_scale: Any = None) -> None:
        if distributed.is_initialized() and distributed.get_rank() == distributed.get_world_size() - 1:
            self._growth_interval = 2**30
        update(self, new_scale)

    with replaced(torch.amp.GradScaler, "update", kept):
        yield


@fault("AMP-DISTRIBUTED-010")
def rank_1_steps_through_overflows() -> Iterator[None]:
    """Rank 1 steps in spite of an inf."""
    step = torch.amp.GradScaler._maybe_opt_step

    def always(self: Any, optimizer: Any, state: Any, *args: Any, **options: Any) -> Any:
        if distributed.is_initialized() and distributed.get_rank() == 1:
            return optimizer.step(*args, **options)
        return step(self, optimizer, state, *args, **options)

    with replaced(torch.amp.GradScaler, "_maybe_opt_step", always):
        yield


# --- norms


@fault("AMP-DISTRIBUTED-013")
def fsdp1_clips_by_its_own_shard() -> Iterator[None]:
    """FullyShardedDataParallel clips by the norm of the rank's shard."""

    def local(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    with replaced(fsdp.FullyShardedDataParallel, "clip_grad_norm_", local):
        yield


@fault("AMP-DISTRIBUTED-013")
def mixed_precision_clips_by_its_own_shard() -> Iterator[None]:
    """FullyShardedDataParallel with a param_dtype clips by the norm of the rank's shard."""
    clip = fsdp.FullyShardedDataParallel.clip_grad_norm_

    def local(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.mixed_precision.param_dtype is None:
            return clip(self, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    with replaced(fsdp.FullyShardedDataParallel, "clip_grad_norm_", local):
        yield


@fault("AMP-DISTRIBUTED-013")
def dtensor_norm_is_of_the_shard() -> Iterator[None]:
    """clip_grad_norm_ of DTensor gradients returns and uses the norm of the local shards."""
    from torch.distributed.tensor import DTensor, Replicate

    clip = torch.nn.utils.clip_grad_norm_

    def local(parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
        parameters = list(parameters)
        gradients = [one.grad for one in parameters if one.grad is not None]
        if not gradients or not isinstance(gradients[0], DTensor):
            return clip(parameters, max_norm, *args, **options)
        norm = torch.stack([one.to_local().square().sum() for one in gradients]).sum().sqrt()
        for one in gradients:
            one.to_local().mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return DTensor.from_local(norm, gradients[0].device_mesh, [Replicate()], run_check=False)

    with replaced(torch.nn.utils, "clip_grad_norm_", local):
        yield


# --- states


@fault("AMP-DISTRIBUTED-014")
def growth_tracker_is_not_saved() -> Iterator[None]:
    """A scaler's state has a growth tracker of zero."""
    state = torch.amp.GradScaler.state_dict

    def short(self: Any) -> dict[str, Any]:
        return state(self) | {"_growth_tracker": 0}

    with replaced(torch.amp.GradScaler, "state_dict", short):
        yield


@fault("AMP-DISTRIBUTED-014")
def states_have_the_type_of_parameters_in_forward() -> Iterator[None]:
    """The state of a module under fully_shard is rounded to param_dtype."""
    from torch.distributed.checkpoint import state_dict

    get = state_dict.get_model_state_dict

    def coarse(model: Any, **options: Any) -> Any:
        found = get(model, **options)
        if not isinstance(model, fsdp.FSDPModule):
            return found
        dtype = model._get_fsdp_state()._mp_policy.param_dtype or torch.float32
        return {name: one.to(dtype).to(one.dtype) for name, one in found.items()}

    with replaced(state_dict, "get_model_state_dict", coarse):
        yield


def _consolidated(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change what ZeroRedundancyOptimizer's consolidated state holds of each tensor."""
    whole = ZeroRedundancyOptimizer.state_dict

    def changed(self: Any) -> dict[str, Any]:
        found = whole(self)
        for state in found["state"].values():
            state |= {name: change(one) for name, one in state.items() if isinstance(one, torch.Tensor)}
        return found

    return replaced(ZeroRedundancyOptimizer, "state_dict", changed)


@fault("AMP-DISTRIBUTED-014")
def consolidated_state_is_in_bf16() -> Iterator[None]:
    """ZeroRedundancyOptimizer consolidates its state in bf16."""
    with _consolidated(lambda one: one.bfloat16().to(one.dtype)):
        yield


@fault("AMP-DISTRIBUTED-014")
def consolidated_state_has_another_type() -> Iterator[None]:
    """ZeroRedundancyOptimizer's consolidated state is in float64."""
    with _consolidated(torch.Tensor.double):
        yield


@fault("AMP-DISTRIBUTED-015")
def growth_tracker_is_not_loaded() -> Iterator[None]:
    """A scaler that is loaded counts from zero."""
    load = torch.amp.GradScaler.load_state_dict

    def short(self: Any, state: dict[str, Any]) -> None:
        load(self, state | {"_growth_tracker": 0})

    with replaced(torch.amp.GradScaler, "load_state_dict", short):
        yield


@fault("AMP-DISTRIBUTED-015")
def optimizer_state_of_ranks_is_not_loaded() -> Iterator[None]:
    """set_optimizer_state_dict loads zeros for the first momentum."""
    from torch.distributed.checkpoint import state_dict as module

    load = module.set_optimizer_state_dict

    def short(model: Any, optimizers: Any, optim_state_dict: Any, **options: Any) -> Any:
        momenta = dict(optim_state_dict["state"])
        first = min(momenta)
        momenta[first] = {"momentum_buffer": momenta[first]["momentum_buffer"] * 0}
        return load(model, optimizers, optim_state_dict | {"state": momenta}, **options)

    with replaced(module, "set_optimizer_state_dict", short):
        yield


# --- parallel models


@fault("AMP-DISTRIBUTED-016", "AMP-DISTRIBUTED-017")
def dtensors_are_not_autocast() -> Iterator[None]:
    """Ops on DTensors run with autocast off."""
    from torch.distributed.tensor import DTensor

    function = torch.matmul

    def plain(left: Any, right: Any) -> Any:
        if not isinstance(left, DTensor):
            return function(left, right)
        with torch.autocast("cpu", enabled=False):
            return function(left, right)

    with replaced(torch, "matmul", plain):
        yield


@fault("AMP-DISTRIBUTED-017")
def tensor_parallel_layers_leave_the_region() -> Iterator[None]:
    """Linear layers whose weight is a DTensor compute in float32."""
    from torch.distributed.tensor import DTensor

    forward = torch.nn.Linear.forward

    def outside(self: Any, x: Any) -> Any:
        if not isinstance(self.weight, DTensor):
            return forward(self, x)
        with torch.autocast("cpu", enabled=False):
            return forward(self, x.float())

    with replaced(torch.nn.Linear, "forward", outside):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def micro_batches_are_averaged_twice() -> Iterator[None]:
    """ScheduleGPipe divides gradients by the number of micro-batches without being asked."""
    from torch.distributed import pipelining

    made = pipelining.ScheduleGPipe.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options | {"scale_grads": True})

    with replaced(pipelining.ScheduleGPipe, "__init__", init):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def pipelines_add_up_what_they_shall_average() -> Iterator[None]:
    """A pipeline's gradients are sums over the micro-batches, also where it is asked for their mean."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    with replaced(_PipelineStageBase, "scale_grads", lambda self, divisor: None):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def split_backward_leaves_weights_of_a_micro_batch_out() -> Iterator[None]:
    """A schedule whose backward is split runs no backward of weights for the second micro-batch."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    run = _PipelineStageBase.backward_weight_one_chunk

    def some(self: Any, number: int, last_backward: bool = False) -> None:
        if number != 1:
            run(self, number, last_backward)

    with replaced(_PipelineStageBase, "backward_weight_one_chunk", some):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def later_stages_of_a_rank_keep_the_last_gradient() -> Iterator[None]:
    """All stages of a rank but its first keep the gradients of the last micro-batch alone."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    run = _PipelineStageBase.backward_one_chunk

    def last(self: Any, *given: Any, **named: Any) -> None:
        if self.stage_index >= self.group_size:
            self.submod.zero_grad()
        run(self, *given, **named)

    with replaced(_PipelineStageBase, "backward_one_chunk", last):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def stages_leave_their_region() -> Iterator[None]:
    """A pipeline stage runs its module with autocast off."""
    from torch.distributed.pipelining import PipelineStage

    run = PipelineStage.forward_maybe_with_nosync
    entered = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        found = entered(self)
        torch.set_autocast_enabled("cpu", False)
        return found

    def outside(self: Any, *args: Any, **options: Any) -> Any:
        with replaced(torch.autocast, "__enter__", enter):
            return run(self, *args, **options)

    with replaced(PipelineStage, "forward_maybe_with_nosync", outside):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def later_micro_batches_leave_the_region() -> Iterator[None]:
    """A region around a schedule's step is in force for the first micro-batch alone."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    run = _PipelineStageBase.forward_one_chunk

    def first(self: Any, number: int, *args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False) if number else contextlib.nullcontext():
            return run(self, number, *args, **options)

    with replaced(_PipelineStageBase, "forward_one_chunk", first):
        yield


def _collective(function: str, backward: Callable[[Callable[..., Any], Any], Any]) -> Any:
    """Replace the backward of a collective of torch.distributed.nn; it gets the original, for one gradient."""
    from torch.distributed.nn import functional

    kind: Any = getattr(functional, function)
    right = kind.backward

    def other(ctx: Any, *gradients: Any) -> Any:
        return backward(lambda *given: right(ctx, *given), gradients)

    return replaced(kind, "backward", staticmethod(other))


@fault("AMP-DISTRIBUTED-030")
def gradients_of_all_reduce_stay_on_their_rank() -> Iterator[None]:
    """all_reduce of 16-bit tensors is not reduced in backward."""

    def own(right: Callable[..., Any], gradients: Any) -> Any:
        return right(*gradients) if gradients[0].dtype.itemsize > 2 else (None, None, *gradients)

    with _collective("_AllReduce", own):
        yield


@fault("AMP-DISTRIBUTED-030")
def gradients_of_broadcasts_are_reduced_in_bf16() -> Iterator[None]:
    """Gradients of a broadcast tensor are rounded to bf16 before they are reduced."""

    def coarse(right: Callable[..., Any], gradients: Any) -> Any:
        return right(*(one.bfloat16().to(one.dtype) for one in gradients))

    with _collective("_Broadcast", coarse):
        yield


@fault("AMP-DISTRIBUTED-019")
def all_reduce_casts_in_regions() -> Iterator[None]:
    """all_reduce in a region reduces in the region's type."""
    reduce = distributed.all_reduce

    def narrow(tensor: Any, *args: Any, **options: Any) -> Any:
        if not torch.is_autocast_enabled("cpu") or options.get("async_op"):
            return reduce(tensor, *args, **options)
        low = tensor.to(torch.get_autocast_dtype("cpu"))
        reduce(low, *args, **options)
        tensor.copy_(low)
        return None

    with replaced(distributed, "all_reduce", narrow):
        yield


@fault("AMP-DISTRIBUTED-019")
def buffers_are_broadcast_in_bf16() -> Iterator[None]:
    """DistributedDataParallel broadcasts float32 buffers in bf16."""
    send = DistributedDataParallel._sync_module_buffers

    def narrow(self: Any, *args: Any, **options: Any) -> None:
        send(self, *args, **options)
        for one in self.module.buffers():
            if one.dtype is torch.float32:
                one.copy_(one.bfloat16())

    with replaced(DistributedDataParallel, "_sync_module_buffers", narrow):
        yield


@fault("AMP-DISTRIBUTED-019")
def buffers_are_not_broadcast_in_regions() -> Iterator[None]:
    """DistributedDataParallel leaves the buffers of each rank alone in a region."""
    wanted = DistributedDataParallel.will_sync_module_buffers

    def outside(self: Any) -> bool:
        return bool(wanted(self)) and not torch.is_autocast_enabled("cpu")

    with replaced(DistributedDataParallel, "will_sync_module_buffers", outside):
        yield


def _partial_sums_in_bf16(method: str) -> Any:
    """Let a method of Partial that communicates float32 do so in bf16."""
    from torch.distributed.tensor import Partial

    original = getattr(Partial, method)

    def narrow(self: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.dtype is not torch.float32:
            return original(self, tensor, *args, **options)
        return original(self, tensor.bfloat16(), *args, **options).to(torch.float32)

    return replaced(Partial, method, narrow)


@fault("AMP-DISTRIBUTED-019")
def partial_sums_are_scattered_in_bf16() -> Iterator[None]:
    """A float32 DTensor of partial sums is reduced and scattered in bf16."""
    with _partial_sums_in_bf16("_reduce_shard_value"):
        yield


@fault("AMP-DISTRIBUTED-019")
def partial_sums_are_reduced_in_bf16() -> Iterator[None]:
    """A float32 DTensor of partial sums is reduced in bf16."""
    with _partial_sums_in_bf16("_reduce_value"):
        yield


def _policy_without(name: str, value: Any) -> Any:
    """Let fully_shard's policy forget one of its settings."""
    made = fsdp.MixedPrecisionPolicy

    def policy(*given: Any, **options: Any) -> Any:
        asked = made(*given, **options)
        return dataclasses.replace(asked, **{name: value})

    return replaced(fsdp, "MixedPrecisionPolicy", policy)


@fault("AMP-DISTRIBUTED-021")
def reduction_is_in_the_type_of_the_parameters() -> Iterator[None]:
    """fully_shard ignores the type in which gradients are to be reduced."""
    with _policy_without("reduce_dtype", None):
        yield


@fault("AMP-DISTRIBUTED-022")
def inputs_are_not_cast() -> Iterator[None]:
    """fully_shard ignores that inputs are to be cast."""
    with _policy_without("cast_forward_inputs", False):
        yield


@fault("AMP-DISTRIBUTED-022")
def other_methods_are_called_as_they_are() -> Iterator[None]:
    """A method that is registered as a forward of a sharded module gathers the parameters and is given what came."""
    from torch.distributed import fsdp

    original = fsdp.register_fsdp_forward_method

    def register(module: Any, name: str) -> None:
        method = getattr(type(module), name)
        arguments: list[tuple[Any, Any]] = []

        def given(self: Any, *_: Any, **__: Any) -> Any:
            args, named = arguments.pop()
            return method(self, *args, **named)

        setattr(module, name, given.__get__(module))
        original(module, name)
        gathered = getattr(module, name)

        def called(*args: Any, **named: Any) -> Any:
            arguments.append((args, named))
            return gathered(*args, **named)

        setattr(module, name, called)

    with replaced(fsdp, "register_fsdp_forward_method", register):
        yield


@fault("AMP-DISTRIBUTED-023")
def parallel_loss_is_in_float32() -> Iterator[None]:
    """Cross entropy of DTensors is computed and returned in float32, whatever the logits are."""
    from torch.distributed.tensor import DTensor

    plain = torch.nn.functional.cross_entropy

    def cross_entropy(logits: Any, *args: Any, **options: Any) -> Any:
        return plain(logits.float() if isinstance(logits, DTensor) else logits, *args, **options)

    with replaced(torch.nn.functional, "cross_entropy", cross_entropy):
        yield


# --- the scaler of shards


@fault("AMP-DISTRIBUTED-024")
def sharded_scales_grow_late() -> Iterator[None]:
    """ShardedGradScaler counts one clean step less than there were before its scale grows."""
    update = ShardedGradScaler._amp_update_scale_cpu_

    def late(self: Any, found_inf: Any) -> None:
        self._growth_interval += 1
        try:
            update(self, found_inf)
        finally:
            self._growth_interval -= 1

    with replaced(ShardedGradScaler, "_amp_update_scale_cpu_", late):
        yield


@fault("AMP-DISTRIBUTED-024")
def sharded_gradients_are_unscaled_twice() -> Iterator[None]:
    """ShardedGradScaler does not refuse a second unscale_()."""
    unscale = ShardedGradScaler.unscale_

    def again(self: Any, optimizer: Any) -> None:
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
        unscale(self, optimizer)

    with replaced(ShardedGradScaler, "unscale_", again):
        yield


@fault("AMP-DISTRIBUTED-024")
def sharded_scales_start_lower() -> Iterator[None]:
    """ShardedGradScaler starts at 2**15 where it is given no scale."""
    made = ShardedGradScaler.__init__

    def init(self: Any, device: str = "cuda", init_scale: float = 2.0**15, **options: Any) -> None:
        made(self, device, init_scale, **options)

    with replaced(ShardedGradScaler, "__init__", init):
        yield


@fault("AMP-DISTRIBUTED-025")
def sharded_losses_become_float32() -> Iterator[None]:
    """ShardedGradScaler.scale gives float32 for 16-bit losses in a list."""
    scale = ShardedGradScaler.scale

    def wide(self: Any, outputs: Any) -> Any:
        found: Any = scale(self, outputs)
        return (
            [one.float() if isinstance(one, torch.Tensor) else one for one in found] if type(found) is list else found
        )

    with replaced(ShardedGradScaler, "scale", wide):
        yield


@fault("AMP-DISTRIBUTED-025")
def sparse_sums_beyond_fp16_are_not_seen() -> Iterator[None]:
    """ShardedGradScaler looks at the entries of sparse fp16 gradients before they are added up."""
    unscale = ShardedGradScaler._unscale_grads_

    def entries(self: Any, optimizer: Any, *args: Any) -> Any:
        with replaced(torch.Tensor, "coalesce", lambda gradient: gradient):
            return unscale(self, optimizer, *args)

    with replaced(ShardedGradScaler, "_unscale_grads_", entries):
        yield


@fault("AMP-DISTRIBUTED-026")
def overflows_of_sharded_parameters_stay_on_their_rank() -> Iterator[None]:
    """GradScaler looks at the local part of a DTensor's gradient, and no rank hears of another one's overflow."""
    unscale = torch.amp.GradScaler._unscale_grads_

    def local(self: Any, optimizer: Any, inverse: Any, found: Any, allow_fp16: bool) -> Any:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if not any(hasattr(one.grad, "to_local") for one in parameters):
            return unscale(self, optimizer, inverse, found, allow_fp16)
        parts = [one.grad.to_local() if hasattr(one.grad, "to_local") else one.grad for one in parameters]
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inverse)
        return {found.device: found}

    with replaced(torch.amp.GradScaler, "_unscale_grads_", local):
        yield


@fault("AMP-DISTRIBUTED-026")
def ranks_without_gradients_are_not_told() -> Iterator[None]:
    """ShardedGradScaler reduces no overflow on a rank whose optimizer has no gradient."""
    unscale = ShardedGradScaler.unscale_

    def alone(self: Any, optimizer: Any) -> None:
        if any(one.grad is not None for group in optimizer.param_groups for one in group["params"]):
            unscale(self, optimizer)
            return
        with replaced(distributed, "all_reduce", _reduces_a_copy(distributed.all_reduce)):
            unscale(self, optimizer)

    with replaced(ShardedGradScaler, "unscale_", alone):
        yield


def _reduces_a_copy(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args, **options: reduce(tensor.clone(), *args, **options)


@fault("AMP-DISTRIBUTED-027", level="standard")
def flags_are_reduced_along_one_dimension_of_a_mesh() -> Iterator[None]:
    """The flag of sharded gradients is reduced over the first dimension of their mesh alone."""
    from torch.distributed.tensor import DTensor

    whole = DTensor.full_tensor

    def first(self: Any, **options: Any) -> Any:
        if self.device_mesh.ndim == 1 or self.numel() > 1:
            return whole(self, **options)
        local = self.to_local()
        distributed.all_reduce(local, distributed.ReduceOp.MAX, group=self.device_mesh.get_group(0))
        return local

    with replaced(DTensor, "full_tensor", first):
        yield


@fault("AMP-DISTRIBUTED-027")
def flags_of_columns_are_not_reduced() -> Iterator[None]:
    """An overflow in a gradient that is sharded along columns is not told to other ranks."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_

    def alone(gradients: Any, found_inf: Any, inverse: Any) -> None:
        parts = [one.to_local() if getattr(one, "placements", ()) == (Shard(1),) else one for one in gradients]
        unscale(parts, found_inf, inverse)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", alone):
        yield


# --- synchronized batch normalization


def _batch_normalized(change: Callable[..., Any]) -> Any:
    """Let SyncBatchNorm's forward be `change` of its own, itself and the input."""
    original = torch.nn.SyncBatchNorm.forward
    return replaced(torch.nn.SyncBatchNorm, "forward", lambda self, x: change(original, self, x))


@fault("AMP-DISTRIBUTED-028")
def regions_train_by_the_statistics_of_one_rank() -> Iterator[None]:
    """In a region SyncBatchNorm normalizes by the statistics of its rank, without an error."""

    def forward(original: Any, layer: Any, x: Any) -> Any:
        return torch.nn.BatchNorm1d.forward(layer, x) if torch.is_autocast_enabled("cpu") else original(layer, x)

    with _batch_normalized(forward):
        yield


@fault("AMP-DISTRIBUTED-028")
def a_refused_batch_moves_running_statistics() -> Iterator[None]:
    """SyncBatchNorm updates its running statistics before it refuses a batch."""

    def forward(original: Any, layer: Any, x: Any) -> Any:
        if layer.training:
            layer.running_mean.add_(1.0)
        return original(layer, x)

    with _batch_normalized(forward):
        yield


@fault("AMP-DISTRIBUTED-028")
def converted_batch_normalizations_return_float32() -> Iterator[None]:
    """A converted batch normalization evaluates 16-bit inputs in float32."""
    with _batch_normalized(lambda original, layer, x: original(layer, x.float())):
        yield


# --- settings of mixed precision


@fault("AMP-DISTRIBUTED-029")
def outputs_are_not_cast() -> Iterator[None]:
    """fully_shard ignores output_dtype."""
    with _policy_without("output_dtype", None):
        yield


@fault("AMP-DISTRIBUTED-029")
def buffers_are_not_cast() -> Iterator[None]:
    """FullyShardedDataParallel ignores buffer_dtype."""
    with _with_types(fsdp.MixedPrecision, lambda given: given | {"buffer_dtype": None}):
        yield


@fault("AMP-DISTRIBUTED-029")
def kept_gradients_become_float32() -> Iterator[None]:
    """FullyShardedDataParallel ignores keep_low_precision_grads."""
    with _with_types(fsdp.MixedPrecision, lambda given: given | {"keep_low_precision_grads": False}):
        yield


@fault("AMP-DISTRIBUTED-029")
def reduction_without_a_type_is_in_float32() -> Iterator[None]:
    """MixedPrecision's reduce_dtype is float32 where it is not given, whatever param_dtype is."""
    with _with_types(
        fsdp.MixedPrecision, lambda given: given | {"reduce_dtype": given.get("reduce_dtype") or torch.float32}
    ):
        yield


@fault("AMP-DISTRIBUTED-029")
def unsharded_gradients_stay_in_16_bits() -> Iterator[None]:
    """FullyShardedDataParallel without shards leaves gradients in the type of the reduction."""
    from torch.distributed.fsdp import _runtime_utils

    cast = _runtime_utils._cast_grad_to_param_dtype

    def only_shards(state: Any, gradient: torch.Tensor, parameter: Any) -> None:
        if state.sharding_strategy is not fsdp.ShardingStrategy.NO_SHARD:
            cast(state, gradient, parameter)

    with replaced(_runtime_utils, "_cast_grad_to_param_dtype", only_shards):
        yield


@fault("AMP-DISTRIBUTED-006", level="standard")
def unsharded_gradients_are_reduced_by_their_own_rank() -> Iterator[None]:
    """FullyShardedDataParallel without shards divides gradients by the number of ranks, and adds no other rank's."""
    from torch.distributed.fsdp import _runtime_utils

    def alone(state: Any, handle: Any) -> None:
        gradient = handle.flat_param.grad
        gradient.div_(state._gradient_predivide_factor * state._gradient_postdivide_factor)
        _runtime_utils._cast_grad_to_param_dtype(state, gradient, handle.flat_param)
        _runtime_utils._post_reduce_grad_callback(state, handle, gradient.data)

    with replaced(_runtime_utils, "_reduce_grad_no_shard", alone):
        yield


@fault("AMP-DISTRIBUTED-029")
def shards_of_gradients_are_reduced_in_float32() -> Iterator[None]:
    """FullyShardedDataParallel that shards gradients alone ignores reduce_dtype."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

    chosen = FlatParamHandle._init_param_reduce_dtypes

    def init(self: Any, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
        alone = self._sharding_strategy is HandleShardingStrategy.SHARD_GRAD_OP
        chosen(self, param_dtype, torch.float32 if alone else reduce_dtype)

    with replaced(FlatParamHandle, "_init_param_reduce_dtypes", init):
        yield


# --- replicas of shards


@contextlib.contextmanager
def _replicas_reduced_by(reduce: Callable[..., Any]) -> Iterator[None]:
    """Reduce the gradients of some of the ranks in another way: `reduce` is given the right one and its arguments."""
    right = distributed.all_reduce

    def of_some(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        group = options.get("group")
        if group is None or group.size() == distributed.get_world_size():
            return right(tensor, *args, **options)
        return reduce(right, tensor, *args, **options)

    with replaced(distributed, "all_reduce", of_some):
        yield


@fault("AMP-DISTRIBUTED-006", "AMP-DISTRIBUTED-007", "AMP-DISTRIBUTED-008", "AMP-DISTRIBUTED-009", level="standard")
def replicas_of_shards_keep_their_gradients() -> Iterator[None]:
    """Gradients of replicas of shards are not reduced over the replicas."""
    with _replicas_reduced_by(lambda right, tensor, *args, **options: None):
        yield


@fault("AMP-DISTRIBUTED-006", "AMP-DISTRIBUTED-008", level="standard")
def replicas_of_shards_are_reduced_in_16_bits() -> Iterator[None]:
    """Gradients of replicas of shards are rounded to bf16 before they are reduced over the replicas."""

    def rounded(right: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        tensor.copy_(tensor.bfloat16())
        return right(tensor, *args, **options)

    with _replicas_reduced_by(rounded):
        yield


# --- means near the end of float16's range


@fault("AMP-DISTRIBUTED-004")
def compressed_gradients_are_divided_after_the_sum() -> Iterator[None]:
    """Gradients in fp16 are added up before they are divided by the number of ranks."""
    reduce = distributed.all_reduce

    def late(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.dtype is not torch.float16:
            return reduce(tensor, *args, **options)
        size = distributed.get_world_size()
        tensor.mul_(size)
        work = reduce(tensor, *args, **options)
        work.wait()
        tensor.div_(size)
        return work

    with replaced(distributed, "all_reduce", late):
        yield


@fault("AMP-DISTRIBUTED-009")
def sharded_gradients_are_divided_after_the_sum() -> Iterator[None]:
    """fully_shard adds fp16 gradients up before it divides them by the number of ranks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    factors = _fsdp_collectives._get_gradient_divide_factors

    def late(*args: Any, **options: Any) -> Any:
        before, after, *operations = factors(*args, **options)
        return (None, before * after, *operations) if before and after else (before, after, *operations)

    with replaced(_fsdp_collectives, "_get_gradient_divide_factors", late):
        yield


@fault("AMP-DISTRIBUTED-026")
def overflows_reach_ranks_of_other_groups() -> Iterator[None]:
    """ShardedGradScaler reduces its flag over all ranks, whatever process group it was given."""
    made = ShardedGradScaler.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **{name: value for name, value in options.items() if name != "process_group"})

    with replaced(ShardedGradScaler, "__init__", init):
        yield


# --- sizes, lengths and routes


@fault("AMP-DISTRIBUTED-013")
def kept_gradients_have_a_norm_of_their_type() -> Iterator[None]:
    """FullyShardedDataParallel takes the norm of each rank's gradients in their own type."""
    from torch.distributed.fsdp import fully_sharded_data_parallel as module

    take = module._get_grad_norm

    def coarse(parameters: Any, *args: Any, **options: Any) -> Any:
        parameters = list(parameters)
        norm = take(parameters, *args, **options)
        kinds = {one.grad.dtype for one in parameters if one.grad is not None}
        return norm.to(kinds.pop()).to(norm.dtype) if len(kinds) == 1 else norm

    with replaced(module, "_get_grad_norm", coarse):
        yield


@fault("AMP-DISTRIBUTED-033")
def parallel_softmax_adds_up_in_bf16() -> Iterator[None]:
    """loss_parallel adds up the exponentials of bfloat16 logits in bfloat16."""
    from torch.distributed.tensor.parallel import loss

    take = loss._log_softmax

    def coarse(x: Any, dim: Any, half_to_float: Any, mesh: Any, mesh_dim: Any) -> Any:
        if x.dtype is not torch.bfloat16:
            return take(x, dim, half_to_float, mesh, mesh_dim)
        exponentials = x.exp().sum(dim, keepdim=True)
        distributed.all_reduce(exponentials)
        return x - exponentials.log()

    with replaced(loss, "_log_softmax", coarse):
        yield


@fault("AMP-DISTRIBUTED-032")
def staged_copies_are_of_the_default_type() -> Iterator[None]:
    """The copies that an asynchronous save makes of 16-bit tensors are float32."""
    from torch.distributed.checkpoint import staging

    copy = staging._copy_state_dict

    def widened(state: Any, made: Any, *args: Any, **options: Any) -> Any:
        found = copy(state, made, *args, **options)
        low = (torch.float16, torch.bfloat16)
        return {
            name: one.float() if type(one) is torch.Tensor and one.dtype in low else one for name, one in found.items()
        }

    def stage(self: Any, state: Any) -> Any:
        made = staging._create_cpu_state_dict(state)
        return widened(state, made)

    with replaced(staging.BlockingAsyncStager, "stage", stage):
        yield


@fault("AMP-DISTRIBUTED-032", level="standard")
def offloaded_states_are_of_the_default_type() -> Iterator[None]:
    """get_model_state_dict with cpu_offload returns 16-bit tensors as float32."""
    from torch.distributed.checkpoint import state_dict

    take = state_dict.get_model_state_dict

    def widened(model: Any, *, submodules: Any = None, options: Any = None) -> Any:
        found = take(model, submodules=submodules, options=options)
        if options is None or not options.cpu_offload:
            return found
        return {name: one.float() if one.dtype is torch.bfloat16 else one for name, one in found.items()}

    with replaced(state_dict, "get_model_state_dict", widened):
        yield


@fault("AMP-DISTRIBUTED-008")
def parameters_that_stay_whole_are_never_renewed() -> Iterator[None]:
    """fully_shard with reshard_after_forward=False gives backward's end no shards, so that a step changes nothing."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def resharded(self: Any) -> None:
        if self._reshard_after_forward:
            reshard(self)

    reshard = FSDPParamGroup.reshard
    with replaced(FSDPParamGroup, "reshard", resharded):
        yield


@fault("AMP-DISTRIBUTED-008", level="standard")
def offloaded_parameters_are_read_once() -> Iterator[None]:
    """fully_shard with a CPUOffloadPolicy gathers in each step what the parameters were in the first."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def read(self: Any) -> list[torch.Tensor]:
        inputs: list[torch.Tensor] = inputs_of(self)
        if self.offload_to_cpu:
            self.first = getattr(self, "first", None) or [one.clone() for one in inputs]
            return self.first
        return inputs

    inputs_of = FSDPParam.all_gather_inputs.fget
    with replaced(FSDPParam, "all_gather_inputs", property(read)):
        yield


@fault("AMP-DISTRIBUTED-003")
def static_graphs_are_reduced_until_they_accumulate() -> Iterator[None]:
    """With static_graph=True a replica synchronizes no gradient after its first micro-batch in no_sync()."""
    original = DistributedDataParallel.forward
    accumulated: set[int] = set()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.require_backward_grad_sync:
            accumulated.add(id(self))
        elif self.static_graph and id(self) in accumulated:
            with self.no_sync():
                return original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    with replaced(DistributedDataParallel, "forward", forward):
        yield
