"""The backend with broken parts, or without parts that it may lack, by name, and the contracts that speak of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

_AUTOCAST, _DEVICE = "AutocastPrivateUse1", "PrivateUse1"
_DEVICE_TYPE = "toyacc"
_KEPT: list[torch.library.Library] = []  # what a library registers goes with it


@dataclass(frozen=True)
class Variant:
    """A kernel for each of some overloads under a dispatch key, and patterns over the contracts that it concerns.

    `module` has attributes of the device module; one that is None is missing. No tensor on the device can have one of
    `missing_types`, and no operator whose name, with a "$" at its end, begins with one of `missing_kernels` has a
    kernel. A `habit` is what a correct backend may do otherwise than the CPU. A backend that `fuses` has the CPU's
    kernels of fused optimizers; one without `generators` makes no `torch.Generator`.
    """

    contracts: tuple[str, ...]
    key: str = _DEVICE
    kernels: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    default_dtype: torch.dtype | None = None  # of regions without a dtype
    missing_types: tuple[torch.dtype, ...] = ()
    missing_kernels: tuple[str, ...] = ()
    habit: str = ""
    fuses: bool = False
    generators: bool = True

    def apply(self) -> None:
        """Change the backend of this process, for good."""
        for name, value in self.module.items():
            if value is None:
                delattr(torch.get_device_module(_DEVICE_TYPE), name)
            else:
                setattr(torch.get_device_module(_DEVICE_TYPE), name, value)
        if self.default_dtype is not None:
            torch.set_autocast_dtype(_DEVICE_TYPE, self.default_dtype)
        for dtype in self.missing_types:
            torch.ops.toyacc.lack(dtype)
        for names in self.missing_kernels:
            torch.ops.toyacc.lack_kernels(names)
        if not self.generators:
            torch.ops.toyacc.make_no_generators()
        if self.habit:
            torch.ops.toyacc.take_up(self.habit)
        if self.fuses:
            torch.ops.toyacc.fuse()
        library = torch.library.Library("aten", "IMPL")
        _KEPT.append(library)
        for name, kernel in self.kernels.items():
            library.impl(name, kernel, self.key, allow_override=True)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without(*names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names, torch.library.fallthrough_kernel)


def _casting(dtype: Callable[[], torch.dtype], *names: str, detached: bool = False, double: bool = False) -> Any:
    """Return kernels that cast every floating tensor to `dtype()`, those of float64 too where `double` says so."""

    def kernel_of(name: str) -> Callable[..., Any]:
        def kernel(*args: Any, **keywords: Any) -> Any:
            def cast(value: Any) -> Any:
                fits = isinstance(value, torch.Tensor) and value.is_floating_point()
                if not fits or (value.dtype == torch.float64 and not double):
                    return value
                return (value.detach() if detached else value).to(dtype())

            given, named = tree_map(cast, (args, keywords))
            with torch.autocast(_DEVICE_TYPE, enabled=False):
                return _operator(name)(*given, **named)

        return kernel

    return {name: kernel_of(name) for name in names}


def _amp_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(_DEVICE_TYPE)


def _half() -> torch.dtype:
    return torch.float16


def _single() -> torch.dtype:
    return torch.float32


def _never_infinite(gradients: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))


def _never_growing(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    if found_inf.item():
        scale.mul_(backoff)
    return scale


def _rounded_to_bfloat16(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    made = torch.mm(input.cpu(), other.cpu())
    return made.bfloat16().to(made.dtype).to(input.device)


def _unguarded_product(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """Exclude the autocast key while the product runs, and include it again only where that returns."""
    key = torch._C._dispatch_key_parse(_AUTOCAST)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
    made = torch.mm(input.to(_amp_dtype()), mat2.to(_amp_dtype()))
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    return made


def _not_implemented(*args: Any, **keywords: Any) -> None:
    raise NotImplementedError(
        "convolution_overrideable not implemented. You are likely triggering this with tensor backend other than "
        "CPU/CUDA/MKLDNN, if this is intended, please use TORCH_LIBRARY_IMPL to override this function "
    )


def _stopped(*args: Any, **keywords: Any) -> None:
    """Raise as the dispatcher does where no kernel and no fallthrough is registered for the key."""
    raise NotImplementedError("Could not run 'aten::exp' with arguments from the 'AutocastPrivateUse1' backend.")


def _contiguous_group_norm(input: torch.Tensor, *arguments: Any) -> Any:
    input.view(-1)  # raises for other layouts, as the kernel that torch composes does
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        on_cpu = [one.cpu() if isinstance(one, torch.Tensor) else one for one in (input, *arguments)]
        return tuple(one.to(input.device) for one in torch.native_group_norm(*on_cpu))


def _fused_sgd(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
    *,
    weight_decay: float,
    momentum: float,
    lr: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Step as torch's for-loop does, on each element where it lies."""
    if found_inf is not None and found_inf.item():
        return
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if grad_scale is not None:
            gradient.div_(grad_scale)
        change = (-gradient if maximize else gradient) + weight_decay * parameter
        if momenta:
            held = momenta[place]
            held.copy_(change if is_first_step else momentum * held + (1 - dampening) * change)
            change = change + momentum * held if nesterov else held
        parameter.sub_(lr * change)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    operands = (None if one is None else one.cpu() for one in (input, weight, bias))
    return torch.nn.functional.linear(*operands).to(input.device)


def _linear_backward(
    input: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    x, w = input.cpu(), weight.cpu()
    rows = gradient.cpu().flatten(0, -2) if gradient.dim() > 1 else gradient.cpu()[None]
    columns = x.flatten(0, -2) if x.dim() > 1 else x[None]
    made = (
        torch.mm(rows, w).reshape(x.shape) if mask[0] else None,
        torch.mm(rows.t(), columns) if mask[1] else None,
        rows.sum(0) if mask[2] else None,
    )
    return tuple(None if one is None else one.to(input.device) for one in made)


# Some thirty rules, as a backend may lack that copied an old list.
_MANY = (
    "bmm", "addmm", "addbmm", "baddbmm", "mv", "matmul", "softmax.int", "log_softmax.int", "layer_norm", "group_norm",
    "exp", "log", "log2", "log10", "log1p", "pow.Tensor_Scalar", "rsqrt", "sum", "sum.dim_IntList", "prod", "cumsum",
    "norm.Scalar", "mse_loss", "l1_loss", "nll_loss", "smooth_l1_loss", "kl_div", "cosine_similarity", "addcdiv",
    "addcmul", "cat", "stack", "dot",
)  # fmt: skip

VARIANTS = {
    "bmm_has_no_rule": Variant(("AMP-CAST-*",), _AUTOCAST, _without("bmm")),
    "thirty_rules_are_missing": Variant(("AMP-CAST-*", "AMP-LOSS-*"), _AUTOCAST, _without(*_MANY)),
    "convolutions_have_no_rule": Variant(
        ("AMP-CAST-*",), _AUTOCAST, _without("conv2d", "conv1d", "_convolution", "convolution")
    ),
    "softmax_stays_in_16_bits": Variant(("AMP-CAST-*",), _AUTOCAST, _without("softmax.int", "log_softmax.int")),
    "normalizations_stay_in_16_bits": Variant(("AMP-CAST-*",), _AUTOCAST, _without("layer_norm", "group_norm")),
    "sums_stay_in_16_bits": Variant(("AMP-CAST-*",), _AUTOCAST, _without("sum", "sum.dim_IntList")),
    "exp_is_lowered": Variant(("AMP-CAST-*",), _AUTOCAST, _casting(_amp_dtype, "exp")),
    "a_rule_that_is_not_declared": Variant(("AMP-CAST-037",), _AUTOCAST, _casting(_amp_dtype, "relu")),
    "exp_stops_at_the_autocast_key": Variant(("AMP-CAST-*",), _AUTOCAST, {"exp": _stopped}),
    "losses_stay_in_16_bits": Variant(("AMP-LOSS-*", "AMP-CAST-*"), _AUTOCAST, _without("mse_loss", "l1_loss")),
    "unsafe_loss_is_allowed": Variant(("AMP-LOSS-*", "AMP-CAST-*"), _AUTOCAST, _without("binary_cross_entropy")),
    "addcmul_is_not_promoted": Variant(("AMP-CAST-*",), _AUTOCAST, _without("addcmul", "addcdiv")),
    "linear_runs_in_fp32": Variant(("AMP-CAST-*",), _AUTOCAST, _casting(_single, "linear")),
    "bf16_regions_compute_in_fp16": Variant(("AMP-CAST-*",), _AUTOCAST, _casting(_half, "mm", "linear", "addmm")),
    "a_listed_dtype_has_no_tensors": Variant(("AMP-REGION-113",), missing_types=(torch.float16, torch.complex32)),
    "float64_is_lowered": Variant(("AMP-CAST-*",), _AUTOCAST, _casting(_amp_dtype, "mm", double=True)),
    "weights_are_cast_each_time": Variant(("AMP-CACHE-*",), _AUTOCAST, _casting(_amp_dtype, "linear")),
    "casts_lose_the_gradient": Variant(
        ("AMP-BACKWARD-*",), _AUTOCAST, _casting(_amp_dtype, "linear", "mm", detached=True)
    ),
    "inf_is_not_found": Variant(
        ("AMP-SCALE-*",), _DEVICE, {"_amp_foreach_non_finite_check_and_unscale_": _never_infinite}
    ),
    "scale_never_grows": Variant(("AMP-SCALE-*",), _DEVICE, {"_amp_update_scale_": _never_growing}),
    "default_dtype_has_no_regions": Variant(
        ("AMP-REGION-00*",), module={"get_amp_supported_dtype": lambda: [torch.bfloat16]}
    ),
    "failing_products_switch_the_rules_off": Variant(("AMP-CAST-116",), _AUTOCAST, {"mm": _unguarded_product}),
    "products_are_rounded_to_bf16": Variant(("AMP-NUMERICS-*",), _DEVICE, {"mm": _rounded_to_bfloat16}),
}

# How the kernels begin that small backends leave out: of linear algebra, transforms, norms, rare losses and poolings,
# and of what optimizers use. "$" ends a name.
_RARE = (
    "linalg_", "_linalg_", "cholesky", "geqrf", "ormqr", "lu_", "_fft_", "special_", "norm_except_dim", "_weight_norm",
    "hypot", "heaviside", "nextafter", "lerp", "native_batch_norm", "roll", "flip", "cumprod", "_logcumsumexp",
    "median", "kthvalue", "mode", "histc", "bincount", "searchsorted", "bucketize", "_unique", "_cdist", "_pdist",
    "renorm", "_ctc_loss", "multi_margin_loss", "multilabel_margin_loss", "grid_sampler", "_embedding_bag", "im2col",
    "col2im", "fractional_max_pool", "max_unpool", "adaptive_max_pool", "max_pool3d", "avg_pool3d", "upsample_",
    "_upsample_", "reflection_pad", "replication_pad", "rrelu", "multinomial", "poisson", "igamma", "polygamma",
    "digamma", "lgamma", "erfinv", "segment_reduce", "index_reduce", "scatter_reduce", "trace$", "fake_quantize",
)  # fmt: skip

# Functions that torch documents for a device module, and regions do without.
_FUNCTIONS = (
    "is_initialized", "set_device", "synchronize", "get_device_properties", "get_rng_state", "set_rng_state", "device",
    "manual_seed", "manual_seed_all", "_is_in_bad_fork", "is_bf16_supported",
)  # fmt: skip

# What a correct backend may lack. Its cases are UNSUPPORTED, and no contract fails.
LACKING = {
    "no_convolutions": Variant(
        ("AMP-TRANSFORM-00[12]", "AMP-CAST-021", "AMP-CAST-031", "AMP-RECIPE-038", "AMP-NUMERICS-120"),
        kernels={"convolution_overrideable": _not_implemented},
    ),
    "no_group_norm_of_channels_last": Variant(
        ("AMP-NUMERICS-06[239]", "AMP-NUMERICS-122"), kernels={"native_group_norm": _contiguous_group_norm}
    ),
    "few_functions_in_the_module": Variant(
        ("AMP-RECIPE-039", "AMP-RECIPE-04[01]", "AMP-REGION-00*", "AMP-SCALE-00*"),
        module=dict.fromkeys(_FUNCTIONS),
    ),
    # As MPS has: of such a kernel torch has no forward derivative, and its backward keeps both operands.
    "linear_is_one_kernel": Variant(
        (
            "AMP-BACKWARD-016", "AMP-BACKWARD-039", "AMP-BACKWARD-056", "AMP-RECIPE-019", "AMP-MEMORY-001",
            "AMP-MEMORY-003", "AMP-MEMORY-006", "AMP-MEMORY-012", "AMP-MEMORY-01[45]", "AMP-TRANSFORM-00[18]",
            "AMP-NUMERICS-121",
        ),
        kernels={"linear": _linear, "linear_backward": _linear_backward},
    ),
    "no_generators": Variant(("AMP-NUMERICS-01[0-4]", "AMP-NUMERICS-114"), generators=False),
    "no_float16": Variant(
        ("AMP-CAST-01*", "AMP-CAST-02*", "AMP-REGION-00*", "AMP-SCALE-00*", "AMP-BF16-00*"),
        module={"get_amp_supported_dtype": lambda: [torch.bfloat16]},
        default_dtype=torch.bfloat16,
    ),
    "no_bfloat16": Variant(
        ("AMP-CAST-01*", "AMP-CAST-02*", "AMP-REGION-00*", "AMP-SCALE-00*", "AMP-BF16-00*"),
        module={"get_amp_supported_dtype": lambda: [torch.float16], "is_bf16_supported": None},
    ),
    # No tensor can have the type, as of float64 on MPS. The contracts are those whose checks asked for it regardless.
    "few_kernels": Variant(
        (
            "AMP-CACHE-057", "AMP-OPTIMIZER-103", "AMP-OPTIMIZER-104", "AMP-OPTIMIZER-105", "AMP-OPTIMIZER-113",
            "AMP-OPTIMIZER-120", "AMP-CLIP-032", "AMP-CLIP-036", "AMP-NUMERICS-085", "AMP-NUMERICS-12[0258]",
            "AMP-TRANSFORM-020", "AMP-BF16-023", "AMP-CAST-110",
        ),
        missing_kernels=_RARE,
    ),
    "no_complex_numbers": Variant(
        ("AMP-BACKWARD-030", "AMP-OPTIMIZER-103", "AMP-CLIP-092", "AMP-CLIP-094"),
        missing_types=(torch.complex32, torch.complex64, torch.complex128),
    ),
    "no_sparse_tensors": Variant(
        ("AMP-SCALE-0*", "AMP-CLIP-094", "AMP-OPTIMIZER-112"), missing_kernels=("_sparse_coo_tensor",)
    ),
    "no_tensors_of_float16": Variant(
        (
            "AMP-REGION-042", "AMP-CACHE-015", "AMP-LOSS-013", "AMP-CLIP-046", "AMP-CLIP-062", "AMP-SCALE-102",
            "AMP-SCALE-124", "AMP-SCALE-149", "AMP-SCALE-153", "AMP-PARITY-040", "AMP-RECIPE-007", "AMP-API-021",
            "AMP-NUMERICS-030", "AMP-NUMERICS-070", "AMP-OPTIMIZER-028", "AMP-CAST-048", "AMP-REGION-037",
            "AMP-REGION-115", "AMP-SCALE-021", "AMP-SCALE-195", "AMP-CLIP-092", "AMP-BF16-011", "AMP-TRANSFORM-014",
            "AMP-COMPILE-00[12]", "AMP-COMPILE-02[01]", "AMP-COMPILE-065", "AMP-COMPILE-067", "AMP-COMPILE-069",
        ),
        module={"get_amp_supported_dtype": lambda: [torch.bfloat16]},
        default_dtype=torch.bfloat16,
        missing_types=(torch.float16, torch.complex32),
    ),
    "no_tensors_of_bfloat16": Variant(
        (
            "AMP-REGION-037", "AMP-REGION-090", "AMP-REGION-111", "AMP-CACHE-006", "AMP-BACKWARD-070", "AMP-CLIP-016",
            "AMP-SCALE-008", "AMP-CAST-022", "AMP-RECIPE-050", "AMP-OPTIMIZER-011", "AMP-OPTIMIZER-047",
            "AMP-NUMERICS-090", "AMP-COMPILE-010", "AMP-COMPILE-020", "AMP-COMPILE-065",
        ),
        module={"get_amp_supported_dtype": lambda: [torch.float16], "is_bf16_supported": None},
        missing_types=(torch.bfloat16,),
    ),
    "no_tensors_of_float64": Variant(
        (
            "AMP-REGION-002", "AMP-BACKWARD-030", "AMP-BACKWARD-068", "AMP-CAST-01[018]", "AMP-CAST-040",
            "AMP-CAST-044", "AMP-CAST-068", "AMP-SCALE-028", "AMP-SCALE-180", "AMP-CLIP-016", "AMP-TRANSFORM-001",
            "AMP-PARITY-041", "AMP-OPTIMIZER-024", "AMP-OPTIMIZER-103", "AMP-NUMERICS-106", "AMP-CAST-023",
            "AMP-CAST-115", "AMP-OPTIMIZER-1[02]*", "AMP-BF16-010", "AMP-NUMERICS-119", "AMP-NUMERICS-122",
            "AMP-TRANSFORM-009", "AMP-TRANSFORM-02[12]", "AMP-COMPILE-00[14]", "AMP-COMPILE-067", "AMP-COMPILE-074",
        ),
        missing_types=(torch.float64, torch.complex128),
    ),
}  # fmt: skip

# Fused optimizers by the CPU's kernels, which are known to be at fault, but for one kernel of its own that is not.
FUSED = {
    "a_fused_sgd_of_its_own": Variant(("AMP-OPTIMIZER-046",), kernels={"_fused_sgd_": _fused_sgd}, fuses=True),
}

# What a backend has to have: the arithmetic, the products and the copies that training and the checks themselves need.
_ALWAYS = (
    "abs", "add", "addmm", "alias", "all", "amax", "amin", "any", "arange", "as_strided", "bernoulli",
    "bitwise_and", "bitwise_not", "bitwise_or", "bmm", "cat", "clone", "copy", "convolution_overrideable",
    "convolution_backward_overrideable", "detach", "diagonal", "div", "dropout", "embedding",
    "embedding_dense_backward", "empty", "empty_like", "empty_strided", "eq", "equal", "exp", "expand", "eye",
    "fill", "full", "full_like", "gather", "ge", "gt", "index", "index_select", "isclose", "isfinite", "isinf",
    "isnan", "is_same_size", "le", "linear", "linspace", "log", "logical_and", "logical_not", "lt", "masked_fill",
    "max", "maximum", "mean", "min", "minimum", "mm", "mse_loss", "mse_loss_backward", "mul", "native_dropout",
    "native_layer_norm", "native_layer_norm_backward", "ne", "neg", "nll_loss_backward", "nll_loss_forward",
    "nonzero", "normal", "ones", "ones_like", "permute", "pow", "rand", "randint", "randn", "random", "randperm",
    "reciprocal", "relu", "reshape", "resize", "rsqrt", "rsub", "scalar_tensor", "scatter", "select", "set",
    "sigmoid", "slice", "sort", "split", "sqrt", "squeeze", "sub", "sum", "t", "tanh", "threshold_backward",
    "transpose", "unbind", "unfold", "uniform", "unsqueeze", "view", "view_as_complex", "view_as_real", "where",
    "zero", "zeros", "zeros_like", "imag", "real", "conj", "_amp_foreach_non_finite_check_and_unscale",
    "_amp_update_scale", "_conj", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_log_softmax",
    "_log_softmax_backward_data", "_reshape_alias", "_softmax", "_softmax_backward_data", "_to_copy",
)  # fmt: skip


def without_drawn_kernels(seed: int, count: int) -> Variant:
    """Return a backend that lacks so many kernels of others, which the seed chooses: no case of it may fail."""
    found = set()
    for operator in torch._C._dispatch_get_all_op_names():
        name = operator.removeprefix("aten::").partition(".")[0]
        if operator.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"):
            found |= {name} if name.rstrip("_") not in _ALWAYS else set()
    drawn = random.Random(seed).sample(sorted(found), count)
    return Variant(("*",), missing_kernels=tuple(f"{name}$" for name in drawn))


# What torch leaves to a backend. Its cases pass, or are UNSUPPORTED.
VARIED = {
    "results_are_contiguous": Variant(
        ("AMP-CAST-05*", "AMP-MEMORY-01*", "AMP-REGION-115"), habit="results are contiguous"
    ),
    "functions_are_off_by_a_rounding": Variant(
        ("AMP-NUMERICS-045", "AMP-NUMERICS-06[0-4]", "AMP-NUMERICS-122", "AMP-LOSS-00[3-6]"),
        habit="functions are off by a rounding",
    ),
    "subnormals_are_zero": Variant(
        (
            "AMP-SCALE-02[01]", "AMP-SCALE-14[2478]", "AMP-SCALE-15[0289]", "AMP-NUMERICS-002", "AMP-NUMERICS-04[2-5]",
            "AMP-NUMERICS-051", "AMP-NUMERICS-100", "AMP-NUMERICS-115",
        ),
        habit="subnormals are zero",
    ),
}  # fmt: skip
