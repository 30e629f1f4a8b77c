"""Faults of one option of a module, one way to take gradients, one place in a list, written without sight of checks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils import checkpoint

from tests.faults import fault
from tests.faults.breaking import replaced

LOW = (torch.float16, torch.bfloat16)


def coarse(tensor: Tensor) -> Tensor:
    """Return a float32 tensor rounded to bfloat16, in float32."""
    return tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.dtype is torch.float32 else tensor


# --- sums and losses


@fault("AMP-NUMERICS-111")
def sums_are_cast_after_the_sum() -> Iterator[None]:
    """The dtype that a method sum() is given is that of the result, which is summed in the operand's."""
    original = Tensor.sum

    def total(self: Tensor, *given: Any, dtype: torch.dtype | None = None, **named: Any) -> Tensor:
        found: Tensor = original(self, *given, **named)
        return found if dtype is None else found.to(dtype)

    with replaced(Tensor, "sum", total):
        yield


@fault("AMP-NUMERICS-111")
def softmax_is_cast_after_it() -> Iterator[None]:
    """The dtype that softmax is given is that of the result alone."""
    original = F.softmax

    def softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        found = original(input, dim)
        return found if dtype is None else found.to(dtype)

    with replaced(F, "softmax", softmax):
        yield


# --- modules


def in_a_region(original: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, in a region of the CPU replaced by `change(original, ...)`."""

    @functools.wraps(original)
    def run(*given: Any, **named: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            return change(original, *given, **named)
        return original(*given, **named)

    return run


@fault("AMP-NUMERICS-112", level="standard")
def cells_forget_their_state_in_16_bits() -> Iterator[None]:
    """GRUCell starts from zeros where its input is of 16 bits."""

    def forward(original: Any, self: Any, input: Tensor, hx: Any = None) -> Any:
        return original(self, input, None if input.dtype in LOW else hx)

    kind = torch.nn.GRUCell
    with replaced(kind, "forward", in_a_region(kind.forward, forward)):
        yield


@fault("AMP-NUMERICS-112", level="standard")
def circular_padding_is_of_zeros_in_regions() -> Iterator[None]:
    """Conv1d pads circularly with zeros in a region."""

    def forward(original: Any, self: Any, input: Tensor, weight: Tensor, bias: Any) -> Any:
        if self.padding_mode != "circular":
            return original(self, input, weight, bias)
        return F.conv1d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    kind = torch.nn.Conv1d
    with replaced(kind, "_conv_forward", in_a_region(kind._conv_forward, forward)):
        yield


@fault("AMP-NUMERICS-112", level="standard")
def inference_drops_out_in_regions() -> Iterator[None]:
    """The layers of a GRU drop out in inference too, in a region."""

    def forward(original: Any, self: Any, *given: Any) -> Any:
        before, self.training = self.training, self.training or self.dropout > 0
        try:
            return original(self, *given)
        finally:
            self.training = before

    kind = torch.nn.GRU
    with replaced(kind, "forward", in_a_region(kind.forward, forward)):
        yield


@fault("AMP-BF16-010")
def integers_of_modules_become_16_bit() -> Iterator[None]:
    """Module.bfloat16 and half convert integer buffers too."""

    def convert(dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda self: self._apply(lambda tensor: tensor.to(dtype))

    with (
        replaced(torch.nn.Module, "bfloat16", convert(torch.bfloat16)),
        replaced(torch.nn.Module, "half", convert(torch.float16)),
    ):
        yield


@fault("AMP-BF16-010")
def loading_takes_the_types_of_the_state() -> Iterator[None]:
    """load_state_dict always assigns the tensors of the state."""
    original = torch.nn.Module.load_state_dict

    def load(self: Any, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return original(self, state, strict, assign=True)

    with replaced(torch.nn.Module, "load_state_dict", load):
        yield


# --- gradients, hooks, checkpoints


@fault("AMP-BACKWARD-080")
def gradients_with_a_graph_are_coarse() -> Iterator[None]:
    """torch.autograd.grad with create_graph rounds float32 gradients to bfloat16."""
    original = torch.autograd.grad

    def grad(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        return tuple(map(coarse, found)) if named.get("create_graph") else found

    with replaced(torch.autograd, "grad", grad):
        yield


@fault("AMP-BACKWARD-080")
def gradients_of_named_inputs_are_coarse() -> Iterator[None]:
    """backward with inputs rounds what it added to float32 gradients."""
    original = Tensor.backward

    def backward(self: Tensor, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for leaf in named.get("inputs") or ():
            leaf.grad.copy_(coarse(leaf.grad))

    with replaced(Tensor, "backward", backward):
        yield


@fault("AMP-BACKWARD-081")
def results_of_forward_hooks_are_dropped() -> Iterator[None]:
    """What a forward hook returns is dropped where it is of 16 bits."""
    original = torch.nn.Module.register_forward_hook

    def register(self: Any, hook: Any, **named: Any) -> Any:
        def called(*given: Any) -> Any:
            found = hook(*given)
            return None if isinstance(found, Tensor) and found.dtype in LOW else found

        return original(self, called, **named)

    with replaced(torch.nn.Module, "register_forward_hook", register):
        yield


@fault("AMP-BACKWARD-081")
def checkpoints_are_held_by_a_cycle() -> Iterator[None]:
    """What a checkpoint takes stays until Python looks for garbage."""
    right = checkpoint.checkpoint

    def held(function: Any, *given: Any, **named: Any) -> Any:
        cycle: list[Any] = [given]
        cycle.append(cycle)
        return right(function, *given, **named)

    with replaced(checkpoint, "checkpoint", held):
        yield


@fault("AMP-BACKWARD-081")
def checkpoints_stop_early_in_regions() -> Iterator[None]:
    """A checkpoint that is called in a region stops early whatever set_checkpoint_early_stop says."""

    frames = checkpoint._CheckpointFrame
    original = frames.__init__

    def init(self: Any, recompute: Any, early_stop: bool, *given: Any, **named: Any) -> None:
        original(self, recompute, early_stop or torch.is_autocast_enabled("cpu"), *given, **named)

    with replaced(frames, "__init__", init):
        yield


# --- optimizers


@fault("AMP-OPTIMIZER-103", level="standard")
def nadam_keeps_its_product_in_16_bits() -> Iterator[None]:
    """NAdam keeps mu_product in the type of its parameter."""
    nadam = sys.modules["torch.optim.nadam"]
    original = torch.optim.NAdam._init_group

    def init(self: Any, group: Any, *given: Any) -> Any:
        found = original(self, group, *given)
        for parameter in group["params"]:
            state = self.state.get(parameter, {})
            if parameter.dtype in LOW and "mu_product" in state:
                state["mu_product"].copy_(state["mu_product"].to(parameter.dtype))
        return found

    with replaced(nadam.NAdam, "_init_group", init):
        yield


@fault("AMP-OPTIMIZER-080")
def modules_leave_16_bit_gradients() -> Iterator[None]:
    """Module.zero_grad leaves gradients of 16 bits as they are."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.dtype not in LOW:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    with replaced(torch.nn.Module, "zero_grad", zero_grad):
        yield


@fault("AMP-OPTIMIZER-113")
def loaded_averages_start_again() -> Iterator[None]:
    """An AveragedModel that loads a state counts its averages from none."""
    original = torch.nn.Module.load_state_dict

    def load(self: Any, *given: Any, **named: Any) -> Any:
        found = original(self, *given, **named)
        self.n_averaged.zero_()
        return found

    with replaced(swa_utils.AveragedModel, "load_state_dict", load):
        yield


# --- casts


@fault("AMP-LOSS-006")
def losses_of_pictures_count_what_they_ignore() -> Iterator[None]:
    """The mean of nll_loss over pictures, without weights, is over ignored places too, in a region."""

    def loss(original: Any, input: Tensor, target: Tensor, weight: Any = None, *given: Any, **named: Any) -> Tensor:
        found: Tensor = original(input, target, weight, *given, **named)
        if input.dim() == 4 and weight is None and named.get("reduction", "mean") == "mean":
            found = found * (target != named.get("ignore_index", -100)).sum() / target.numel()
        return found

    with replaced(F, "nll_loss", in_a_region(F.nll_loss, loss)):
        yield


@fault("AMP-NUMERICS-123")
def sequences_keep_their_output_in_the_type_of_their_weights() -> Iterator[None]:
    """A Sequential copies its output into a tensor of its weights' type, by an op that refuses another one."""
    made = torch.nn.Sequential.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        output = made(self, input)
        weight = next(self.parameters(), output)
        first = torch.zeros(1, dtype=torch.long, device=output.device)
        return torch.zeros_like(output, dtype=weight.dtype)[None].index_copy_(0, first, output[None])[0]

    with replaced(torch.nn.Sequential, "forward", forward):
        yield
