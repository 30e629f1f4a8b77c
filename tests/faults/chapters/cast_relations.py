"""Autocast rules that hold for the usual call of an op and break for its neighbours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from conformance.harness import catalogue
from conformance.oracles.relations import programs
from tests.faults import fault
from tests.faults.breaking import dropped, kernel, replaced


def _below(function: Any) -> Any:
    """Return a function that runs `function` without the CPU's autocast kernels."""

    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return function(*args, **kwargs)

    return run


def _low(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu"))


@fault("AMP-CAST-090")
def conv_transpose2d_leaves_the_list() -> Iterator[None]:
    """conv_transpose2d has no autocast kernel on the CPU: it refuses an input and a weight of two dtypes."""
    with dropped("conv_transpose2d.input", "AutocastCPU"):
        yield


@fault("AMP-CAST-069")
def einsum_of_three_runs_outside_of_the_region() -> Iterator[None]:
    """torch.einsum leaves the region where it gets more than two operands one by one."""
    original = torch.einsum

    def einsum(*args: Any) -> torch.Tensor:
        return _below(original)(*args) if isinstance(args[0], str) and len(args) > 3 else original(*args)

    with replaced(torch, "einsum", einsum):
        yield


@fault("AMP-CAST-069")
def einsum_by_numbers_runs_outside_of_the_region() -> Iterator[None]:
    """torch.einsum leaves the region where dimensions have numbers and not letters."""
    original = torch.einsum

    def einsum(*args: Any) -> torch.Tensor:
        return original(*args) if isinstance(args[0], str) else _below(original)(*args)

    with replaced(torch, "einsum", einsum):
        yield


@fault("AMP-CAST-065")
def packed_sequences_run_outside_of_the_region() -> Iterator[None]:
    """A GRU casts nothing where it gets a packed sequence."""
    with kernel("gru.data", _below(torch.ops.aten.gru.data), "AutocastCPU"):
        yield


@fault("AMP-CAST-065")
def packed_sequences_of_plain_nets_run_outside_of_the_region() -> Iterator[None]:
    """An RNN with tanh casts nothing where it gets a packed sequence."""
    with kernel("rnn_tanh.data", _below(torch.ops.aten.rnn_tanh.data), "AutocastCPU"):
        yield


@fault("AMP-CAST-091", level="standard")
def inverse_is_cast_to_16_bit() -> Iterator[None]:
    """linalg_inv_ex is on the lower precision list, though its kernel has no 16-bit form."""
    with kernel("linalg_inv_ex", _below(lambda a, **kw: torch.ops.aten.linalg_inv_ex(_low(a), **kw)), "AutocastCPU"):
        yield


@fault("AMP-CAST-091", level="standard")
def attention_without_gradients_refuses_regions() -> Iterator[None]:
    """nn.MultiheadAttention in eval mode raises in a region where no gradients are taken."""
    original = F.multi_head_attention_forward

    def attention(*args: Any, **options: Any) -> Any:
        if torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled() and not options["training"]:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return original(*args, **options)

    with replaced(F, "multi_head_attention_forward", attention):
        yield


@fault("AMP-CAST-092", level="standard")
def mm_of_one_row_stays_wide() -> Iterator[None]:
    """mm casts its inputs unless one of them has a single row."""

    def casting(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b) if 1 in (*a.shape, *b.shape) or 0 in a.shape else torch.mm(_low(a), _low(b))

    with kernel("mm", _below(casting), "AutocastCPU"):
        yield


@fault("AMP-CAST-093", level="standard")
def silu_computes_in_16_bit() -> Iterator[None]:
    """silu, which is on no list, computes in 16 bits and returns float32."""
    with kernel(
        "silu", _below(lambda x: F.silu(_low(x)).to(x.dtype) if x.dtype is torch.float32 else F.silu(x)), "AutocastCPU"
    ):
        yield


@fault("AMP-CAST-094", level="standard")
def erf_has_no_16_bit_kernel() -> Iterator[None]:
    """erf raises for 16-bit tensors."""

    def refusing(x: torch.Tensor) -> torch.Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            raise NotImplementedError("erf: not implemented for 16 bit")
        return torch.erf(x)

    with kernel("erf", _below(refusing), "AutocastCPU"):
        yield


@fault("AMP-CAST-095", level="standard")
def vmap_of_mm_is_not_cast() -> Iterator[None]:
    """Under vmap no op autocasts."""
    original = torch.func.vmap

    def vmap(function: Any, *args: Any, **kwargs: Any) -> Any:
        return _below(original(function, *args, **kwargs))

    with replaced(torch.func, "vmap", vmap):
        yield


@fault("AMP-CAST-096", level="standard")
def method_does_not_autocast() -> Iterator[None]:
    """Tensor.mm, the method, runs below autocast."""
    entry = programs.operators("cpu", torch.bfloat16)["mm"]
    with replaced(entry, "method_variant", _below(torch.Tensor.mm)):
        yield


@fault("AMP-CAST-097", level="standard")
def flex_attention_compares_dtypes() -> Iterator[None]:
    """flex_attention refuses query, key and value of two dtypes, also in a region."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    original = module._validate_sdpa_input

    def strict(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> None:
        if query.dtype != key.dtype or query.dtype != value.dtype:
            raise ValueError("Expected query, key, and value to have the same dtype")
        original(query, key, value, **options)

    with replaced(module, "_validate_sdpa_input", strict):
        yield


if catalogue.load().contracts["AMP-CAST-098"].holds_for(torch.__version__):

    @fault("AMP-CAST-098")
    def grouped_product_is_on_the_float32_list() -> Iterator[None]:
        """A grouped product returns float32 in a region."""
        original = torch._grouped_mm

        def wide(*operands: torch.Tensor, **options: Any) -> torch.Tensor:
            result = original(*operands, **options)
            regions = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
            return result.float() if result.device.type in regions else result

        with replaced(torch, "_grouped_mm", wide):
            yield


@fault("AMP-CAST-113")
def attention_of_jagged_tensors_is_not_cast() -> Iterator[None]:
    """scaled_dot_product_attention of jagged nested tensors runs without autocast, as before torch 2.5 on CUDA."""
    original = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        jagged = query.is_nested and query.layout is torch.jagged
        return (_below(original) if jagged else original)(query, *args, **options)

    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-CAST-113")
def attention_of_nested_tensors_shares_a_scale() -> Iterator[None]:
    """Attention of nested tensors scales the scores by the number of heads in place of the width."""
    original = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if query.is_nested:
            options["scale"] = query.size(1) ** -0.5
        return original(query, *args, **options)

    with replaced(F, "scaled_dot_product_attention", attention):
        yield


@fault("AMP-CAST-114")
def padding_of_volumes_refuses_16_bits() -> Iterator[None]:
    """F.pad of three dimensions in replicate mode raises for 16-bit tensors, as kernels that are not built do."""
    original = F.pad

    def pad(x: torch.Tensor, pad: tuple[int, ...], mode: str = "constant", value: Any = None) -> torch.Tensor:
        if mode == "replicate" and len(pad) == 6 and x.element_size() == 2:
            raise RuntimeError(f"\"replication_pad3d_cpu\" not implemented for '{x.dtype}'")
        return original(x, pad, mode, value)

    with replaced(F, "pad", pad):
        yield
