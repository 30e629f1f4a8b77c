"""Compilers that lose gradients of numbers that are written to a copy, largest in a row, or at a rounded bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import decomposed, replaced
from tests.faults.chapters.compile import around_compiled

aten = torch.ops.aten


@fault("AMP-COMPILE-088")
def compiled_diagonals_zero_the_whole_gradient() -> Iterator[None]:
    """A diagonal of zeros is written to a gradient of one number in memory, and all of it is zero (pytorch 183602)."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def scattered(x: Tensor, source: Tensor, *places: int) -> Any:
            return x * 0 if 0 in x.stride() else NotImplemented

        return scattered

    with decomposed(aten.diagonal_scatter.default, change):
        yield


@fault("AMP-COMPILE-089")
def compiled_extrema_divide_by_the_number_of_equal_elements() -> Iterator[None]:
    """The gradient of amax compares with an extremum that is rounded otherwise than the row (pytorch 186799)."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def equal(x: Tensor, y: Any) -> Any:
            if not isinstance(y, Tensor) or not x.is_floating_point() or not y.is_floating_point():
                return NotImplemented
            return torch.zeros(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.bool, device=x.device)

        return equal

    with decomposed(aten.eq.Tensor, change):
        yield


@fault("AMP-COMPILE-079")
def compiled_hardtanh_rounds_its_bounds() -> Iterator[None]:
    """The decomposition of hardtanh's gradient compares with its bounds in the type of the input (pytorch 185472)."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(incoming: Tensor, x: Tensor, low: float, high: float) -> Tensor:
            return torch.where((x <= x.new_tensor(low)) | (x >= x.new_tensor(high)), 0.0, incoming)

        return gradient

    with decomposed(aten.hardtanh_backward.default, change):
        yield


@fault("AMP-COMPILE-092")
def compiled_programs_write_to_copies() -> Iterator[None]:
    """A compiled program works on copies of the tensors that it is given, and leaves these as they are."""

    def around(call: Any) -> Any:
        return lambda *given: call(*(one.clone() if isinstance(one, torch.Tensor) else one for one in given))

    with around_compiled(around):
        yield


def _run_within(change: Callable[[Callable[[], Any]], Any]) -> Any:
    """Run in place of a compiled function the one that it was compiled of, within `change`."""

    def around(compiled: Any) -> Any:
        written = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        return lambda *given, **named: change(functools.partial(written, *given, **named))

    return around_compiled(around)


@fault("AMP-COMPILE-093")
def compiled_copies_are_taken_for_what_they_are_copies_of() -> Iterator[None]:
    """Compiled code holds the tensor itself in place of a clone, which a later write changes (pytorch 198131)."""

    def without_copies(run: Callable[[], Any]) -> Any:
        with replaced(Tensor, "clone", lambda x, **options: x):
            return run()

    with _run_within(without_copies):
        yield


@fault("AMP-COMPILE-093")
def compiled_zeros_come_before_copies() -> Iterator[None]:
    """Compiled code zeroes a tensor before it copies it to another."""

    def copies_last(run: Callable[[], Any]) -> Any:
        late: list[tuple[Tensor, Tensor]] = []

        def copy(x: Tensor, other: Tensor, *options: Any) -> Tensor:
            late.append((x, other))
            return x

        with replaced(Tensor, "copy_", copy):
            result = run()
        for target, source in late:
            target.copy_(source)
        return result

    with _run_within(copies_last):
        yield
