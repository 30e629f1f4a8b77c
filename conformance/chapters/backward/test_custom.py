"""Check custom_fwd and custom_bwd in every documented form and every autocast state."""

from __future__ import annotations

import collections
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.manual_training import Cube
from ...oracles.numbers.formats import OTHER
from ...oracles.policy.overloads import mode_of
from .support import Around, Forward, Product, decorated, integers, state, surroundings, unlike_elsewhere


@contract("AMP-BACKWARD-028")
def test_state_of_both_passes(case: Case, target: Target) -> None:
    # A plain model of the docstrings: forward has the state around it, off where it casts; backward has forward's.
    dtypes = case.supported(target)
    default = state(target)[1]
    recorded: list[Any] = []

    def record_state(ctx: Any, tensor: torch.Tensor, *, named: torch.Tensor) -> object:
        recorded.append((*state(target), tensor.dtype, named.dtype))
        return recorded

    wrong: list[str] = []
    combinations = list(
        itertools.product(surroundings(dtypes), surroundings(dtypes), (None, torch.float32, *dtypes), (True, False))
    )
    given = torch.ones(2, device=target.device), torch.ones(2, device=target.device, dtype=dtypes[0])
    keywords = {"device_type": target.device_type}
    backward = torch.amp.custom_bwd(record_state, **keywords)
    forwards = {
        to: torch.amp.custom_fwd(record_state, cast_inputs=to, **keywords) for to in (None, torch.float32, *dtypes)
    }
    for ahead, behind, to, elsewhere in combinations:
        recorded.clear()
        ctx = torch.autograd.function.FunctionCtx()
        around = default if ahead.dtype is None else ahead.dtype
        enabled = ahead.dtype is not None and ahead.enabled
        with unlike_elsewhere(target, elsewhere, OTHER[dtypes[-1]]):
            with ahead.open(target):
                results = [forwards[to](ctx, given[0], named=given[1])]
                after = state(target)
            with behind.open(target):
                # The state is that of a call: another call of the function in between has its own.
                forwards[to](torch.autograd.function.FunctionCtx(), given[0], named=given[1])
                recorded.pop()
                before_backward = state(target)
                # Twice, as in a retained graph.
                results += [backward(ctx, given[0], named=given[1]) for _ in range(2)]
                after_backward = state(target)
        types = [tensor.dtype if to is None or not enabled else to for tensor in given]
        behind_forward = (enabled and to is None, around, *(tensor.dtype for tensor in given))
        promised = [(enabled and to is None, around, *types), behind_forward, behind_forward]
        found = (recorded, after, after_backward, [result is recorded for result in results])
        if found != (promised, (enabled, around), before_backward, [True, True, True]):
            wrong.append(f"forward in {ahead}, cast_inputs {to}, backward in {behind}: {found}, promised {promised}")
    case.equal("combinations that differ", wrong[:3], [])
    case.note("combinations of a state for forward, one for backward, a cast and other devices", len(combinations))


@contract("AMP-BACKWARD-028")
def test_exceptions_leave_the_state(case: Case, target: Target) -> None:
    def fail(*_: object) -> None:
        raise LookupError("from inside")

    dtype = case.supported(target)[0]
    keywords = {"device_type": target.device_type}
    forward = torch.amp.custom_fwd(fail, cast_inputs=torch.float32, **keywords)
    ctx = torch.autograd.function.FunctionCtx()
    with target.autocast(dtype):
        error = case.raises("what forward raises", LookupError, lambda: forward(ctx))
        case.equal("arguments of the exception", error.args, ("from inside",))
        case.equal("state after forward raised", state(target), (True, dtype))
        backward = torch.amp.custom_bwd(fail, **keywords)
        error = case.raises("what backward raises", LookupError, lambda: backward(ctx))
        case.equal("arguments of the exception", error.args, ("from inside",))
        case.equal("state after backward raised", state(target), (True, dtype))


@contract("AMP-BACKWARD-029")
def test_cache_flag_of_backward(case: Case, target: Target) -> None:
    dtype = case.supported(target)[0]
    recorded: list[bool] = []

    def record_state(*_: object) -> None:
        recorded.append(torch.is_autocast_cache_enabled())

    forward = torch.amp.custom_fwd(record_state, device_type=target.device_type)
    backward = torch.amp.custom_bwd(record_state, device_type=target.device_type)
    for cached in (True, False):
        ctx = torch.autograd.function.FunctionCtx()
        recorded.clear()
        with target.autocast(dtype, cache_enabled=cached):
            forward(ctx)
        backward(ctx)
        case.equal("cache flag in forward and in backward", recorded, [cached, cached])


@contract("AMP-BACKWARD-066", on=("torch.cuda", "fake:cuda"))
def test_deprecated_decorators_in_every_state(case: Case, target: Target) -> None:
    # torch.autocast("cuda") disables itself without CUDA, so backward on fake tensors is compared with the new name's;
    # a region that belongs to another device shows in the states of the others.
    dtypes = case.supported(target)
    recorded: list[Any] = []

    def record_state(ctx: Any, *tensors: torch.Tensor) -> object:
        states = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu", "xpu")]
        recorded.append((states, [tensor.dtype for tensor in tensors]))
        return recorded

    def passes(forward: Forward, backward: Forward, ahead: Around, behind: Around) -> list[Any]:
        """Return the records of both passes, whether each returned its result, and the state around forward."""
        recorded.clear()
        ctx = torch.autograd.function.FunctionCtx()
        with unlike_elsewhere(target, not behind.enabled, OTHER[dtypes[-1]]):
            with ahead.open(target):
                found: list[Any] = [state(target), forward(ctx, *given) is recorded, state(target)]
            with behind.open(target):
                found.append(backward(ctx, *given) is recorded)
        return [*found, *recorded]

    old, new, kind = torch.cuda.amp, torch.amp, {"device_type": "cuda"}
    wrong: list[str] = []
    with mode_of(target), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        types = [torch.float32, dtypes[0], torch.float64, torch.int64]
        # The last is on the CPU, whose tensors are not cast.
        given = [*(torch.ones(1, device=target.device, dtype=dtype) for dtype in types), torch.ones(1)]
        for to in (None, torch.float32, *dtypes):
            successor = new.custom_fwd(record_state, cast_inputs=to, **kind), new.custom_bwd(record_state, **kind)
            forms = old.custom_fwd(record_state, cast_inputs=to), old.custom_fwd(cast_inputs=to)(record_state)
            for ahead, behind in itertools.product(surroundings(dtypes), surroundings(dtypes)):
                expected = passes(*successor, ahead, behind)
                enabled, around = expected[0]
                casts = enabled and to is not None
                seen = [to if casts else dtype for dtype in types[:2]] + [*types[2:], torch.float32]
                for form in forms:
                    found = passes(form, old.custom_bwd(record_state), ahead, behind)
                    states, arguments = found[4]
                    forward = states[0], arguments
                    if found != expected or forward != ((enabled and not casts, around), seen):
                        wrong.append(f"forward in {ahead}, cast_inputs {to}, backward in {behind}: {found[4:]}")
    case.equal("combinations that differ", wrong[:3], [])


class Wrapped(list[Any]):
    """A subclass of list."""


@contract("AMP-BACKWARD-030")
def test_containers_of_inputs(case: Case, target: Target, rng: torch.Generator) -> None:
    for to in case.supported(target):
        # float32 in a region of `to`, and vice versa.
        source = torch.randn(4, generator=rng).to(target.device)
        cast, key = source.to(to), source.clone()
        rows = [source, source]
        given = {
            "list": [source, 1],
            "tuple": (source, [source]),
            "class of its own": Wrapped([source]),
            "mapping": {"a": source, 2: source, (1, 2): (source,)},
            "ordered mapping": collections.OrderedDict(first=source, second=source),
            "keys": {key: "value"},
            "iterator": iter(rows),
            "text in a list": ["text", b"bytes", "", "x"],
            "empty": [[], (), {}],
        }
        seen: list[tuple[Any, Any]] = []

        @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=to)
        def record(ctx: Any, *args: Any, seen: list[Any] = seen, **kwargs: Any) -> None:
            seen.append((args, kwargs))

        with target.autocast(to):
            record(torch.autograd.function.FunctionCtx(), given, source, number=3, tensor=source)
        (found, alone), keywords = seen[0]
        case.identical(f"{to}: a bare argument", alone, cast)
        case.identical(f"{to}: a keyword", keywords["tensor"], cast)
        case.equal(f"{to}: a number by keyword", keywords["number"], 3)
        same_structure(case, f"{to}: ", found, given, cast, rows)


def same_structure(case: Case, name: str, found: Any, given: Any, cast: torch.Tensor, rows: list[torch.Tensor]) -> None:
    case.equal(f"{name}list", [type(part) for part in found["list"]], [type(cast), int])
    case.identical(f"{name}in a list", found["list"][0], cast)
    case.equal(f"{name}tuple", [type(found["tuple"]), type(found["tuple"][1])], [tuple, list])
    case.identical(f"{name}in a list in a tuple", found["tuple"][1][0], cast)
    case.equal(f"{name}class of a list", type(found["class of its own"]), Wrapped)
    case.identical(f"{name}in it", found["class of its own"][0], cast)
    case.equal(f"{name}keys of a mapping", list(found["mapping"]), list(given["mapping"]))
    case.identical(f"{name}in a tuple in a mapping", found["mapping"][1, 2][0], cast)
    case.equal(f"{name}keys of an ordered mapping", list(found["ordered mapping"]), ["first", "second"])
    case.identical(f"{name}in an ordered mapping", found["ordered mapping"]["second"], cast)
    (key,) = found["keys"]
    case.identical(f"{name}a tensor as a key", key, cast)
    walked = list(found["iterator"])
    case.equal(f"{name}tensors from an iterator", len(walked), len(rows))
    case.identical(f"{name}from an iterator", walked[-1], cast)
    case.equal(f"{name}texts", found["text in a list"], given["text in a list"])
    case.equal(f"{name}empty containers", found["empty"], given["empty"])


@contract("AMP-BACKWARD-030")
def test_inputs_of_other_kinds(case: Case, target: Target, rng: torch.Generator) -> None:
    dtype = case.supported(target)[0]
    kinds = [torch.int8, torch.int64, torch.uint8, torch.bool]
    kinds += filter(target.computes_in, (torch.complex64, torch.float64))
    given: list[Any] = [torch.ones(3, device=target.device, dtype=kind) for kind in kinds]
    given += [torch.ones(3, device="meta"), 1, 2.5, None, True, 1j, torch.float16, target.device, object(), len]
    if importlib.util.find_spec("numpy") is not None:
        given += [torch.ones(3).numpy(), torch.ones(2, 2).double().numpy()]
    seen: list[Any] = []

    @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=dtype)
    def record(ctx: Any, *args: Any) -> None:
        seen.extend(args)

    with target.autocast(dtype):
        record(torch.autograd.function.FunctionCtx(), *given, list(given))
    changed = [f"{a!r} became {b!r}" for a, b in zip(given, seen, strict=False) if a is not b]
    case.equal("arguments that are not the object that was passed", changed, [])
    changed = [f"{a!r} became {b!r}" for a, b in zip(given, seen[-1], strict=True) if a is not b]
    case.equal("the same inside a list", changed, [])


class Pair(NamedTuple):
    """A named tuple of two tensors."""

    left: torch.Tensor
    right: torch.Tensor


@contract("AMP-BACKWARD-031")
def test_named_tuples(case: Case, target: Target, rng: torch.Generator) -> None:
    dtype = case.supported(target)[0]
    pair = Pair(*(torch.randn(3, generator=rng).to(target.device) for _ in range(2)))
    seen: list[Pair] = []

    @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=dtype)
    def record(ctx: Any, pair: Pair) -> None:
        seen.append(pair)

    with target.autocast(dtype):
        record(torch.autograd.function.FunctionCtx(), pair)
    case.identical("the field left", seen[0].left, pair.left.to(dtype))
    case.identical("the field right", seen[0].right, pair.right.to(dtype))


def forms(decorator: Callable[..., Any], **keywords: Any) -> dict[str, Callable[[Forward], Forward]]:
    """Return all call forms of a decorator that takes `device_type`."""
    first = dict(itertools.islice(keywords.items(), 1))
    rest = {name: value for name, value in keywords.items() if name not in first}
    return {
        "called": decorator(**keywords),
        "direct": lambda function: decorator(function, **keywords),
        "partial": functools.partial(decorator, **keywords),
        "called partial": functools.partial(decorator, **first)(**rest),
    }


@contract("AMP-BACKWARD-032")
def test_forms_of_the_decorators(case: Case, target: Target, rng: torch.Generator) -> None:
    left, right = integers(rng, target, 5, 7), integers(rng, target, 7, 3)
    exact = left.detach().cpu().double(), right.detach().cpu().double()
    kind = {"device_type": target.device_type}
    wrong: list[str] = []
    for dtype, to in itertools.product(case.supported(target), (None, torch.float32)):
        cast = {} if to is None else {"cast_inputs": to}
        backward_forms = forms(torch.amp.custom_bwd, **kind)
        for name, forward in forms(torch.amp.custom_fwd, **kind, **cast).items():
            function = decorated(forward, backward_forms[name])
            with target.autocast(dtype):
                output = function.apply(left, right)
            ones = torch.ones_like(output)
            found = torch.autograd.grad(output, (left, right), ones)
            single = ones.cpu().double()
            expected = single @ exact[1].T, exact[0].T @ single
            right_values = output.detach().cpu().double().equal(exact[0] @ exact[1]) and all(
                seen.dtype == torch.float32 and seen.cpu().double().equal(promised)
                for seen, promised in zip(found, expected, strict=True)
            )
            if output.dtype != (to or dtype) or not right_values:
                wrong.append(f"{name}, cast_inputs {to}, in {dtype}: output {output.dtype}")
    case.equal("forms that differ", wrong, [])
    for name in ("custom_fwd", "custom_bwd"):
        for form, decorator in forms(getattr(torch.amp, name), **kind).items():
            kept = decorator(Product.backward)
            case.equal(f"{name}, {form}: name and doc", (kept.__name__, kept.__doc__), ("backward", "Doc of backward."))
            case.true(f"{name}, {form}: what it wraps", kept.__wrapped__ is Product.backward)  # type: ignore[attr-defined]


@contract("AMP-BACKWARD-033")
def test_decorators_without_arguments(case: Case, target: Target, rng: torch.Generator) -> None:
    function = decorated(torch.amp.custom_fwd, torch.amp.custom_bwd)
    left, right = integers(rng, target, 5, 7), integers(rng, target, 7, 3)
    for dtype in case.supported(target):
        with target.autocast(dtype):
            output = function.apply(left, right)
        case.equal("dtype of the output", output.dtype, dtype)
        gradient = torch.autograd.grad(output, left, torch.ones_like(output))[0]
        case.identical("gradient", gradient, torch.ones_like(output).float().mm(right.detach().t()))


@contract("AMP-BACKWARD-034")
def test_function_with_setup_context(case: Case, target: Target, rng: torch.Generator) -> None:
    class Separate(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=target.device_type)
        def forward(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left.mm(right)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type=target.device_type))

    left, right = integers(rng, target, 5, 7), integers(rng, target, 7, 3)
    for dtype in case.supported(target):
        with target.autocast(dtype):
            output = Separate.apply(left, right)
        case.equal("dtype of the output", output.dtype, dtype)
        gradient = torch.autograd.grad(output, left, torch.ones_like(output))[0]
        case.identical("gradient", gradient, torch.ones_like(output).float().mm(right.detach().t()))


@contract("AMP-BACKWARD-035")
def test_second_derivative_of_a_custom_function(case: Case, target: Target, rng: torch.Generator) -> None:
    # For weights c, the gradients of sum(c AB) are c B' and A' c; those of their squares' sum 2 A c c' and the like.
    shapes = (3, 4), (4, 5)
    for dtype, to in itertools.product(case.supported(target), (None, torch.float32)):
        left, right = (integers(rng, target, *shape) for shape in shapes)
        weights = integers(rng, target, 3, 5).detach()
        kind = {"device_type": target.device_type}
        forward = torch.amp.custom_fwd(**kind, **({} if to is None else {"cast_inputs": to}))
        function = decorated(forward, torch.amp.custom_bwd(**kind))
        with target.autocast(dtype):
            output = function.apply(left, right)
        inner = torch.autograd.grad((output.float() * weights).sum(), (left, right), create_graph=True)
        case.equal(f"{dtype}, {to}: types of the inner gradients", [part.dtype for part in inner], [torch.float32] * 2)
        inner[0].square().sum().add(inner[1].square().sum()).backward()
        a, b, c = (tensor.detach().cpu().double() for tensor in (left, right, weights))
        for name, leaf, exact in (("left", left, 2 * c @ (a.T @ c).T), ("right", right, 2 * (c @ b.T).T @ c)):
            assert leaf.grad is not None
            case.equal(f"{dtype}, {to}: type at {name}", leaf.grad.dtype, torch.float32)
            case.identical(f"{dtype}, {to}: second derivative at {name}", leaf.grad.cpu().double() + 0.0, exact + 0.0)


@contract("AMP-BACKWARD-036")
def test_second_derivative_through_a_cast(case: Case, target: Target) -> None:
    kind = {"device_type": target.device_type}

    class Float32Cube(torch.autograd.Function):
        forward = staticmethod(torch.amp.custom_fwd(Cube.forward, cast_inputs=torch.float32, **kind))
        backward = staticmethod(torch.amp.custom_bwd(Cube.backward, **kind))

    for dtype in case.supported(target):
        for outside in (True, False):
            x = torch.tensor([1.0, 2.0, -3.0], dtype=dtype, device=target.device).requires_grad_()
            with target.autocast(dtype, enabled=not outside):
                output = Float32Cube.apply(x)
            (inner,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            where = "control: nothing is cast" if outside else f"{dtype} cast to float32"
            case.equal(f"{where}: first derivative", inner.tolist(), [3.0, 12.0, 27.0])
            case.equal(f"{where}: it depends on the input", inner.requires_grad, True)
            (second,) = torch.autograd.grad(inner.sum(), x)
            case.equal(f"{where}: second derivative", second.tolist(), [6.0, 12.0, -18.0])


@contract("AMP-BACKWARD-037")
def test_imported_function_in_a_disabled_subregion(case: Case, target: Target, rng: torch.Generator) -> None:
    first, second = integers(rng, target, 5, 7), integers(rng, target, 7, 3)
    weight = integers(rng, target, 7, 7)
    for dtype in case.supported(target):
        with target.autocast(dtype):
            hidden = first.mm(weight)
            case.equal("dtype before the subregion", hidden.dtype, dtype)
            with target.autocast(dtype, enabled=False):
                output = Product.apply(hidden.float(), second.float())
        case.equal("dtype of the output", output.dtype, torch.float32)
        ones = torch.ones_like(output)
        found = torch.autograd.grad(output, (first, weight, second), ones)
        a, w, b, g = (tensor.detach().cpu().double() for tensor in (first, weight, second, ones))
        exact = (g @ b.T) @ w.T, a.T @ (g @ b.T), (a @ w).T @ g
        for name, seen, promised in zip(("input", "weight", "second"), found, exact, strict=True):
            case.equal(f"type of the gradient of {name}", seen.dtype, torch.float32)
            case.identical(f"gradient of {name}", seen.cpu().double() + 0.0, promised + 0.0)


@contract("AMP-BACKWARD-038")
def test_inputs_of_unlike_types(case: Case, target: Target, rng: torch.Generator) -> None:
    # "Takes multiple floating-point Tensor inputs" of different types: what the decorators are for.
    kind = {"device_type": target.device_type}
    function = decorated(torch.amp.custom_fwd(**kind), torch.amp.custom_bwd(**kind))
    for dtype in case.supported(target):
        types = (torch.float32, dtype)
        for left_type, right_type in itertools.product(types, types):
            left, right = integers(rng, target, 5, 7, dtype=left_type), integers(rng, target, 7, 3, dtype=right_type)
            with target.autocast(dtype):
                output = function.apply(left, right)
            case.equal("dtype of the output", output.dtype, dtype)
            found = torch.autograd.grad(output, (left, right), torch.ones_like(output))
            a, b, g = (tensor.detach().cpu().double() for tensor in (left, right, torch.ones_like(output)))
            for leaf, seen, promised in zip((left, right), found, (g @ b.T, a.T @ g), strict=True):
                case.equal(f"{left_type} by {right_type}: type of a gradient", seen.dtype, leaf.dtype)
                case.identical(f"{left_type} by {right_type}: gradient", seen.cpu().double() + 0.0, promised + 0.0)
    left = integers(rng, target, 5, 7)
    with target.autocast(dtype):
        output = Product.apply(left, integers(rng, target, 7, 3))
    case.equal("control: undecorated, forward is cast", output.dtype, dtype)
    case.raises(
        "control: and backward meets two types",
        RuntimeError,
        lambda: output.backward(torch.ones_like(output)),
    )


@contract("AMP-BACKWARD-065")
def test_weight_shared_with_a_custom_function(case: Case, target: Target, rng: torch.Generator) -> None:
    kind = {"device_type": target.device_type}
    function = decorated(torch.amp.custom_fwd(**kind), torch.amp.custom_bwd(**kind))
    for dtype in case.supported(target):
        x, weight = integers(rng, target, 3, 5), integers(rng, target, 5, 5)
        with target.autocast(dtype):
            output = function.apply(x, weight).mm(weight)
        ones = torch.ones_like(output)
        found = torch.autograd.grad(output, (x, weight), ones)
        a, w, g = (tensor.detach().cpu().double() for tensor in (x, weight, ones))
        exact = g @ w.T @ w.T, a.T @ (g @ w.T) + (a @ w).T @ g
        for name, seen, promised in zip(("input", "weight"), found, exact, strict=True):
            case.identical(f"{dtype}: gradient of the {name}", seen.cpu().double() + 0.0, promised + 0.0)


def _writing(target: Target, cast_inputs: torch.dtype | None) -> type[torch.autograd.Function]:
    class Writing(torch.autograd.Function):
        """Multiply the first tensor by the second in place."""

        @staticmethod
        @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=cast_inputs)
        def forward(ctx: Any, tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(factor)
            ctx.mark_dirty(tensor)
            return tensor.mul_(factor)

        @staticmethod
        @torch.amp.custom_bwd(device_type=target.device_type)
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * ctx.saved_tensors[0], None

    return Writing


def _marking(target: Target, cast_inputs: torch.dtype | None, absent: list[int]) -> type[torch.autograd.Function]:
    class Marking(torch.autograd.Function):
        """Return a product, the places of its largest elements, its signs, and twice the first factor."""

        @staticmethod
        @torch.amp.custom_fwd(device_type=target.device_type, cast_inputs=cast_inputs)
        def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
            product = left.mm(right)
            places, signs = product.argmax(1), product.sign()
            ctx.mark_non_differentiable(places, signs)
            ctx.set_materialize_grads(False)
            return product, places, signs, left * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=target.device_type)
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
            absent.append(sum(gradient is None for gradient in gradients))
            return (None if gradients[3] is None else gradients[3] * 2), None

    return Marking


@contract("AMP-BACKWARD-087")
def test_functions_that_write_to_an_input(case: Case, target: Target, rng: torch.Generator) -> None:
    for region, dtype in itertools.product(case.supported(target), (torch.float32, *case.supported(target))):
        for cast_inputs in (None, dtype):  # a cast to the type that the tensor has casts nothing
            leaf, factor = integers(rng, target, 5, 7), integers(rng, target, 5, 7).detach().to(dtype)
            with target.autocast(region):
                tensor = leaf.to(dtype) * 1
                before = tensor.detach().clone()
                output = _writing(target, cast_inputs).apply(tensor, factor)
            what = f"{dtype} in a region of {region}, cast_inputs={cast_inputs}"
            case.true(f"{what}: the tensor itself is returned", output is tensor)
            case.identical(f"{what}: the tensor", tensor.detach(), before * factor)
            (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output))
            case.identical(f"{what}: gradient", gradient, factor.float())


@contract("AMP-BACKWARD-087")
def test_functions_that_mark_outputs(case: Case, target: Target, rng: torch.Generator) -> None:
    for region in case.supported(target):
        for cast_inputs in (None, torch.float32, region):
            left, right = integers(rng, target, 5, 7), integers(rng, target, 7, 3)
            absent: list[int] = []
            with target.autocast(region):
                outputs = _marking(target, cast_inputs, absent).apply(left, right)
            what = f"region of {region}, cast_inputs={cast_inputs}"
            needs = [output.requires_grad for output in outputs]
            case.equal(f"{what}: outputs that require gradients", needs, [True, False, False, True])
            (gradient,) = torch.autograd.grad(outputs[3].sum(), left)
            case.equal(f"{what}: gradients that are None in backward", absent, [3])
            case.identical(f"{what}: gradient", gradient, torch.full_like(left, 2.0).detach())
