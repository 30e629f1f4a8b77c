"""Casts of the wrong op, the wrong argument, or to the wrong type, and kernels that are wrong inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.faults import fault
from tests.faults.breaking import dropped, kernel


def _below(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run without the autocast kernels of `key`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return function(*args, **kwargs)

    return run


def _low(tensor: Any, device_type: str = "cpu", keep: tuple[torch.dtype, ...] = (torch.float64,)) -> Any:
    """Cast to the region's dtype what is floating and not of a type in `keep`."""
    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype not in keep:
        return tensor.to(torch.get_autocast_dtype(device_type))
    return tensor


def _wide(tensor: Any) -> Any:
    return tensor.float() if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor


@fault("AMP-CAST-001")
def cuda_op_leaves_the_lower_precision_list() -> Iterator[None]:
    """addmv has no autocast kernel on CUDA."""
    with dropped("addmv", "AutocastCUDA"):
        yield


@fault("AMP-CAST-001")
def cuda_op_moves_to_float32() -> Iterator[None]:
    """bmm is on the float32 list of CUDA."""
    moved = _below("AutocastCUDA", lambda a, b: torch.bmm(_wide(a), _wide(b)))
    with kernel("bmm", moved, "AutocastCUDA"):
        yield


@fault("AMP-CAST-002")
def cuda_softmax_stays_16_bit() -> Iterator[None]:
    """softmax has no autocast kernel on CUDA."""
    with dropped("softmax.int", "AutocastCUDA"):
        yield


@fault("AMP-CAST-002")
def cuda_overload_is_forgotten() -> Iterator[None]:
    """pow of a number to a tensor, one of three overloads, has no autocast kernel on CUDA."""
    with dropped("pow.Scalar", "AutocastCUDA"):
        yield


@fault("AMP-CAST-003")
def widest_type_is_that_of_the_first() -> Iterator[None]:
    """addcmul on CUDA runs in the type of its first input."""

    def first(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, value: float = 1) -> torch.Tensor:
        return torch.addcmul(a, b.to(a.dtype), c.to(a.dtype), value=value)

    with kernel("addcmul", _below("AutocastCUDA", first), "AutocastCUDA"):
        yield


@fault("AMP-CAST-004")
def cpu_op_leaves_the_lower_precision_list() -> Iterator[None]:
    """baddbmm has no autocast kernel on the CPU."""
    with dropped("baddbmm", "AutocastCPU"):
        yield


@fault("AMP-CAST-004")
def cpu_convolution_with_named_padding_is_forgotten() -> Iterator[None]:
    """conv2d with padding="same", an overload of its own, has no autocast kernel on the CPU."""
    with dropped("conv2d.padding", "AutocastCPU"):
        yield


@fault("AMP-CAST-005")
def cpu_op_leaves_the_float32_list() -> Iterator[None]:
    """avg_pool3d has no autocast kernel on the CPU."""
    with dropped("avg_pool3d", "AutocastCPU"):
        yield


@fault("AMP-CAST-006")
def cpu_cat_lowers() -> Iterator[None]:
    """cat on the CPU runs in the region's dtype, whatever its inputs are."""
    lowered = _below("AutocastCPU", lambda tensors, dim=0: torch.cat([_low(x) for x in tensors], dim))
    with kernel("cat", lowered, "AutocastCPU"):
        yield


@fault("AMP-CAST-008")
def undocumented_op_leaves_its_list() -> Iterator[None]:
    """huber_loss has no autocast kernel on CUDA."""
    with dropped("huber_loss", "AutocastCUDA"):
        yield


@fault("AMP-CAST-009", "AMP-CAST-012")
def product_is_computed_in_float32() -> Iterator[None]:
    """mm on the CPU computes in float32 and rounds its result alone."""

    def precise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _low(torch.mm(_wide(a), _wide(b)))

    with kernel("mm", _below("AutocastCPU", precise), "AutocastCPU"):
        yield


@fault("AMP-CAST-009")
def scaling_of_the_addend_is_forgotten() -> Iterator[None]:
    """addmm on the CPU drops beta and alpha under autocast."""

    def plain(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: float) -> torch.Tensor:
        return torch.addmm(_low(c), _low(a), _low(b))

    with kernel("addmm", _below("AutocastCPU", plain), "AutocastCPU"):
        yield


@fault("AMP-CAST-010")
def product_kernel_is_a_hundredth_too_large() -> Iterator[None]:
    """bmm on the CPU is wrong below autocast, so that casting by hand gives the same wrong result."""

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2) * 1.01

    with kernel("bmm", wrong, "CPU"):
        yield


@fault("AMP-CAST-011")
def float32_in_name_only() -> Iterator[None]:
    """trace on the CPU is summed in 16 bit and widened."""
    narrow = _below("AutocastCPU", lambda x: torch.trace(x).to(x.dtype).float())
    with kernel("trace", narrow, "AutocastCPU"):
        yield


@fault("AMP-CAST-012")
def bias_is_not_cast() -> Iterator[None]:
    """linear on CUDA casts its input and weight and forgets the bias."""

    def partial(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(_low(x, "cuda"), _low(w, "cuda"), b)

    with kernel("linear", _below("AutocastCUDA", partial), "AutocastCUDA"):
        yield


@fault("AMP-CAST-012")
def input_is_cast_twice() -> Iterator[None]:
    """mm on the CPU casts its first input to the region's dtype, back, and there again."""

    def twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(_low(_wide(_low(a))), _low(b))

    with kernel("mm", _below("AutocastCPU", twice), "AutocastCPU"):
        yield


@fault("AMP-CAST-013")
def relu_is_on_the_cuda_list() -> Iterator[None]:
    """relu runs in float32 on CUDA."""
    with kernel("relu", _below("AutocastCUDA", lambda x: torch.relu(_wide(x))), "AutocastCUDA"):
        yield


@fault("AMP-CAST-014")
def softmax_is_on_the_cpu_list() -> Iterator[None]:
    """softmax runs in float32 on the CPU, as it does on CUDA."""
    listed = _below("AutocastCPU", lambda x, dim, dtype=None: torch.softmax(x, dim, dtype=dtype or torch.float32))
    with kernel("softmax.int", listed, "AutocastCPU"):
        yield


@fault("AMP-CAST-015")
def addition_is_on_the_lower_precision_list() -> Iterator[None]:
    """add runs in the region's dtype on the CPU."""
    lowered = _below("AutocastCPU", lambda x, y, alpha=1: torch.add(_low(x), _low(y), alpha=alpha))
    with kernel("add.Tensor", lowered, "AutocastCPU"):
        yield


@fault("AMP-CAST-052")
def in_place_product_is_lowered() -> Iterator[None]:
    """addmm_ on the CPU rounds its operands to the region's dtype."""

    def lowered(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **scales: float) -> torch.Tensor:
        return c.addmm_(_low(a).to(a.dtype), _low(b).to(b.dtype), **scales)

    with kernel("addmm_", _below("AutocastCPU", lowered), "AutocastCPU"):
        yield


@fault("AMP-CAST-052")
def product_with_out_is_lowered() -> Iterator[None]:
    """mm with out= on the CPU rounds its operands to the region's dtype."""

    def lowered(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.mm(_low(a).to(a.dtype), _low(b).to(b.dtype), out=out)

    with kernel("mm.out", _below("AutocastCPU", lowered), "AutocastCPU"):
        yield


@fault("AMP-CAST-018")
def explicit_dtype_is_overwritten() -> Iterator[None]:
    """sum on CUDA returns float32 whatever dtype the caller asks for."""

    def deaf(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> torch.Tensor:
        return torch.sum(x, dim, keepdim, dtype=torch.float32)

    with kernel("sum.dim_IntList", _below("AutocastCUDA", deaf), "AutocastCUDA"):
        yield


@fault("AMP-CAST-044")
def float64_is_lowered() -> Iterator[None]:
    """mm on the CPU casts float64 inputs as well."""
    eager = _below("AutocastCPU", lambda a, b: torch.mm(_low(a, keep=()), _low(b, keep=())))
    with kernel("mm", eager, "AutocastCPU"):
        yield


@fault("AMP-CAST-044")
def integers_become_float32() -> Iterator[None]:
    """prod on the CPU casts integers to float32."""
    eager = _below("AutocastCPU", lambda x, dim, keepdim=False, dtype=None: torch.prod(x.float(), dim, keepdim))
    with kernel("prod.dim_int", eager, "AutocastCPU"):
        yield


@fault("AMP-CAST-022")
def other_16_bit_type_passes_for_the_right_one() -> Iterator[None]:
    """mm on the CPU casts float32 inputs only."""
    keep = (torch.float64, torch.float16, torch.bfloat16)
    lazy = _below("AutocastCPU", lambda a, b: torch.mm(_low(a, keep=keep), _low(b, keep=keep)))
    with kernel("mm", lazy, "AutocastCPU"):
        yield


@fault("AMP-CAST-024")
def binary_cross_entropy_is_not_refused() -> Iterator[None]:
    """binary_cross_entropy runs in a CUDA region."""
    with dropped("binary_cross_entropy", "AutocastCUDA"):
        yield


@fault("AMP-CAST-026")
def cpu_binary_cross_entropy_leaves_its_list() -> Iterator[None]:
    """binary_cross_entropy has no autocast kernel on the CPU."""
    with dropped("binary_cross_entropy", "AutocastCPU"):
        yield


@fault("AMP-CAST-046")
def cast_detaches_the_weight() -> Iterator[None]:
    """linear on the CPU casts a detached weight, which gets no gradient."""

    def detached(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(_low(x), _low(w.detach()), _low(b))

    with kernel("linear", _below("AutocastCPU", detached), "AutocastCPU"):
        yield


@fault("AMP-CAST-031")
def cast_loses_the_memory_format() -> Iterator[None]:
    """conv2d on CUDA casts to contiguous copies."""

    def contiguous(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *rest: Any) -> torch.Tensor:
        return torch.conv2d(_low(x, "cuda").contiguous(), _low(w, "cuda").contiguous(), _low(b, "cuda"), *rest)

    with kernel("conv2d", _below("AutocastCUDA", contiguous), "AutocastCUDA"):
        yield


@fault("AMP-CAST-036")
def registration_is_lost_where_no_result_shows_it() -> Iterator[None]:
    """layer_norm has no autocast kernel on CUDA, while native_layer_norm has."""
    with dropped("layer_norm", "AutocastCUDA"):
        yield
