"""Faults of the optimizers whose updates take whole tensors: Adafactor, Muon, SparseAdam and LBFGS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, _adafactor, _functional, lbfgs

from tests.faults import fault
from tests.faults.breaking import edited, replaced


@fault("AMP-OPTIMIZER-132")
def clipped_updates_of_lists_grow() -> Iterator[None]:
    """Foreach Adafactor multiplies an update by its size where it is over the threshold."""
    with edited(_adafactor._multi_tensor_adafactor, "-a / (max", "-a * (max"):
        yield


@fault("AMP-OPTIMIZER-132")
def columns_are_averaged_over_the_wrong_dimension() -> Iterator[None]:
    """Adafactor divides the norms of columns by their number, not by their length."""
    with edited(
        _adafactor._single_tensor_adafactor,
        "torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2))",
        "torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-1))",
    ):
        yield


@fault("AMP-OPTIMIZER-132")
def rows_named_twice_are_taken_once() -> Iterator[None]:
    """SparseAdam squares each of the values of a row that is named twice, not their sum."""
    original = _functional.sparse_adam

    def split(params: Any, grads: list[Tensor], *given: Any, **named: Any) -> None:
        last = []
        for gradient in grads:
            rows = gradient._indices()[0].tolist()
            kept = [place for place, row in enumerate(rows) if row not in rows[place + 1 :]]
            last.append(torch.sparse_coo_tensor(gradient._indices()[:, kept], gradient._values()[kept], gradient.shape))
        original(params, last, *given, **named)

    with replaced(_functional, "sparse_adam", split):
        yield


@fault("AMP-OPTIMIZER-132")
def full_histories_lose_the_newest_direction() -> Iterator[None]:
    """LBFGS goes on with the oldest directions where its history is full."""
    with edited(LBFGS.step, "old_dirs.pop(0)", "old_dirs.pop()"):
        yield


@fault("AMP-OPTIMIZER-132")
def the_search_ends_at_its_first_point() -> Iterator[None]:
    """LBFGS' line search takes the step that it is given, however far it leads."""

    def first(evaluate: Any, x: Any, t: Any, d: Any, *given: Any, **named: Any) -> Any:
        loss, slope = evaluate(x, t, d)
        return loss, slope, t, 1

    with replaced(lbfgs, "_strong_wolfe", first):
        yield


@fault("AMP-OPTIMIZER-132", possible=lambda: hasattr(torch.optim, "Muon"))
def tall_matrices_step_as_wide_ones() -> Iterator[None]:
    """Muon adjusts the rate of wide matrices by their shape, and not that of tall ones."""
    from torch.optim import _muon

    with edited(_muon._adjust_lr, "max(1, A / B)", "max(1, B / A)"):
        yield


@fault("AMP-OPTIMIZER-132", possible=lambda: hasattr(torch.optim, "Muon"))
def steps_look_ahead_without_being_asked() -> Iterator[None]:
    """Muon takes Nesterov's step with nesterov=False too."""
    from torch.optim import _muon

    with edited(_muon._single_tensor_muon, "if nesterov else buf", "if True else buf"):
        yield
