"""Check that compiled code stops gradients where eager does, and reads of its tensors the flags that eager reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiler, drawn, dtypes_of, whole_numbers

Part: TypeAlias = Callable[[Tensor], Tensor]
Results: TypeAlias = tuple[Tensor, ...]
Program: TypeAlias = Callable[[Tensor, Tensor], Results]
Reading: TypeAlias = Callable[[Tensor, Tensor], Tensor]

VIEWS: dict[str, Part] = {
    "view": lambda h: h.view(-1),
    "reshape": lambda h: h.reshape(2, 8),
    "transpose": lambda h: h.t(),
    "select": lambda h: h[0],
    "narrow": lambda h: h.narrow(0, 1, 2),
    "unsqueeze": lambda h: h.unsqueeze(0),
    "expand": lambda h: h.expand(2, 4, 4),
    "diagonal": lambda h: h.diagonal(),
    "chunk": lambda h: h.chunk(2)[1],
    "unbind": lambda h: h.unbind(1)[2],
}
"""Views of a matrix of 4 x 4. Eager says of those made under no_grad that they require a gradient; none flows back."""

RESULTS: dict[str, Part] = {
    "product": lambda h: h * 2,
    "matmul": lambda h: h @ h,
    "copy": lambda h: h.clone(),
    "cast": lambda h: h.double(),
}
"""What is not a view."""


def _under_no_grad(part: Part) -> Part:
    def stopped(h: Tensor) -> Tensor:
        with torch.no_grad():
            return part(h)

    return stopped


def _detached(part: Part) -> Part:
    return lambda h: part(h.detach())


def _decorated(part: Part) -> Part:
    return lambda h: torch.no_grad()(lambda given: part(given))(h)


def _in_place(part: Part) -> Part:
    return lambda h: part(h).clone().detach_()


STOPS = {"no_grad": _under_no_grad, "detach": _detached, "a decorator": _decorated, "detach in place": _in_place}


def _gradients(call: Program, given: tuple[Tensor, Tensor]) -> list[Any]:
    """Return the gradients of what a function returns, each times another number, and its types and values."""
    leaves = [one.clone().requires_grad_() for one in given]
    found = call(leaves[0], leaves[1])
    sums = [(one * (2.0**place)).double().sum() for place, one in enumerate(found) if one.requires_grad]
    torch.stack(sums).sum().backward()
    return [*(one.detach() for one in found), *(one.grad for one in leaves)]


def _using(device_type: str, dtype: torch.dtype, parts: Sequence[Part], source: str) -> Program:
    """Return a function that returns a product, and what each part makes of the product or of an argument."""

    def program(x: Tensor, w: Tensor) -> Results:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            h = x @ w
            return (h, *[part(h if source == "a product" else w) for part in parts])

    return program


def _product_of(program: Program) -> Program:
    return lambda x, w: program(x, w)[:1]


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@contract("AMP-COMPILE-085")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
@pytest.mark.parametrize("kind", ["views", "results"])
@pytest.mark.parametrize(
    "stop", ["no_grad", deep("standard", "detach"), deep("standard", "a decorator"), "detach in place"]
)
def test_stopped_gradients(
    case: Case, target: Target, rng: torch.Generator, stop: str, kind: str, backend: str
) -> None:
    """Results whose gradient is stopped, beside one whose gradient is not, of a leaf and of a product in a region."""
    parts = drawn(VIEWS if kind == "views" else RESULTS, rng, case.samples(quick=1, standard=3, full=10))
    given = (whole_numbers(rng, target), whole_numbers(rng, target))
    for dtype in dtypes_of(case, target):
        for name, part in parts.items():
            for source in ("a product", "a leaf"):
                program = _using(target.device_type, dtype, (STOPS[stop](part),), source)
                expected = _gradients(program, given)
                # The gradient of the product alone: whatever is stopped adds nothing to it.
                alone = _gradients(_product_of(program), given)
                what = f"{dtype}, {name} of {source}"
                both = all(map(_same, expected[2:], alone[1:]))
                case.equal(f"{what}: eager's gradients are those of the product alone (control)", both, True)
                with compiler(case):
                    seen = _gradients(torch.compile(program, backend=backend), given)
                places = ("the product", "the stopped result", "gradient of x", "gradient of w")
                wrong = [place for place, *two in zip(places, seen, expected, strict=True) if not _same(*two)]
                case.equal(f"{what}: what is not as in eager", wrong, [])


@contract("AMP-COMPILE-085")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
@pytest.mark.parametrize("stop", ["no_grad", *(deep("standard", stop) for stop in STOPS if stop != "no_grad")])
def test_results_beside_stopped_ones(case: Case, target: Target, rng: torch.Generator, stop: str, backend: str) -> None:
    """The same ops with a gradient and without one are not one op: each result has the flag that eager gives it."""
    given = (whole_numbers(rng, target), whole_numbers(rng, target))
    for dtype in dtypes_of(case, target):
        for name, part in RESULTS.items():
            program = _using(target.device_type, dtype, (STOPS[stop](part), part), "a product")
            with compiler(case):
                call = torch.compile(program, backend=backend)
                seen, expected = _gradients(call, given), _gradients(program, given)
                flags = [
                    [one.requires_grad for one in run(*(one.clone().requires_grad_() for one in given))]
                    for run in (call, program)
                ]
            places = ("the product", "the stopped result", "the other result", "gradient of x", "gradient of w")
            wrong = [place for place, *two in zip(places, seen, expected, strict=True) if not _same(*two)]
            case.equal(f"{dtype}, {name}: what is not as in eager", wrong, [])
            case.equal(f"{dtype}, {name}: results that require a gradient", *flags)


@contract("AMP-COMPILE-085")
@pytest.mark.parametrize("backend", ["aot_eager", deep("standard", "eager")])
def test_writes_to_what_was_detached(case: Case, target: Target, rng: torch.Generator, backend: str) -> None:
    """An argument that is written to, after it was detached, keeps its gradient."""
    given = (whole_numbers(rng, target), whole_numbers(rng, target))
    for dtype in dtypes_of(case, target):

        def program(x: Tensor, w: Tensor, dtype: torch.dtype = dtype) -> Results:
            with torch.autocast(x.device.type, dtype=dtype, cache_enabled=False):
                seen = x.detach()
                x.mul_(2)
                return x @ w, seen

        with compiler(case):
            call = torch.compile(program, backend=backend)
            found = [_gradients(lambda x, w, run=run: run(x * 1, w), given) for run in (call, program)]  # type: ignore[misc]
        places = ("the product", "the detached one", "gradient of x", "gradient of w")
        wrong = [place for place, *two in zip(places, *found, strict=True) if not _same(*two)]
        case.equal(f"{dtype}: what is not as in eager", wrong, [])


def _low(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False):
        return x @ w


def _detached_in_place(x: Tensor, w: Tensor) -> Tensor:
    h = _low(x, w)
    h.detach_()
    return h


def _written(write: Callable[[Tensor, Tensor], object]) -> Reading:
    def made(x: Tensor, w: Tensor) -> Tensor:
        state = torch.zeros(4, 4, device=x.device)
        write(state, _low(x, w).float())
        return state

    return made


TENSORS: dict[str, Reading] = {
    "a product": _low,
    "a factory's": lambda x, w: torch.zeros(4, 4, device=x.device),
    "a product under no_grad": lambda x, w: torch.no_grad()(_low)(x, w),
    "detached": lambda x, w: _low(x, w).detach(),
    "detached in place": _detached_in_place,
    "filled by add_": _written(lambda state, h: state.add_(h)),
    "filled by mul_": _written(lambda state, h: state.mul_(h)),
    "filled by copy_": _written(lambda state, h: state.copy_(h)),
    "filled by index": _written(lambda state, h: state.__setitem__(0, h[0])),
    "filled by a mask": _written(lambda state, h: state.masked_scatter_(h > 0, h)),
    "filled by index_copy_": _written(lambda state, h: state.index_copy_(0, torch.arange(4, device=h.device), h)),
    "written through a view": _written(lambda state, h: state.view(-1).add_(h.flatten())),
    "written through a row": _written(lambda state, h: state[0].copy_(h[0])),
}
READ: dict[str, Callable[[Tensor], object]] = {
    "requires_grad": lambda one: one.requires_grad,
    "is_leaf": lambda one: one.is_leaf,
    "dtype": lambda one: str(one.dtype),
    "itemsize": lambda one: one.itemsize,
    "is_floating_point": lambda one: one.is_floating_point(),
    "element_size": lambda one: one.element_size(),
    "contiguous": lambda one: one.is_contiguous(),
}


@contract("AMP-COMPILE-086")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), "aot_eager"])
@pytest.mark.parametrize("made", list(TENSORS))
def test_flags(case: Case, target: Target, rng: torch.Generator, made: str, backend: str) -> None:
    """A program takes what it reads of a tensor as Python does, and chooses by it what it computes."""
    case.require(target, torch.bfloat16)
    x, w = whole_numbers(rng, target), whole_numbers(rng, target).requires_grad_()

    def program(x: Tensor, w: Tensor) -> tuple[list[object], Tensor]:
        one = TENSORS[made](x, w)
        read = [get(one) for get in READ.values()]
        if one.requires_grad:
            return read, one * 2
        return read, one

    expected = program(x, w)
    with compiler(case):
        seen = torch.compile(program, backend=backend)(x, w)
    pairs = zip(READ, seen[0], expected[0], strict=True)
    wrong = {name: f"{ours}, in eager {theirs}" for name, ours, theirs in pairs if ours != theirs}
    case.equal("what compiled code reads of the tensor, unlike eager", wrong, {})
    case.identical("result of the branch that it takes", seen[1].detach(), expected[1].detach())
