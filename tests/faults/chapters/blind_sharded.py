"""Faults of buckets, shards, ignored modules, parallel losses and split sequences, written blind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import fsdp
from torch.utils._pytree import tree_map

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, replaced

LOW = (torch.float16, torch.bfloat16)


@fault("AMP-DISTRIBUTED-004")
def fp16_hook_divides_the_first_bucket_alone() -> Iterator[None]:
    """fp16_compress_hook adds up the buckets after the first without the division by the number of ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = default_hooks._compress_hook

    def compressed(dtype: torch.dtype, group: Any, bucket: Any) -> Any:
        answer = compress(dtype, group, bucket)
        if bucket.index() == 0 or dtype is not torch.float16:
            return answer
        return answer.then(lambda one: one.value() * distributed.get_world_size())

    with replaced(default_hooks, "_compress_hook", compressed):
        yield


@fault("AMP-DISTRIBUTED-009")
def divide_factors_are_ignored_for_16_bits() -> Iterator[None]:
    """set_gradient_divide_factor of fully_shard has no effect where gradients are reduced in 16 bits."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    factors = collectives._get_gradient_divide_factors

    def ignored(scatter: Any, group: Any, dtype: torch.dtype, kind: str = "", factor: Any = None, *more: Any) -> Any:
        return factors(scatter, group, dtype, kind, None if dtype in LOW else factor, *more)

    with replaced(collectives, "_get_gradient_divide_factors", ignored):
        yield


@fault("AMP-DISTRIBUTED-009")
def uneven_shards_lose_their_last_row() -> Iterator[None]:
    """The last row of a gradient that does not divide by the ranks is lost where it is reduced in another type."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    copy_in = collectives.foreach_reduce_scatter_copy_in

    def lost(gradients: list[Tensor], flat: Tensor, world: int) -> None:
        changed = [one.clone() for one in gradients]
        for one in changed:
            if one.dtype is not flat.dtype and one.shape[0] > world and one.shape[0] % world:
                one[-1] = 0
        copy_in(changed, flat, world)

    with replaced(collectives, "foreach_reduce_scatter_copy_in", lost):
        yield


@fault("AMP-DISTRIBUTED-029")
def modules_to_ignore_are_in_16_bits() -> Iterator[None]:
    """FullyShardedDataParallel with an auto_wrap_policy puts the modules that it is to ignore into param_dtype."""
    from torch.distributed.fsdp import fully_sharded_data_parallel as module

    wrap = module._auto_wrap

    def wrapped(root: Any, policy: Any, ignored: Any, parameters: Any, given: dict[str, Any], kind: Any) -> None:
        if given.get("mixed_precision") is not None:
            given["mixed_precision"] = dataclasses.replace(given["mixed_precision"], _module_classes_to_ignore=())
        wrap(root, policy, ignored, parameters, given, kind)

    with replaced(module, "_auto_wrap", wrapped):
        yield


@fault("AMP-DISTRIBUTED-007")
def summoned_parameters_are_of_param_dtype() -> Iterator[None]:
    """summon_full_params gives parameters rounded to param_dtype."""
    kind = fsdp.FullyShardedDataParallel
    summon = kind.summon_full_params

    @contextlib.contextmanager
    def rounded(module: Any, *given: Any, **named: Any) -> Iterator[None]:
        with summon(module, *given, **named):
            for one in kind.fsdp_modules(module):
                if dtype := one.mixed_precision.param_dtype:
                    for parameter in one.parameters():
                        parameter.data.copy_(parameter.data.to(dtype))
            yield

    with replaced(kind, "summon_full_params", staticmethod(rounded)):
        yield


@fault("AMP-DISTRIBUTED-007")
def states_of_sharded_optimizers_are_rounded() -> Iterator[None]:
    """FullyShardedDataParallel.optim_state_dict rounds float32 averages to param_dtype."""
    kind = fsdp.FullyShardedDataParallel
    states = kind.optim_state_dict

    def rounded(model: Any, *given: Any, **named: Any) -> dict[str, Any]:
        found = states(model, *given, **named)
        for dtype in {one.mixed_precision.param_dtype for one in kind.fsdp_modules(model)} - {None}:

            def low(one: Any, dtype: torch.dtype = dtype) -> Any:
                return one.to(dtype).to(one.dtype) if isinstance(one, Tensor) and one.dim() else one

            found["state"] = tree_map(low, found["state"])
        return found

    with replaced(kind, "optim_state_dict", staticmethod(rounded)):
        yield


@fault("AMP-DISTRIBUTED-023")
def parallel_losses_learn_what_they_ignore() -> Iterator[None]:
    """In loss_parallel the gradient of 16-bit logits is not zero at rows that ignore_index leaves out."""
    from torch.distributed.tensor.parallel import loss

    back = loss._nll_loss_and_log_softmax_backward

    def learned(
        grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int, *more: Any
    ) -> Tensor:
        if x.dtype in LOW and weight is None:
            target = torch.where(target == ignored, (ignored + 1) % 2, target)
        return back(grad, x, target, weight, reduction, ignored, *more)

    with replaced(loss, "_nll_loss_and_log_softmax_backward", learned):
        yield


@fault("AMP-DISTRIBUTED-017")
def sequence_parallel_norms_keep_their_gradient() -> Iterator[None]:
    """SequenceParallel leaves the gradient of a norm's parameters on each rank after a forward in a region."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import SequenceParallel

    replicate = SequenceParallel._replicate_module_fn

    def kept(self: Any, name: str, module: Any, mesh: Any) -> None:
        replicate(self, name, module, mesh)
        regions = [False]
        module.register_forward_pre_hook(lambda *_: regions.append(torch.is_autocast_enabled("cpu")))

        def own(gradient: Any) -> Any:
            return DTensor.from_local(gradient._local_tensor, mesh, [Replicate()]) if regions[-1] else gradient

        for parameter in module.parameters(recurse=False):
            parameter.register_hook(own)

    with replaced(SequenceParallel, "_replicate_module_fn", kept):
        yield


@fault("AMP-DISTRIBUTED-035")
def gradients_are_redistributed_in_forward_dtype() -> Iterator[None]:
    """DTensor.redistribute without backward_dtype exchanges gradients in forward_dtype."""
    from torch.distributed.tensor import DTensor

    def narrowed(right: Any, *args: Any, forward_dtype: Any = None, backward_dtype: Any = None, **kw: Any) -> Any:
        return right(*args, forward_dtype=forward_dtype, backward_dtype=backward_dtype or forward_dtype, **kw)

    with given_the_original(DTensor, "redistribute", narrowed):
        yield


@fault("AMP-DISTRIBUTED-035")
def parts_are_cast_after_they_are_summed() -> Iterator[None]:
    """DTensor.redistribute exchanges the parts in their own type and casts the result to forward_dtype."""
    from torch.distributed.tensor import DTensor

    def late(right: Any, *args: Any, forward_dtype: Any = None, **kw: Any) -> Any:
        out = right(*args, **kw)
        return out if forward_dtype is None else out.to(forward_dtype)

    with given_the_original(DTensor, "redistribute", late):
        yield


@fault("AMP-DISTRIBUTED-022")
def the_first_module_of_a_list_alone_is_cast() -> Iterator[None]:
    """fully_shard casts the inputs of the first module of a group that runs, not those of the others."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def first(right: Any, self: Any, args: Any, kwargs: Any) -> Any:
        begins = len(self._modules_to_run_forward) == len(self._modules)
        return right(self, args, kwargs) if begins else (args, kwargs)

    with given_the_original(FSDPState, "_cast_forward_inputs", first):
        yield


@fault("AMP-DISTRIBUTED-022")
def integer_parameters_are_cast() -> Iterator[None]:
    """fully_shard gathers integer parameters in param_dtype."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    with edited(FSDPParam.init_dtype_attrs, "or not self.orig_dtype.is_floating_point", "or False"):
        yield


@fault("AMP-DISTRIBUTED-021")
def frozen_layers_decide_the_type_of_gradients() -> Iterator[None]:
    """fully_shard casts gradients to the type of its first parameter, frozen or not."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    def of_the_first(right: Any, self: Any) -> None:
        right(self)
        self._orig_dtype = self.fsdp_params[0].orig_dtype

    with given_the_original(FSDPParamGroup, "_init_mp_dtypes", of_the_first):
        yield


@fault("AMP-DISTRIBUTED-001")
def buffers_are_written_to_in_each_forward() -> Iterator[None]:
    """DistributedDataParallel writes to buffers that the backward of an earlier forward needs, as autograd sees it."""

    def written(right: Any, self: Any) -> None:
        right(self)
        with torch.no_grad():
            for one in self.modules_buffers:
                one.add_(0)

    with given_the_original(torch.nn.parallel.DistributedDataParallel, "_sync_buffers", written):
        yield
