"""The order in which autocast casts the inputs of an op, which nothing promises, read from the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .trace.casts import traced_casts
from .trace.ops import OpTrace


class CastOrder:
    """Read the order of casts from one call of each op in a region of its own, at the op's first call.

    C++ leaves the order in which arguments are evaluated to the compiler, and a backend may have written the kernels of
    some ops otherwise than torch's macros write the rest. Backward sees the order: it runs the casts' gradients in the
    opposite one. A trace around the first call of an op holds the op's own call twice: call the program once before.

    `region` makes a region for the device, in the amp dtype of the calls.
    """

    def __init__(self, region: Callable[[], AbstractContextManager[Any]]) -> None:
        self._region = region
        self._read: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def of(self, name: str, call: partial[Any], cast: list[int]) -> list[int]:
        """Sort `cast`, the places of the inputs of `call` to cast; keywords are counted after positional arguments.

        Inputs that no cast was seen of, and all of a call that raises in a region, keep their order.
        """
        if len(cast) < 2:
            return cast
        key = name, tuple(cast)
        if key not in self._read:
            seen = self._seen(call)
            self._read[key] = sorted(cast, key=lambda place: seen.index(place) if place in seen else len(seen))
        return self._read[key]

    def _seen(self, call: partial[Any]) -> list[int]:
        alone = partial(call.func, *tree_map(_detached, call.args), **tree_map(_detached, call.keywords))
        with torch.no_grad(), self._region(), OpTrace() as trace:
            try:
                alone()
            except Exception:  # the region that is judged raises it too
                return []
        names = [*map(str, range(len(call.args))), *call.keywords]
        paths = (cast.argument for cast in traced_casts(trace, alone))
        return list(dict.fromkeys(names.index(path.split("[")[0]) for path in paths if path is not None))


def _detached(value: Any) -> Any:
    """The input as a tensor of its own, also where the call is given one twice; no region keeps a cast of it."""
    return value.detach() if isinstance(value, torch.Tensor) else value
