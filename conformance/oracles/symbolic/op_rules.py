"""What each operation saves for backward (derivatives.yaml), and how it is run; arguments are cast already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..policy.declared import third_party
from .tensors import SymbolicRegion, Value, widest

Rule = Callable[..., Value]


@dataclass(frozen=True)
class Op:
    """`rule` evaluates the operation symbolically, `run` calls torch."""

    rule: Rule
    run: Callable[..., torch.Tensor]


def _saves_input(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), x.shape, x.dtype, saves=(x,))


def _saves_result(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), x.shape, x.dtype, saves_result=True)


def _saves_nothing(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), x.shape, x.dtype)


def _product(region: SymbolicRegion, a: Value, b: Value, shape: tuple[int, ...], *others: Value) -> Value:
    # addmm, mm, bmm: each factor is saved for the other one's gradient.
    saves = (*((a,) if b.grad else ()), *((b,) if a.grad else ()))
    return region.op((a, b, *others), shape, a.dtype, saves=saves)


def has_one_derivative_of_linear(device_type: str) -> bool:
    """Whether `linear` keeps both operands for backward: with a kernel of its own it has one formula of all gradients.

    Elsewhere torch composes it of a transpose and a product (derivatives.yaml: linear, addmm, mm).
    """
    keys = {"mps": "MPS", third_party(): "PrivateUse1"}
    key = keys.get(device_type)
    return key is not None and bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::linear", key))


def _linear(region: SymbolicRegion, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if has_one_derivative_of_linear(region.device_type):
        operands = (x, weight, *(() if bias is None else (bias,)))
        return region.op(operands, (*x.shape[:-1], weight.shape[0]), x.dtype, saves=(x, weight))
    return _product(region, x, weight, (*x.shape[:-1], weight.shape[0]), *(() if bias is None else (bias,)))


def _matmul(region: SymbolicRegion, a: Value, b: Value) -> Value:
    return _product(region, a, b, (*a.shape[:-1], b.shape[-1]))


def _addmm(region: SymbolicRegion, c: Value, a: Value, b: Value) -> Value:
    return _product(region, a, b, (*a.shape[:-1], b.shape[-1]), c)


def _mul(region: SymbolicRegion, a: Value, b: Value) -> Value:
    # Factors of two types: the sum is of the wider one, and each is saved as it came.
    saves = (*((a,) if b.grad else ()), *((b,) if a.grad else ()))
    return region.op((a, b), max(a.shape, b.shape, key=len), widest(a, b), saves=saves)


def _add(region: SymbolicRegion, a: Value, b: Value) -> Value:
    return region.op((a, b), max(a.shape, b.shape, key=len), widest(a, b), passes=True)


def _convolution(
    region: SymbolicRegion, x: Value, weight: Value, *bias: Value, padding: int = 0, stride: int = 1
) -> Value:
    # derivatives.yaml, convolution: one formula for all three gradients, so input and weight are always saved.
    sizes = zip(x.shape[2:], weight.shape[2:], strict=True)
    space = tuple((size + 2 * padding - kernel) // stride + 1 for size, kernel in sizes)
    return region.op((x, weight, *bias), (x.shape[0], weight.shape[0], *space), x.dtype, saves=(x, weight))


def _transposed(region: SymbolicRegion, x: Value, weight: Value, *bias: Value, stride: int = 1) -> Value:
    sizes = zip(x.shape[2:], weight.shape[2:], strict=True)
    space = tuple((size - 1) * stride + kernel for size, kernel in sizes)
    return region.op((x, weight, *bias), (x.shape[0], weight.shape[1], *space), x.dtype, saves=(x, weight))


def _max_pool2d(region: SymbolicRegion, x: Value) -> Value:
    shape = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
    return region.op((x,), shape, x.dtype, saves=(x, region.fresh(shape, torch.int64)))


def _avg_pool2d(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2), x.dtype, saves=(x,))


def _global_pool(region: SymbolicRegion, x: Value) -> Value:
    # adaptive_avg_pool2d to one element is a mean (aten/src/ATen/native/AdaptiveAveragePooling.cpp): saves sizes only.
    return region.op((x,), (*x.shape[:2], 1, 1), x.dtype)


def _layer_norm(region: SymbolicRegion, x: Value, weight: Value, bias: Value) -> Value:
    # native_layer_norm: mean and 1/std of each row, in the type of the weight where that is the wider one.
    rows = x.shape[:-1]
    saved = [region.fresh(rows, widest(x, weight)) for _ in range(2)]
    return region.op((x, weight, bias), x.shape, x.dtype, saves=(x, weight, *saved))


def _group_norm(region: SymbolicRegion, x: Value, weight: Value, bias: Value, *, groups: int = 1) -> Value:
    saved = [region.fresh((x.shape[0], groups), widest(x, weight)) for _ in range(2)]
    return region.op((x, weight, bias), x.shape, x.dtype, saves=(x, weight, *saved))


def _batch_norm(region: SymbolicRegion, x: Value, weight: Value, bias: Value) -> Value:
    # On no list: 16-bit input beside fp32 weights; mean and 1/std of each channel in the type of the weights. What a
    # library reserves beside them is bytes (uint8) and left out of the count.
    saved = [region.fresh((x.shape[1],), widest(x, weight)) for _ in range(2)]
    return region.op((x, weight, bias), x.shape, x.dtype, saves=(x, weight, *saved))


def _dropout(region: SymbolicRegion, x: Value) -> Value:
    # aten/src/ATen/native/Dropout.cpp: a fused kernel, where there is one, saves a mask of bool; the others multiply
    # by noise of the input's type.
    mask = region.fresh(x.shape, x.dtype if region.device_type == "cpu" else torch.bool)
    return region.op((x,), x.shape, x.dtype, saves=(mask,))


def _attention(region: SymbolicRegion, query: Value, key: Value, value: Value) -> Value:
    # The fused kernels keep operands, result, and the log-sum-exp of each row of logits in fp32.
    sums = region.fresh(query.shape[:-1], torch.float32)
    shape = (*query.shape[:-1], value.shape[-1])
    return region.op((query, key, value), shape, query.dtype, saves=(query, key, value, sums), saves_result=True)


def _embedding(region: SymbolicRegion, words: Value, table: Value) -> Value:
    return region.op((table,), (*words.shape, table.shape[-1]), table.dtype, saves=(words,))


def _cat(region: SymbolicRegion, a: Value, b: Value) -> Value:
    return region.op((a, b), (a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:]), widest(a, b))


def _glu(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), (*x.shape[:-1], x.shape[-1] // 2), x.dtype, saves=(x,))


def _mse_loss(region: SymbolicRegion, x: Value, target: Value) -> Value:
    # The result is made for every element and then resized to the mean of them (aten/src/ATen/native/BinaryOps.cpp,
    # the meta function), so its storage stays as large as the input.
    return region.view(region.op((x, target), x.shape, x.dtype, saves=(x, target)), ())


def _huber_loss(region: SymbolicRegion, x: Value, target: Value) -> Value:
    return region.op((x, target), (), x.dtype, saves=(x, target))


def _l1_loss(region: SymbolicRegion, x: Value, target: Value) -> Value:
    # A difference, its absolute value, which saves it, and a mean (aten/src/ATen/native/Loss.cpp).
    return _mean(region, _saves_input(region, region.op((x, target), x.shape, x.dtype, passes=True)))


def _nll_loss(region: SymbolicRegion, x: Value, target: Value) -> Value:
    # Beside its input the total weight, one number.
    return region.op((x,), (), x.dtype, saves=(x, target, region.fresh((), x.dtype)))


def _cross_entropy(region: SymbolicRegion, x: Value, target: Value) -> Value:
    # log_softmax saves its result, in the type of the logits (aten/src/ATen/native/LossNLL.cpp asks for that one);
    # nll_loss, on every fp32 list, saves it in fp32.
    chances = _saves_result(region, x)
    return _nll_loss(region, chances if region.amp_dtype is None else region.cast(chances, torch.float32), target)


def _mean(region: SymbolicRegion, x: Value) -> Value:
    return region.op((x,), (), x.dtype)


def _flatten(region: SymbolicRegion, x: Value) -> Value:
    return region.view(x, (x.shape[0], x.elements // x.shape[0]))


def _rows(region: SymbolicRegion, x: Value) -> Value:
    return region.view(x, (x.elements // x.shape[-1], x.shape[-1]))


def _transpose(region: SymbolicRegion, x: Value) -> Value:
    return region.view(x, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


def _heads(region: SymbolicRegion, x: Value, *, heads: int) -> Value:
    batch, length, width = x.shape
    return region.view(x, (batch, heads, length, width // heads))


def _merge(region: SymbolicRegion, x: Value) -> Value:
    batch, heads, length, width = x.shape
    return region.view(x, (batch, length, heads * width))


def _part(region: SymbolicRegion, x: Value, *, number: int, of: int) -> Value:
    # Its gradient is one of all parts, zeros but for this one.
    return region.view(x, (*x.shape[:-1], x.shape[-1] // of), passes=False)


def _bias(bias: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    return bias[0] if bias else None


def _run_convolution(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor, **options: int) -> torch.Tensor:
    call: Any = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    result: torch.Tensor = call(x, weight, _bias(bias), **options)
    return result


_CONVOLUTION = Op(_convolution, _run_convolution)
_INPUT = ("gelu", "silu", "elu", "selu", "leaky_relu", "hardswish", "hardtanh", "softplus", "mish")
_INPUT_OF_TORCH = ("log1p", "square", "sin", "acos", "abs", "cosh")
_RESULT_OF_TORCH = ("tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal")

OPS: dict[str, Op] = {
    "linear": Op(_linear, lambda *tensors: F.linear(*tensors)),
    "matmul": Op(_matmul, lambda a, b: torch.matmul(a, b)),
    "mm": Op(_matmul, lambda a, b: torch.mm(a, b)),
    "bmm": Op(_matmul, lambda a, b: torch.bmm(a, b)),
    "addmm": Op(_addmm, lambda c, a, b: torch.addmm(c, a, b)),
    "baddbmm": Op(_addmm, lambda c, a, b: torch.baddbmm(c, a, b)),
    "conv1d": _CONVOLUTION,
    "conv2d": _CONVOLUTION,
    "conv3d": _CONVOLUTION,
    "conv_transpose2d": Op(_transposed, lambda x, w, *bias, stride=1: F.conv_transpose2d(x, w, _bias(bias), stride)),
    "relu": Op(_saves_result, lambda x: F.relu(x)),
    "softmax": Op(_saves_result, lambda x: torch.softmax(x, -1)),
    "log_softmax": Op(_saves_result, lambda x: torch.log_softmax(x, -1)),
    **{name: Op(_saves_input, lambda x, name=name: getattr(F, name)(x)) for name in _INPUT},
    **{name: Op(_saves_input, lambda x, name=name: getattr(torch, name)(x)) for name in _INPUT_OF_TORCH},
    **{name: Op(_saves_result, lambda x, name=name: getattr(torch, name)(x)) for name in _RESULT_OF_TORCH},
    "pow": Op(_saves_input, lambda x: torch.pow(x, 3)),
    "cumsum": Op(_saves_nothing, lambda x: torch.cumsum(x, -1)),
    "glu": Op(_glu, lambda x: F.glu(x)),
    "mul": Op(_mul, lambda a, b: a * b),
    "add": Op(_add, lambda a, b: a + b),
    "cat": Op(_cat, lambda a, b: torch.cat([a, b], 1)),
    "dropout": Op(_dropout, lambda x: F.dropout(x, 0.5)),
    "embedding": Op(_embedding, lambda words, table: F.embedding(words, table)),
    "layer_norm": Op(_layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
    "group_norm": Op(_group_norm, lambda x, w, b, groups=1: F.group_norm(x, groups, w, b)),
    "batch_norm": Op(_batch_norm, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "scaled_dot_product_attention": Op(_attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "max_pool2d": Op(_max_pool2d, lambda x: F.max_pool2d(x, 2)),
    "avg_pool2d": Op(_avg_pool2d, lambda x: F.avg_pool2d(x, 2)),
    "global_pool": Op(_global_pool, lambda x: F.adaptive_avg_pool2d(x, 1)),
    "mse_loss": Op(_mse_loss, lambda x, target: F.mse_loss(x, target)),
    "l1_loss": Op(_l1_loss, lambda x, target: F.l1_loss(x, target)),
    "smooth_l1_loss": Op(_mse_loss, lambda x, target: F.smooth_l1_loss(x, target)),
    "huber_loss": Op(_huber_loss, lambda x, target: F.huber_loss(x, target)),
    "nll_loss": Op(_nll_loss, lambda x, target: F.nll_loss(x, target)),
    "cross_entropy": Op(_cross_entropy, lambda x, target: F.cross_entropy(x, target)),
    "mean": Op(_mean, lambda x: x.mean()),
    "flatten": Op(_flatten, lambda x: x.flatten(1)),
    "rows": Op(_rows, lambda x: x.flatten(0, -2)),
    "transpose": Op(_transpose, lambda x: x.transpose(-2, -1)),
    "heads": Op(_heads, lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2)),
    "merge": Op(_merge, lambda x: x.transpose(1, 2).flatten(2)),
    "part": Op(_part, lambda x, number, of: x.chunk(of, -1)[number]),
}
