"""Backward: the types of its ops and gradients, custom autograd functions, and checkpointing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.trace.ops import trace_of
from .exact_chains import EXACT
from .op_chains import CHAINS, Chain

OTHER = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

by_chain = pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)


def normal(rng: torch.Generator) -> Callable[[tuple[int, ...]], torch.Tensor]:
    return lambda shape: torch.randn(shape, generator=rng)


def small_integers(rng: torch.Generator) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """-1, 0 and 1: products and short sums of them are exact in every floating-point type."""
    return lambda shape: torch.randint(-1, 2, shape, generator=rng).float()


def cotangent(output: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(output.shape, generator=rng).to(output.device, output.dtype)


def backward_from(output: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Run backward from a gradient of the output that differs by element, and return that gradient."""
    gradient = cotangent(output, rng)
    output.backward(gradient)
    return gradient


def forward(chain: Chain, leaves: Mapping[str, torch.Tensor], target: Target, dtype: torch.dtype) -> torch.Tensor:
    with target.autocast(dtype):
        return chain.autocast(leaves)


def gradients(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take the gradients of the leaves away from them."""
    taken = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return taken


def same_gradients(
    case: Case, what: str, seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    case.equal(f"{what}: leaves with a gradient", sorted(seen), sorted(expected))
    for name, gradient in expected.items():
        case.identical(f"{what}: gradient of {name}", seen[name], gradient)


@by_chain
@contract("AMP-BACKWARD-001")
def test_types_of_backward_ops(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    output: list[torch.Tensor] = []
    ahead = trace_of(lambda: output.append(forward(chain, leaves, target, amp_dtype)))
    gradient = cotangent(output[0], rng)
    back = trace_of(lambda: output[0].backward(gradient))
    case.at_least("ops that compute in backward", len(back.computing), 1)
    for direction, stream in (("forward", ahead), ("backward", back)):
        for op in stream.computing:
            promised = torch.float32 if op.name in chain.float32_ops else amp_dtype
            case.equal(f"{direction}, {op.name}: types in", sorted(set(map(str, op.inputs))), [str(promised)])
            case.equal(f"{direction}, {op.name}: types out", sorted(set(map(str, op.outputs))), [str(promised)])


@by_chain
@contract("AMP-BACKWARD-002")
def test_control_without_a_region(case: Case, chain: Chain, target: Target, rng: torch.Generator) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    output = chain.autocast(leaves)
    back = trace_of(lambda: output.backward(torch.ones_like(output)))
    types = {str(dtype) for op in back.computing for dtype in op.inputs + op.outputs}
    case.equal("types of backward ops", sorted(types), ["torch.float32"])


@contract("AMP-BACKWARD-003")
def test_types_of_intermediate_gradients(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    seen: dict[str, torch.dtype] = {}

    def watched(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(lambda gradient: seen.__setitem__(name, gradient.dtype))
        return tensor

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(target.device).requires_grad_()

    first, second, kernel = leaf(12, 16), leaf(12, 12), leaf(4, 3, 3, 3)
    x, images = leaf(8, 16), leaf(2, 3, 6, 6)
    with target.autocast(amp_dtype):
        product = watched("linear", functional.linear(watched("input", x), watched("weight", first)))
        active = watched("relu", functional.relu(product))
        squares = watched("mse_loss", functional.mse_loss(active, torch.zeros_like(active), reduction="none"))
        again = watched("linear after float32", functional.linear(squares, second))
        maps = watched("conv2d", functional.conv2d(images, kernel))
        paired = watched("bmm", torch.bmm(maps.flatten(2), maps.flatten(2).mT))
        loss = watched("loss", functional.mse_loss(again, torch.ones_like(again)))
        other = watched("second loss", functional.mse_loss(paired, torch.ones_like(paired)))
    (loss + other).backward()
    single = {"input", "weight", "mse_loss", "loss", "second loss"}
    expected = {name: torch.float32 if name in single else amp_dtype for name in seen}
    case.equal("tensors whose gradient was seen", len(seen), 10)
    for name, dtype in expected.items():
        case.equal(f"gradient of {name}", seen[name], dtype)


@by_chain
@contract("AMP-BACKWARD-004")
def test_gradients_of_parameters(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    output = forward(chain, leaves, target, amp_dtype)
    backward_from(output, rng)
    for name, leaf in leaves.items():
        gradient = leaf.grad
        case.true(f"{name} has a gradient", gradient is not None)
        assert gradient is not None
        case.equal(f"{name}: dtype", gradient.dtype, torch.float32)
        case.equal(f"{name}: shape", tuple(gradient.shape), tuple(leaf.shape))
        case.equal(f"{name}: device", gradient.device, leaf.device)
        case.equal(f"{name}: layout", gradient.layout, leaf.layout)
        case.equal(f"{name}: strides", gradient.stride(), leaf.stride())


@by_chain
@contract("AMP-BACKWARD-005")
def test_parameters_are_left_alone(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    state = {name: (leaf.data_ptr(), leaf._version, leaf.dtype) for name, leaf in leaves.items()}
    output = forward(chain, leaves, target, amp_dtype)
    after_forward = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    backward_from(output, rng)
    for name, leaf in leaves.items():
        case.identical(f"{name} after forward", after_forward[name], before[name])
        case.identical(f"{name} after backward", leaf, before[name])
        case.equal(f"{name}: storage, version, dtype", (leaf.data_ptr(), leaf._version, leaf.dtype), state[name])
        case.true(f"{name} is a leaf that requires grad", leaf.is_leaf and leaf.requires_grad)


@by_chain
@contract("AMP-BACKWARD-006")
def test_gradients_equal_casts_by_hand(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    with repeatable_convolutions():
        output = forward(chain, leaves, target, amp_dtype)
        gradient = backward_from(output, rng)
        seen = gradients(leaves)
        by_hand = chain.by_hand(leaves, amp_dtype)
        case.identical("output", output.detach(), by_hand.detach())
        by_hand.backward(gradient)
        same_gradients(case, "against casts by hand", seen, gradients(leaves))


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if chain.name in EXACT], ids=lambda chain: chain.name)
@contract("AMP-BACKWARD-007")
def test_integer_gradients_are_exact(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    draw = small_integers(rng)
    leaves = chain.leaves(draw, target.device)
    exact = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()}
    output, reference = forward(chain, leaves, target, amp_dtype), EXACT[chain.name](exact)
    gradient = draw(tuple(output.shape))
    output.backward(gradient.to(output.device, output.dtype))
    reference.backward(gradient.double())
    case.identical("output", output.detach().cpu().double() + 0.0, reference.detach() + 0.0)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert exact[name].grad is not None
        # Adding zero makes every zero positive; its sign is nobody's promise.
        case.identical(f"gradient of {name}", leaf.grad.cpu().double() + 0.0, exact[name].grad + 0.0)


@contract("AMP-BACKWARD-008")
def test_gradients_round_as_16_bit_does(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    weight = torch.randn(96, 128, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(64, 128, generator=rng).to(target.device).requires_grad_()
    with target.autocast(amp_dtype):
        output = functional.linear(x, weight)
    gradient = backward_from(output, rng)
    incoming = gradient.cpu().double()
    exact = {
        "weight": (weight, incoming.T @ x.detach().cpu().double()),
        "input": (x, incoming @ weight.detach().cpu().double()),
    }
    # Two roundings, of one operand and of the result, each uniform over half a spacing: about 0.6 u in the norm.
    # Below 0.3 u nothing was rounded to 16 bit; above 1.5 u more than these two were (measurement notes, 4.3).
    for name, (leaf, reference) in exact.items():
        assert leaf.grad is not None
        error = float((leaf.grad.cpu().double() - reference).norm() / reference.norm())
        case.between(f"gradient of the {name}: relative error", error / UNIT[amp_dtype], 0.3, 1.5, "u")
        single = (
            (incoming.float().T @ x.detach().cpu()) if name == "weight" else incoming.float() @ weight.detach().cpu()
        )
        control = float((single.double() - reference).norm() / reference.norm())
        case.at_most(f"control: the {name}'s in float32", control / UNIT[amp_dtype], 0.1, "u")


@pytest.mark.parametrize("kind", ["float32", "amp", "other"])
@contract("AMP-BACKWARD-009")
def test_gradient_of_an_input(
    case: Case, kind: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    given = {"float32": torch.float32, "amp": amp_dtype, "other": OTHER[amp_dtype]}[kind]
    if kind == "other" and not target.supports(given):
        case.unsupported(f"{target.name} lacks {given}")
    x = torch.randn(8, 16, generator=rng).to(target.device, given).requires_grad_()
    weight = torch.randn(6, 16, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        output = functional.linear(x, weight)
    gradient = backward_from(output, rng)
    case.equal("dtype of the output", output.dtype, amp_dtype)
    assert x.grad is not None
    case.identical("gradient of the input", x.grad, torch.mm(gradient, weight.to(amp_dtype)).to(given))


@by_chain
@contract("AMP-BACKWARD-010")
def test_backward_inside_a_region(
    case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    with repeatable_convolutions():
        output = forward(chain, leaves, target, amp_dtype)
        gradient = backward_from(output, rng)
        outside = gradients(leaves)
        with target.autocast(amp_dtype):
            output = chain.autocast(leaves)
            output.backward(gradient)
        same_gradients(case, "inside against outside", gradients(leaves), outside)


@contract("AMP-BACKWARD-011")
def test_frozen_parameters(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    chain = next(chain for chain in CHAINS if chain.name == "two-layers")
    leaves = chain.leaves(normal(rng), target.device)
    output = forward(chain, leaves, target, amp_dtype)
    gradient = backward_from(output, rng)
    control = gradients(leaves)
    for name in ("x", "first"):
        leaves[name].requires_grad_(False)
    forward(chain, leaves, target, amp_dtype).backward(gradient)
    seen = gradients(leaves)
    case.equal("parameters with a gradient", sorted(seen), ["bias", "second"])
    for name, found in seen.items():
        case.identical(f"gradient of {name}, as without freezing", found, control[name])


@contract("AMP-BACKWARD-012")
def test_gradients_add_up_in_float32(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = torch.zeros(4, 16).to(target.device).requires_grad_()
    parts = []
    for size in (1.0, 2.0**-9, 2.0**-12):
        x = torch.randn(1, 16, generator=rng).to(target.device) * size
        with target.autocast(amp_dtype):
            output = functional.linear(x, weight)
        output.backward(torch.ones_like(output))
        # A row of ones times one row: each element is one rounded input, so nothing else rounds.
        parts.append(x.to(amp_dtype).float().expand(4, 16))
    assert weight.grad is not None
    case.identical("sum of three gradients", weight.grad, (parts[0] + parts[1]) + parts[2])
    lowered = ((parts[0].to(amp_dtype) + parts[1].to(amp_dtype)) + parts[2].to(amp_dtype)).float()
    lost = int((lowered != weight.grad).sum())
    case.at_least("control: elements that a 16-bit sum gets wrong", lost, 1)


@by_chain
@contract("AMP-BACKWARD-013")
def test_autograd_grad(case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    with repeatable_convolutions():
        output = forward(chain, leaves, target, amp_dtype)
        gradient = cotangent(output, rng)
        found = torch.autograd.grad(output, list(leaves.values()), gradient, retain_graph=True)
        case.equal("leaves whose .grad was set", [n for n, leaf in leaves.items() if leaf.grad is not None], [])
        output.backward(gradient)
        same_gradients(case, "grad against backward", dict(zip(leaves, found, strict=True)), gradients(leaves))


@contract("AMP-BACKWARD-014")
def test_double_backward(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    chain = next(chain for chain in CHAINS if chain.name == "to-loss")
    leaves = chain.leaves(normal(rng), target.device)

    def penalty(loss: torch.Tensor) -> torch.Tensor:
        inner = torch.autograd.grad(loss, leaves["weight"], create_graph=True)[0]
        case.equal("dtype of the inner gradient", inner.dtype, torch.float32)
        return inner.square().sum()

    penalty(forward(chain, leaves, target, amp_dtype)).backward()
    seen = gradients(leaves)
    penalty(chain.by_hand(leaves, amp_dtype)).backward()
    expected = gradients(leaves)
    case.true("the penalty reaches the weight", "weight" in expected)
    same_gradients(case, "second derivative", seen, expected)


@contract("AMP-BACKWARD-015")
def test_hooks(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    layer = torch.nn.Linear(16, 6).to(target.device)
    seen: dict[str, object] = {}
    layer.weight.register_hook(lambda gradient: seen.__setitem__("tensor hook", gradient.dtype))
    layer.weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.__setitem__("post-accumulate hook", parameter.grad.dtype)
    )
    layer.register_full_backward_hook(
        lambda module, inputs, outputs: seen.update({"module, out": outputs[0].dtype, "module, in": inputs[0].dtype})
    )
    x = torch.randn(8, 16, generator=rng).to(target.device).requires_grad_()
    with target.autocast(amp_dtype):
        output = layer(x)
    backward_from(output, rng)
    promised = {
        "tensor hook": torch.float32,
        "post-accumulate hook": torch.float32,
        "module, out": amp_dtype,
        "module, in": torch.float32,
    }
    for name, dtype in promised.items():
        case.equal(name, seen.get(name), dtype)


@contract("AMP-BACKWARD-016")
def test_disabled_subregion(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    first = torch.randn(12, 16, generator=rng).to(target.device).requires_grad_()
    second = torch.randn(6, 12, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(8, 16, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        hidden = functional.linear(x, first)
        with target.autocast(amp_dtype, enabled=False):
            output = functional.linear(hidden.float(), second)
    gradient = cotangent(output, rng)
    back = trace_of(lambda: output.backward(gradient))
    products = [op for op in back.computing if op.name == "aten::mm"]
    types = [sorted(set(map(str, op.inputs + op.outputs))) for op in products]
    case.equal("types of the products, last layer first", types, [["torch.float32"]] * 2 + [[str(amp_dtype)]])
    case.identical("gradient of the float32 layer", second.grad, torch.mm(gradient.T, hidden.detach().float()))


class Product(torch.autograd.Function):
    """A matrix product whose forward and backward tell the state that they run in."""

    told: dict[str, Any] = {}  # noqa: RUF012

    @staticmethod
    def tell(device_type: str, where: str, *tensors: torch.Tensor) -> None:
        Product.told[where] = {
            "enabled": torch.is_autocast_enabled(device_type),
            "dtype": torch.get_autocast_dtype(device_type),
            "given": [tensor.dtype for tensor in tensors],
        }


def decorated(device_type: str, cast_inputs: torch.dtype | None = None) -> type[torch.autograd.Function]:
    """A fresh matrix product, decorated in the documented form as torch.amp is now."""
    keywords = {} if cast_inputs is None else {"cast_inputs": cast_inputs}

    class Decorated(Product):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type, **keywords)
        def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(left, right)
            Product.tell(device_type, "forward", left, right)
            return left.mm(right)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            left, right = ctx.saved_tensors
            Product.tell(device_type, "backward", gradient)
            return gradient.mm(right.T), left.T.mm(gradient)

    Product.told = {}
    return Decorated


def operands(target: Target, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.randn(shape, generator=rng).to(target.device, dtype).requires_grad_() for shape in ((5, 7), (7, 3))
    )


def ambient(target: Target, state: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """What surrounds backward: no region, a region of the other 16-bit type, a disabled one."""
    if state == "outside":
        return contextlib.nullcontext()
    return target.autocast(OTHER[dtype], enabled=state == "other-dtype")


around_backward = pytest.mark.parametrize("around", ["outside", "other-dtype", "disabled"])


@around_backward
@contract("AMP-BACKWARD-017")
def test_custom_function(case: Case, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    left, right = operands(target, rng)
    function = decorated(target.device_type)
    with target.autocast(amp_dtype):
        output = function.apply(left, right)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    told = Product.told
    case.equal("enabled in forward", told["forward"]["enabled"], True)
    case.equal("types given to forward", told["forward"]["given"], [torch.float32, torch.float32])
    case.equal("enabled in backward", told["backward"]["enabled"], True)
    case.equal("dtype of the region in backward", told["backward"]["dtype"], amp_dtype)
    low_left, low_right = left.detach().to(amp_dtype), right.detach().to(amp_dtype)
    case.identical("output", output.detach(), low_left.mm(low_right))
    case.identical("gradient of the left operand", left.grad, gradient.mm(low_right.T).float())
    case.identical("gradient of the right operand", right.grad, low_left.T.mm(gradient).float())


@around_backward
@contract("AMP-BACKWARD-018")
def test_custom_function_outside(
    case: Case, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    left, right = operands(target, rng)
    output = decorated(target.device_type).apply(left, right)
    with ambient(target, around, amp_dtype):
        gradient = backward_from(output, rng)
    told = Product.told
    case.equal("enabled in forward", told["forward"]["enabled"], False)
    case.equal("enabled in backward", told["backward"]["enabled"], False)
    case.identical("output", output.detach(), left.detach().mm(right.detach()))
    case.identical("gradient of the left operand", left.grad, gradient.mm(right.detach().T))
    case.identical("gradient of the right operand", right.grad, left.detach().T.mm(gradient))


@contract("AMP-BACKWARD-018")
def test_custom_function_in_a_region_of_another_device(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    left, right = operands(target, rng)
    with torch.autocast("cpu" if target.device_type == "xpu" else "xpu", dtype=amp_dtype):
        output = decorated(target.device_type).apply(left, right)
        backward_from(output, rng)
    told = Product.told
    case.equal("enabled in forward", told["forward"]["enabled"], False)
    case.equal("enabled in backward", told["backward"]["enabled"], False)
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
    told = Product.told
    case.equal("enabled in forward", told["forward"]["enabled"], False)
    case.equal("types given to forward", told["forward"]["given"], [to, to])
    case.equal("enabled in backward", told["backward"]["enabled"], False)
    case.equal("type given to backward", told["backward"]["given"], [to])
    cast_left, cast_right = left.detach().to(to), right.detach().to(to)
    case.identical("output", output.detach(), cast_left.mm(cast_right))
    case.identical("gradient of the left operand", left.grad, gradient.mm(cast_right.T).to(from_))
    case.identical("gradient of the right operand", right.grad, cast_left.T.mm(gradient).to(from_))


@contract("AMP-BACKWARD-020")
def test_cast_inputs_reach(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    def floats(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(4, generator=rng).to(target.device).to(dtype)

    # Backends such as MPS have no float64; there the row is left out.
    wide = {"float64": floats(torch.float64)} if target.device_type != "mps" else {}
    integers = torch.arange(4, device=target.device)
    flags = integers > 1
    given: dict[str, Any] = {
        "tensors": [floats(torch.float32), (floats(torch.float16), {"deep": floats(torch.bfloat16)})],
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
    case.equal("types given to forward", Product.told["forward"]["given"], [torch.float32, torch.float32])
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
            case.raises(f"{given!r}", ValueError, functools.partial(decorator, function, device_type=given), "str")
    kept = decorator(nothing, device_type="cpu")
    case.equal("control: the name that is kept", kept.__name__, "nothing")
    case.equal("control: both spellings", decorator(device_type="cpu")(nothing).__wrapped__, nothing)


@contract("AMP-BACKWARD-023")
def test_deprecated_custom_fwd(case: Case) -> None:
    # Both names of the old module mean CUDA; its autocast state can be set where CUDA is missing.
    seen: list[tuple[bool, torch.dtype, torch.dtype]] = []

    def record(ctx: Any, tensor: torch.Tensor) -> None:
        seen.append((torch.is_autocast_enabled("cuda"), ctx._dtype, tensor.dtype))

    old = case.warns("custom_fwd", FutureWarning, lambda: torch.cuda.amp.custom_fwd(record), r"torch\.amp\.custom_fwd")
    case.warns("custom_bwd", FutureWarning, lambda: torch.cuda.amp.custom_bwd(record), r"torch\.amp\.custom_bwd")
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
            kept = [(context._fwd_used_autocast, context._dtype) for context in contexts]
            case.equal("state kept for backward", kept, [(enabled, dtype)] * 2)
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("cast", [False, True], ids=["current-state", "cast-inputs"])
@contract("AMP-BACKWARD-024", on="cuda")
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
    seen = case.warns("the old names", FutureWarning, lambda: old(left, right), r"torch\.amp\.custom_(fwd|bwd)")
    gradient = backward_from(seen, rng)
    ours = gradients({"left": left, "right": right})
    with target.autocast(amp_dtype):
        expected = decorated("cuda", torch.float32 if cast else None).apply(left, right)
    expected.backward(gradient)
    case.identical("output", seen.detach(), expected.detach())
    same_gradients(case, "old against new", ours, gradients({"left": left, "right": right}))


both_kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Segment(torch.nn.Module):
    """Two layers with dropout between them, which tell the autocast state of every forward."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 24), torch.nn.Linear(24, 16)
        self.device_type = device_type
        self.told: list[tuple[bool, torch.dtype, bool, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(functional.relu(self.first(x)), 0.4)
        self.told.append(
            (
                torch.is_autocast_enabled(self.device_type),
                torch.get_autocast_dtype(self.device_type),
                torch.is_autocast_cache_enabled(),
                hidden.dtype,
            )
        )
        result: torch.Tensor = self.second(hidden)
        return result


def through_checkpoint(
    segment: Segment,
    x: torch.Tensor,
    target: Target,
    dtype: torch.dtype,
    around: contextlib.AbstractContextManager[None],
    **checkpointing: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients of a step from the same random state; without keywords, without a checkpoint."""
    torch.manual_seed(7)
    with target.autocast(dtype, cache_enabled=False):
        output = checkpoint(segment, x, **checkpointing) if checkpointing else segment(x)
        loss = functional.mse_loss(output, torch.zeros_like(output))
    with around:
        loss.backward()
    return output.detach(), gradients({"x": x, **dict(segment.named_parameters())})


def segment_and_input(target: Target, rng: torch.Generator) -> tuple[Segment, torch.Tensor]:
    segment = Segment(target.device_type)
    with torch.no_grad():
        for parameter in segment.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    return segment.to(target.device), torch.randn(8, 16, generator=rng).to(target.device).requires_grad_()


@both_kinds
@around_backward
@contract("AMP-BACKWARD-025")
def test_checkpoint(
    case: Case, reentrant: bool, around: str, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)
    surrounding = ambient(target, around, amp_dtype)
    output, seen = through_checkpoint(segment, x, target, amp_dtype, surrounding, use_reentrant=reentrant)
    case.equal("forwards of the segment", len(segment.told), 2)
    case.equal("state in forward", segment.told[0], (True, amp_dtype, False, amp_dtype))
    case.equal("state in the recomputation", segment.told[1], segment.told[0])
    # Backward ops that run inside another region follow that region, so the control runs inside it as well.
    surrounding = ambient(target, around, amp_dtype)
    plain, expected = through_checkpoint(segment, x, target, amp_dtype, surrounding)
    case.identical("output", output, plain)
    same_gradients(case, "against no checkpoint", seen, expected)


@both_kinds
@contract("AMP-BACKWARD-026")
def test_checkpoint_keeps_dropout(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)

    def step(**checkpointing: bool) -> dict[str, torch.Tensor]:
        return through_checkpoint(segment, x, target, amp_dtype, contextlib.nullcontext(), **checkpointing)[1]

    expected = step()
    kept = step(use_reentrant=reentrant, preserve_rng_state=True)
    lost = step(use_reentrant=reentrant, preserve_rng_state=False)
    same_gradients(case, "random state kept", kept, expected)
    # 192 dropout decisions at 0.4 agree twice with probability 0.52**192.
    wrong = int((lost["second.weight"] != expected["second.weight"]).sum())
    case.at_least("control: elements that differ where it is not kept", wrong, 1)


@both_kinds
@contract("AMP-BACKWARD-027")
def test_checkpoint_in_a_disabled_subregion(
    case: Case, reentrant: bool, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    segment, x = segment_and_input(target, rng)
    with target.autocast(amp_dtype):
        with target.autocast(amp_dtype, enabled=False):
            output = checkpoint(segment, x, use_reentrant=reentrant)
        loss = functional.mse_loss(output, torch.zeros_like(output))
        case.equal("dtype of the output", output.dtype, torch.float32)
        loss.backward()
    case.equal("enabled, in forward and recomputation", [told[0] for told in segment.told], [False, False])
    case.equal("dtype, in forward and recomputation", [told[3] for told in segment.told], [torch.float32] * 2)
