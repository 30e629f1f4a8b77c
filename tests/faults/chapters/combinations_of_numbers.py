"""Faults of ops on rows and numbers that only one combination of their options shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.faults import fault
from tests.faults.breaking import given_the_original, replaced
from tests.faults.chapters.blind_uses import LOW


@fault("AMP-NUMERICS-136")
def beta_is_lost_on_columns() -> Iterator[None]:
    """addmm of 16 bits adds a column whole, whatever beta is, where alpha is not 1."""

    def added(original: Any, x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        column = x.dtype in LOW and x.dim() == 2 and x.shape[1] == 1 and alpha != 1
        result: Tensor = original(x, left, right, beta=1 if column else beta, alpha=alpha)
        return result

    with given_the_original(torch, "addmm", added):
        yield


@fault("AMP-NUMERICS-136")
def correction_is_one_where_dimensions_stay() -> Iterator[None]:
    """Var of 16 bits along several dimensions that are kept is corrected by one, whatever is asked for."""

    def spread(original: Any, x: Tensor, dim: Any, *, correction: int = 1, keepdim: bool = False) -> Tensor:
        several = x.dtype in LOW and keepdim and len(dim) > 1
        result: Tensor = original(x, dim, correction=1 if several else correction, keepdim=keepdim)
        return result

    with given_the_original(torch, "var", spread):
        yield


@fault("AMP-NUMERICS-136", level="standard")
def what_is_there_counts_in_means_of_columns() -> Iterator[None]:
    """index_reduce by means along the last dimension of 16 bits includes what is there, asked or not."""

    def reduced(original: Any, x: Tensor, dim: int, *given: Any, include_self: bool = True) -> Tensor:
        last = x.dtype in LOW and dim in (-1, x.dim() - 1) and given[-1] == "mean"
        result: Tensor = original(x, dim, *given, include_self=last or include_self)
        return result

    with given_the_original(torch, "index_reduce", reduced):
        yield


@fault("AMP-NUMERICS-136")
def full_losses_are_of_logarithms_alone() -> Iterator[None]:
    """poisson_nll_loss of 16 bits leaves Stirling's term out where the input is no logarithm."""

    def loss(original: Any, x: Tensor, *given: Any, log_input: bool = True, full: bool = False, **named: Any) -> Tensor:
        full = full and (log_input or x.dtype not in LOW)
        result: Tensor = original(x, *given, log_input=log_input, full=full, **named)
        return result

    with given_the_original(F, "poisson_nll_loss", loss):
        yield


@fault("AMP-NUMERICS-136")
def scales_of_rows_without_shift_are_lost() -> Iterator[None]:
    """layer_norm of 16 bits over several dimensions drops its weight where it has no bias."""

    def normalized(original: Any, x: Tensor, inner: Any, weight: Any = None, bias: Any = None, *given: Any) -> Tensor:
        alone = x.dtype in LOW and len(inner) > 1 and bias is None
        result: Tensor = original(x, inner, None if alone else weight, bias, *given)
        return result

    with given_the_original(F, "layer_norm", normalized):
        yield


@fault("AMP-NUMERICS-136", level="standard")
def states_of_layers_without_bias_begin_at_zero() -> Iterator[None]:
    """A GRU of 16 bits in both directions and without bias ignores the state that it is given."""
    original = torch.nn.GRU.forward

    def forward(self: Any, x: Tensor, hx: Any = None) -> Any:
        ignored = x.dtype in LOW and self.bidirectional and not self.bias
        return original(self, x, None if ignored else hx)

    with replaced(torch.nn.GRU, "forward", forward):
        yield
