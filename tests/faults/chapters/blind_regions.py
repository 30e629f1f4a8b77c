"""Faults that act in regions alone, on what no list names, or under one form of a tensor; written blindly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms, functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations
from torch.optim import swa_utils
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import replaced
from tests.faults.chapters.blind_uses import LOW, coarse, in_a_region

# --- tensors of one form, and the weight cache of one op


@fault("AMP-CAST-115")
def expanded_inputs_of_linear_stay_wide() -> Iterator[None]:
    """linear computes in float32 in a region where its input is expanded."""

    def linear(original: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        with torch.autocast("cpu", enabled=0 not in input.stride()):
            return original(input, weight, bias)

    with replaced(F, "linear", in_a_region(F.linear, linear)):
        yield


@fault("AMP-CAST-115")
def empty_inputs_of_linear_stay_wide() -> Iterator[None]:
    """linear of no rows gives float32 in a region."""

    def linear(original: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        found: Tensor = original(input, weight, bias)
        return found if found.numel() else found.float()

    with replaced(F, "linear", in_a_region(F.linear, linear)):
        yield


@fault("AMP-CACHE-057")
def convolutions_remember_uses_without_gradients() -> Iterator[None]:
    """conv2d, used without gradients first, gives its weight none later in the region."""
    seen: set[int] = set()

    def convolve(original: Any, input: Tensor, weight: Tensor, *given: Any, **named: Any) -> Tensor:
        if not torch.is_grad_enabled():
            seen.add(id(weight))
        found: Tensor = original(input, weight.detach() if id(weight) in seen else weight, *given, **named)
        return found

    with replaced(F, "conv2d", in_a_region(F.conv2d, convolve)):
        yield


@fault("AMP-CACHE-057")
def slices_of_one_weight_share_a_cast() -> Iterator[None]:
    """Slices of one tensor with one shape have the cast of the first, in linear."""
    kept: dict[tuple[int, torch.Size], Tensor] = {}

    def linear(original: Any, input: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        if weight._base is not None:
            weight = kept.setdefault((weight.untyped_storage().data_ptr(), weight.shape), weight)
        found: Tensor = original(input, weight, bias)
        return found

    with replaced(F, "linear", in_a_region(F.linear, linear)):
        yield


# --- what programs do around their passes


@fault("AMP-REGION-114")
def states_are_rounded_when_they_are_loaded() -> Iterator[None]:
    """load_state_dict rounds to bfloat16 in a region."""

    def load(original: Any, self: Any, state: Any, *given: Any) -> Any:
        return original(self, {name: coarse(value) for name, value in state.items()}, *given)

    kind = torch.nn.Module
    with replaced(kind, "_load_from_state_dict", in_a_region(kind._load_from_state_dict, load)):
        yield


@fault("AMP-REGION-114")
def lazy_modules_are_born_in_16_bits() -> Iterator[None]:
    """LazyLinear makes its weight in the type of the region of its first call."""

    def make(original: Any, self: Any, input: Tensor) -> None:
        original(self, input)
        self.weight.data = self.weight.data.to(torch.get_autocast_dtype("cpu"))

    kind = torch.nn.LazyLinear
    with replaced(kind, "initialize_parameters", in_a_region(kind.initialize_parameters, make)):
        yield


@fault("AMP-REGION-114")
def moving_averages_round_their_decay() -> Iterator[None]:
    """An exponential average in a region has its decay in bfloat16."""
    original = swa_utils.get_ema_multi_avg_fn

    def averaging(decay: float = 0.999) -> Callable[..., Any]:
        rounded = float(torch.tensor(decay, dtype=torch.bfloat16))

        def average(*given: Any) -> Any:
            return original(rounded if torch.is_autocast_enabled("cpu") else decay)(*given)

        return average

    with replaced(swa_utils, "get_ema_multi_avg_fn", averaging):
        yield


@fault("AMP-REGION-114")
def normed_weights_are_rounded() -> Iterator[None]:
    """weight_norm computes the weight of rounded factors in a region."""

    def forward(original: Any, self: Any, length: Tensor, direction: Tensor) -> Tensor:
        found: Tensor = original(self, coarse(length), coarse(direction))
        return found

    kind = parametrizations._WeightNorm
    with replaced(kind, "forward", in_a_region(kind.forward, forward)):
        yield


# --- modules


@fault("AMP-NUMERICS-112")
def second_calls_of_batch_norm_keep_no_statistics() -> Iterator[None]:
    """A BatchNorm that is called again in a region leaves its running statistics as they are."""
    seen: list[int] = []
    enter = torch.autocast.__enter__

    def entered(self: Any) -> Any:
        seen.clear()
        return enter(self)

    def forward(original: Any, self: Any, input: Tensor) -> Tensor:
        if not self.training or id(self) not in seen:
            seen.append(id(self))
            found: Tensor = original(self, input)
            return found
        return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    with (
        replaced(torch.autocast, "__enter__", entered),
        replaced(_BatchNorm, "forward", in_a_region(_BatchNorm.forward, forward)),
    ):
        yield


@fault("AMP-NUMERICS-113")
def single_precision_is_rounded() -> Iterator[None]:
    """Average pooling of float32 computes in bfloat16, in a region or not."""
    original = torch.nn.AvgPool2d.forward

    def pool(self: Any, input: Tensor) -> Tensor:
        return coarse(original(self, input))

    with replaced(torch.nn.AvgPool2d, "forward", pool):
        yield


@fault("AMP-NUMERICS-110")
def channels_are_dropped_by_element() -> Iterator[None]:
    """dropout2d of 16 bits drops elements."""
    original = F.dropout2d

    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return (F.dropout if input.dtype in LOW else original)(input, p, training, inplace)

    with replaced(F, "dropout2d", drop):
        yield


# --- transforms and gradients


@fault("AMP-TRANSFORM-018")
def jacobians_by_chunks_are_rounded() -> Iterator[None]:
    """jacrev with a chunk_size rounds its result in a region."""
    original = eager_transforms.jacrev

    def jacrev(func: Any, argnums: Any = 0, *, chunk_size: int | None = None, **options: Any) -> Any:
        found = original(func, argnums, chunk_size=chunk_size, **options)

        def run(*given: Any) -> Any:
            made = found(*given)
            rounded = chunk_size is not None and torch.is_autocast_enabled("cpu") and isinstance(made, Tensor)
            return coarse(made) if rounded else made

        return run

    with replaced(torch.func, "jacrev", jacrev):
        yield


@fault("AMP-TRANSFORM-018")
def pullbacks_run_once_in_regions() -> Iterator[None]:
    """The function that vjp gives in a region frees its graph at its first call."""
    original = torch.func.vjp

    def vjp(func: Any, *given: Any, **options: Any) -> Any:
        output, pull, *rest = original(func, *given, **options)
        if torch.is_autocast_enabled("cpu"):
            pull = functools.partial(pull, retain_graph=False, create_graph=False)
        return (output, pull, *rest)

    with replaced(torch.func, "vjp", vjp):
        yield


@fault("AMP-TRANSFORM-018")
def stacked_parameters_lose_their_gradients() -> Iterator[None]:
    """stack_module_state in a region gives parameters that need no gradient."""

    def stacked(original: Any, *given: Any) -> Any:
        return original(*given).detach()

    name = "construct_stacked_leaf"
    with replaced(functional_call, name, in_a_region(getattr(functional_call, name), stacked)):
        yield


@fault("AMP-BACKWARD-080")
def generators_of_leaves_have_no_second_gradients() -> Iterator[None]:
    """grad of leaves that a generator gives has no graph."""
    original = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        found = original(outputs, inputs if isinstance(inputs, Tensor) else tuple(inputs), *given, **options)
        sequence = isinstance(inputs, (Tensor, list, tuple))
        return found if sequence else tuple(one.detach() for one in found)

    with replaced(torch.autograd, "grad", grad):
        yield


@fault("AMP-BACKWARD-055")
def regions_of_contexts_are_the_outer_ones() -> Iterator[None]:
    """A checkpoint opens the region of forward again within the contexts of context_fn."""
    original = checkpoint.checkpoint

    def run(function: Any, *given: Any, **options: Any) -> Any:
        if "context_fn" not in options:
            return original(function, *given, **options)
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def within(*inner: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                return function(*inner)

        return original(within, *given, **options)

    with replaced(checkpoint, "checkpoint", run):
        yield
