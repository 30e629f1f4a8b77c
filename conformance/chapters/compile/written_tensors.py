"""Programs with regions that write to their arguments or buffers, of each type, and programs with dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional
from torch.utils import checkpoint

Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
SIZE = 4


def programs(device_type: str, dtype: torch.dtype) -> Mapping[str, Program]:
    """Return functions of a matrix and of a state, a matrix of any type, to which each writes in its way."""

    def product(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            return torch.mm(x, x)

    def added(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(product(x).to(state.dtype))
        return state * 2

    def copied(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.copy_(product(x))
        return state + 1

    def part(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state[1:3] = product(x)[1:3]
        return product(x)

    def put(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            state.index_put_((torch.tensor([0, 2], device=x.device),), torch.mm(x, x)[:2].to(state.dtype))
        return state.clone()

    def twice(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        low = product(x)
        state.mul_(2)
        state.view(-1)[3:].sub_(1)
        return low

    def shifted(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state[1:] = state[:-1].clone()
        return product(x)

    def flipped(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.index_put_((torch.arange(SIZE, device=x.device),), product(x).to(state.dtype))
        state.add_(state.flip(0))
        return state + 1

    return {each.__name__: each for each in (added, copied, part, put, twice, shifted, flipped)}


def views(device_type: str, dtype: torch.dtype) -> Mapping[str, Program]:
    """Return functions of a matrix and of a state that return a view of the state, or the state itself."""

    def product(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            return torch.mm(x, x)

    return {
        "rows": lambda x, state: state[1:3],
        "transposed": lambda x, state: state.t(),
        "flat, of a state that is written": lambda x, state: state.add_(product(x).to(state.dtype)).view(-1),
        "cast to its own type": lambda x, state: state.to(state.dtype),
        "a copy": lambda x, state: state.to(state.dtype, copy=True),
    }


class Writing(torch.nn.Module):
    """A program as a module whose buffer is the state."""

    def __init__(self, program: Program, state: torch.Tensor) -> None:
        super().__init__()
        self.program = program
        self.state: torch.Tensor
        self.register_buffer("state", state.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(x, self.state)


def every(made: Mapping[str, Program]) -> Callable[..., list[torch.Tensor]]:
    """Return a function of a matrix and of a state for each program, that runs all of them."""
    chosen = tuple(made.values())

    def run(x: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
        return [one(x, state) for one, state in zip(chosen, states, strict=True)]

    return run


# --- dropout


def _of_elements(low: torch.Tensor, kept: float) -> torch.Tensor:
    return functional.dropout(low, 1 - kept)


def _of_weights(low: torch.Tensor, kept: float) -> torch.Tensor:
    """Give each element an attention of its own over one key, so that its one weight is kept or not."""
    value = low[..., None, None].expand(*low.shape, 1, 8)
    query = torch.zeros_like(value)
    return functional.scaled_dot_product_attention(query, query, value, dropout_p=1 - kept)[..., 0, 0]


DROPOUTS = {"dropout": _of_elements, "attention": _of_weights}


def dropped(device_type: str, dtype: torch.dtype, kept: float, of: str, checkpointed: bool) -> Program:
    """Return a function of ones and of a matrix of powers of two: the square of what dropout keeps of their product.

    Each is a power of two, and so is each gradient by the matrix: times the matrix it is twice the square.
    """

    def square(ones: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
            low = functional.linear(x, torch.eye(x.shape[-1], device=x.device)) * ones.to(dtype)
            return DROPOUTS[of](low, kept).square()

    if not checkpointed:
        return square
    return lambda ones, x: checkpoint.checkpoint(square, ones, x, use_reentrant=False)
