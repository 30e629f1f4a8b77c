"""Check that compiled code opens a region in whatever way it is written."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .support import compiler, whole_numbers

Product = Callable[[Tensor], Tensor]


def _with(make: Callable[[str, torch.dtype], contextlib.AbstractContextManager[object]]) -> Callable[..., Product]:
    """Return a maker of products in the region that `make` opens of a device type and a dtype."""

    def of(device_type: str, dtype: torch.dtype) -> Product:
        def product(x: Tensor) -> Tensor:
            with make(device_type, dtype):
                return x @ x

        return product

    return of


@contextlib.contextmanager
def _generator(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(device_type, dtype):
        yield


class _Around:
    """A context manager of a class that keeps a region."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.region = torch.autocast(device_type, dtype=dtype)

    def __enter__(self) -> None:
        self.region.__enter__()

    def __exit__(self, *given: object) -> None:
        self.region.__exit__(*given)


def _stacked(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(device_type, dtype=dtype))
            return x @ x

    return product


def _decorated(device_type: str, dtype: torch.dtype) -> Product:
    @torch.autocast(device_type, dtype=dtype)
    def inner(x: Tensor) -> Tensor:
        return x @ x

    return lambda x: inner(x)


def _chosen(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype) if x.dim() == 2 else contextlib.nullcontext():
            return x @ x

    return product


def _partial(device_type: str, dtype: torch.dtype) -> Product:
    region = functools.partial(torch.autocast, device_type, dtype=dtype)

    def product(x: Tensor) -> Tensor:
        with region():
            return x @ x

    return product


def _older(device_type: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Open a region by the deprecated class of a device type, where it has one."""
    kind = {"cpu": torch.cpu.amp.autocast, "cuda": torch.cuda.amp.autocast}.get(device_type)
    return torch.autocast(device_type, dtype) if kind is None else kind(dtype=dtype)


SPELLINGS: dict[str, Callable[[str, torch.dtype], Product]] = {
    "autocast by position": _with(lambda device_type, dtype: torch.autocast(device_type, dtype)),
    "autocast by keyword": _with(lambda device_type, dtype: torch.autocast(device_type=device_type, dtype=dtype)),
    "torch.amp.autocast": _with(lambda device_type, dtype: torch.amp.autocast(device_type, dtype)),
    "with all arguments": _with(lambda device_type, dtype: torch.autocast(device_type, dtype, True, False)),
    "disabled": _with(lambda device_type, dtype: torch.autocast(device_type, dtype, enabled=False)),
    "disabled by position": _with(lambda device_type, dtype: torch.autocast(device_type, dtype, False)),
    "in a generator": _with(_generator),
    "in a class": _with(_Around),
    "on an ExitStack": _stacked,
    "decorator": _decorated,
    "one of two managers": _chosen,
    "partial": _partial,
}


def _caught(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        try:
            with torch.autocast(device_type, dtype=dtype):
                y = x @ x
                raise KeyError(y.dtype)
        except KeyError:
            return x @ x

    return product


def _caught_from_a_call(device_type: str, dtype: torch.dtype) -> Product:
    def failing(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype):
            raise KeyError(x.dim())

    def product(x: Tensor) -> Tensor:
        try:
            return failing(x)
        except KeyError:
            return x @ x

    return product


def _suppressed(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        with contextlib.suppress(KeyError), torch.autocast(device_type, dtype=dtype):
            raise KeyError(x.dim())
        return x @ x

    return product


def _broken_off(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast(device_type, dtype=dtype):
                break
        return x @ x

    return product


def _continued(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        found = [x]
        for number in range(3):
            if number == 2:
                found.append(x @ x)
                continue
            with torch.autocast(device_type, dtype=dtype):
                continue
        return found[-1]

    return product


def _returned(device_type: str, dtype: torch.dtype) -> Product:
    def low(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype):
            return x @ x

    return lambda x: x @ low(x).float()


LEFT: dict[str, Callable[[str, torch.dtype], Product]] = {
    "a caught exception": _caught,
    "a caught exception of a call": _caught_from_a_call,
    "an exception that is suppressed": _suppressed,
    "break": _broken_off,
    "continue": _continued,
    "return": _returned,
}
"""Products outside of a region, by how the region was left."""


def _decorators(*names: str) -> Callable[[str, torch.dtype], Product]:
    """Return a maker of products whose function gets these decorators, the innermost first, where it is compiled."""

    def of(device_type: str, dtype: torch.dtype) -> Product:
        made: dict[str, Callable[[], Any]] = {
            "region": lambda: torch.autocast(device_type, dtype=dtype),
            "disabled": lambda: torch.autocast(device_type, enabled=False),
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "set_grad_enabled": lambda: torch.set_grad_enabled(False),
        }

        def product(x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return x @ x

            found: Callable[[Tensor], Tensor] = inner
            for name in names:
                found = made[name]()(found)
            return found(x)

        return product

    return of


DECORATED = {
    ", ".join(names): _decorators(*names)
    for names in (
        ("region",),
        ("no_grad", "region"),
        ("region", "no_grad"),
        ("region", "inference_mode"),
        ("region", "set_grad_enabled"),
        ("region", "disabled"),
        ("disabled", "region"),
        ("region", "region"),
    )
}
"""Products of a function that compiled code decorates, the innermost decorator first."""


def _recursive(device_type: str, dtype: torch.dtype) -> Product:
    @torch.autocast(device_type, dtype=dtype)
    def inner(x: Tensor, depth: int) -> Tensor:
        return inner(x, depth - 1) if depth else x @ x

    return lambda x: inner(x, 2)


def _nested(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        region = torch.autocast(device_type, dtype=dtype)
        with region:
            with region:
                inside = x @ x
            return inside + x @ x

    return product


def _one_after_another(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        region = torch.autocast(device_type, dtype=dtype)
        with region:
            found = x @ x
        between = x @ x
        with region:
            return found + x @ x + between.to(found.dtype)

    return product


def _called_by_name(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        region = torch.autocast(device_type, dtype=dtype)
        region.__enter__()
        found = x @ x
        region.__exit__(None, None, None)
        return found

    return product


def _held(device_type: str, dtype: torch.dtype) -> Product:
    def product(x: Tensor) -> Tensor:
        with torch.autocast(device_type, dtype=dtype) as region:
            return x @ x if region is not x else x

    return product


REENTERED: dict[str, Callable[[str, torch.dtype], Product]] = {
    "nested": _nested,
    "recursive": _recursive,
}
"""Products in regions of one object that is entered again before it is left."""

HELD: dict[str, Callable[[str, torch.dtype], Product]] = {
    "one after another": _one_after_another,
    "by as": _held,
}
OLDER = {"of the older class": _with(_older)}
BACKENDS = pytest.mark.parametrize("backend", ["eager", deep("standard", "aot_eager")])


@contract("AMP-COMPILE-070")
@BACKENDS
def test_spellings(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, backend: str) -> None:
    _judge(case, target, amp_dtype, rng, backend, SPELLINGS)


@contract("AMP-COMPILE-070")
@BACKENDS
def test_older_classes(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, backend: str) -> None:
    _judge(case, target, amp_dtype, rng, backend, OLDER)


@contract("AMP-COMPILE-070")
@BACKENDS
@pytest.mark.parametrize(
    "decorators", [deep("standard", name) if name != "region, no_grad" else name for name in DECORATED]
)
def test_decorators_in_compiled_code(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, decorators: str, backend: str
) -> None:
    _judge(case, target, amp_dtype, rng, backend, {decorators: DECORATED[decorators]}, control=False)


@contract("AMP-COMPILE-070")
@BACKENDS
@pytest.mark.parametrize("how", ["nested", deep("standard", "recursive")])
def test_regions_entered_again(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, how: str, backend: str
) -> None:
    _judge(case, target, amp_dtype, rng, backend, {how: REENTERED[how]})


@contract("AMP-COMPILE-070")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("standard", "aot_eager")])
@pytest.mark.parametrize("how", [deep("standard", name) for name in HELD])
def test_held_regions(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, how: str, backend: str
) -> None:
    _judge(case, target, amp_dtype, rng, backend, {how: HELD[how]})


@contract("AMP-COMPILE-070")
@pytest.mark.parametrize("backend", [deep("standard", "eager"), deep("standard", "aot_eager")])
def test_methods_called_by_name(
    case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, backend: str
) -> None:
    """The methods of an object that compiled code made, in place of a with statement."""
    _judge(case, target, amp_dtype, rng, backend, {"called by name": _called_by_name})


@contract("AMP-COMPILE-070")
@BACKENDS
def test_ways_out(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator, backend: str) -> None:
    names = list(LEFT) if case.level != "quick" else ["a caught exception", "an exception that is suppressed", "break"]
    _judge(case, target, amp_dtype, rng, backend, {name: LEFT[name] for name in names})


def _judge(
    case: Case,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    backend: str,
    spellings: dict[str, Callable[[str, torch.dtype], Product]],
    *,
    control: bool = True,
) -> None:
    x = whole_numbers(rng, target)
    wrong: dict[str, str] = {}
    for name, make in spellings.items():
        product = make(target.device_type, amp_dtype)
        with compiler(case), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older classes are deprecated
            plain = product(x)
            seen = torch.compile(product, backend=backend)(x)
        if seen.dtype != plain.dtype or not torch.equal(seen, plain):
            wrong[name] = f"{seen.dtype}, in eager {plain.dtype}"
        if control and plain.dtype != (torch.float32 if "disabled" in name or name in LEFT else amp_dtype):
            wrong[f"{name} (control)"] = f"{plain.dtype} in eager"
        if torch.is_autocast_enabled(target.device_type):
            torch.set_autocast_enabled(target.device_type, False)
            wrong[f"{name}, after it"] = "autocast is on"
    case.equal("regions that are not in compiled code what they are in eager", wrong, {})
