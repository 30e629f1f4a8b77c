"""Defects that PyTorch shipped before 2.6, planted again, with their numbers in docs/evidence/upstream.

Each names the contract of which the table says that it would have shown the defect.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.distributed.fsdp import sharded_grad_scaler
from torch.nn import functional
from torch.optim import adagrad, adam, sparse_adam, swa_utils
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import dropped, edited, kernel, replaced


@fault("AMP-BACKWARD-054")
def recomputation_in_the_default_dtype() -> Iterator[None]:
    """Reentrant checkpoints recompute with the default dtype of the device, not the region's (71169)."""
    plain = checkpoint._get_autocast_kwargs

    def kwargs(device_type: str = "cuda") -> Any:
        device, cpu = plain(device_type)
        for one in (device, cpu):
            if one is not None:
                one["dtype"] = torch.bfloat16 if one["dtype"] is torch.float16 else torch.float16
        return device, cpu

    with replaced(checkpoint, "_get_autocast_kwargs", kwargs):
        yield


@fault("AMP-CAST-006")
def cat_in_a_cpu_region_does_not_promote() -> Iterator[None]:
    """torch.cat ignores the promote policy in a CPU region and takes the type of its first tensor (87684)."""

    def cat(tensors: Any, dim: int = 0) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.cat([one.to(tensors[0].dtype) for one in tensors], dim)

    with kernel("cat", cat, "AutocastCPU"):
        yield


@fault("AMP-BACKWARD-028")
def custom_backward_runs_in_the_default_dtype() -> Iterator[None]:
    """custom_bwd opens a region without the dtype of forward (87979)."""
    plain = autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if inspect.stack()[1].function == "decorate_bwd":
            dtype = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
        plain(self, device_type, dtype, *args, **options)

    with replaced(autocast_mode.autocast, "__init__", init):
        yield


@fault("AMP-OPTIMIZER-100")
def foreach_refuses_a_float64_default_type() -> Iterator[None]:
    """The foreach Adam raises where float64 is the default type (110940, 111671)."""
    plain = adam._multi_tensor_adam

    def step(*args: Any, **options: Any) -> None:
        if torch.get_default_dtype() is torch.float64:
            raise RuntimeError("value cannot be converted to type float without overflow")
        plain(*args, **options)

    with replaced(adam, "_multi_tensor_adam", step):
        yield


@fault("AMP-OPTIMIZER-112")
def sparse_optimizer_refuses_gradients_without_entries() -> Iterator[None]:
    """SparseAdam raises on a sparse gradient without entries (82486)."""
    plain = sparse_adam.SparseAdam.step

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.grad._nnz() == 0:
                    raise ValueError("SparseAdam does not support gradients without entries")
        return plain(self, closure)

    with replaced(sparse_adam.SparseAdam, "step", step):
        yield


@fault("AMP-OPTIMIZER-113")
def averaged_model_forgets_the_buffers() -> Iterator[None]:
    """AveragedModel leaves the buffers alone with use_buffers=False (84053)."""
    plain = swa_utils.AveragedModel.update_parameters

    def update(self: Any, model: torch.nn.Module) -> None:
        kept = [one.clone() for one in self.module.buffers()]
        plain(self, model)
        if not self.use_buffers:
            for one, before in zip(self.module.buffers(), kept, strict=True):
                one.copy_(before)

    with replaced(swa_utils.AveragedModel, "update_parameters", update):
        yield


@fault("AMP-DISTRIBUTED-010")
def overflow_is_read_before_its_reduction() -> Iterator[None]:
    """ShardedGradScaler takes found_inf of this rank, as it was before the reduction over the ranks (115710)."""
    # That of one process reduces nothing.
    with replaced(sharded_grad_scaler.ShardedGradScaler, "unscale_", torch.amp.GradScaler.unscale_):
        yield


@fault("AMP-CAST-112")
def fused_product_of_an_encoder_is_not_cast() -> Iterator[None]:
    """The CPU has no rule for _addmm_activation (135936)."""
    with dropped("_addmm_activation", "AutocastCPU"):
        yield


@fault("AMP-CAST-111")
def fused_inference_is_not_a_number_with_a_mask() -> Iterator[None]:
    """A fused encoder layer gives NaN in rows of a sequence with padding (118628)."""
    plain = torch._transformer_encoder_layer_fwd

    def layer(*given: Any) -> torch.Tensor:
        out = plain(*given)
        return out if given[-2] is None else torch.full_like(out, float("nan"))

    with replaced(torch, "_transformer_encoder_layer_fwd", layer):
        yield


@fault("AMP-REGION-050")
def refused_dtypes_raise() -> Iterator[None]:
    """torch.autocast("cpu", dtype=torch.float32) raises after its warning (100565)."""
    plain = autocast_mode.autocast.__enter__

    def enter(self: Any) -> Any:
        if self.device == "cpu" and self.fast_dtype is torch.float32:
            raise RuntimeError("Currently, AutocastCPU only support Bfloat16 or Half as the autocast_cpu_dtype")
        return plain(self)

    with replaced(autocast_mode.autocast, "__enter__", enter):
        yield


@fault("AMP-SCALE-183")
def scaler_asserts_its_device_type() -> Iterator[None]:
    """GradScaler refuses device types other than cuda, cpu and xla (119358)."""
    plain = torch.amp.GradScaler.__init__

    def init(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
        if str(device).partition(":")[0] not in ("cuda", "cpu", "xla"):
            raise AssertionError(device)
        plain(self, device, *args, **options)

    with replaced(torch.amp.GradScaler, "__init__", init):
        yield


@fault("AMP-NUMERICS-088")
def block_masks_are_read_in_part() -> Iterator[None]:
    """Attention with a boolean mask takes whole blocks of hidden keys for visible ones (108503, 127055)."""
    plain = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **options: Any) -> Any:
        if attn_mask is not None and attn_mask.dtype is torch.bool and attn_mask.shape[-1] >= 32:
            attn_mask = attn_mask.clone()
            attn_mask[..., :16] = True
        return plain(query, key, value, attn_mask, *args, **options)

    with replaced(functional, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-OPTIMIZER-102")
def step_is_loaded_in_the_type_of_the_parameter() -> Iterator[None]:
    """load_state_dict casts the number of steps to the type of the parameter (75224)."""
    cast = torch.optim.Optimizer._process_value_according_to_param_policy

    def process(param: Any, value: Any, param_id: int, param_groups: Any, key: Any = None) -> Any:
        loaded = cast(param, value, param_id, param_groups, key)
        return loaded.to(param.dtype) if key == "step" else loaded

    with replaced(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(process)):
        yield


@fault("AMP-OPTIMIZER-112")
def foreach_leaves_groups_behind_a_sparse_one_unmoved() -> Iterator[None]:
    """The foreach Adagrad ends at its first group with a sparse gradient (110444)."""
    with edited(adagrad._multi_tensor_adagrad, "            continue\n", "            return\n"):
        yield


@fault("AMP-NUMERICS-080")
def cosine_of_float16_is_zero_or_infinite() -> Iterator[None]:
    """cosine_similarity multiplies squared norms in float16 (69512)."""

    def cosine(a: Any, b: Any, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
        squares = (a * a).sum(dim) * (b * b).sum(dim)
        return (a * b).sum(dim) / squares.sqrt().clamp(min=eps)

    with replaced(functional, "cosine_similarity", cosine), replaced(torch, "cosine_similarity", cosine):
        yield


@fault("AMP-NUMERICS-084")
def norm_of_order_1_stops_growing() -> Iterator[None]:
    """The 1-norm of a long bfloat16 vector is added up in bfloat16 and stops at 256 (92164)."""
    plain = torch.Tensor.norm

    def norm(x: torch.Tensor, p: Any = "fro", *args: Any, **options: Any) -> torch.Tensor:
        found = plain(x, p, *args, **options)
        return found.clamp(max=256) if p == 1 and found.dtype is torch.bfloat16 else found

    with replaced(torch.Tensor, "norm", norm):
        yield
