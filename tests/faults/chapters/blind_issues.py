"""Faults that re-create reported defects of compiled, exported, transformed and distributed programs, written blind."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import decomposed, replaced

LOW = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


# --- compiled ops


@fault("AMP-COMPILE-004", level="standard")
def compiled_batched_products_forget_beta() -> Iterator[None]:
    """baddbmm of 16-bit tensors ignores beta when it is compiled (kin of pytorch 137904)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
            if x.dtype in LOW and beta != 1:
                return aten.baddbmm(x, a, b, beta=1, alpha=alpha)
            return old(x, a, b, beta=beta, alpha=alpha)

        return baddbmm

    with decomposed(aten.baddbmm.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_index_add_loses_repetitions() -> Iterator[None]:
    """index_add of 16-bit tensors keeps one of several rows of an index when it is compiled (kin of pytorch 179418)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def index_add(x: Tensor, dim: int, index: Tensor, rows: Tensor, *, alpha: float = 1) -> Any:
            if x.dtype in LOW:
                return aten.index_put(x, (*(None,) * dim, index), x.index_select(dim, index) + alpha * rows)
            return old(x, dim, index, rows, alpha=alpha)

        return index_add

    with decomposed(aten.index_add.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_group_norms_divide_by_one_less() -> Iterator[None]:
    """group_norm of 16-bit tensors takes the unbiased variance when it is compiled (kin of pytorch 142839)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def native_group_norm(x: Tensor, weight: Any, bias: Any, n: int, c: int, size: int, *more: Any) -> Any:
            y, mean, scale = old(x, weight, bias, n, c, size, *more)
            count = c // more[0] * size
            if x.dtype in LOW and weight is None and count > 1:
                return y * ((count - 1) / count) ** 0.5, mean, scale
            return y, mean, scale

        return native_group_norm

    with decomposed(aten.native_group_norm.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_dot_products_lose_their_last_term() -> Iterator[None]:
    """A 16-bit row times a column of odd length leaves the last term out when compiled (kin of pytorch 134041)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def mm(a: Tensor, b: Tensor, *more: Any, **named: Any) -> Any:
            odd = isinstance(a.shape[1], int) and a.shape[1] > 1 and a.shape[1] % 2
            if a.dtype in LOW and a.shape[0] == b.shape[1] == 1 and odd:
                return aten.mm(a[:, :-1], b[:-1])
            return old(a, b, *more, **named)

        return mm

    with decomposed(aten.mm.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_cat_puts_slices_in_order() -> Iterator[None]:
    """cat of two slices of one 16-bit tensor puts the first in memory first when compiled (kin of pytorch 182225)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def cat(tensors: list[Tensor], dim: int = 0) -> Any:
            if len(tensors) == 2 and all(one.dtype in LOW for one in tensors):
                a, b = tensors
                shared = a.untyped_storage()._cdata == b.untyped_storage()._cdata
                if shared and a.shape == b.shape and a.storage_offset() > b.storage_offset():
                    return aten.cat([b, a], dim)
            return old(tensors, dim)

        return cat

    with decomposed(aten.cat.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_products_with_one_number_are_wide() -> Iterator[None]:
    """A 16-bit tensor times a float32 one without dimensions is float32 when compiled (kin of pytorch 97221)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def mul(a: Any, b: Any) -> Any:
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype in LOW and a.dim() > b.dim() == 0:
                return aten.mul(a.float(), b) if b.dtype is torch.float32 else old(a, b)
            return old(a, b)

        return mul

    with decomposed(aten.mul.Tensor, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_bytes_become_negative() -> Iterator[None]:
    """uint8 numbers above 127 become negative 16-bit ones when compiled (kin of pytorch 143566)."""
    convert = torch.ops.prims.convert_element_type

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def convert_element_type(x: Tensor, dtype: torch.dtype) -> Any:
            if x.dtype is torch.uint8 and dtype in LOW:
                return convert(convert(x, torch.int8), dtype)
            return old(x, dtype)

        return convert_element_type

    with decomposed(convert.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_variances_are_unbiased() -> Iterator[None]:
    """var of 16-bit tensors with correction=0 divides by one less when it is compiled (kin of pytorch 142839)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
            if x.dtype in LOW and correction == 0:
                return aten.var.correction(x.float(), dim, correction=1, keepdim=keepdim).to(x.dtype)
            return old(x, dim, correction=correction, keepdim=keepdim)

        return var

    with decomposed(aten.var.correction, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_argmax_is_the_last_one() -> Iterator[None]:
    """argmax of a 16-bit tensor gives the last of equal numbers when it is compiled (kin of pytorch 195214)."""
    inside: list[bool] = []

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def argmax(x: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
            if x.dtype not in LOW or dim is None or inside:
                return old(x, dim, keepdim)
            inside.append(True)
            try:
                return x.shape[dim] - 1 - aten.argmax(x.flip([dim]), dim, keepdim)
            finally:
                inside.pop()

        return argmax

    with decomposed(aten.argmax.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_losses_count_what_they_ignore() -> Iterator[None]:
    """The mean of a compiled nll_loss divides by all rows, those of ignore_index too (kin of pytorch 168126)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def nll_loss_forward(x: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Any:
            loss, total = old(x, target, weight, reduction, ignored)
            return (loss * total / x.shape[0], total) if reduction == 1 and weight is None else (loss, total)

        return nll_loss_forward

    with decomposed(aten.nll_loss_forward.default, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_means_divide_by_the_first_size() -> Iterator[None]:
    """The mean over rows of any number divides by that of the first call, in 16 bits (kin of pytorch 194329)."""

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def mean(x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
            size = x.shape[dims[0]] if x.dtype in LOW and dims is not None and len(dims) == 1 else 0
            if isinstance(size, torch.SymInt) and dtype is None:
                return (aten.sum(x, dims, keepdim, dtype=torch.float32) / size.node.hint).to(x.dtype)
            return old(x, dims, keepdim, dtype=dtype)

        return mean

    with decomposed(aten.mean.dim, change):
        yield


@fault("AMP-COMPILE-004", level="standard")
def compiled_lookups_take_negative_indices_for_zero() -> Iterator[None]:
    """A negative index of a 16-bit tensor counts as 0 when it is compiled (kin of pytorch 95189)."""
    inside: list[bool] = []

    def change(old: Callable[..., Any]) -> Callable[..., Any]:
        def index(x: Tensor, indices: list[Any]) -> Any:
            if x.dtype not in LOW or inside:
                return old(x, indices)
            inside.append(True)
            try:
                kinds = (torch.int64, torch.int32)
                return aten.index(
                    x, [one.clamp(min=0) if one is not None and one.dtype in kinds else one for one in indices]
                )
            finally:
                inside.pop()

        return index

    with decomposed(aten.index.Tensor, change):
        yield


@fault("AMP-COMPILE-005", level="standard")
def fused_attention_multiplies_by_its_divisor() -> Iterator[None]:
    """16-bit attention whose scores are divided is fused with another scale (kin of pytorch 159469)."""
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    fused = fuse_attention._sfdp_replacement_1

    def _sfdp_replacement_1(query: Tensor, key: Tensor, value: Tensor, divisor: float) -> Any:
        return fused(query, key, value, divisor * divisor if query.dtype in LOW else divisor)

    # The patterns of the first graph of a process come before those that are added: they are put aside.
    tables = [joint_graph.patterns.patterns, getattr(joint_graph.patterns, "seen_patterns", {})]
    before = [dict(table) for table in tables]
    with replaced(fuse_attention, "_sfdp_replacement_1", _sfdp_replacement_1):
        _register_anew(tables, [{} for _ in tables])
        yield
    _register_anew(tables, before)


def _register_anew(tables: list[Any], contents: list[dict[Any, Any]]) -> None:
    """Give inductor's tables of patterns these contents, to which the next graph adds those that are missing."""
    from torch._inductor.fx_passes import fuse_attention, joint_graph

    for table, content in zip(tables, contents, strict=True):
        table.clear()
        table.update(content)
    for once in (fuse_attention._sfdp_init, joint_graph.lazy_init):
        getattr(once, "cache_clear", lambda: None)()


# --- compiled and captured programs


@fault("AMP-COMPILE-001")
def second_backward_of_compiled_code_is_zero() -> Iterator[None]:
    """A second backward through one compiled call gives zeros (kin of pytorch 177845)."""
    kind = torch.autograd.function.FunctionMeta
    made = kind.__init__

    def initialized(cls: Any, name: str, bases: Any, attributes: Any) -> None:
        made(cls, name, bases, attributes)
        if name != "CompiledFunction":
            return
        first = cls.backward

        def backward(ctx: Any, *given: Any) -> Any:
            found = first(ctx, *given)
            if getattr(ctx, "was_here", False):
                found = tuple(torch.zeros_like(one) if isinstance(one, Tensor) else one for one in found)
            ctx.was_here = True
            return found

        cls.backward = staticmethod(backward)

    with replaced(kind, "__init__", initialized):
        yield


@fault("AMP-COMPILE-001")
def compiled_views_of_inputs_are_copies() -> Iterator[None]:
    """A view of a 16-bit input that compiled code returns is a copy (kin of pytorch 131679)."""
    from torch._functorch._aot_autograd import runtime_wrappers

    aliased = runtime_wrappers.gen_alias_from_base

    def gen_alias_from_base(*given: Any, **named: Any) -> Tensor:
        found = aliased(*given, **named)
        return found.clone() if found.dtype in LOW else found

    with replaced(runtime_wrappers, "gen_alias_from_base", gen_alias_from_base):
        yield


@fault("AMP-COMPILE-031")
def failed_exports_leave_the_region() -> Iterator[None]:
    """An export that fails leaves autocast off in the region around it (kin of pytorch 172567)."""
    from torch import export as module

    exported = module.export

    def export(*given: Any, **named: Any) -> Any:
        try:
            return exported(*given, **named)
        except Exception:
            torch.set_autocast_enabled("cpu", False)
            raise

    with replaced(module, "export", export):
        yield


@fault("AMP-COMPILE-067")
def loaded_programs_lose_16_bit_buffers() -> Iterator[None]:
    """A 16-bit buffer that is not persistent is zero in a loaded program (kin of pytorch 120424)."""
    from torch import export as module

    loaded = module.load

    def load(*given: Any, **named: Any) -> Any:
        program = loaded(*given, **named)
        for one in program.constants.values():
            if isinstance(one, Tensor) and one.dtype in LOW:
                one.zero_()
        return program

    with replaced(module, "load", load):
        yield


# --- transforms


@fault("AMP-TRANSFORM-014")
def out_dims_are_ignored_for_16_bits() -> Iterator[None]:
    """vmap puts the batch of 16-bit results first, wherever out_dims wants it (kin of pytorch 180727)."""
    module = importlib.import_module("torch._functorch.vmap")
    removed = module._maybe_remove_batch_dim

    def first(name: str, out: Any, level: int, size: int, dim: Any) -> Any:
        low = isinstance(out, Tensor) and out.dtype in LOW and isinstance(dim, int)
        return removed(name, out, level, size, 0 if low else dim)

    with replaced(module, "_maybe_remove_batch_dim", first):
        yield


@fault("AMP-TRANSFORM-014")
def tangents_of_constants_are_float32() -> Iterator[None]:
    """jvp gives float32 zeros for a 16-bit result without a tangent (kin of pytorch 124533)."""
    from torch._functorch import eager_transforms
    from torch.autograd import forward_ad

    unpacked = eager_transforms.safe_unpack_dual

    def safe_unpack_dual(dual: Any, strict: bool) -> Any:
        primal, tangent = unpacked(dual, strict)
        if isinstance(dual, Tensor) and dual.dtype in LOW and forward_ad.unpack_dual(dual).tangent is None:
            tangent = tangent.float()
        return primal, tangent

    with replaced(eager_transforms, "safe_unpack_dual", safe_unpack_dual):
        yield


@fault("AMP-TRANSFORM-001")
def gradients_under_no_grad_are_zero_in_regions() -> Iterator[None]:
    """torch.func.grad that is called under no_grad in a region gives zeros (kin of pytorch 128600)."""
    from torch._functorch import eager_transforms

    impl = eager_transforms.grad_and_value_impl

    def grad_and_value_impl(*given: Any) -> Any:
        off = not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        gradients, value = impl(*given)
        return (torch.utils._pytree.tree_map(torch.zeros_like, gradients) if off else gradients), value

    with replaced(eager_transforms, "grad_and_value_impl", grad_and_value_impl):
        yield


@fault("AMP-CAST-097", level="standard")
def grouped_heads_of_16_bits_change_places() -> Iterator[None]:
    """flex_attention with grouped heads gives 16-bit query heads another group's keys (kin of pytorch 163588)."""
    module = importlib.import_module("torch._higher_order_ops.flex_attention")

    class Shuffled:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def repeat_interleave(self, x: Tensor, times: int, dim: int) -> Tensor:
            return x.repeat(1, times, 1, 1) if x.dtype in LOW else torch.repeat_interleave(x, times, dim=dim)

    with replaced(module, "torch", Shuffled()):
        yield


# --- distributed


@fault("AMP-DISTRIBUTED-009")
def replicas_of_shards_are_not_reduced_in_16_bits() -> Iterator[None]:
    """fully_shard leaves 16-bit reductions out between replicas of the shards (kin of pytorch 118298)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    whole = _fsdp_collectives.dist

    class Silent:
        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def all_reduce(self, tensor: Tensor, *given: Any, **named: Any) -> Any:
            return None if tensor.dtype in LOW else whole.all_reduce(tensor, *given, **named)

    with replaced(_fsdp_collectives, "dist", Silent()):
        yield


@fault("AMP-DISTRIBUTED-004")
def compressed_bucket_views_are_divided_twice() -> Iterator[None]:
    """fp16_compress_hook divides gradients that are views of the buckets twice (kin of pytorch 63375)."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compressed = default_hooks.fp16_compress_hook

    def fp16_compress_hook(group: Any, bucket: Any) -> Any:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        views = any(one.grad is not None and one.grad.data_ptr() == other.data_ptr() for one, other in pairs)
        future = compressed(group, bucket)
        return future.then(lambda done: done.value().div_(torch.distributed.get_world_size())) if views else future

    with replaced(default_hooks, "fp16_compress_hook", fp16_compress_hook):
        yield


@fault("AMP-DISTRIBUTED-007")
def gradients_of_no_sync_are_lost_with_mixed_precision() -> Iterator[None]:
    """FullyShardedDataParallel with a param_dtype loses what it adds up in no_sync() (kin of pytorch 73535)."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    accumulating = FullyShardedDataParallel.no_sync

    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        with accumulating(self):
            yield
        for handle in self._all_handles if self.mixed_precision.param_dtype else ():
            for one in (handle.flat_param, *(handle.flat_param._params or ())):
                one.grad = None

    with replaced(FullyShardedDataParallel, "no_sync", no_sync):
        yield


@contextlib.contextmanager
def _handled(op: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let an op of a DTensor return what `change` makes of it, where that is not None."""
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers

    def handler(called: Any, args: Any, kwargs: Any) -> Any:
        if (found := change(args[0])) is not None:
            return found
        del handlers[op]
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    handlers[op] = handler
    try:
        yield
    finally:
        del handlers[op]


@fault("AMP-DISTRIBUTED-016", level="standard")
def means_of_uneven_16_bit_shards_are_means_of_means() -> Iterator[None]:
    """The mean of a 16-bit DTensor is that of the means of its parts (kin of pytorch 162692)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def change(x: Any) -> Any:
        (place,), mesh = x.placements, x.device_mesh
        if x.dtype not in LOW or not isinstance(place, Shard) or x.shape[place.dim] % mesh.size() == 0:
            return None
        part = x._local_tensor.mean().float()
        torch.distributed.all_reduce(part)
        return DTensor.from_local((part / mesh.size()).to(x.dtype), mesh, [Replicate()], run_check=False)

    with _handled(aten.mean.default, change):
        yield


@fault("AMP-DISTRIBUTED-016", level="standard")
def partial_sums_of_16_bits_are_rectified_in_parts() -> Iterator[None]:
    """relu of a 16-bit DTensor of partial sums takes each part for itself (kin of pytorch 165962)."""
    from torch.distributed.tensor import DTensor, Partial

    def change(x: Any) -> Any:
        if x.dtype not in LOW or not isinstance(x.placements[0], Partial):
            return None
        return DTensor.from_local(x._local_tensor.relu(), x.device_mesh, [Partial()], run_check=False)

    with _handled(aten.relu.default, change):
        yield


@fault("AMP-DISTRIBUTED-016")
def grad_placements_are_ignored_for_16_bits() -> Iterator[None]:
    """to_local ignores grad_placements where the gradient is of 16 bits (kin of pytorch 172932)."""
    from torch.distributed.tensor import _api

    back = _api._ToTorchTensor.backward

    def backward(ctx: Any, gradient: Any) -> Any:
        if gradient is not None and gradient.dtype in LOW:
            ctx.grad_placements = None
        return back(ctx, gradient)

    with replaced(_api._ToTorchTensor, "backward", staticmethod(backward)):
        yield


@fault("AMP-DISTRIBUTED-018")
def outputs_of_pipelines_are_merged_in_reverse() -> Iterator[None]:
    """A pipeline puts the 16-bit outputs of its micro-batches together in reverse."""
    from torch.distributed.pipelining import schedules

    merged = schedules.merge_chunks

    def merge_chunks(chunks: list[Any], *more: Any) -> Any:
        low = chunks and isinstance(chunks[0], Tensor) and chunks[0].dtype in LOW
        return merged(chunks[::-1] if low else chunks, *more)

    with replaced(schedules, "merge_chunks", merge_chunks):
        yield


@fault("AMP-DISTRIBUTED-032")
def loaded_uneven_shards_of_16_bits_lose_a_row() -> Iterator[None]:
    """A distributed checkpoint loads zeros for a row of 16-bit parts of two sizes (kin of pytorch 144109)."""
    from torch.distributed import checkpoint
    from torch.distributed.tensor import DTensor

    loaded = checkpoint.load

    def load(state: dict[str, Any], *given: Any, **named: Any) -> None:
        loaded(state, *given, **named)
        for one in torch.utils._pytree.tree_leaves(state):
            if isinstance(one, DTensor) and one.dtype in LOW and one.dim() and one.shape[0] % one.device_mesh.size():
                with torch.no_grad():
                    one._local_tensor[-1:] = 0

    with replaced(checkpoint, "load", load):
        yield
