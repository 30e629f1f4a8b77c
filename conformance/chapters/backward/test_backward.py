"""Check the dtypes of backward ops and the dtypes, layout and values of gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...measure.storages import memory
from ...oracles.numbers.formats import OTHER
from ...oracles.trace.ops import trace_of
from .exact_chains import EXACT
from .op_chains import CHAINS, Chain
from .support import (
    UNIT,
    backward_from,
    by_chain,
    cotangent,
    forward,
    gradients,
    normal,
    same_gradients,
    small_integers,
)


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
    for direction, stream in (("forward", ahead), ("backward", back)):
        floating = [op for op in stream.computing if op.outputs]
        case.at_least(f"{direction}, ops that compute floating-point numbers", len(floating), 1)
        for op in stream.computing:
            promised = torch.float32 if op.name in chain.float32_ops else amp_dtype
            case.equal(f"{direction}, {op.name}: types in", sorted(set(map(str, op.inputs))), [str(promised)])
            if op in floating:  # a comparison has no floating-point result
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
    state = {name: (memory(leaf), leaf._version, leaf.dtype) for name, leaf in leaves.items()}
    output = forward(chain, leaves, target, amp_dtype)
    after_forward = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    backward_from(output, rng)
    for name, leaf in leaves.items():
        case.identical(f"{name} after forward", after_forward[name], before[name])
        case.identical(f"{name} after backward", leaf, before[name])
        case.equal(f"{name}: storage, version, dtype", (memory(leaf), leaf._version, leaf.dtype), state[name])
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
        manual = chain.manual(leaves, amp_dtype)
        case.identical("output", output.detach(), manual.detach())
        manual.backward(gradient)
        same_gradients(case, "against manual casts", seen, gradients(leaves))


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
        # Adding zero makes every zero positive; its sign is not promised.
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
    if kind == "other":
        case.require(target, given)
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
@contract("AMP-BACKWARD-041")
def test_autograd_grad(case: Case, chain: Chain, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    leaves = chain.leaves(normal(rng), target.device)
    with repeatable_convolutions():
        output = forward(chain, leaves, target, amp_dtype)
        gradient = cotangent(output, rng)
        found = torch.autograd.grad(output, list(leaves.values()), gradient, retain_graph=True)
        case.equal("leaves whose .grad was set", [n for n, leaf in leaves.items() if leaf.grad is not None], [])
        output.backward(gradient)
        same_gradients(case, "grad against backward", dict(zip(leaves, found, strict=True)), gradients(leaves))


@contract("AMP-BACKWARD-045")
def test_double_backward(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    chain = next(chain for chain in CHAINS if chain.name == "to-loss")
    leaves = chain.leaves(normal(rng), target.device)

    def penalty(loss: torch.Tensor) -> torch.Tensor:
        inner = torch.autograd.grad(loss, leaves["weight"], create_graph=True)[0]
        case.equal("dtype of the inner gradient", inner.dtype, torch.float32)
        return inner.square().sum()

    penalty(forward(chain, leaves, target, amp_dtype)).backward()
    seen = gradients(leaves)
    penalty(chain.manual(leaves, amp_dtype)).backward()
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


def _four_times(calls: list[None], gradient: torch.Tensor) -> torch.Tensor:
    calls.append(None)
    return gradient * 4


@contract("AMP-BACKWARD-015")
def test_retained_gradients(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    """An intermediate result retains the gradient that its hooks made, whenever they were registered, and adds up."""
    weight = torch.randn(6, 16, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(8, 16, generator=rng).to(target.device)
    for last in ("hook", "retain_grad"):
        with target.autocast(amp_dtype):
            hidden = functional.linear(x, weight)
        hooked: list[None] = []
        if last == "hook":
            hidden.retain_grad()
        hidden.register_hook(partial(_four_times, hooked))
        if last == "retain_grad":
            hidden.retain_grad()
        gradient = cotangent(hidden, rng)
        for number in (1, 2):
            hidden.backward(gradient, retain_graph=True)
            wanted = gradient * 4 * number
            case.identical(f"{last} registered last: gradient retained of pass {number}", hidden.grad, wanted)
        case.equal(f"{last} registered last: calls of the hook", len(hooked), 2)


@contract("AMP-BACKWARD-015")
@pytest.mark.parametrize("times", [1, 3])
def test_retained_gradients_of_written_results(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, times: int
) -> None:
    """A result that is written to retains the gradient by what it is at the end, and by no version before."""
    weight = torch.randn(6, 16, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(8, 16, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        hidden = functional.linear(x, weight)
        hidden.retain_grad()
        for _ in range(times):
            hidden.mul_(4)
        result = hidden * 2
    gradient = cotangent(result, rng)
    result.backward(gradient)
    case.identical("gradient retained of the last version", hidden.grad, gradient * 2)


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
    types = [sorted(set(map(str, op.inputs + op.outputs))) for op in back.matrix_products]
    case.equal("types of the products, last layer first", types, [["torch.float32"]] * 2 + [[str(amp_dtype)]])
    case.identical("gradient of the float32 layer", second.grad, torch.mm(gradient.T, hidden.detach().float()))
