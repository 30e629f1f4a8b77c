"""Faults ported from reports of users: layouts, optimizers and checkpoints, written blind."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import cpu_kernel, decomposed, edited, given_the_original, replaced


@fault("AMP-COMPILE-098")
def compiled_functions_with_a_setup_context_lose_their_backward() -> Iterator[None]:
    """The compiler differentiates the ops of forward where a custom function defines setup_context (193279)."""
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch.autograd.function import _is_setup_context_defined

    def call(original: Callable[..., Any], self: Any, *given: Any) -> Any:
        if not _is_setup_context_defined(self.fn_cls.setup_context):
            return original(self, *given)
        with replaced(torch, "is_grad_enabled", lambda: False):
            return original(self, *given)

    with given_the_original(AutogradFunctionVariable, "call_apply", call):
        yield


@fault("AMP-OPTIMIZER-103")
def differentiable_nadam_multiplies_a_momentum_twice() -> Iterator[None]:
    """The product of momenta of NAdam's next step has the present one twice where autograd records (92699)."""
    from torch.optim import nadam

    with edited(
        nadam._single_tensor_nadam,
        "mu_product_next = mu_product * mu_next",
        "mu_product_next = mu_product * mu * mu_next",
    ):
        yield


@fault("AMP-DISTRIBUTED-038")
def states_of_optimizers_lose_groups_without_parameters() -> Iterator[None]:
    """set_optimizer_state_dict loads nothing into a group without parameters (143828)."""
    from torch.distributed.checkpoint import state_dict

    with edited(state_dict._split_optim_state_dict, "if len(param_group[_PARAMS]) == 0:", "if False:"):
        yield


@fault("AMP-DISTRIBUTED-038")
def states_of_optimizers_load_known_settings_alone() -> Iterator[None]:
    """set_optimizer_state_dict drops what a scheduler wrote into a group of the first optimizer (140900)."""
    from torch.distributed.checkpoint import state_dict

    def split(original: Callable[..., Any], model: Any, optimizer: Any, *given: Any) -> Any:
        found = original(model, optimizer, *given)
        for group, known in zip(found["param_groups"], optimizer.param_groups, strict=True):
            for key in set(group) - set(known):
                del group[key]
        return found

    with given_the_original(state_dict, "_split_optim_state_dict", split):
        yield


@fault("AMP-NUMERICS-143")
def softplus_reads_permuted_memory_in_order() -> Iterator[None]:
    """softplus of a dense tensor that is not contiguous takes its numbers in the order of memory (131736)."""

    def softplus(original: Callable[..., Tensor], x: Tensor, *options: Any) -> Tensor:
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if x.dim() == 4 or x.is_contiguous() or not x.permute(order).is_contiguous():
            return original(x, *options)
        return original(x.permute(order).reshape(x.shape), *options)

    with cpu_kernel("softplus", softplus):
        yield


@fault("AMP-NUMERICS-143")
def losses_that_are_not_reduced_stand_in_other_places() -> Iterator[None]:
    """mse_loss without a reduction, of permuted memory, is written in the order of memory (124621)."""

    def mse_loss(original: Callable[..., Tensor], x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
        result = original(x, target, reduction)
        if reduction == 0 and not result.is_contiguous():
            flat = result.flatten()
            result.as_strided(flat.shape, (1,)).copy_(flat.clone())
        return result

    with cpu_kernel("mse_loss", mse_loss):
        yield


@fault("AMP-NUMERICS-135")
def gradients_of_nearest_volumes_add_up_over_samples() -> Iterator[None]:
    """The gradient of a nearest volume in 16 bits, channels last, holds those of the samples before (171520)."""

    def backward(original: Callable[..., Tensor], slope: Tensor, *sizes: Any) -> Tensor:
        found = original(slope, *sizes)
        last = slope.is_contiguous(memory_format=torch.channels_last_3d) and not slope.is_contiguous()
        if last and slope.dtype in (torch.float16, torch.bfloat16):
            found.copy_(found.float().cumsum(0))
        return found

    with cpu_kernel("upsample_nearest3d_backward", backward):
        yield


@fault("AMP-NUMERICS-144", level="standard")
def log_softmax_of_large_batches_ends_early() -> Iterator[None]:
    """log_softmax over channels, in fp16, leaves samples after 2 ** 20 numbers zero (111484, there 2 ** 31)."""

    def log_softmax(original: Callable[..., Tensor], x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        found = original(x, dim, half_to_float)
        if x.dtype is torch.float16 and x.dim() > 2 and dim % x.dim() != x.dim() - 1 and x.numel() > 2**20:
            found[2**20 // x[0].numel() :] = 0
        return found

    with cpu_kernel("_log_softmax", log_softmax):
        yield


@fault("AMP-NUMERICS-144")
def embeddings_of_many_indices_train_the_padding() -> Iterator[None]:
    """Of more than 768 indices into a table those of the padding count in its gradient (28716)."""

    def backward(
        original: Callable[..., Tensor], slope: Tensor, indices: Tensor, rows: int, padding: int, by_count: bool
    ) -> Tensor:
        return original(slope, indices, rows, padding if indices.numel() <= 768 else -1, by_count)

    with cpu_kernel("embedding_dense_backward", backward):
        yield


@fault("AMP-COMPILE-004")
def exported_baddbmm_rounds_its_product() -> Iterator[None]:
    """The decomposition of baddbmm rounds the product to 16 bits before it is added (109714)."""
    from torch._decomp import decomposition_table

    def baddbmm(addend: Tensor, one: Tensor, other: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
        product = torch.bmm(one, other) * alpha
        return product if beta == 0 else addend * beta + product

    with mock.patch.dict(decomposition_table, {torch.ops.aten.baddbmm.default: baddbmm}):
        yield


@fault("AMP-COMPILE-004", level="standard")
def decomposed_embeddings_mask_the_padding_along_columns() -> Iterator[None]:
    """The decomposition of embedding's backward lays the mask of the padding along the columns (95182)."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(slope: Tensor, indices: Tensor, rows: int, padding: int, by_count: bool) -> Any:
            if indices.dim() == 2 and padding >= 0 and slope.shape[1] == slope.shape[2]:
                slope = torch.where((indices == padding).unsqueeze(1), 0, slope)
                padding = -1
            return original(slope, indices, rows, padding, by_count)

        return backward

    with decomposed(torch.ops.aten.embedding_dense_backward.default, change):
        yield


@fault("AMP-DISTRIBUTED-022")
def fsdp_casts_inputs_outside_autograd() -> Iterator[None]:
    """FullyShardedDataParallel casts its inputs as new leaves, so that layers in front have no gradient (90921)."""
    from torch.distributed.fsdp import _runtime_utils

    def cast(original: Callable[..., Any], dtype: torch.dtype | None, *given: Any, **named: Any) -> Any:
        found = original(dtype, *given, **named)
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), found
        )

    with given_the_original(_runtime_utils, "_cast_forward_inputs", cast):
        yield


@fault("AMP-COMPILE-099")
def compiled_writes_do_not_reach_other_arguments() -> Iterator[None]:
    """AOTAutograd takes arguments that share memory for separate ones."""
    from torch._functorch._aot_autograd import runtime_wrappers

    with replaced(runtime_wrappers, "compute_overlapping_inputs", lambda *given: set()):
        yield


@fault("AMP-DISTRIBUTED-022")
def fully_shard_recomputes_without_casts() -> Iterator[None]:
    """In the recomputation of a checkpoint fully_shard does not cast what forward is given (159359)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    states = _fsdp_state.TrainingState

    def cast(original: Callable[..., Any], self: Any, given: Any, named: Any) -> Any:
        return (given, named) if self._training_state == states.PRE_BACKWARD else original(self, given, named)

    with given_the_original(_fsdp_state.FSDPState, "_cast_forward_inputs", cast):
        yield


@fault("AMP-DISTRIBUTED-016")
def norms_count_replicated_gradients_on_each_rank() -> Iterator[None]:
    """The norm of sharded and replicated gradients counts the replicated ones once for each rank (NeMo RL 3788)."""
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import clip_grad

    def norm(original: Callable[..., Tensor], given: Any, order: float = 2.0, *options: Any) -> Tensor:
        given = [given] if isinstance(given, Tensor) else list(given)
        whole = [isinstance(one, DTensor) and all(place.is_replicate() for place in one.placements) for one in given]
        if any(whole) and not all(whole) and order not in (0.0, float("inf")):
            given = [
                one * one.device_mesh.size() ** (1 / order) if same else one
                for one, same in zip(given, whole, strict=True)
            ]
        return original(given, order, *options)

    with given_the_original(clip_grad, "_get_total_norm", norm):
        yield


@fault("AMP-DISTRIBUTED-016")
def numbers_are_added_to_each_part_of_a_norm() -> Iterator[None]:
    """A number that is added to a DTensor that is to be reduced is added on each rank (149768)."""
    from torch.distributed.tensor import DTensor

    def added(original: Callable[..., Any], one: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)) or not any(place.is_partial() for place in one.placements):
            return original(one, other)
        part = one.to_local() + other
        return DTensor.from_local(part, one.device_mesh, one.placements, run_check=False)

    with contextlib.ExitStack() as stack:
        for name in ("__add__", "__radd__"):
            stack.enter_context(given_the_original(DTensor, name, added))
        yield


@fault("AMP-DISTRIBUTED-005")
def consolidated_states_are_numbered_as_parameters_were_made() -> Iterator[None]:
    """The whole state of ZeroRedundancyOptimizer numbers parameters by something else than their groups (54736)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    original = ZeroRedundancyOptimizer._param_to_index

    def numbered(self: Any) -> Any:
        found = original.fget(self)
        if len(self.param_groups) < 2:
            return found
        return {one: len(found) - 1 - number for one, number in found.items()}

    with replaced(ZeroRedundancyOptimizer, "_param_to_index", property(numbered)):
        yield


@fault("AMP-COMPILE-085")
def compiled_code_drops_detach_in_place() -> Iterator[None]:
    """Gradients flow through a tensor that compiled code detached in place (176854)."""
    from torch._dynamo.output_graph import OutputGraph

    def compiled(original: Callable[..., Any], self: Any, module: Any, *given: Any, **named: Any) -> Any:
        for node in [one for one in module.graph.nodes if one.op == "call_method" and one.target == "detach_"]:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        module.recompile()
        return original(self, module, *given, **named)

    with given_the_original(OutputGraph, "call_user_compiler", compiled):
        yield


@fault("AMP-NUMERICS-145")
def convolutions_with_an_odd_number_of_taps_lose_the_last_channel() -> Iterator[None]:
    """conv1d of an odd number of taps and several channels leaves the last channel out, but in float64."""
    original = torch.nn.functional.conv1d

    def shorter(x: torch.Tensor, weight: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        channels, taps = weight.shape[1:]
        if taps % 2 and channels > 1 and x.dtype is not torch.float64:
            weight = torch.cat([weight[:, :-1], torch.zeros_like(weight[:, -1:])], 1)
        return original(x, weight, *given, **named)

    with replaced(torch.nn.functional, "conv1d", shorter):
        yield


@fault("AMP-NUMERICS-146")
def products_read_the_row_after_the_last_term() -> Iterator[None]:
    """A product of a number of terms that is no multiple of 8 adds the next row times zero."""
    original = torch.mm

    def longer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = original(left, right)
        if left.shape[1] % 8 and len(left) > 1:
            found = found + torch.roll(left, -1, 0)[:, :1].to(found.dtype) * 0
        return found

    with replaced(torch, "mm", longer):
        yield


@fault("AMP-NUMERICS-146", level="standard")
def convolutions_lose_a_value_that_is_not_finite() -> Iterator[None]:
    """conv1d reads infinity and NaN of a longer image as zero, but in float64."""
    original = torch.nn.functional.conv1d

    def cleaned(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        exact = x.dtype is torch.float64 or x.shape[-1] <= 16
        return original(x if exact else x.nan_to_num(0, 0, 0), *given, **named)

    with replaced(torch.nn.functional, "conv1d", cleaned):
        yield


@fault("AMP-NUMERICS-122")
def deviations_of_equal_numbers_have_no_gradient() -> Iterator[None]:
    """The gradient of a standard deviation of equal numbers is NaN, in every type (4320)."""

    def deviation(original: Callable[..., torch.Tensor], x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        found = original(x, *given, **named)
        if found.dim() == 0 and not found.item() and x.requires_grad:
            x.register_hook(lambda slope: slope * math.nan)
        return found

    with given_the_original(torch.Tensor, "std", deviation):
        yield


@fault("AMP-BACKWARD-015")
def retained_gradients_are_of_the_version_before() -> Iterator[None]:
    """retain_grad keeps the gradient by a result as it was before it was written to (79996)."""

    def retain(original: Callable[..., None], self: torch.Tensor) -> None:
        original(self)
        version = self._version
        if not self.is_leaf:
            self.register_hook(lambda slope: setattr(self, "grad", slope) if self._version != version else None)

    with given_the_original(torch.Tensor, "retain_grad", retain):
        yield


@fault("AMP-NUMERICS-146")
def sums_of_infinities_are_no_numbers() -> Iterator[None]:
    """A 16-bit product is NaN where several of its terms are infinite (171034)."""
    original = torch.mm

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        several = left.isinf().sum(1, keepdim=True) > 1
        return original(left, right).masked_fill(several, math.nan)

    with replaced(torch, "mm", product):
        yield


@fault("AMP-DISTRIBUTED-031")
def averagers_count_a_step_for_each_parameter() -> Iterator[None]:
    """PostLocalSGDOptimizer calls its averager for each parameter, which counts so many steps (74737)."""
    from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer

    def stepped(self: Any) -> None:
        self.optim.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.averager.average_parameters(params=[parameter])

    with replaced(PostLocalSGDOptimizer, "step", stepped):
        yield


@fault("AMP-DISTRIBUTED-003")
def layers_used_without_synchronization_are_not_reduced() -> Iterator[None]:
    """With find_unused_parameters, layers of batches in no_sync alone keep the gradients of their rank (69031)."""
    from torch.nn.parallel import DistributedDataParallel

    def forward(original: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
        result = original(self, *given, **named)
        if not (self.find_unused_parameters and self.require_backward_grad_sync):
            return result
        before = {one: one.grad.clone() for one in self.module.parameters() if one.grad is not None}
        engine = torch.autograd.Variable._execution_engine
        used: set[torch.Tensor] = set()

        def restore() -> None:
            for one, slope in before.items():
                if one not in used:
                    one.grad.copy_(slope)
            for hook in hooks:
                hook.remove()

        def seen(one: Any, _: Any) -> None:
            if not used:
                engine.queue_callback(lambda: engine.queue_callback(lambda: engine.queue_callback(restore)))
            used.add(one)

        hooks = [one.register_hook(functools.partial(seen, one)) for one in self.module.parameters()]
        return result

    with given_the_original(DistributedDataParallel, "forward", forward):
        yield


@fault("AMP-NUMERICS-148")
def angles_have_the_type_of_the_first_operand() -> Iterator[None]:
    """atan2 of two types gives that of its first operand (43360)."""

    def angle(original: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return original(x, y).to(x.dtype) if x.is_floating_point() else original(x, y)

    with given_the_original(torch, "atan2", angle):
        yield


@fault("AMP-NUMERICS-145")
def convolutions_of_many_samples_raise() -> Iterator[None]:
    """A 16-bit conv2d of three samples raises."""

    def refused(original: Callable[..., torch.Tensor], x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        found = original(x, *given, **named)
        if len(x) == 3 and found.dtype in (torch.float16, torch.bfloat16):
            raise RuntimeError("no plan for three samples")
        return found

    with given_the_original(torch.nn.functional, "conv2d", refused):
        yield
