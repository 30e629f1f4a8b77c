"""Ops that join a list, and autocast kernels that are wrong for some arguments, some regions, or inside only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from conformance.self_check.planting import autocast_key
from tests.faults import fault
from tests.faults.breaking import kernel
from tests.faults.cast_rules import RULES, Rule, cast, following, is_castable, ruled

Arguments = dict[str, Any]

# Overloads that no list of the device type names: the list they join, and at which level a contract looks at
# their results.
_JOINED = (
    ("add.Tensor", "cuda", "lower_precision", "quick", "AMP-CAST-013"),
    ("mul.Tensor", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("mean.dim", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("sigmoid", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("tanh", "cuda", "lower_precision", "quick", "AMP-CAST-013"),
    ("gelu", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("sqrt", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("where.self", "cuda", "lower_precision", "quick", "AMP-CAST-013"),
    ("max_pool2d", "cuda", "lower_precision", "quick", "AMP-CAST-013"),
    ("batch_norm", "cuda", "fp32", "quick", "AMP-CAST-013"),
    ("cat", "cuda", "lower_precision", "quick", "AMP-CAST-015"),
    ("stack", "cuda", "fp32", "quick", "AMP-CAST-015"),
    ("silu", "cuda", "lower_precision", "standard", "AMP-CAST-013"),
    ("relu", "cpu", "lower_precision", "quick", "AMP-CAST-014"),
    ("mul.Tensor", "cpu", "lower_precision", "quick", "AMP-CAST-014"),
    ("gelu", "cpu", "lower_precision", "quick", "AMP-CAST-014"),
    ("softmax.int", "cpu", "lower_precision", "quick", "AMP-CAST-014"),
    ("layer_norm", "cpu", "fp32", "quick", "AMP-CAST-014"),
    ("exp", "cpu", "fp32", "quick", "AMP-CAST-014"),
    ("sum.dim_IntList", "cpu", "fp32_set_dtype", "quick", "AMP-CAST-014"),
    ("pow.Tensor_Tensor", "cpu", "fp32", "quick", "AMP-CAST-014"),
    ("silu", "cpu", "fp32", "standard", "AMP-CAST-014"),
    ("embedding", "cpu", "lower_precision", "standard", "AMP-CAST-014"),
    ("index_select", "cpu", "lower_precision", "standard", "AMP-CAST-014"),
    ("cumsum", "cpu", "fp32_set_dtype", "standard", "AMP-CAST-014"),
    ("upsample_bilinear2d.vec", "cpu", "fp32", "standard", "AMP-CAST-014"),
    # An op of the operator database that the suite has no sample of, and one that only comes to be known
    ("nan_to_num", "cpu", "lower_precision", "standard", "AMP-CAST-037 AMP-CAST-049"),
    ("nan_to_num", "xpu", "idle", "quick", "AMP-CAST-037"),
)


def _joins(overload: str, device_type: str, rule: str, level: str, contracts: str) -> None:
    def breakage() -> Iterator[None]:
        with ruled(overload, rule, device_type):
            yield

    breakage.__name__ = f"{overload.replace('.', '_')}_joins_the_ops_of_{device_type}"
    breakage.__doc__ = f"{overload}, which no list names, has a kernel for {device_type}: {rule}."
    fault(*contracts.split(), level=level)(breakage)


for _row in _JOINED:
    _joins(*_row)


def broken(
    overload: str, device_type: str, *contracts: str, level: str = "quick"
) -> Callable[[Callable[[Any, Arguments, torch.dtype], Any]], Rule]:
    """Register a rule as a fault: what autocast does with the overload in regions of the device type."""

    def register(rule: Rule) -> Rule:
        def breakage() -> Iterator[None]:
            with following(overload, rule, device_type):
                yield

        breakage.__name__, breakage.__doc__ = rule.__name__, rule.__doc__
        fault(*contracts, level=level)(breakage)
        return rule

    return register


def _but(named: Arguments, dtype: torch.dtype, *names: str) -> Arguments:
    """All castable arguments cast, but for those of these names."""
    return {**named, **cast({name: value for name, value in named.items() if name not in names}, dtype)}


def _only(named: Arguments, dtype: torch.dtype, *names: str) -> Arguments:
    """The arguments of these names cast, and no others."""
    return {**named, **cast({name: named[name] for name in names}, dtype)}


def _all(named: Arguments, change: Callable[[torch.Tensor], Any]) -> Arguments:
    changed: Arguments = tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, named)
    return changed


def _tensors(named: Arguments) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(named) if isinstance(leaf, torch.Tensor)]


# Nothing is registered: the op itself looks at autocast.


@fault("AMP-CAST-014", level="standard")
def mish_casts_without_a_registration() -> Iterator[None]:
    """mish on the CPU returns the region's dtype, by its kernel of autograd."""

    def looks(x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.aten.mish(x)
        return result.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else result

    with kernel("mish", looks, "AutogradCPU"):
        yield


# The right dtype, and the wrong precision inside.


def _one_unit_off(result: torch.Tensor) -> torch.Tensor:
    result.view(-1)[-1:] = torch.nextafter(result.view(-1)[-1:], torch.full_like(result.view(-1)[-1:], torch.inf))
    return result


def _truncated(x: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of float32, without a cast."""
    return (x.view(torch.int32) & -0x10000).view(torch.float32) if x.dtype is torch.float32 else x


@broken("conv1d", "cpu", "AMP-CAST-038")
def last_element_of_a_convolution_is_one_unit_off(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """conv1d on the CPU: the last element of its result is the next larger number."""
    return _one_unit_off(op(**cast(named, amp_dtype)))


@broken("stack", "cpu", "AMP-CAST-042")
def last_element_of_a_stack_is_one_unit_off(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """stack on the CPU: the last element of its result is the next larger number."""
    return _one_unit_off(RULES["widest"](op, named, amp_dtype))


@broken("mse_loss", "cpu", "AMP-CAST-039")
def loss_in_float32_has_16_bits(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mse_loss on the CPU returns a float32 of which the lower half is zero."""
    return _truncated(op(**cast(named, torch.float32)))


@broken("smooth_l1_loss", "cpu", "AMP-CAST-039", level="standard")
def float32_inputs_of_a_loss_have_16_bits(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """smooth_l1_loss on the CPU clears the lower half of its float32 inputs."""
    return op(**_all(cast(named, torch.float32), _truncated))


@broken("avg_pool3d", "cpu", "AMP-CAST-039")
def pool_in_float32_has_16_bits(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """avg_pool3d on the CPU runs in the type of its input and widens its result."""
    return op(**named).float()


@broken("linalg_vecdot", "cuda", "AMP-CAST-038")
def product_of_16_bits_is_taken_in_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """linalg_vecdot on CUDA casts its inputs, widens them again, and rounds its result."""
    return op(**cast(cast(named, amp_dtype), torch.float32)).to(amp_dtype)


@broken("mv", "cuda", "AMP-CAST-038")
def product_is_rounded_after_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mv on CUDA computes in the type of its inputs and rounds its result."""
    return op(**cast(named, torch.float32)).to(amp_dtype)


@broken("group_norm", "cuda", "AMP-CAST-039", level="standard")
def norm_in_float32_sees_rounded_inputs(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """group_norm on CUDA rounds its inputs to 16 bits before it widens them."""
    return op(**cast(cast(named, amp_dtype), torch.float32))


# A cast of the wrong arguments only.


@broken("baddbmm", "cuda", "AMP-CAST-038")
def addend_is_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """baddbmm on CUDA casts its factors and not its addend."""
    return op(**_but(named, amp_dtype, "self"))


@broken("layer_norm", "cuda", "AMP-CAST-039")
def norm_casts_its_weights_alone(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """layer_norm on CUDA casts weight and bias and not its input."""
    return op(**_but(named, torch.float32, "input"))


@broken("nll_loss", "cpu", "AMP-CAST-039")
def loss_casts_its_class_weights_alone(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """nll_loss on the CPU casts the weights of the classes and not its input."""
    return op(**_only(named, torch.float32, "weight"))


@broken("scatter_add", "cuda", "AMP-CAST-042")
def widest_type_is_that_of_the_source(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """scatter_add on CUDA runs in the type of what is added."""
    return op(**_only(named, named["src"].dtype, "self"))


@broken("prelu", "cpu", "AMP-CAST-038")
def activation_casts_its_weight_alone(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """prelu on the CPU casts its weight and not its input."""
    return op(**_only(named, amp_dtype, "weight"))


@broken("cdist", "mps", "AMP-CAST-039")
def second_input_alone_is_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cdist on MPS casts its second input."""
    return op(**_only(named, torch.float32, "x2"))


@broken("quantile", "cpu", "AMP-CAST-039")
def second_tensor_is_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """quantile on the CPU casts its input and not the quantiles."""
    return op(**_but(named, torch.float32, "q"))


@broken("lstm_cell", "cuda", "AMP-CAST-038")
def state_of_a_cell_is_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """lstm_cell on CUDA does not look into the list with its state."""
    return op(**_but(named, amp_dtype, "hx"))


@broken("einsum", "xpu", "AMP-CAST-038")
def first_of_a_list_alone_is_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """einsum on XPU casts the first of its operands."""
    first, *others = named["tensors"]
    return op(**{**named, "tensors": [first.to(amp_dtype), *others]})


# A cast that breaks the graph.


@broken("conv2d", "cpu", "AMP-CAST-046")
def cast_detaches_the_weight_of_a_convolution(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """conv2d on the CPU casts a detached weight."""
    return op(**cast({**named, "weight": named["weight"].detach()}, amp_dtype))


@broken("linear", "cpu", "AMP-CAST-046")
def cast_detaches_the_bias(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """linear on the CPU casts a detached bias."""
    bias = named.get("bias")
    return op(**cast({**named, "bias": bias if bias is None else bias.detach()}, amp_dtype))


@broken("cat", "cpu", "AMP-CAST-046")
def cast_detaches_what_is_in_a_list(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cat on the CPU detaches those of its inputs that it casts."""
    wide = any(x.dtype is torch.float32 for x in named["tensors"])
    target = torch.float32 if wide else amp_dtype
    detached = [x.detach().to(target) if is_castable(x) and x.dtype is not target else x for x in named["tensors"]]
    return op(**{**named, "tensors": detached})


@broken("mse_loss", "cpu", "AMP-CAST-046")
def cast_detaches_the_target(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mse_loss on the CPU casts a detached target."""
    return op(**cast({**named, "target": named["target"].detach()}, torch.float32))


@broken("prelu", "cpu", "AMP-CAST-046")
def cast_detaches_the_weight_of_an_activation(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """prelu on the CPU casts a detached weight."""
    return op(**cast({**named, "weight": named["weight"].detach()}, amp_dtype))


@broken("linalg_vecdot", "cpu", "AMP-CAST-046", level="standard")
def cast_detaches_a_factor(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """linalg_vecdot on the CPU casts a detached second factor."""
    return op(**cast({**named, "y": named["y"].detach()}, amp_dtype))


@broken("reflection_pad1d", "cpu", "AMP-CAST-046", level="standard")
def cast_detaches_the_input(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """reflection_pad1d on the CPU casts a detached input."""
    return op(**cast(_all(named, torch.Tensor.detach), torch.float32))


# A cast that leaves the memory format.


def _contiguous(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format) if is_castable(x) else x


@broken("mm", "cpu", "AMP-CAST-045", level="standard")
def cast_straightens_a_transposed_matrix(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mm on the CPU casts to row-major copies."""
    return op(**_all(named, lambda x: _contiguous(x, amp_dtype)))


@broken("conv3d", "cpu", "AMP-CAST-045", level="standard")
def cast_straightens_a_volume(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """conv3d on the CPU casts to contiguous copies, also what is channels-last."""
    return op(**_all(named, lambda x: _contiguous(x, amp_dtype)))


@broken("conv2d", "mps", "AMP-CAST-045", level="standard")
def cast_straightens_the_weight_alone(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """conv2d on MPS casts its weight to a contiguous copy."""
    return op(**{**cast(named, amp_dtype), "weight": _contiguous(named["weight"], amp_dtype)})


@broken("upsample_nearest2d", "cuda", "AMP-CAST-045", level="standard")
def widening_straightens_an_image(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """upsample_nearest2d on CUDA casts to contiguous copies."""
    return op(**_all(named, lambda x: _contiguous(x, torch.float32)))


# Casts of float64, integers and complex numbers.


def _any_float(named: Arguments, dtype: torch.dtype) -> Arguments:
    return _all(named, lambda x: x.to(dtype) if x.is_floating_point() else x)


@broken("exp", "cuda", "AMP-CAST-044")
def float64_is_narrowed_to_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """exp on CUDA casts float64 to float32."""
    return op(**_any_float(named, torch.float32))


@broken("sum.dim_IntList", "cuda", "AMP-CAST-044")
def sum_of_float64_is_asked_for_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """sum on CUDA asks for float32 whatever the type of its input."""
    return op(**{**named, "dtype": named.get("dtype") or torch.float32})


@broken("norm.Scalar", "cuda", "AMP-CAST-044")
def norm_of_float64_is_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """norm on CUDA asks for float32 whatever the type of its input."""
    return torch.ops.aten.norm.ScalarOpt_dtype(named["self"], named.get("p", 2), dtype=torch.float32)


@broken("cat", "cpu", "AMP-CAST-044")
def float64_in_a_list_is_narrowed(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cat on the CPU casts float64 to float32 where it finds both."""
    wide = any(x.dtype in (torch.float32, torch.float64) for x in named["tensors"])
    return op(**_any_float(named, torch.float32 if wide else amp_dtype))


@broken("baddbmm", "cpu", "AMP-CAST-044", level="standard")
def float64_is_lowered_beside_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """baddbmm on the CPU lowers float64 where another argument is float32."""
    if any(is_castable(x) for x in _tensors(named)):
        return op(**_any_float(named, amp_dtype))
    return op(**named)


@broken("addcdiv", "cuda", "AMP-CAST-044", level="standard")
def float64_is_lowered_by_promotion(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """addcdiv on CUDA brings float64 to float32."""
    return op(**_any_float(named, torch.float32))


@broken("exp", "xpu", "AMP-CAST-044", level="standard")
def integers_are_widened(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """exp on XPU casts integers to float32."""
    return op(**_all(named, lambda x: x if x.is_complex() or x.dtype is torch.float64 else x.float()))


@broken("cat", "cpu", "AMP-CAST-044")
def integers_are_lowered(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cat on the CPU casts integers to the region's dtype."""
    named = _all(named, lambda x: x.to(amp_dtype) if x.dtype is torch.int64 else x)
    return RULES["widest"](op, named, amp_dtype)


@broken("index_put", "cuda", "AMP-CAST-044")
def bools_are_lowered(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """index_put on CUDA casts bools to the region's dtype, masks too."""
    named = _all(named, lambda x: x.to(amp_dtype) if x.dtype is torch.bool else x)
    return RULES["widest"](op, named, amp_dtype)


@broken("mm", "cpu", "AMP-CAST-044")
def complex_numbers_lose_their_imaginary_part(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mm on the CPU casts complex numbers."""
    return op(**_all(named, lambda x: x.real.to(amp_dtype) if x.is_complex() else x.to(amp_dtype)))


# Weights past the cache.


@broken("mm", "cpu", "AMP-CACHE-001")
def product_casts_its_weight_each_time(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """mm on the CPU casts its weight at each call, past the cache."""
    return op(**cast(named, amp_dtype))


# Only in some regions, or for some inputs.


Where = Callable[[Arguments, torch.dtype], bool]


def spares(
    overload: str, device_type: str, policy: str, *contracts: str, level: str = "quick"
) -> Callable[[Where], Where]:
    """Register as a fault: the overload follows its policy, but casts nothing where the predicate holds."""

    def register(where: Where) -> Where:
        def rule(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
            return RULES["idle" if where(named, amp_dtype) else policy](op, named, amp_dtype)

        rule.__name__, rule.__doc__ = where.__name__, where.__doc__
        broken(overload, device_type, *contracts, level=level)(rule)
        return where

    return register


def _floating(named: Arguments) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(named) if tensor.is_floating_point()]


@spares("conv1d", "cpu", "lower_precision", "AMP-CAST-038", level="standard")
def float16_region_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """conv1d on the CPU casts nothing in a float16 region."""
    return amp_dtype is torch.float16


@spares("layer_norm", "cuda", "fp32", "AMP-CAST-039", level="standard")
def bfloat16_region_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """layer_norm on CUDA casts nothing in a bfloat16 region."""
    return amp_dtype is torch.bfloat16


@spares("prod", "cpu", "fp32", "AMP-CAST-045")
def tensors_without_dimensions_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """prod on the CPU casts nothing that has no dimension."""
    return named["self"].dim() == 0


@spares("huber_loss", "cuda", "fp32", "AMP-CAST-045", level="standard")
def zero_dimensional_inputs_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """huber_loss on CUDA casts nothing where its input has no dimension."""
    return named["self"].dim() == 0


@spares("exp", "cuda", "fp32", "AMP-CAST-045")
def empty_tensors_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """exp on CUDA casts no tensor without elements."""
    return named["self"].numel() == 0


@spares("mm", "cpu", "lower_precision", "AMP-CAST-032", "AMP-CAST-045")
def strided_tensors_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """mm on the CPU casts nothing where a factor is not contiguous."""
    return any(not tensor.is_contiguous() for tensor in _floating(named))


@spares("stack", "cpu", "widest", "AMP-CAST-045")
def expanded_tensors_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """stack on the CPU leaves expanded inputs to the promotion of the op itself."""
    return any(0 in tensor.stride() for tensor in _floating(named))


@spares("conv2d", "xpu", "lower_precision", "AMP-CAST-045", level="standard")
def channels_last_images_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """conv2d on XPU casts nothing where its input is channels-last."""
    x = named["input"]
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@spares("mse_loss", "cpu", "fp32", "AMP-CAST-046")
def inputs_of_a_loss_that_require_gradients_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """mse_loss on the CPU casts nothing where an input requires a gradient."""
    return any(tensor.requires_grad for tensor in _floating(named))


@spares("linear", "cpu", "lower_precision", "AMP-CAST-060", "AMP-CAST-062")
def layer_without_bias_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """linear on the CPU casts nothing where there is no bias."""
    return named.get("bias") is None


@spares("matmul", "cuda", "lower_precision", "AMP-CAST-060", "AMP-CAST-063")
def product_of_four_dimensions_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """matmul on CUDA casts nothing of four dimensions."""
    return any(tensor.dim() > 3 for tensor in _floating(named))


@spares("mm", "cpu", "lower_precision", "AMP-CACHE-001")
def inference_mode_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """mm on the CPU casts nothing in inference mode."""
    return torch.is_inference_mode_enabled()


@spares("addmm", "cpu", "lower_precision", "AMP-CAST-021", "AMP-CAST-038", level="standard")
def factors_that_are_low_already_are_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """addmm on the CPU casts nothing where its first argument is in the region's dtype already."""
    return named["self"].dtype is amp_dtype


@broken("scaled_dot_product_attention", "cuda", "AMP-CAST-038")
def attention_mask_is_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """scaled_dot_product_attention on CUDA does not cast its mask."""
    return op(**_but(named, amp_dtype, "attn_mask"))


@broken("multi_margin_loss", "cpu", "AMP-CAST-039")
def class_weights_of_a_margin_loss_are_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """multi_margin_loss on the CPU does not cast the weights of its classes."""
    return op(**_but(named, torch.float32, "weight"))


@broken("linalg_matrix_rank.atol_rtol_tensor", "cpu", "AMP-CAST-039")
def relative_tolerance_is_not_cast(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """linalg_matrix_rank on the CPU does not cast its relative tolerance."""
    return op(**_but(named, torch.float32, "rtol"))


@broken("conv2d", "cpu", "AMP-CAST-054")
def convolution_casts_its_weight_each_time(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """conv2d on the CPU casts its weight at each call, past the cache."""
    return op(**cast(named, amp_dtype))


@spares("group_norm", "cuda", "fp32", "AMP-CAST-053")
def norm_without_weights_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """group_norm on CUDA casts nothing where it has no weight."""
    return named.get("weight") is None


@spares("conv1d", "cuda", "lower_precision", "AMP-CAST-053", level="standard")
def convolution_without_bias_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """conv1d on CUDA casts nothing where there is no bias."""
    return named.get("bias") is None


@spares("smooth_l1_loss", "cuda", "fp32", "AMP-CAST-053", level="standard")
def loss_that_is_not_reduced_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """smooth_l1_loss on CUDA casts nothing where it is not asked for a mean."""
    return named.get("reduction", 1) != 1


@fault("AMP-CAST-052")
def in_place_product_autocasts() -> Iterator[None]:
    """addmm_ on the CPU multiplies in the amp dtype and puts the result into its float32 argument."""

    def run(self: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **scalars: Any) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            low = torch.get_autocast_dtype("cpu")
            return self.copy_(torch.addmm(self.to(low), left.to(low), right.to(low), **scalars))

    with kernel("addmm_", run, "AutocastCPU"):
        yield


@fault("AMP-CAST-014", "AMP-CAST-049")
def kernel_below_asks_whether_autocast_is_on() -> Iterator[None]:
    """relu's kernel on the CPU returns the amp dtype where autocast is on, which a trace of its casts would hide."""

    def run(x: torch.Tensor) -> torch.Tensor:
        result = x.clamp_min(0)
        on = torch.is_autocast_enabled("cpu") and x.dtype is torch.float32
        return result.to(torch.get_autocast_dtype("cpu")) if on else result

    with kernel("relu", run, "CPU"):
        yield


@spares("addmm", "cpu", "lower_precision", "AMP-CAST-055")
def product_without_its_addend_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """addmm on the CPU casts nothing where beta is zero."""
    return named.get("beta", 1) == 0


@spares("baddbmm", "cpu", "lower_precision", "AMP-CAST-055")
def batched_product_without_its_addend_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """baddbmm on the CPU casts nothing where beta is zero."""
    return named.get("beta", 1) == 0


@spares("addr", "cuda", "lower_precision", "AMP-CAST-055")
def outer_product_without_its_addend_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """addr on CUDA casts nothing where beta is zero."""
    return named.get("beta", 1) == 0


@broken("cat", "cpu", "AMP-CAST-056")
def cat_does_not_ask_empty_tensors(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cat on the CPU promotes to the widest type of the tensors that have elements."""
    full = [one for one in named["tensors"] if one.numel()]
    if not full or len(full) == len(named["tensors"]):
        return RULES["widest"](op, named, amp_dtype)
    widest = functools.reduce(torch.promote_types, [one.dtype for one in full])
    return op(**{**named, "tensors": [one.to(widest) for one in full]})


@broken("ctc_loss.IntList", "cpu", "AMP-CAST-055")
def ctc_loss_without_infinities_rounds_its_input(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """ctc_loss on the CPU rounds float32 numbers to the amp dtype where it gives zeros in place of infinities."""
    if named.get("zero_infinity", False):
        named = {**named, "log_probs": named["log_probs"].to(amp_dtype)}
    return RULES["fp32"](op, named, amp_dtype)


@spares("linear", "cpu", "lower_precision", "AMP-CAST-056")
def linear_of_a_vector_without_bias_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """linear on the CPU casts nothing where the input is a vector and there is no bias."""
    return named["input"].dim() == 1 and named.get("bias") is None


@spares("conv2d", "cuda", "lower_precision", "AMP-CAST-056", level="standard")
def convolution_of_one_image_without_bias_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """conv2d on CUDA casts nothing where the input has no batch dimension and there is no bias."""
    return named["input"].dim() == 3 and named.get("bias") is None


@spares("sum.dim_IntList", "cuda", "fp32_set_dtype", "AMP-CAST-055")
def sum_that_keeps_its_dimension_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """sum on CUDA stays in its input's type where it keeps the dimension."""
    return bool(named.get("keepdim", False))


@spares("einsum", "cuda", "lower_precision", "AMP-CAST-056", level="standard")
def einsum_of_three_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """einsum on CUDA casts nothing where it has more than two operands."""
    return len(named["tensors"]) > 2


@spares("conv2d", "cpu", "lower_precision", "AMP-CAST-057", level="standard")
def convolution_in_inference_mode_is_forgotten(named: Arguments, amp_dtype: torch.dtype) -> bool:
    """conv2d on the CPU casts nothing in inference mode."""
    return torch.is_inference_mode_enabled()


# What a policy promises that another promise does not cover.


@broken("cumsum", "cuda", "AMP-CAST-040")
def a_dtype_that_is_asked_for_is_overruled(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """cumsum on CUDA is called with float32 whatever dtype it is asked for."""
    return op(**{**named, "dtype": torch.float32})


@broken("prod.dim_int", "cuda", "AMP-CAST-040", level="standard")
def product_is_widened_before_it_is_taken(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """prod on CUDA casts its input in place of asking for a dtype."""
    return op(**cast(named, torch.float32))


@broken("binary_cross_entropy", "cuda", "AMP-CAST-043")
def cross_entropy_of_probabilities_is_allowed(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """binary_cross_entropy on CUDA runs in float32 in place of being refused."""
    return op(**cast(named, torch.float32))


@broken("addcmul", "cuda", "AMP-CAST-047")
def third_operand_is_not_asked(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """addcmul on CUDA promotes to the widest type of its first two operands."""
    wide = torch.float32 in (named["self"].dtype, named["tensor1"].dtype)
    return op(**cast(named, torch.float32 if wide else amp_dtype))


@broken("stack", "cpu", "AMP-CAST-048")
def stack_refuses_the_other_type_after_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """stack on the CPU refuses a tensor of the other 16-bit type where one of float32 stands before it, too."""
    if any(one.dtype not in (amp_dtype, torch.float32) for one in _tensors(named) if is_castable(one)):
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return RULES["widest"](op, named, amp_dtype)


@broken("bilinear", "cuda", "AMP-CAST-029")
def bilinear_with_a_bias_runs_in_float32(op: Any, named: Arguments, amp_dtype: torch.dtype) -> Any:
    """bilinear on CUDA runs in float32 where it has a bias, of whatever type."""
    wide = named.get("bias") is not None
    return RULES["fp32" if wide else "widest"](op, named, amp_dtype)


def _unguarded(overload: str, operator: Callable[..., Any], device_type: str) -> Iterator[None]:
    """Exclude the autocast key while the op runs, and include it again only where the op returns."""
    key = torch._C._dispatch_key_parse(autocast_key(device_type))

    def run(*args: Any, **keywords: Any) -> Any:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        dtype = torch.get_autocast_dtype(device_type)
        given = tree_map(lambda one: one.to(dtype) if is_castable(one) else one, args)
        made = operator(*given, **keywords)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        return made

    with kernel(overload, run, autocast_key(device_type)):
        yield


@fault("AMP-CAST-116")
def failing_product_switches_the_rules_of_a_cpu_off() -> Iterator[None]:
    """mm on the CPU has a guard that an exception does not unwind."""
    yield from _unguarded("mm", torch.ops.aten.mm, "cpu")


@fault("AMP-CAST-116")
def failing_sum_of_products_switches_the_rules_of_cuda_off() -> Iterator[None]:
    """addbmm on CUDA has a guard that an exception does not unwind."""
    yield from _unguarded("addbmm", torch.ops.aten.addbmm, "cuda")
