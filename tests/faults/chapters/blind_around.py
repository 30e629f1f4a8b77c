"""Faults of errors, copies, hooks, replaced weights and open regions around the calls that AMP is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import OptState
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.hooks import BackwardHook

from tests.faults import fault
from tests.faults.breaking import kernel, replaced
from tests.faults.chapters.blind_apart import backing_off_after
from tests.faults.chapters.blind_routes import _below as below
from tests.simulation.emulated.build import uncompiled

Scaler = torch.amp.GradScaler
LOW = (torch.float16, torch.bfloat16)


@fault("AMP-SCALE-196")
def error_of_an_optimizer_forgets_the_unscaling() -> Iterator[None]:
    """After an error of the optimizer the scaler takes the gradients for scaled ones."""
    step = Scaler._maybe_opt_step

    def tried(self: Any, optimizer: Optimizer, state: dict[str, Any], *given: Any, **named: Any) -> Any:
        try:
            return step(self, optimizer, state, *given, **named)
        except BaseException:
            state["stage"] = OptState.READY
            raise

    with replaced(Scaler, "_maybe_opt_step", tried):
        yield


@fault("AMP-SCALE-196")
def step_is_noted_before_it_is_done() -> Iterator[None]:
    """step() notes that it was called before it calls the optimizer, so that it refuses to be called again."""
    step = Scaler._maybe_opt_step

    def noted(self: Any, optimizer: Optimizer, state: dict[str, Any], *given: Any, **named: Any) -> Any:
        state["stage"] = OptState.STEPPED
        return step(self, optimizer, state, *given, **named)

    with replaced(Scaler, "_maybe_opt_step", noted):
        yield


@fault("AMP-SCALE-197")
def scaled_outputs_are_rounded_in_a_region() -> Iterator[None]:
    """scale() in an enabled region rounds float32 outputs to the type of the region."""
    scale = Scaler.scale

    def scaled(self: Any, outputs: Any) -> Any:
        found = scale(self, outputs)
        inside = self._enabled and torch.is_autocast_enabled("cpu") and isinstance(found, Tensor)
        return found.to(torch.get_autocast_dtype("cpu")).to(found.dtype) if inside else found

    with replaced(Scaler, "scale", scaled):
        yield


@fault("AMP-SCALE-197")
def explicit_unscaling_rounds_in_a_region() -> Iterator[None]:
    """unscale_ that a user calls in an enabled region rounds float32 gradients to the type of the region."""
    unscale = Scaler.unscale_

    def unscaled(self: Any, optimizer: Optimizer) -> None:
        unscale(self, optimizer)
        if torch.is_autocast_enabled("cpu"):
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.grad is not None and parameter.grad.dtype is torch.float32:
                    parameter.grad.copy_(parameter.grad.to(torch.get_autocast_dtype("cpu")))

    with replaced(Scaler, "unscale_", unscaled):
        yield


@fault("AMP-SCALE-198")
def gradients_of_a_pass_that_raised_are_remembered() -> Iterator[None]:
    """A scaler backs off for gradients that overflowed in a pass which was given up, before any step."""
    with backing_off_after(lambda outputs: not bool(outputs.isfinite().all())):
        yield


@fault("AMP-SCALE-199")
def flags_of_overflows_are_the_processs() -> Iterator[None]:
    """A step is skipped if any scaler of the process found inf since the last update of any of them."""
    unscale, update = Scaler._unscale_grads_, Scaler.update
    met: list[bool] = []

    def unscaled(self: Any, *given: Any, **named: Any) -> Any:
        flags = unscale(self, *given, **named)
        if any(bool(flag) for flag in flags.values()):
            met.append(True)
        for flag in flags.values() if met else ():
            flag.fill_(1.0)
        return flags

    def updated(self: Any, *given: Any, **named: Any) -> None:
        met.clear()
        update(self, *given, **named)

    with replaced(Scaler, "_unscale_grads_", unscaled), replaced(Scaler, "update", updated):
        yield


@fault("AMP-CACHE-058")
def layers_keep_their_weight_for_a_region() -> Iterator[None]:
    """A Linear goes on in a region with the weight that it had when it was first used there."""
    forward, leave = nn.Linear.forward, torch.autocast.__exit__
    kept: dict[int, tuple[nn.Module, Tensor]] = {}

    def used(self: nn.Linear, features: Tensor) -> Tensor:
        if (
            torch.is_autocast_enabled("cpu")
            and torch.is_autocast_cache_enabled()
            and isinstance(self.weight, nn.Parameter)
        ):
            _, weight = kept.setdefault(id(self), (self, self.weight))
            return F.linear(features, weight, self.bias)
        return forward(self, features)

    def left(self: Any, *given: Any) -> Any:
        kept.clear()
        return leave(self, *given)

    with replaced(nn.Linear, "forward", used), replaced(torch.autocast, "__exit__", left):
        yield


@fault("AMP-REGION-116")
def copies_of_a_region_have_the_default_dtype() -> Iterator[None]:
    """A copy of an autocast instance is made of its device type and flags alone."""

    def reduced(self: Any, *_: Any) -> Any:
        return torch.autocast, (self.device, None, self._enabled, self._cache_enabled)

    with replaced(torch.autocast, "__reduce_ex__", reduced):
        yield


@fault("AMP-BACKWARD-083")
def modules_with_backward_hooks_return_float32() -> Iterator[None]:
    """A module with a full backward hook returns its 16-bit output in float32 in a region."""
    hooked = BackwardHook.setup_output_hook

    def wide(self: Any, outputs: Any) -> Any:
        found = hooked(self, outputs)
        low = isinstance(found, Tensor) and found.dtype in LOW and torch.is_autocast_enabled("cpu")
        return found.float() if low else found

    with replaced(BackwardHook, "setup_output_hook", wide):
        yield


@fault("AMP-BACKWARD-084")
def gradients_come_back_after_the_hook() -> Iterator[None]:
    """A 16-bit gradient that a post-accumulate hook has freed is put back after it."""
    register = Tensor.register_post_accumulate_grad_hook

    def registered(self: Tensor, hook: Any) -> Any:
        def called(parameter: Tensor) -> None:
            gradient = parameter.grad
            hook(parameter)
            if parameter.grad is None and parameter.dtype in LOW:
                parameter.grad = gradient

        return register(self, called)

    with replaced(Tensor, "register_post_accumulate_grad_hook", registered):
        yield


def _wide_of_fake_tensors(op: Callable[..., Any], device_type: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an autocast kernel of a product that computes in the type of the region, with fake tensors in float32."""

    def product(left: Tensor, right: Tensor) -> Tensor:
        dtype = torch.float32 if isinstance(left, FakeTensor) else torch.get_autocast_dtype(device_type)
        found: Tensor = below(op, left.to(dtype), right.to(dtype))
        return found

    return product


@fault("AMP-CAST-050")
def fake_products_stay_wide() -> Iterator[None]:
    """matmul of fake tensors of the CPU runs in float32 in a region."""
    with kernel("matmul", _wide_of_fake_tensors(torch.matmul, "cpu"), "AutocastCPU"):
        yield


@fault("AMP-CAST-050", machine="backend", possible=lambda: uncompiled() is None)
def fake_products_of_a_backend_stay_wide() -> Iterator[None]:
    """mm of fake tensors of a third party's backend runs in float32 in a region."""
    with kernel("mm", _wide_of_fake_tensors(torch.mm, "toyacc"), "AutocastPrivateUse1"):
        yield


@fault("AMP-CAST-096", level="standard")
def alias_of_cat_takes_the_first_type() -> Iterator[None]:
    """torch.concatenate of tensors of two types gives in a region the type of the first."""

    def concatenate(tensors: list[Tensor], dim: int = 0) -> Tensor:
        return torch.cat(tensors, dim).to(tensors[0].dtype)

    with kernel("concatenate", concatenate, "AutocastCPU"):
        yield


@fault("AMP-OPTIMIZER-102")
def averages_stay_in_the_type_of_the_checkpoint() -> Iterator[None]:
    """load_state_dict keeps averages of a 16-bit checkpoint in 16 bits beside float32 parameters."""
    cast = Optimizer._process_value_according_to_param_policy

    def process(param: Any, value: Any, param_id: int, param_groups: Any, key: Any = None) -> Any:
        if key != "step" and value.dtype in LOW:
            return value.to(param.device)
        return cast(param, value, param_id, param_groups, key)

    with replaced(Optimizer, "_process_value_according_to_param_policy", staticmethod(process)):
        yield


@fault("AMP-BF16-011")
def modules_cast_complex_buffers_to_bfloat16() -> Iterator[None]:
    """Module.bfloat16() casts complex tensors too, whose imaginary part is lost."""

    def cast(self: nn.Module) -> nn.Module:
        return self._apply(lambda x: x.bfloat16() if x.is_floating_point() or x.is_complex() else x)

    with replaced(nn.Module, "bfloat16", cast):
        yield


@fault("AMP-BF16-011")
def modules_leave_unsaved_buffers_as_they_are() -> Iterator[None]:
    """Conversions of a module pass over buffers that are not saved."""
    apply = nn.Module._apply

    def saved(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        unsaved = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        apply(self, fn, recurse)
        self._buffers.update(unsaved)
        return self

    with replaced(nn.Module, "_apply", saved):
        yield


@fault("AMP-BF16-012")
def converted_packed_sequences_forget_their_order() -> Iterator[None]:
    """PackedSequence.to drops the places by which the batch was sorted."""
    convert = PackedSequence.to

    def forgetful(self: PackedSequence, *args: Any, **options: Any) -> PackedSequence:
        found = convert(self, *args, **options)
        return found if found is self else PackedSequence(found.data, found.batch_sizes)

    with replaced(PackedSequence, "to", forgetful):
        yield


@fault("AMP-LOSS-019")
def probabilities_of_a_loss_are_rounded() -> Iterator[None]:
    """cross_entropy rounds float32 probabilities to the type of the region."""
    plain = F.cross_entropy

    def cross_entropy(x: Tensor, target: Tensor, *given: Any, **named: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu") and target.dtype is torch.float32:
            target = target.to(torch.get_autocast_dtype("cpu")).float()
        return plain(x, target, *given, **named)

    with replaced(F, "cross_entropy", cross_entropy):
        yield


@fault("AMP-OPTIMIZER-130")
def average_of_adam_is_rounded() -> Iterator[None]:
    """Adam rounds the average of float32 gradients to bfloat16 after each step."""
    step = torch.optim.Adam.step

    def stepped(self: Any, closure: Any = None) -> Any:
        answer = step(self, closure)
        for state in self.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        return answer

    with replaced(torch.optim.Adam, "step", stepped):
        yield


@fault("AMP-BACKWARD-085")
def gradients_of_nothing_are_float32() -> Iterator[None]:
    """autograd.grad gives float32 zeros for 16-bit tensors that took no part."""
    plain = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *given: Any, materialize_grads: bool = False, **named: Any) -> Any:
        if not materialize_grads:
            return plain(outputs, inputs, *given, **named)
        found = plain(outputs, inputs, *given, allow_unused=True, **named)
        return tuple(torch.zeros(x.shape) if one is None else one for one, x in zip(found, inputs, strict=True))

    with replaced(torch.autograd, "grad", grad):
        yield


@fault("AMP-DISTRIBUTED-032")
def checkpoints_round_master_weights() -> Iterator[None]:
    """A distributed checkpoint that holds bfloat16 tensors stores those in float32 rounded to them."""
    resolve = DefaultSavePlanner.resolve_data

    def resolved(self: Any, item: Any) -> Any:
        found = resolve(self, item)
        low = any(isinstance(x, Tensor) and x.dtype is torch.bfloat16 for x in self.state_dict.values())
        wide = isinstance(found, Tensor) and found.dtype is torch.float32
        return found.bfloat16().float() if low and wide else found

    with replaced(DefaultSavePlanner, "resolve_data", resolved):
        yield


@fault("AMP-CAST-110")
def spectral_norm_rounds_its_weight_in_a_region() -> Iterator[None]:
    """The weight that spectral_norm computes in a region is rounded to the type of the region."""
    forward = parametrizations._SpectralNorm.forward

    def rounded(self: Any, weight: Tensor) -> Tensor:
        found = forward(self, weight)
        return found.to(torch.get_autocast_dtype("cpu")).float() if torch.is_autocast_enabled("cpu") else found

    with replaced(parametrizations._SpectralNorm, "forward", rounded):
        yield


@fault("AMP-COMPILE-070")
def compiled_regions_of_the_older_class_lose_their_dtype() -> Iterator[None]:
    """Compiled code opens torch.cpu.amp.autocast with the default dtype, whatever it is given."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    create = AutocastModeVariable.create

    def created(func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.cpu.amp.autocast:
            kwargs.pop("dtype", None)
        return create(func, args, kwargs)

    with replaced(AutocastModeVariable, "create", staticmethod(created)):
        yield
