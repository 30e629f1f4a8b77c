"""Check state, outputs and gradients of custom functions with custom_fwd and custom_bwd."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.numbers.formats import OTHER
from .support import ambient, around_backward, backward_from, gradients, same_gradients


class Product(torch.autograd.Function):
    """A matrix product whose forward and backward record their autocast state."""

    recorded: dict[str, Any] = {}  # noqa: RUF012

    @staticmethod
    def record_state(device_type: str, where: str, *tensors: torch.Tensor) -> None:
        Product.recorded[where] = {
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
            "given": [tensor.dtype for tensor in tensors],
        }


def decorated(device_type: str, cast_inputs: torch.dtype | None = None) -> type[torch.autograd.Function]:
    """Return a new matrix product with the documented decorators of the current torch.amp."""
    keywords = {} if cast_inputs is None else {"cast_inputs": cast_inputs}

    class Decorated(Product):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, **keywords)
        def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(left, right)
            Product.record_state(device_type, "forward", left, right)
            return left.mm(right)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            left, right = ctx.saved_tensors
            Product.record_state(device_type, "backward", gradient)
            return gradient.mm(right.T), left.T.mm(gradient)

    Product.recorded = {}
    return Decorated


def operands(target: Target, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(shape, generator=rng).to(target.device, dtype).requires_grad_() for shape in ((5, 7), (7, 3))
    )


@around_backward
@contract("AMP-BACKWARD-028")
def test_custom_function(case: Case, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    left, right = operands(target, rng)
    function = decorated(target.device_type)
    with target.autocast(amp_dtype):
        output = function.apply(left, right)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    recorded = Product.recorded
    case.equal("enabled in forward", recorded["forward"]["enabled"], True)
    case.equal("types given to forward", recorded["forward"]["given"], [torch.float32, torch.float32])
    case.equal("enabled in backward", recorded["backward"]["enabled"], True)
    case.equal("dtype of the region in backward", recorded["backward"]["dtype"], amp_dtype)
    low_left, low_right = left.detach().to(amp_dtype), right.detach().to(amp_dtype)
    case.identical("output", output.detach(), low_left.mm(low_right))
    case.identical("gradient of the left operand", left.grad, gradient.mm(low_right.T).float())
    case.identical("gradient of the right operand", right.grad, low_left.T.mm(gradient).float())


@around_backward
@contract("AMP-BACKWARD-028")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_custom_function_in_a_checkpoint(
    case: Case, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, reentrant: bool
) -> None:
    """A reentrant checkpoint goes back through the call that backward itself makes."""
    left, right = operands(target, rng)
    function = decorated(target.device_type)
    with target.autocast(amp_dtype):
        output = checkpoint(function.apply, left, right, use_reentrant=reentrant)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    recorded = Product.recorded
    seen = [recorded[where]["enabled"] for where in ("forward", "backward")]
    case.equal("enabled in the recomputed forward and in backward", seen, [True, True])
    case.equal("dtype of the region in backward", recorded["backward"]["dtype"], amp_dtype)
    low_left, low_right = left.detach().to(amp_dtype), right.detach().to(amp_dtype)
    case.identical("gradient of the left operand", left.grad, gradient.mm(low_right.T).float())
    case.identical("gradient of the right operand", right.grad, low_left.T.mm(gradient).float())


@around_backward
@contract("AMP-BACKWARD-028")
def test_custom_function_outside(
    case: Case, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    left, right = operands(target, rng)
    output = decorated(target.device_type).apply(left, right)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    recorded = Product.recorded
    case.equal("enabled in forward", recorded["forward"]["enabled"], False)
    case.equal("enabled in backward", recorded["backward"]["enabled"], False)
    case.identical("output", output.detach(), left.detach().mm(right.detach()))
    case.identical("gradient of the left operand", left.grad, gradient.mm(right.detach().T))
    case.identical("gradient of the right operand", right.grad, left.detach().T.mm(gradient))


@contract("AMP-BACKWARD-028")
def test_custom_function_in_a_region_of_another_device(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    left, right = operands(target, rng)
    with torch.autocast("cpu" if target.device_type == "xpu" else "xpu", dtype=amp_dtype):
        output = decorated(target.device_type).apply(left, right)
        backward_from(output, rng)
    recorded = Product.recorded
    case.equal("enabled in forward", recorded["forward"]["enabled"], False)
    case.equal("enabled in backward", recorded["backward"]["enabled"], False)
    case.identical("output", output.detach(), left.detach().mm(right.detach()))


@pytest.mark.parametrize("given", ["amp", "float32"])
@around_backward
@contract("AMP-BACKWARD-019")
def test_cast_inputs(
    case: Case, around: str, given: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    from_, to = (amp_dtype, torch.float32) if given == "amp" else (torch.float32, amp_dtype)
    left, right = operands(target, rng, from_)
    function = decorated(target.device_type, cast_inputs=to)
    with target.autocast(amp_dtype):
        output = function.apply(left, right)
        case.equal("enabled after forward", torch.is_autocast_enabled(target.device_type), True)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    recorded = Product.recorded
    case.equal("enabled in forward", recorded["forward"]["enabled"], False)
    case.equal("types given to forward", recorded["forward"]["given"], [to, to])
    case.equal("enabled in backward", recorded["backward"]["enabled"], False)
    case.equal("type given to backward", recorded["backward"]["given"], [to])
    cast_left, cast_right = left.detach().to(to), right.detach().to(to)
    case.identical("output", output.detach(), cast_left.mm(cast_right))
    case.identical("gradient of the left operand", left.grad, gradient.mm(cast_right.T).to(from_))
    case.identical("gradient of the right operand", right.grad, cast_left.T.mm(gradient).to(from_))


_SHAPES = ((), (0,), (1,), (4,), (2, 3), (0, 3), (2, 2, 2), (1, 2, 1, 2), (1, 1, 2, 1, 2))


@contract("AMP-BACKWARD-030")
def test_cast_inputs_reach(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    def floats(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(4, generator=rng).to(target.device).to(dtype)

    wide = {"float64": floats(torch.float64)} if target.computes_in(torch.float64) else {}
    low, brief = (dtype if target.computes_in(dtype) else torch.float32 for dtype in (torch.float16, torch.bfloat16))
    integers = torch.arange(4, device=target.device)
    flags = integers > 1
    forms = {f"{len(shape)}-d, {math.prod(shape)} elements": torch.randn(shape, generator=rng) for shape in _SHAPES}
    forms = {name: one.to(target.device) for name, one in forms.items()}
    forms["transposed"] = forms["2-d, 6 elements"].T
    forms["expanded"] = forms["0-d, 1 elements"].expand(3)
    forms["sliced"] = forms["3-d, 8 elements"][..., 1:]
    forms["parameter"] = torch.nn.Parameter(forms["2-d, 6 elements"].clone())
    given: dict[str, Any] = {
        "forms": forms,
        "tensors": [floats(torch.float32), (floats(low), {"deep": floats(brief)})],
        "others": [integers, flags, 3, 2.5, "text", b"bytes", None, True],
        "wide": wide,
        "elsewhere": torch.ones(4, device="meta"),
    }
    seen: list[Any] = []

    @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=amp_dtype)
    def record(ctx: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    with target.autocast(OTHER[amp_dtype] if target.supports(OTHER[amp_dtype]) else amp_dtype):
        record(torch.autograd.function.FunctionCtx(), given, keyword=given["tensors"])
    (args, kwargs) = seen[0]
    found, whole = args[-1], given["tensors"]
    for where, cast in (("positional", found["tensors"]), ("keyword", kwargs["keyword"])):
        case.equal(f"{where}: containers", (type(cast), type(cast[1]), type(cast[1][1])), (list, tuple, dict))
        case.identical(f"{where}: in a list", cast[0], whole[0].to(amp_dtype))
        case.identical(f"{where}: in a tuple in it", cast[1][0], whole[1][0].to(amp_dtype))
        case.identical(f"{where}: in a dict in that", cast[1][1]["deep"], whole[1][1]["deep"].to(amp_dtype))
    for name, tensor in forms.items():
        case.identical(f"float32, {name}", found["forms"][name].detach(), tensor.detach().to(amp_dtype))
    case.true("integers are the same object", found["others"][0] is integers)
    case.true("a tensor of another device is the same object", found["elsewhere"] is given["elsewhere"])
    case.true("booleans are the same object", found["others"][1] is flags)
    case.equal("numbers, text, None", found["others"][2:], given["others"][2:])
    for name, tensor in wide.items():
        case.true(f"{name} is the same object", found["wide"][name] is tensor)


@contract("AMP-BACKWARD-021")
def test_cast_inputs_outside(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    left, right = operands(target, rng)
    output = decorated(target.device_type, cast_inputs=amp_dtype).apply(left, right)
    gradient = backward_from(output, rng)
    case.equal("types given to forward", Product.recorded["forward"]["given"], [torch.float32, torch.float32])
    case.identical("output", output.detach(), left.detach().mm(right.detach()))
    case.identical("gradient of the left operand", left.grad, gradient.mm(right.detach().T))
    with target.autocast(amp_dtype):
        inside = decorated(target.device_type, cast_inputs=amp_dtype).apply(left, right)
    case.equal("control: dtype inside a region", inside.dtype, amp_dtype)


def nothing(*args: Any) -> None:
    return None


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
@contract("AMP-BACKWARD-022")
def test_device_type_of_a_custom_function(case: Case, name: str) -> None:
    decorator = getattr(torch.amp, name)
    for given in (torch.device("cpu"), 0, None):
        for function in (nothing, None):
            case.raises(
                f"{given!r}",
                ValueError,
                functools.partial(decorator, function, device_type=given),
                names=("str|string",),
            )
    kept = decorator(nothing, device_type="cpu")
    case.equal("control: the name that is kept", kept.__name__, "nothing")
    case.equal("control: both spellings", decorator(device_type="cpu")(nothing).__wrapped__, nothing)


@contract("AMP-BACKWARD-066")
def test_deprecated_custom_fwd(case: Case) -> None:
    # Both names of the old module mean CUDA; its autocast state can be set where CUDA is missing.
    seen: list[tuple[bool, torch.dtype, torch.dtype]] = []

    def record(ctx: Any, tensor: torch.Tensor) -> None:
        seen.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), tensor.dtype))

    old = case.warns(
        "custom_fwd", FutureWarning, lambda: torch.cuda.amp.custom_fwd(record), names=("torch.amp.custom_fwd",)
    )
    case.warns("custom_bwd", FutureWarning, lambda: torch.cuda.amp.custom_bwd(record), names=("torch.amp.custom_bwd",))
    new = torch.amp.custom_fwd(record, device_type="cuda")
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        for enabled, dtype in ((True, torch.bfloat16), (True, torch.float16), (False, torch.float16)):
            torch.set_autocast_enabled("cuda", enabled)
            torch.set_autocast_dtype("cuda", dtype)
            contexts = torch.autograd.function.FunctionCtx(), torch.autograd.function.FunctionCtx()
            old(contexts[0], torch.ones(1))
            new(contexts[1], torch.ones(1))
            case.equal(f"state seen, enabled {enabled}, {dtype}", seen[-2], seen[-1])
            case.equal("control: the state that was set", seen[-1], (enabled, dtype, torch.float32))
            kept = [dict(vars(context)) for context in contexts]
            case.equal("state kept for backward, as by the new name", kept[0], kept[1])
            case.true("control: the dtype is kept", str(dtype) in str(kept[1]), kept[1])
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("cast", [False, True], ids=["current-state", "cast-inputs"])
@contract("AMP-BACKWARD-066", on="cuda")
def test_deprecated_custom_function(
    case: Case, cast: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    def old(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        class Old(torch.autograd.Function):
            @staticmethod
            @torch.cuda.amp.custom_fwd(**({"cast_inputs": torch.float32} if cast else {}))
            def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(left, right)
                return left.mm(right)

            @staticmethod
            @torch.cuda.amp.custom_bwd
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                left, right = ctx.saved_tensors
                return gradient.mm(right.T), left.T.mm(gradient)

        with target.autocast(amp_dtype):
            return Old.apply(left, right)

    left, right = operands(target, rng, amp_dtype if cast else torch.float32)
    seen = case.warns(
        "the old names", FutureWarning, lambda: old(left, right), names=("torch.amp.custom_fwd|torch.amp.custom_bwd",)
    )
    gradient = backward_from(seen, rng)
    ours = gradients({"left": left, "right": right})
    with target.autocast(amp_dtype):
        expected = decorated("cuda", torch.float32 if cast else None).apply(left, right)
    expected.backward(gradient)
    case.identical("output", seen.detach(), expected.detach())
    same_gradients(case, "old against new", ours, gradients({"left": left, "right": right}))
