"""Check hooks, autograd.grad, several roots, second derivatives, threads and saved tensors under AMP."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.formats import OTHER
from .op_chains import AFTER_AN_UNLISTED_OP, CHAINS, Chain
from .support import UNIT, cotangent, forward, gradients, integers, normal, small_integers

BY_NAME: Mapping[str, Chain] = {chain.name: chain for chain in CHAINS}
LOWERED = tuple(chain for chain in CHAINS if not chain.float32_ops)


def exactly(case: Case, what: str, seen: torch.Tensor | None, exact: torch.Tensor) -> None:
    """Return whether `seen` equals `exact`, a float64 tensor; zeros of either sign are equal."""
    assert seen is not None
    case.identical(what, seen.detach().cpu().double() + 0.0, exact.detach() + 0.0)


def difference(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names under which dtype, shape or bits differ, or that one side lacks."""
    names = sorted(set(seen) ^ set(expected))
    for name in sorted(set(seen) & set(expected)):
        ours, theirs = seen[name], expected[name]
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            names.append(name)
    return names


class Watched:
    """Two layers and a weighted sum; every kind of hook records a copy of its gradients."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self.leaves = leaves
        self.seen: dict[str, torch.Tensor] = {}

    def note(self, name: str, *tensors: torch.Tensor | None) -> None:
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                self.seen[f"{name} {number}"] = tensor.detach().clone()

    def loss(self) -> torch.Tensor:
        layer = torch.nn.Linear(16, 8, bias=False, device=self.leaves["x"].device, dtype=self.leaves["x"].dtype)
        layer.weight = torch.nn.Parameter(self.leaves["first"].detach().clone())
        layer.register_full_backward_pre_hook(lambda _, out: self.note("module, before", *out))
        layer.register_full_backward_hook(lambda _, into, out: self.note("module, after", *into, *out))
        layer.weight.register_post_accumulate_grad_hook(lambda leaf: self.note("post-accumulate", leaf.grad))
        layer.weight.register_hook(lambda gradient: self.note("leaf", gradient))
        hidden = layer(self.leaves["x"])
        hidden.register_hook(lambda gradient: self.note("tensor", gradient))
        hidden.retain_grad()
        # Not linear, whose node has other inputs on a device with a kernel of it.
        output = torch.mm(functional.relu(hidden), self.leaves["second"].t())
        assert output.grad_fn is not None
        output.grad_fn.register_hook(lambda into, out: self.note("node, after", *into, *out))
        output.grad_fn.register_prehook(lambda out: self.note("node, before", *out))
        several = (hidden, self.leaves["second"])
        torch.autograd.graph.register_multi_grad_hook(several, lambda found: self.note("several", *found))
        loss = (output.to(self.leaves["goal"].dtype) * self.leaves["goal"]).sum()
        loss.register_hook(lambda gradient: self.note("loss", gradient))
        self.hidden, self.weight = hidden, layer.weight
        return loss


@contract("AMP-BACKWARD-039")
def test_hooks_see_scaled_gradients(case: Case, target: Target, rng: torch.Generator) -> None:
    # Integers below 2^8 times a power of two: every product and sum is exact in both 16-bit types.
    shapes = {"x": (4, 16), "first": (8, 16), "second": (3, 8), "goal": (4, 3)}
    leaves = {name: integers(rng, target, *shape) for name, shape in shapes.items()}
    exact = Watched({name: leaf.detach().cpu().double().requires_grad_() for name, leaf in leaves.items()})
    exact.loss().backward()
    exact.note("retained", exact.hidden.grad)
    compared = 0
    scales = (1.0, 2.0**-3, 2.0**8)
    for dtype, scale in itertools.product(case.supported(target), scales):
        scaler = torch.amp.GradScaler(target.device_type, init_scale=scale)
        watched = Watched(leaves)
        with target.autocast(dtype):
            loss = watched.loss()
        scaler.scale(loss).backward()
        watched.note("retained", watched.hidden.grad)
        gradients(leaves)
        case.equal(f"{dtype}, scale {scale}: hooks that ran", sorted(watched.seen), sorted(exact.seen))
        wrong = [
            name
            for name, seen in watched.seen.items()
            if not torch.equal(seen.cpu().double(), exact.seen[name] * scale)
        ]
        case.equal(f"{dtype}, scale {scale}: hooks that saw other than the gradient times the scale", wrong, [])
        optimizer = torch.optim.SGD([watched.weight], lr=1.0)
        scaler.unscale_(optimizer)
        exactly(case, f"{dtype}, scale {scale}: after unscale_", watched.weight.grad, exact.seen["post-accumulate 0"])
        compared += len(watched.seen)
    case.note("gradients compared", compared)


def leaves_of_every_layout(target: Target, rng: torch.Generator) -> dict[str, tuple[torch.Tensor, Any]]:
    """Return leaves by name, each with a lower-precision function of it, for an input of 4 rows of 6 or 2 images."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=rng).float().to(target.device)

    rows, images = draw(4, 6), draw(2, 3, 5, 5)
    square = draw(6, 6)
    made = {
        "contiguous": (draw(5, 6), lambda w: functional.linear(rows, w)),
        "transposed": (draw(6, 5).t(), lambda w: functional.linear(rows, w)),
        "every second column": (draw(5, 12)[:, ::2], lambda w: functional.linear(rows, w)),
        "expanded": (draw(1, 6).expand(5, 6), lambda w: functional.linear(rows, w)),
        "bias": (draw(5), lambda w: functional.linear(rows, square[:5], w)),
        "shared by two products": (square, lambda w: functional.linear(functional.linear(rows, w), w)),
        "one element": (draw(1, 1), lambda w: functional.linear(rows[:, :1], w)),
        "empty": (draw(0, 6), lambda w: functional.linear(rows, w)),
        "kernel": (draw(4, 3, 3, 3), lambda w: functional.conv2d(images, w)),
        "channels last": (
            draw(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
            lambda w: functional.conv2d(images, w),
        ),
        "both channels last": (
            draw(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
            lambda w: functional.conv2d(images.contiguous(memory_format=torch.channels_last), w),
        ),
        "batch of matrices": (draw(3, 4, 2).transpose(0, 1), lambda w: torch.bmm(draw(4, 2, 3), w)),
    }
    return {name: (leaf.detach().requires_grad_(), run) for name, (leaf, run) in made.items()}


def promised_strides(leaf: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a new gradient: the leaf's own where it is dense and without overlap, else row-major.

    torch.autograd, "Default gradient layouts".
    """
    pairs = sorted((stride, size) for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size != 1)
    reach = 1
    for stride, size in pairs:
        if stride != reach:
            return torch.empty(leaf.shape).stride()
        reach *= size
    return leaf.stride()


@contract("AMP-BACKWARD-040")
def test_layouts_of_gradients(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        for name, (leaf, run) in leaves_of_every_layout(target, rng).items():
            found = []
            for _ in range(2):
                with target.autocast(dtype), repeatable_convolutions():
                    output = run(leaf)
                output.float().sum().backward()
                assert leaf.grad is not None
                found.append((leaf.grad.dtype, leaf.grad.shape, leaf.grad.stride(), leaf.grad.clone()))
            case.equal(f"{dtype}, {name}: dtype of the output", output.dtype, dtype)
            first, second = found
            case.equal(f"{dtype}, {name}: type and shape", first[:2], (torch.float32, leaf.shape))
            if leaf.numel():
                case.equal(f"{dtype}, {name}: strides", first[2], promised_strides(leaf))
            case.equal(f"{dtype}, {name}: strides after a second backward", second[2], first[2])


@contract("AMP-BACKWARD-040")
def test_layouts_of_sparse_gradients(case: Case, target: Target, rng: torch.Generator) -> None:
    weight = integers(rng, target, 7, 6)
    product = integers(rng, target, 5, 6)
    indices = torch.tensor([1, 3, 1], device=target.device)
    for dtype in case.supported(target):
        for sparse in (True, False):
            with target.autocast(dtype):
                found = functional.embedding(indices, weight, sparse=sparse)
                output = functional.linear(found, product)
            output.float().sum().backward()
            gradient = gradients({"weight": weight})["weight"]
            product.grad = None
            case.equal(f"{dtype}: type of the rows", found.dtype, torch.float32)
            case.equal(f"{dtype}: type", gradient.dtype, torch.float32)
            case.equal(f"{dtype}: layout", gradient.layout, torch.sparse_coo if sparse else torch.strided)
            exact = torch.zeros(7, 6, dtype=torch.float64)
            exact[1], exact[3] = 2 * product.detach().cpu().double().sum(0), product.detach().cpu().double().sum(0)
            exactly(case, f"{dtype}: gradient", gradient.to_dense() if sparse else gradient, exact)


@contract("AMP-BACKWARD-041")
def test_some_inputs_of_grad(case: Case, target: Target, rng: torch.Generator) -> None:
    chain = BY_NAME["two-layers"]
    for dtype in case.supported(target):
        leaves = chain.leaves(normal(rng), target.device)
        unused = torch.zeros(3, device=target.device).requires_grad_()
        output = forward(chain, leaves, target, dtype)
        gradient = cotangent(output, rng)
        output.backward(gradient, retain_graph=True)
        whole = gradients(leaves)
        names = list(leaves)
        subsets = [part for size in range(1, len(names) + 1) for part in itertools.permutations(names, size)]
        wrong = []
        for subset in subsets:
            found = torch.autograd.grad(output, [leaves[name] for name in subset], gradient, retain_graph=True)
            wrong += difference(dict(zip(subset, found, strict=True)), {name: whole[name] for name in subset})
        case.equal(f"{dtype}: gradients of a subset that differ", wrong, [])
        asked = (leaves["first"], unused)
        case.raises(
            "an input that was not used",
            RuntimeError,
            functools.partial(torch.autograd.grad, output, asked, gradient, retain_graph=True),
            names=("allow_unused|unused|used",),
        )
        allowed = torch.autograd.grad(output, asked, gradient, retain_graph=True, allow_unused=True)
        case.identical(f"{dtype}: beside an unused input", allowed[0], whole["first"])
        case.true(f"{dtype}: nothing for the unused input", allowed[1] is None, allowed[1])
        made = torch.autograd.grad(output, asked, gradient, materialize_grads=True)
        case.identical(f"{dtype}: zeros for the unused input", made[1], torch.zeros_like(unused))
        case.equal(f"{dtype}: .grad that was set", sorted(gradients(leaves)), [])
    case.note("subsets, in every order", len(subsets))


@contract("AMP-BACKWARD-041")
def test_grad_of_intermediates_and_batches(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        x, weight = integers(rng, target, 3, 7), integers(rng, target, 5, 7)
        with target.autocast(dtype):
            hidden = functional.linear(x, weight)
            output = functional.mse_loss(hidden, torch.zeros_like(hidden), reduction="sum")
        inner, outer = torch.autograd.grad(output, (hidden, weight), retain_graph=True)
        case.equal(
            f"{dtype}: types at a 16-bit tensor and at a leaf", (inner.dtype, outer.dtype), (dtype, torch.float32)
        )
        exact = 2 * x.detach().cpu().double() @ weight.detach().cpu().double().T
        exactly(case, f"{dtype}: at the 16-bit tensor", inner, exact)
        # A row of the Jacobian for each element of the output, all at once.
        rows = torch.eye(15, device=target.device).view(15, 3, 5).to(dtype)
        (batched,) = torch.autograd.grad(hidden, weight, rows, retain_graph=True, is_grads_batched=True)
        case.equal(f"{dtype}: type of a batch of gradients", batched.dtype, torch.float32)
        for number, row in enumerate(rows):
            (single,) = torch.autograd.grad(hidden, weight, row, retain_graph=True)
            if not torch.equal(batched[number], single):
                case.identical(f"{dtype}: row {number} of a batch against it alone", batched[number], single)
        case.identical(f"{dtype}: the last row of a batch against it alone", batched[-1], single)


@contract("AMP-BACKWARD-042")
def test_backward_into_some_inputs(case: Case, target: Target, rng: torch.Generator) -> None:
    chain = BY_NAME["two-layers"]
    for dtype in case.supported(target):
        leaves = chain.leaves(normal(rng), target.device)
        output = forward(chain, leaves, target, dtype)
        gradient = cotangent(output, rng)
        output.backward(gradient, retain_graph=True)
        whole = gradients(leaves)
        for name, leaf in leaves.items():
            output.backward(gradient, inputs=[leaf], retain_graph=True)
            found = gradients(leaves)
            case.equal(f"{dtype}, into {name}: leaves that differ", difference(found, {name: whole[name]}), [])


@contract("AMP-BACKWARD-043")
def test_several_roots(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        x, first, second = integers(rng, target, 4, 6), integers(rng, target, 5, 6), integers(rng, target, 3, 5)
        with target.autocast(dtype):
            hidden = functional.linear(x, first)
            output = functional.linear(hidden, second)
            loss = functional.mse_loss(hidden, torch.zeros_like(hidden), reduction="sum")
        steps = torch.randint(-1, 2, output.shape, generator=rng).to(target.device, dtype)
        case.equal(f"{dtype}: types of the roots", (output.dtype, loss.dtype), (dtype, torch.float32))
        torch.autograd.backward([output, loss], [steps, None])
        a, w, v, g = (tensor.detach().cpu().double() for tensor in (x, first, second, steps))
        into_hidden = g @ v + 2 * (a @ w.T)
        found = gradients({"x": x, "first": first, "second": second})
        exact = {"x": into_hidden @ w, "first": into_hidden.T @ a, "second": g.T @ (a @ w.T)}
        for name, promised in exact.items():
            case.equal(f"{dtype}: type of the gradient of {name}", found[name].dtype, torch.float32)
            # At most 75: integers below 2^8 are exact in both dtypes.
            exactly(case, f"{dtype}: gradient of {name}", found[name], promised)


@contract("AMP-BACKWARD-044")
def test_second_backward_of_one_graph(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong = []
    for dtype, chain in itertools.product(case.supported(target), CHAINS):
        leaves = chain.leaves(normal(rng), target.device)
        with repeatable_convolutions():
            output = forward(chain, leaves, target, dtype)
            gradient = cotangent(output, rng)
            output.backward(gradient, retain_graph=True)
            once = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
            output.backward(gradient)
        twice = gradients(leaves)
        wrong += [f"{chain.name} in {dtype}: {name}" for name in difference(twice, {k: 2 * g for k, g in once.items()})]
    case.equal("gradients that a second backward of the graph does not double", wrong[:3], [])
    case.raises(
        "a third one", RuntimeError, lambda: output.backward(gradient), names=("retain_graph|graph|twice|second time",)
    )


@contract("AMP-BACKWARD-045")
def test_second_derivatives(case: Case, target: Target, rng: torch.Generator) -> None:
    # Integers, so that a second derivative does not depend on the order of its sum.
    compared, wrong = 0, []
    for dtype, chain in itertools.product(case.supported(target), LOWERED):
        leaves = chain.leaves(small_integers(rng), target.device)
        weights = torch.randint(-1, 2, (1, 1), generator=rng).to(target.device)

        def second(output: torch.Tensor, leaves: Mapping[str, torch.Tensor] = leaves) -> dict[str, torch.Tensor]:
            asked = [leaf for leaf in leaves.values() if leaf.requires_grad]
            inner = torch.autograd.grad(output.float().sum() + 0 * weights.sum(), asked, create_graph=True)  # noqa: B023
            sum(part.square().sum() for part in inner).backward()
            return {**gradients(leaves), **{f"inner {n}": part.detach() for n, part in enumerate(inner)}}

        with repeatable_convolutions():
            seen = second(forward(chain, leaves, target, dtype))
            expected = second(chain.manual(leaves, dtype))
        compared += len(expected)
        wrong += [f"{chain.name} in {dtype}: {name}" for name in difference(seen, expected)]
        case.equal(f"{chain.name} in {dtype}: types", {part.dtype for part in seen.values()}, {torch.float32})
    case.equal("first and second derivatives that differ from those of manual casts", wrong[:3], [])
    case.note("derivatives compared", compared)


@contract("AMP-BACKWARD-046")
def test_backward_in_a_region_of_another_type(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        other = OTHER[dtype]
        case.require(target, other)
        x, weight = torch.randn(16, 32, generator=rng), torch.randn(24, 32, generator=rng)
        x, weight = x.to(target.device), weight.to(target.device).requires_grad_()
        with target.autocast(dtype):
            output = functional.linear(x, weight)
        gradient = cotangent(output, rng)
        with target.autocast(other):
            output.backward(gradient)
        assert weight.grad is not None
        case.equal(f"{dtype} inside {other}: type", weight.grad.dtype, torch.float32)
        exact = gradient.cpu().double().T @ x.cpu().double()
        # Operands and result may be rounded in either type: three roundings of the coarser one at the most.
        error = float((weight.grad.cpu().double() - exact).norm() / exact.norm())
        case.at_most(f"{dtype} inside {other}: relative error", error / UNIT[torch.bfloat16], 3.0, "u of bfloat16")


def outside_and_inside(
    chain: Chain,
    target: Target,
    dtype: torch.dtype,
    rng: torch.Generator,
    around: contextlib.AbstractContextManager[object],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients of one forward in `dtype`: of a backward outside of regions, and of one in `around`."""
    leaves = chain.leaves(normal(rng), target.device)
    with repeatable_convolutions():
        output = forward(chain, leaves, target, dtype)
        gradient = cotangent(output, rng)
        output.backward(gradient, retain_graph=True)
        outside = gradients(leaves)
        with around:
            output.backward(gradient)
    return outside, gradients(leaves)


@contract("AMP-BACKWARD-046")
def test_backward_in_a_disabled_region(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong = []
    for dtype, chain in itertools.product(case.supported(target), CHAINS):
        around = target.autocast(OTHER[dtype], enabled=False)
        outside, inside = outside_and_inside(chain, target, dtype, rng, around)
        wrong += [f"{chain.name} in {dtype}: {name}" for name in difference(inside, outside)]
    case.equal("gradients that a disabled region around backward changes", wrong[:3], [])


# The regions in which backward may be called: whether of the other dtype, and whether with the weight cache.
AROUND = {"same": (False, True), "same-uncached": (False, False), "other": (True, True)}


@contract("AMP-BACKWARD-075")
@pytest.mark.parametrize("around", AROUND)
def test_backward_keeps_the_types_of_forward(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, around: str
) -> None:
    is_other, cached = AROUND[around]
    region_dtype = OTHER[amp_dtype] if is_other else amp_dtype
    case.require(target, region_dtype)
    wrong, compared = [], 0
    for chain in CHAINS:
        region = target.autocast(region_dtype, cache_enabled=cached)
        outside, inside = outside_and_inside(chain, target, amp_dtype, rng, region)
        compared += len(inside)
        wrong += [f"{chain.name}: {name}" for name in difference(inside, outside)]
    case.at_least("gradients compared", compared, len(CHAINS))
    case.equal("gradients that the region around backward changes", wrong[:3], [])


@contract("AMP-BACKWARD-047")
def test_backward_in_another_thread(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        chain = BY_NAME["through-float32"]
        leaves = chain.leaves(normal(rng), target.device)
        output = forward(chain, leaves, target, dtype)
        gradient = cotangent(output, rng)
        output.backward(gradient, retain_graph=True)
        expected = gradients(leaves)
        recorded: list[bool] = []

        def backward(
            output: torch.Tensor = output, gradient: torch.Tensor = gradient, recorded: list[bool] = recorded
        ) -> None:
            output.backward(gradient, retain_graph=True)
            recorded.append(torch.is_autocast_enabled(target.device_type))

        # The region of the waiting thread does not apply in the other.
        with target.autocast(OTHER[dtype]):
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        case.equal(f"{dtype}: autocast in the other thread", recorded, [False])
        case.equal(f"{dtype}: gradients that differ", difference(gradients(leaves), expected), [])


def as_it_is(kept: Any) -> Any:
    return kept


class Saved:
    """Saved-tensor hooks that record the saved tensors, and pass them through `pack` and `unpack`."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any] = as_it_is,
        unpack: Callable[[Any], Any] = as_it_is,
    ) -> None:
        self.packed: list[torch.Tensor] = []
        self.unpacked = 0
        self._pack, self._unpack = pack, unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        self.packed.append(tensor.detach())
        return self._pack(tensor)

    def unpack(self, kept: Any) -> Any:
        self.unpacked += 1
        return self._unpack(kept)

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @property
    def floating(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.packed if tensor.is_floating_point()]


@contract("AMP-BACKWARD-048")
def test_types_of_saved_tensors(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong, compared = [], 0
    for dtype, chain in itertools.product(case.supported(target), LOWERED):
        leaves = chain.leaves(normal(rng), target.device)
        lowered, plain = Saved(), Saved()
        with lowered.hooks():
            forward(chain, leaves, target, dtype)
        with plain.hooks():
            chain.autocast(leaves)
        types = {tensor.dtype for tensor in lowered.floating}
        if types != {dtype}:
            wrong.append(f"{chain.name} in {dtype} saves {types}")
        if {tensor.dtype for tensor in plain.floating} != {torch.float32}:
            wrong.append(f"control: {chain.name} outside saves {plain.floating}")
        sizes = [sum(tensor.numel() for tensor in saved.floating) for saved in (lowered, plain)]
        # Elements are as many, so bytes are half. A 16-bit ReLU or shared weight may be saved as one tensor or two.
        if sizes[0] > sizes[1]:
            wrong.append(f"{chain.name} in {dtype} saves {sizes[0]} elements, outside {sizes[1]}")
        compared += len(lowered.packed)
    case.equal("chains that save another type", wrong[:3], [])
    case.note("tensors saved by lower precision ops", compared)
    for dtype in case.supported(target):
        leaves = BY_NAME["to-loss"].leaves(normal(rng), target.device)
        saved = Saved()
        with saved.hooks():
            forward(BY_NAME["to-loss"], leaves, target, dtype)
        shapes = {(tensor.dtype, tuple(tensor.shape)) for tensor in saved.floating}
        case.true(f"{dtype}: linear saves its input", (dtype, (8, 16)) in shapes, shapes)
        case.true(f"{dtype}: the float32 loss saves float32 logits", (torch.float32, (8, 6)) in shapes, shapes)
        wide = [shape for kind, shape in shapes if kind == torch.float32 and shape != (8, 6)]
        case.equal(f"{dtype}: other tensors saved in float32", wide, [])


@contract("AMP-BACKWARD-049")
def test_saved_tensor_hooks(case: Case, target: Target, rng: torch.Generator) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "as they are": lambda: Saved().hooks(),
        "as float32": lambda: Saved(lambda t: (t.dtype, t.float()), lambda kept: kept[1].to(kept[0])).hooks(),
        "as copies": lambda: Saved(torch.Tensor.clone).hooks(),
        "on the CPU": torch.autograd.graph.save_on_cpu,
    }
    wrong, compared = [], 0
    for dtype, chain in itertools.product(case.supported(target), (*CHAINS, AFTER_AN_UNLISTED_OP)):
        leaves = chain.leaves(normal(rng), target.device)
        with repeatable_convolutions():
            output = forward(chain, leaves, target, dtype)
            gradient = cotangent(output, rng)
            output.backward(gradient)
            expected = gradients(leaves)
            for name, hooks in ways.items():
                with hooks():
                    output = forward(chain, leaves, target, dtype)
                output.backward(gradient)
                found = gradients(leaves)
                compared += len(found)
                wrong += [f"{chain.name} in {dtype}, {name}: {leaf}" for leaf in difference(found, expected)]
    case.equal("gradients that differ where saved tensors are kept otherwise", wrong[:3], [])
    case.note("gradients compared", compared)
    saved = Saved(unpack=lambda kept: kept * 2)
    leaves = BY_NAME["mm"].leaves(normal(rng), target.device)
    with saved.hooks():
        output = forward(BY_NAME["mm"], leaves, target, dtype)
    output.backward(gradient := cotangent(output, rng), retain_graph=True)
    doubled = gradients(leaves)["weight"]
    exact = 2 * leaves["x"].detach().to(dtype).t().mm(gradient).float()
    case.identical("control: what unpack returns is what backward uses", doubled, exact)
    case.equal("saved and unpacked", saved.unpacked, len(saved.packed))


@contract("AMP-BACKWARD-049")
def test_hooks_at_every_use_of_a_weight(case: Case, target: Target, rng: torch.Generator) -> None:
    """Save for backward at a later use in the region, whose cast comes from the weight cache, what the first saves."""
    wrong, compared = [], 0
    for dtype, chain in itertools.product(case.supported(target), CHAINS):
        leaves = {name: torch.nn.Parameter(leaf) for name, leaf in chain.leaves(normal(rng), target.device).items()}
        uses = [Saved() for _ in range(3)]
        with target.autocast(dtype):
            for saved in uses:
                with saved.hooks():
                    chain.autocast(leaves)
        first, *later = [[(one.dtype, tuple(one.shape)) for one in saved.packed] for saved in uses]
        compared += len(first)
        wrong += [f"{chain.name} in {dtype}: {other}, at first {first}" for other in later if other != first]
    case.at_least("tensors saved at the first use", compared, 1)
    case.equal("what hooks see of a later use that differs from the first", wrong[:3], [])


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings of anomaly mode and of the imports of forward mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contract("AMP-BACKWARD-050")
def test_anomaly_mode(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        chain = BY_NAME["to-loss"]
        leaves = chain.leaves(normal(rng), target.device)
        forward(chain, leaves, target, dtype).backward()
        expected = gradients(leaves)
        with quietly(), torch.autograd.detect_anomaly():
            forward(chain, leaves, target, dtype).backward()
            case.equal(f"{dtype}: gradients that differ", difference(gradients(leaves), expected), [])
            with target.autocast(dtype):
                hidden = functional.linear(leaves["x"], leaves["weight"])
            # Zero times infinity: the derivative of the root at zero, times that of the absolute value there.
            root = (hidden - hidden.detach()).abs().sqrt().sum()
            case.raises(f"{dtype}: a NaN of a 16-bit op", RuntimeError, root.backward, names=("nan",))


@contract("AMP-BACKWARD-051")
def test_function_transforms(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype in case.supported(target):
        layer = torch.nn.Linear(6, 5).to(target.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=rng))
        parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        rows = torch.randint(-1, 2, (4, 6), generator=rng).float().to(target.device)

        def loss(weights: Mapping[str, torch.Tensor], x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            with target.autocast(dtype):
                output = torch.func.functional_call(layer, dict(weights), (x,))  # noqa: B023
                return functional.mse_loss(output, torch.zeros_like(output), reduction="sum")

        with target.autocast(dtype):
            output = layer(rows)
            whole = functional.mse_loss(output, torch.zeros_like(output), reduction="sum")
        whole.backward()
        expected = gradients(dict(layer.named_parameters()))
        found = torch.func.grad(loss)(parameters, rows)
        case.equal(f"{dtype}: torch.func.grad differs at", difference(found, expected), [])
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, rows)
        summed = {name: gradient.sum(0) for name, gradient in each.items()}
        case.equal(f"{dtype}: the sum of torch.func.vmap over rows differs at", difference(summed, expected), [])
        back = torch.func.jacrev(loss)(parameters, rows)
        case.equal(f"{dtype}: torch.func.jacrev differs at", difference(back, expected), [])
        if case.level == "quick":  # Forward mode loads the decompositions of torch, a third of a second.
            continue
        direction = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
        with quietly():
            _, along = torch.func.jvp(functools.partial(loss, x=rows), (parameters,), (direction,))
        exact = sum(gradient.cpu().double().sum() for gradient in expected.values())
        case.equal(f"{dtype}: torch.func.jvp", float(along), float(exact))


class Intermediates(TorchFunctionMode):
    """A mode that records every differentiable result except casts, and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if isinstance(result, torch.Tensor) and result.requires_grad and name not in ("to", "float"):
            result.retain_grad()
            self.kept.append((name, result))
        return result


@contract("AMP-BACKWARD-052")
def test_gradients_of_intermediates(case: Case, target: Target, rng: torch.Generator) -> None:
    wrong, compared = [], 0
    for dtype, chain in itertools.product(case.supported(target), CHAINS):
        leaves = chain.leaves(normal(rng), target.device)
        with repeatable_convolutions():
            with Intermediates() as ours:
                output = forward(chain, leaves, target, dtype)
            gradient = cotangent(output, rng)
            output.backward(gradient)
            gradients(leaves)
            with Intermediates() as theirs:
                manual = chain.manual(leaves, dtype)
            manual.backward(gradient)
        names = [[name for name, _ in run.kept] for run in (ours, theirs)]
        if names[0] != names[1]:
            wrong.append(f"{chain.name} in {dtype}: {names[0]}, by hand {names[1]}")
            continue
        for (name, seen), (_, expected) in zip(ours.kept, theirs.kept, strict=True):
            assert seen.grad is not None
            assert expected.grad is not None
            compared += 1
            if seen.grad.dtype != seen.dtype or difference({name: seen.grad}, {name: expected.grad}):
                wrong.append(f"{chain.name} in {dtype}: {name}, {seen.grad.dtype} for {seen.dtype}")
    case.equal("intermediate gradients that differ from those of manual casts", wrong[:3], [])
    case.note("intermediate gradients compared", compared)


MEETINGS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "residual": lambda low, high: low + high,
    "difference": lambda low, high: high - low,
    "product": lambda low, high: low * high,
    "cat": lambda low, high: torch.cat([low, high]),
    "stack": lambda low, high: torch.stack([high, low]),
    "where": lambda low, high: torch.where(high > 0, low, high),
    "maximum": lambda low, high: torch.maximum(low.float(), high),
    "residual, twice": lambda low, high: (low + high) + low,
    "part": lambda low, high: low[1:] + high[:-1],
}


@contract("AMP-BACKWARD-053")
def test_where_types_meet(case: Case, target: Target, rng: torch.Generator) -> None:
    for dtype, (name, meet) in itertools.product(case.supported(target), MEETINGS.items()):
        x, weight, high = integers(rng, target, 4, 6), integers(rng, target, 5, 6), integers(rng, target, 4, 5)
        exact = [tensor.detach().cpu().double().requires_grad_() for tensor in (x, weight, high)]
        with target.autocast(dtype):
            low = functional.linear(x, weight)
            low.retain_grad()
            met = meet(low, high)
        case.equal(f"{dtype}, {name}: types", (low.dtype, met.dtype), (dtype, torch.float32))
        steps = torch.randint(-1, 2, met.shape, generator=rng).to(target.device)
        (met * steps).sum().backward()
        (meet(exact[0] @ exact[1].T, exact[2]) * steps.cpu()).sum().backward()
        assert low.grad is not None
        case.equal(f"{dtype}, {name}: type at the 16-bit tensor", low.grad.dtype, dtype)
        for leaf, reference in zip((x, weight, high), exact, strict=True):
            assert leaf.grad is not None
            assert reference.grad is not None
            case.equal(f"{dtype}, {name}: type at a leaf", leaf.grad.dtype, torch.float32)
            exactly(case, f"{dtype}, {name}: gradient of a leaf of {tuple(leaf.shape)}", leaf.grad, reference.grad)


@contract("AMP-BACKWARD-085")
@pytest.mark.parametrize("place", ["in", "outside"])
def test_gradients_that_are_not_there(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    """Ask for the gradients of tensors that took no part, and pass none through a function of several outputs."""
    region = functools.partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    for dtype in (torch.float32, amp_dtype):
        used, unused = (torch.ones(2, 3, device=target.device, dtype=dtype, requires_grad=True) for _ in range(2))
        with region():
            loss = (used * 2).float().sum()
            found = torch.autograd.grad(loss, [used, unused], materialize_grads=True)
        case.identical(f"{dtype}: gradient of what took part", found[0], torch.full((2, 3), 2.0, dtype=dtype))
        case.identical(f"{dtype}: gradient of what took none", found[1], torch.zeros(2, 3, dtype=dtype))
        for decorated, materialized in itertools.product((False, True), repeat=2):
            seen: list[torch.dtype | None] = []
            function = several_outputs(target, (dtype, dtype), (), seen, decorated, materialized)
            used.grad = None
            with region():
                first, _ = function.apply(used)
            first.float().sum().backward()
            what = f"{dtype}, {decorated=}, {materialized=}"
            case.equal(
                f"{what}: types of the slopes, of which one is undefined",
                seen,
                [dtype, dtype if materialized else None],
            )
            case.identical(f"{what}: gradient", used.grad, torch.ones_like(used))


def several_outputs(
    target: Target,
    dtypes: tuple[torch.dtype, ...],
    marked: tuple[int, ...],
    seen: list[torch.dtype | None],
    decorated: bool,
    materialized: bool = True,
) -> type[torch.autograd.Function]:
    """Return a function of which output number n is its input n + 1 times, in a dtype, or is non-differentiable.

    Its backward puts the types of what it gets into `seen`.
    """

    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tuple((x * (number + 1)).to(dtype) for number, dtype in enumerate(dtypes))
        if marked:
            ctx.mark_non_differentiable(*(outputs[number] for number in marked))
        ctx.set_materialize_grads(materialized)
        ctx.dtype = x.dtype
        return outputs

    def backward(ctx: Any, *slopes: Any) -> torch.Tensor:
        seen.extend(None if slope is None else slope.dtype for slope in slopes)
        parts = [(number + 1) * slope.to(ctx.dtype) for number, slope in enumerate(slopes) if slope is not None]
        return torch.stack(parts).sum(0)

    if decorated:
        forward = torch.amp.custom_fwd(forward, device_type=target.device_type)
        backward = torch.amp.custom_bwd(backward, device_type=target.device_type)
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Several", (torch.autograd.Function,), members)


@contract("AMP-BACKWARD-085")
@pytest.mark.parametrize("place", ["in", "outside"])
def test_marked_outputs(case: Case, target: Target, amp_dtype: torch.dtype, place: str) -> None:
    """Mark none, one and several of four outputs of two types as non-differentiable."""
    region = functools.partial(target.autocast, amp_dtype) if place == "in" else contextlib.nullcontext
    dtypes = (amp_dtype, torch.float32, torch.float32, amp_dtype)
    wrong = {}
    choices = [chosen for count in range(4) for chosen in itertools.permutations(range(4), count)]
    for marked, decorated in itertools.product(choices, (False, True)):
        seen: list[torch.dtype | None] = []
        x = torch.ones(2, 3, device=target.device, requires_grad=True)
        with region():
            outputs = several_outputs(target, dtypes, marked, seen, decorated).apply(x)
        free = [number for number, output in enumerate(outputs) if output.requires_grad]
        sum(outputs[number].float().sum() for number in free).backward()
        wanted = [number for number in range(4) if number not in marked]
        slope = sum(number + 1 for number in wanted)
        if free != wanted or seen != list(dtypes) or x.grad is None or not bool((x.grad == slope).all()):
            wrong[f"marked {marked}, {decorated=}"] = free, seen, None if x.grad is None else x.grad.tolist()
    case.equal("functions with other differentiable outputs, slopes of other types, or another gradient", wrong, {})
