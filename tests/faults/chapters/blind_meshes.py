"""Faults of norms of sums over ranks, changes of placements on meshes, local_map and attributes under fully_shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original


@fault("AMP-DISTRIBUTED-016")
def norms_of_sums_are_made_of_parts() -> Iterator[None]:
    """The norm of a DTensor that is a sum over the ranks is made of the norms of its parts."""
    from torch.distributed.tensor._ops import _math_ops

    old = "isinstance(p, Partial) and p.reduce_op != reduction_op"
    new = f"{old} and not isinstance(reduction_op, NormReduction)"
    with edited(_math_ops.common_reduction_strategy, old, new):
        yield


@fault("AMP-DISTRIBUTED-016")
def clipping_scales_a_copy_of_sums() -> Iterator[None]:
    """clip_grad_norm_ scales a copy of gradients that are sums over the ranks, and leaves them as they are."""
    from torch.nn.utils import clip_grad

    old = "torch._foreach_mul_(device_grads, clip_coef_clamped.to(device))"
    sums = "any(p.is_partial() for p in getattr(one, 'placements', ()))"
    given = f"[one.clone() if {sums} else one for one in device_grads]"
    with edited(clip_grad._clip_grads_with_norm_, old, old.replace("device_grads", given)):
        yield


@fault("AMP-DISTRIBUTED-035", level="standard")
def gathered_parts_keep_their_padding() -> Iterator[None]:
    """A shard that is gathered over the first dimension of a mesh of two keeps the zeros that fill up its parts."""
    from torch.distributed.tensor.placement_types import Shard

    def filled(gather: Any, self: Any, local: Tensor, mesh: Any, at: int, shape: Any) -> Tensor:
        whole: Tensor = gather(self, local, mesh, at, shape)
        if mesh.ndim == 2 and at == 0 and whole.shape[self.dim] % mesh.size(0):
            whole.select(self.dim, -1).zero_()
        return whole

    with given_the_original(Shard, "_to_replicate_tensor", filled):
        yield


@fault("AMP-DISTRIBUTED-016")
def local_map_makes_replicas() -> Iterator[None]:
    """local_map makes each result a DTensor of replicas."""
    from torch.distributed.tensor.experimental import _func_map

    old = "DTensor.from_local(out, device_mesh, spec, run_check=False)"
    new = "DTensor.from_local(out, device_mesh, None, run_check=False)"
    with edited(_func_map._local_map_wrapped, old, new):
        yield


@fault("AMP-DISTRIBUTED-021")
def sharded_parameters_are_all_trained() -> Iterator[None]:
    """fully_shard makes parameters that require gradients of all that it is given."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param as module

    old, new = "requires_grad=param.requires_grad", "requires_grad=True"
    with edited(module.FSDPParam._init_sharded_param, old, new):
        yield


@fault("AMP-DISTRIBUTED-037", level="standard")
def strided_shards_are_gathered_in_the_order_of_ranks() -> Iterator[None]:
    """The parts of a parameter that is split over data and tensor ranks are joined rank by rank (pytorch 166598)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    def by_ranks(gather: Any, self: Any, local: Tensor, mesh: Any, at: int, *given: Any) -> Tensor:
        whole: Tensor = gather(self, local, mesh, at, *given)
        parts = whole.chunk(self.split_factor * mesh.size(at), self.dim)
        return torch.cat([part for rank in range(mesh.size(at)) for part in parts[rank :: mesh.size(at)]], self.dim)

    with given_the_original(_StridedShard, "_to_replicate_tensor", by_ranks):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def gradients_that_stay_on_a_rank_are_halved() -> Iterator[None]:
    """A stage halves the gradient that it takes from the next stage of the same rank, as if it were sent twice."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def halved(take: Any, self: Any, outputs: tuple[Tensor | None, ...], at: int) -> None:
        take(self, tuple(None if one is None else one / 2 for one in outputs), at)

    with given_the_original(_PipelineStageBase, "set_local_bwd_input", halved):
        yield


@fault("AMP-DISTRIBUTED-018", level="standard")
def one_forward_one_backward_always_averages() -> Iterator[None]:
    """Schedule1F1B divides gradients by the number of micro-batches, asked to or not."""
    from torch.distributed.pipelining import Schedule1F1B

    def averaged(run: Any, self: Any, *given: Any, **named: Any) -> Any:
        result = run(self, *given, **named)
        self._stage.scale_grads(self._n_microbatches)
        return result

    with given_the_original(Schedule1F1B, "_step_microbatches", averaged):
        yield
