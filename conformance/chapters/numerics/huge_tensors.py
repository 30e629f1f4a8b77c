"""Operations on tensors of more than 2^31 elements whose results are known without computing them.

Each fills its operands in pieces, runs in a region, and compares its result in pieces with numbers that hold exactly:
what lies beyond the limit in one piece is found at the right place in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LIMIT = 2**31
"""One more than the greatest signed integer of 32 bits, which kernels count elements with where they may."""

BEYOND = 2**10
"""Elements of a flat tensor beyond the limit."""

WIDTH = 1000
"""Elements of a row of a matrix: no power of two, so that the limit lies inside a row."""

PIECE = 2**24
"""Elements that are filled or compared at once."""

Region = Callable[[], AbstractContextManager[object]]
Numbers = Callable[[Tensor], Tensor]
"""The numbers of some rows (their places, int64), in float32."""


@dataclass(frozen=True)
class Setting:
    """Where an operation runs, in what region, and how many elements count as too many."""

    device: torch.device
    dtype: torch.dtype
    region: Region
    limit: int = LIMIT

    @property
    def rows(self) -> int:
        """Rows of `WIDTH`, of which the last three lie beyond the limit."""
        return self.limit // WIDTH + 4

    def probes(self) -> Tensor:
        """Return places at both ends and around the limit of a flat tensor."""
        beyond = (self.limit + step for step in (-1, 0, 1, BEYOND - 2, BEYOND - 1))
        return torch.tensor([0, 1, *beyond], device=self.device)

    def flat(self, numbers: Callable[[Tensor], Tensor]) -> Tensor:
        """Make a flat tensor of float32 with `numbers` of 1 to 7 at the probes and zeros elsewhere."""
        made = torch.zeros(self.limit + BEYOND, device=self.device)
        made[self.probes()] = numbers(torch.arange(1, 8, device=self.device)).float()
        return made

    def wrong_of_flat(self, seen: Tensor, numbers: Callable[[Tensor], Tensor]) -> int:
        """Count the elements that are not as in `flat`."""
        probes = self.probes()

        def expected(rows: Tensor) -> Tensor:
            made = torch.zeros(len(rows) * BEYOND, device=self.device)
            places = probes - rows[0] * BEYOND
            here = (places >= 0) & (places < len(made))
            made[places[here]] = numbers(here.nonzero().flatten() + 1).float()
            return made.view(-1, BEYOND)

        return self.wrong(seen.view(-1, BEYOND), expected)

    def wrong(self, seen: Tensor, expected: Numbers) -> int:
        """Count the elements of a matrix that are not as expected, some rows at a time; NaN is always wrong."""
        count, step = 0, max(1, PIECE // seen.shape[1])
        for start in range(0, len(seen), step):
            part = seen[start : start + step]
            rows = torch.arange(start, start + len(part), device=self.device)
            count += int((part.float() != expected(rows)).sum())
        return count


Found = Iterator[tuple[str, int]]
"""What was compared, and how many of it were wrong."""


@dataclass(frozen=True)
class Operation:
    """An operation on such a tensor; `width` bytes for each of its elements are alive at once, at most."""

    name: str
    width: int
    run: Callable[[Setting], Found]


def _cast(setting: Setting) -> Found:
    wide = setting.flat(lambda n: n + 2.0**-12)
    narrow = wide.to(setting.dtype)
    yield "elements of the cast", setting.wrong_of_flat(narrow, lambda n: n)
    del wide
    yield "elements of the cast back", setting.wrong_of_flat(narrow.float(), lambda n: n)


def _owner(gradient: Tensor) -> torch.nn.Parameter:
    """Return one number expanded to many elements, so that its gradient is the only large tensor."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=gradient.device).expand(gradient.shape))
    parameter.grad = gradient
    return parameter


def _unscale(setting: Setting) -> Found:
    gradient = setting.flat(lambda n: n * 1024.0)
    optimizer = torch.optim.SGD([_owner(gradient)])
    for last, scale in (("finite", 4.0), ("infinite", 2.0)):
        scaler = torch.amp.GradScaler(setting.device.type, init_scale=4.0)
        scaler.scale(torch.ones((), device=setting.device))
        scaler.unscale_(optimizer)
        if last == "finite":
            wrong = setting.wrong_of_flat(gradient, lambda n: n * 256.0)
            yield "elements of the unscaled gradient", wrong
        scaler.update()
        yield f"scales afterwards, the last element being {last}", int(scaler.get_scale() != scale)
        gradient[-1] = torch.inf


def _norm(setting: Setting) -> Found:
    # Four elements of 1 and three of 2: the squares are 16.
    gradient = setting.flat(lambda n: torch.where(n <= 4, 1, 2))
    parameter = _owner(gradient)
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1e9, foreach=True)
    yield "norms", int(norm.item() != 4.0)
    torch.nn.utils.clip_grad_norm_([parameter], 2.0, foreach=True)
    # The factor is 2 / (4 + 1e-6), a half to 2^-21.
    kept, right = gradient[setting.probes()].cpu(), torch.tensor([0.5] * 4 + [1.0] * 3)
    yield "elements that are clipped", int(((kept / right - 1).abs() > 2.0**-20).sum())


def _softmax(setting: Setting) -> Found:
    marked = torch.tensor([0, setting.limit // WIDTH, setting.rows - 1], device=setting.device)
    logits = torch.full((setting.rows, WIDTH), -torch.inf, dtype=setting.dtype, device=setting.device)
    logits[:, 0] = 0
    logits[marked, -1] = 0
    with setting.region():
        result = torch.softmax(logits, -1)

    def expected(rows: Tensor) -> Tensor:
        made, halves = torch.zeros(len(rows), WIDTH, device=setting.device), torch.isin(rows, marked)
        made[:, 0] = torch.where(halves, 0.5, 1.0)
        made[halves, -1] = 0.5
        return made

    yield "elements of the result", setting.wrong(result, expected)


def _index(setting: Setting) -> Found:
    numbers = torch.arange(setting.rows, device=setting.device) % 251
    table = torch.empty(setting.rows, WIDTH, dtype=setting.dtype, device=setting.device)
    table.copy_(numbers.unsqueeze(1)).requires_grad_()
    edge = setting.limit // WIDTH
    chosen = torch.tensor([0, edge - 1, edge, edge + 1, setting.rows - 1], device=setting.device)
    places = torch.tensor([0, setting.limit - 1, setting.limit, table.numel() - 1], device=setting.device)
    with setting.region():
        rows, elements = F.embedding(chosen, table), table.detach().view(-1)[places]
    yield "elements of rows that are looked up", int((rows != numbers[chosen].unsqueeze(1)).sum())
    yield "elements that are looked up", int((elements != numbers[places // WIDTH]).sum())
    rows.backward(torch.ones_like(rows))
    assert table.grad is not None
    ones = setting.wrong(table.grad, lambda rows: torch.isin(rows, chosen).float().unsqueeze(1))
    yield "elements of the gradient", ones


def _product(setting: Setting, rows: int, depth: int, columns: int) -> Found:
    """Multiply a matrix of one element a row, in turn in each column, by small integers."""
    left = torch.zeros(rows, depth, dtype=setting.dtype, device=setting.device)
    place = torch.arange(rows, device=setting.device)
    left[place, place % depth] = (1 + place % 7).to(setting.dtype)
    numbers = 3 * torch.arange(depth, device=setting.device).unsqueeze(1) + torch.arange(columns, device=setting.device)
    right = (numbers % 5 - 2).float()
    with setting.region():
        result = torch.mm(left, right.to(setting.dtype))
    yield (
        "elements of the result",
        setting.wrong(result, lambda rows: (1 + rows % 7).unsqueeze(1) * right[rows % depth]),
    )


def _large_operand(setting: Setting) -> Found:
    return _product(setting, setting.limit // 1024 + 8, 1024, 8)


def _large_result(setting: Setting) -> Found:
    columns = 2 ** (setting.limit.bit_length() // 2)
    return _product(setting, setting.limit // columns + 1, 8, columns)


OPERATIONS: dict[str, Operation] = {
    one.name: one
    for one in (
        Operation("cast", 6, _cast),
        Operation("unscale", 4, _unscale),
        Operation("norm", 4, _norm),
        Operation("softmax", 10, _softmax),
        Operation("index", 4, _index),
        Operation("matmul of a large operand", 2, _large_operand),
        Operation("matmul with a large result", 2, _large_result),
    )
}
