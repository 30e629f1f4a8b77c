"""Scalers and optimizers that get their protocol, their forms, their histories or their counters wrong."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import adagrad, adam

from tests.faults import fault
from tests.faults.breaking import edited, replaced

SCALER = torch.amp.GradScaler
PRESET = 'getattr(optimizer, "grad_scale", None)\n'


def _found(state: dict[str, Any]) -> bool:
    return any(flag.item() for flag in state["found_inf_per_device"].values())


def _around_step(before: Callable[[Any, bool], None]) -> Callable[..., Any]:
    """A GradScaler._maybe_opt_step that first does something with the optimizer and whether it skips."""
    original = SCALER._maybe_opt_step

    def maybe_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        before(optimizer, _found(state))
        return original(self, optimizer, state, *args, **kwargs)

    return maybe_step


# --- the protocol


@fault("AMP-OPTIMIZER-065")
def the_scale_itself_is_handed_over() -> Iterator[None]:
    """A self-scaling optimizer is handed the scaler's own scale tensor."""
    with edited(SCALER.step, 'else scaler * getattr(optimizer, "grad_scale", 1)', "else self._scale"):
        yield


@fault("AMP-OPTIMIZER-065")
def the_flag_itself_is_handed_over() -> Iterator[None]:
    """A self-scaling optimizer is handed the very flag that update() looks at."""
    with edited(
        SCALER.step,
        "optimizer.found_inf = found_inf",
        'optimizer.found_inf = next(iter(optimizer_state["found_inf_per_device"].values()))',
    ):
        yield


@fault("AMP-OPTIMIZER-065")
def the_handed_scale_is_fp64() -> Iterator[None]:
    """The scale that is handed over is widened to fp64."""
    with edited(SCALER.step, "else scaler *", "else scaler.double() *"):
        yield


@fault("AMP-OPTIMIZER-066")
def preset_is_dropped_after_unscale() -> Iterator[None]:
    """A grad_scale that the user set is ignored where unscale_ was called."""
    with edited(SCALER.step, PRESET, "None\n"):
        yield


@fault("AMP-OPTIMIZER-066")
def preset_is_multiplied_after_unscale() -> Iterator[None]:
    """A grad_scale that the user set is multiplied by the loss scale although unscale_ was called."""
    with edited(SCALER.step, PRESET, '(scaler * optimizer.grad_scale if hasattr(optimizer, "grad_scale") else None)\n'):
        yield


@fault("AMP-OPTIMIZER-060", "AMP-OPTIMIZER-066")
def the_scale_stays() -> Iterator[None]:
    """The attribute grad_scale stays on an optimizer after its step."""
    with edited(SCALER.step, "del optimizer.grad_scale  #", "pass  #"):
        yield


@fault("AMP-OPTIMIZER-067")
def any_keywords_are_the_older_protocol() -> Iterator[None]:
    """A step that takes **kwargs is handed the scaler."""
    with edited(
        SCALER.step,
        '"grad_scaler" in inspect.signature(optimizer.step).parameters',
        'bool({"grad_scaler", "kwargs"} & set(inspect.signature(optimizer.step).parameters))',
    ):
        yield


@fault("AMP-OPTIMIZER-067")
def older_protocol_goes_by_position() -> Iterator[None]:
    """Only a grad_scaler that may be positional is seen."""
    with edited(
        SCALER.step,
        '"grad_scaler" in inspect.signature(optimizer.step).parameters',
        '"grad_scaler" in inspect.getfullargspec(inspect.unwrap(optimizer.step)).args',
    ):
        yield


@fault("AMP-OPTIMIZER-067")
def older_protocol_gets_attributes() -> Iterator[None]:
    """An optimizer of the older protocol has the attributes of the newer one set as well."""
    with edited(
        SCALER.step,
        'kwargs_.update({"grad_scaler": self})',
        'kwargs_.update({"grad_scaler": self}); optimizer.found_inf = 0',
    ):
        yield


@fault("AMP-OPTIMIZER-068")
def stage_is_set_before_the_step() -> Iterator[None]:
    """An optimizer counts as stepped when its step raised."""
    original = SCALER._maybe_opt_step

    def maybe_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        state["stage"] = torch.amp.grad_scaler.OptState.STEPPED
        return original(self, optimizer, state, *args, **kwargs)

    with replaced(SCALER, "_maybe_opt_step", maybe_step):
        yield


@fault("AMP-OPTIMIZER-082")
def a_closure_of_none_is_accepted() -> Iterator[None]:
    """closure=None is passed on to the optimizer."""
    with edited(SCALER.step, 'if "closure" in kwargs:', 'if kwargs.get("closure") is not None:'):
        yield


@fault("AMP-OPTIMIZER-070", "AMP-OPTIMIZER-074", "AMP-OPTIMIZER-075")
def hooks_are_passed_by() -> Iterator[None]:
    """The scaler calls the function under the hooks."""
    with edited(
        SCALER._maybe_opt_step,
        "optimizer.step(*args, **kwargs)",
        "type(optimizer).step.__wrapped__(optimizer, *args, **kwargs)",
    ):
        yield


@fault("AMP-OPTIMIZER-072", "AMP-OPTIMIZER-076")
def schedulers_do_not_see_the_step() -> Iterator[None]:
    """The scaler calls the step of the class, which the scheduler has not wrapped."""
    with edited(
        SCALER._maybe_opt_step, "optimizer.step(*args, **kwargs)", "type(optimizer).step(optimizer, *args, **kwargs)"
    ):
        yield


# --- several optimizers and histories


@fault("AMP-OPTIMIZER-052")
def a_flag_once_set_is_handed_on() -> Iterator[None]:
    """The flag of a self-scaling optimizer is added to that of the next one in the iteration."""
    original = SCALER._check_inf_per_device

    def check(self: Any, optimizer: Any) -> Any:
        flags = original(self, optimizer)
        states = [state["found_inf_per_device"] for state in self._per_optimizer_states.values()]
        for device, flag in flags.items():
            flag.copy_(torch.stack([state[device] for state in states if device in state]).amax())
        return flags

    with replaced(SCALER, "_check_inf_per_device", check):
        yield


@fault("AMP-OPTIMIZER-052")
def update_ends_the_iteration_of_one() -> Iterator[None]:
    """update() forgets the stage of one optimizer only."""
    original = SCALER.update

    def update(self: Any, new_scale: Any = None) -> None:
        states = dict(self._per_optimizer_states)
        original(self, new_scale)
        for key in list(states)[2:]:
            self._per_optimizer_states[key] = states[key]

    with replaced(SCALER, "update", update):
        yield


@fault("AMP-OPTIMIZER-022")
def the_first_scale_is_handed_over() -> Iterator[None]:
    """Self-scaling optimizers are handed the scale of the first iteration for ever."""
    original = SCALER._get_scale_async

    def first(self: Any) -> Any:
        scale = original(self)
        return self.__dict__.setdefault("_first_scale", None if scale is None else scale.clone())

    with replaced(SCALER, "_get_scale_async", first):
        yield


@fault("AMP-OPTIMIZER-022", "AMP-OPTIMIZER-011")
def rates_back_off_with_the_scale() -> Iterator[None]:
    """A skipped step halves the learning rate."""

    def halve(optimizer: Any, skips: bool) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2 if skips else group["lr"]

    with replaced(SCALER, "_maybe_opt_step", _around_step(halve)):
        yield


@fault("AMP-OPTIMIZER-022", "AMP-OPTIMIZER-035")
def missing_gradients_become_zeros() -> Iterator[None]:
    """A parameter without gradient is given one of zeros."""

    def fill(optimizer: Any, skips: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    with replaced(SCALER, "_maybe_opt_step", _around_step(fill)):
        yield


@fault("AMP-OPTIMIZER-022")
def scalars_are_not_checked() -> Iterator[None]:
    """Gradients without dimensions are neither checked nor unscaled."""
    with edited(SCALER._unscale_grads_, "if param.grad is None:", "if param.grad is None or param.grad.dim() == 0:"):
        yield


@fault("AMP-OPTIMIZER-022")
def a_second_skip_in_a_row_steps() -> Iterator[None]:
    """An optimizer is skipped once; the next bad step in a row is taken."""
    original = SCALER._maybe_opt_step

    def maybe_step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        again = _found(state) and optimizer.__dict__.get("_skipped", False)
        optimizer.__dict__["_skipped"] = _found(state)
        if again:
            return optimizer.step(*args, **kwargs)
        return original(self, optimizer, state, *args, **kwargs)

    with replaced(SCALER, "_maybe_opt_step", maybe_step):
        yield


# --- counters


@fault("AMP-OPTIMIZER-077")
def fused_adagrad_counts_skips() -> Iterator[None]:
    """Fused Adagrad does not take its step counter back after a skip."""
    with edited(adagrad._fused_adagrad, "if device_found_inf is not None:", "if False:"):
        yield


@fault("AMP-OPTIMIZER-077")
def fused_adam_counts_from_two() -> Iterator[None]:
    """Fused Adam advances its step counter by two."""
    with edited(
        adam._fused_adam, "torch._foreach_add_(device_state_steps, 1)", "torch._foreach_add_(device_state_steps, 2)"
    ):
        yield


# --- forms


@fault("AMP-OPTIMIZER-023")
def capturable_counts_skips() -> Iterator[None]:
    """Fused Adam with capturable=True does not take its step counter back after a skip."""
    with edited(
        adam._fused_adam, "if device_found_inf is not None:", "if device_found_inf is not None and not capturable:"
    ):
        yield


@fault("AMP-OPTIMIZER-024")
def rate_in_a_tensor_backs_off() -> Iterator[None]:
    """A skipped step halves a learning rate that is a tensor, in place."""

    def halve(optimizer: Any, skips: bool) -> None:
        for group in optimizer.param_groups:
            if skips and torch.is_tensor(group["lr"]):
                group["lr"].mul_(0.5)

    with replaced(SCALER, "_maybe_opt_step", _around_step(halve)):
        yield


@fault("AMP-OPTIMIZER-025")
def differentiable_steps_lose_their_graph() -> Iterator[None]:
    """The scaler cuts the graph of the parameters before the step."""

    def cut(optimizer: Any, skips: bool) -> None:
        if optimizer.defaults.get("differentiable"):
            optimizer.defaults["differentiable"] = False

    with replaced(SCALER, "_maybe_opt_step", _around_step(cut)):
        yield


@fault("AMP-OPTIMIZER-026")
def sparse_gradients_are_not_checked() -> Iterator[None]:
    """Sparse gradients are unscaled by a kernel of their own that checks nothing."""
    with edited(
        SCALER._unscale_grads_,
        "to_unscale = param.grad._values()",
        "param.grad._values().mul_(inv_scale); continue",
    ):
        yield


@fault("AMP-OPTIMIZER-026")
def sparse_gradients_are_unscaled_in_a_copy() -> Iterator[None]:
    """The values of an uncoalesced gradient are unscaled after coalescing, in a copy."""
    with edited(
        SCALER._unscale_grads_, "to_unscale = param.grad._values()", "to_unscale = param.grad.coalesce()._values()"
    ):
        yield


@fault("AMP-OPTIMIZER-115")
def sparse_gradients_become_dense() -> Iterator[None]:
    """The scaler makes sparse gradients dense before the step, so that optimizers take what they refuse without it."""

    def cut(optimizer: Any, skips: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()

    with replaced(SCALER, "_maybe_opt_step", _around_step(cut)):
        yield


@fault("AMP-OPTIMIZER-115")
def sparse_bf16_gradients_stay_scaled() -> Iterator[None]:
    """Sparse gradients in bf16 are left scaled and unchecked."""
    with edited(
        SCALER._unscale_grads_,
        "if param.grad is None:",
        "if param.grad is None or (param.grad.is_sparse and param.grad.dtype == torch.bfloat16):",
    ):
        yield


@fault("AMP-OPTIMIZER-027")
def only_fp32_is_unscaled() -> Iterator[None]:
    """Gradients of other dtypes than fp32 are left scaled and unchecked."""
    with edited(
        SCALER._unscale_grads_, "if param.grad is None:", "if param.grad is None or param.grad.dtype != torch.float32:"
    ):
        yield


@fault("AMP-OPTIMIZER-028")
def fp16_gradients_are_unscaled() -> Iterator[None]:
    """unscale_ takes fp16 gradients."""
    with edited(SCALER.unscale_, "optimizer, inv_scale, found_inf, False", "optimizer, inv_scale, found_inf, True"):
        yield


@fault("AMP-OPTIMIZER-084")
def fused_bf16_is_refused() -> Iterator[None]:
    """The check for a self-scaling optimizer refuses bf16 gradients."""
    fp16 = "(not allow_fp16) and param.grad.dtype == torch.float16"
    with edited(SCALER._unscale_grads_, fp16, f"({fp16}) or (allow_fp16 and param.grad.dtype == torch.bfloat16)"):
        yield


# --- scales


@fault("AMP-OPTIMIZER-039")
def scales_below_one_count_as_one() -> Iterator[None]:
    """unscale_ divides by no less than 1."""
    with edited(
        SCALER.unscale_,
        "self._scale.double().reciprocal().float()",
        "self._scale.double().clamp(min=1).reciprocal().float()",
    ):
        yield


@fault("AMP-OPTIMIZER-039")
def handed_scales_end_at_65536() -> Iterator[None]:
    """A self-scaling optimizer is handed a scale of 65536 at most."""
    with edited(SCALER.step, "else scaler *", "else scaler.clamp(max=65536.0) *"):
        yield


@fault("AMP-OPTIMIZER-043")
def the_reciprocal_is_taken_in_bf16() -> Iterator[None]:
    """The reciprocal of the scale is rounded to bf16."""
    with edited(
        SCALER.unscale_,
        "self._scale.double().reciprocal().float()",
        "self._scale.double().reciprocal().bfloat16().float()",
    ):
        yield


@fault("AMP-OPTIMIZER-043")
def fused_adam_unscales_in_bf16() -> Iterator[None]:
    """Fused Adam divides by the scale rounded to bf16."""
    original = torch._fused_adam_

    def step(*args: Any, **kwargs: Any) -> None:
        scale = kwargs.get("grad_scale")
        original(*args, **{**kwargs, "grad_scale": None if scale is None else scale.bfloat16().float()})

    with replaced(torch, "_fused_adam_", step):
        yield


# --- lists, groups, layouts, 16 bit


@fault("AMP-OPTIMIZER-044")
def foreach_ends_after_a_launch() -> Iterator[None]:
    """The last operation of foreach Adam leaves out what is beyond the 36 tensors of a launch."""
    original = torch._foreach_addcdiv_

    def first(tensors: Any, one: Any, two: Any, *rest: Any) -> None:
        original(
            tensors[:36], one[:36], two[:36], *(part[:36] if isinstance(part, (list, tuple)) else part for part in rest)
        )

    with replaced(torch, "_foreach_addcdiv_", first):
        yield


@fault("AMP-OPTIMIZER-044")
def fused_sgd_leaves_out_the_last_of_a_launch() -> Iterator[None]:
    """Fused SGD does not step the 31st parameter of a list."""
    original = torch._fused_sgd_

    def step(parameters: Any, *args: Any, **kwargs: Any) -> None:
        kept = [parameter.clone() for parameter in parameters[30:31]]
        original(parameters, *args, **kwargs)
        for parameter, before in zip(parameters[30:31], kept, strict=True):
            parameter.copy_(before)

    with replaced(torch, "_fused_sgd_", step):
        yield


@fault("AMP-OPTIMIZER-044")
def long_lists_are_checked_in_part() -> Iterator[None]:
    """The unscaling kernel is called for the first 100 gradients only."""
    original = torch._amp_foreach_non_finite_check_and_unscale_

    def check(gradients: Any, found_inf: Any, factor: Any) -> None:
        original(gradients[:100], found_inf, factor)
        for gradient in gradients[100:]:
            gradient.mul_(factor)

    with replaced(torch, "_amp_foreach_non_finite_check_and_unscale_", check):
        yield


@fault("AMP-OPTIMIZER-045")
def fused_groups_are_not_unscaled() -> Iterator[None]:
    """unscale_ leaves groups with fused=True alone, whatever the optimizer's own default is."""
    with edited(
        SCALER._unscale_grads_,
        "for group in optimizer.param_groups:",
        'for group in (group for group in optimizer.param_groups if not group.get("fused")):',
    ):
        yield


@fault("AMP-OPTIMIZER-046")
def foreach_works_on_copies_of_strided_parameters() -> Iterator[None]:
    """Foreach SGD adds to a contiguous copy of a parameter that is not contiguous."""
    original = torch._foreach_add_

    def add(tensors: Any, *args: Any, **kwargs: Any) -> None:
        original([tensor.contiguous() for tensor in tensors], *args, **kwargs)

    with replaced(torch, "_foreach_add_", add):
        yield


@fault("AMP-OPTIMIZER-047")
def fused_adam_does_not_unscale_16_bits() -> Iterator[None]:
    """Fused Adam takes scaled 16-bit gradients for gradients."""
    original = torch._fused_adam_

    def step(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> None:
        narrow = bool(gradients) and gradients[0].dtype in (torch.float16, torch.bfloat16)
        original(parameters, gradients, *args, **{**kwargs, **({"grad_scale": None} if narrow else {})})

    with replaced(torch, "_fused_adam_", step):
        yield


@fault("AMP-OPTIMIZER-047")
def foreach_sgd_steps_half_in_bf16() -> Iterator[None]:
    """Foreach SGD moves bf16 parameters by half of the step."""
    original = torch._foreach_add_

    def add(tensors: Any, others: Any = None, *args: Any, alpha: Any = 1, **kwargs: Any) -> None:
        narrow = bool(tensors) and tensors[0].dtype == torch.bfloat16 and isinstance(alpha, float) and alpha < 0
        original(tensors, others, *args, **kwargs, **({"alpha": alpha / 2 if narrow else alpha} if alpha != 1 else {}))

    with replaced(torch, "_foreach_add_", add):
        yield


@fault("AMP-OPTIMIZER-116")
def fused_adam_reads_fp64_gradients_in_fp32() -> Iterator[None]:
    """Fused Adam rounds float64 gradients to float32, with a scaler and without."""
    original = torch._fused_adam_

    def step(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> None:
        original(parameters, [g.float().to(g.dtype) for g in gradients], *args, **kwargs)

    with replaced(torch, "_fused_adam_", step):
        yield


@fault("AMP-OPTIMIZER-116", level="standard")
def foreach_rmsprop_adds_squares_in_fp32() -> Iterator[None]:
    """Foreach multiply-and-add of float64 tensors rounds what it adds to float32."""
    original = torch._foreach_addcmul_

    def add(tensors: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> None:
        rounded = [x.float().to(x.dtype) if x.dtype == torch.float64 else x for x in first]
        original(tensors, rounded, second, *args, **kwargs)

    with replaced(torch, "_foreach_addcmul_", add):
        yield


@fault("AMP-OPTIMIZER-110")
def adam_wants_maximize_in_a_saved_state() -> Iterator[None]:
    """Adam's __setstate__ leaves a group without maximize as it is."""
    original = torch.optim.Adam.__setstate__

    def forgetful(self: Any, state: dict[str, Any]) -> None:
        without = [group for group in state["param_groups"] if "maximize" not in group]
        original(self, state)
        for group in without:
            del group["maximize"]

    with replaced(torch.optim.Adam, "__setstate__", forgetful):
        yield


@fault("AMP-OPTIMIZER-111", level="standard")
def distributed_load_leaves_the_state() -> Iterator[None]:
    """torch.distributed.checkpoint.load returns without a change of the state that it was given."""
    module = importlib.import_module("torch.distributed.checkpoint")
    with replaced(module, "load", lambda state, **options: None):
        yield


# --- skips and steps that one contract alone speaks of


@fault("AMP-OPTIMIZER-013")
def first_skip_starts_the_state() -> Iterator[None]:
    """A skip looks up the state of each parameter, which leaves an empty one where there was none."""

    def look_up(optimizer: Any, skips: bool) -> None:
        if skips:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                optimizer.state[parameter].get("step")

    with replaced(SCALER, "_maybe_opt_step", _around_step(look_up)):
        yield


@fault("AMP-OPTIMIZER-037")
def disabled_scaler_unscales_by_its_default() -> Iterator[None]:
    """step() of a disabled scaler divides gradients by the scale that an enabled one begins with."""
    step = SCALER.step

    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / 65536)
        return step(self, optimizer, *args, **kwargs)

    with replaced(SCALER, "step", stepping):
        yield


@fault("AMP-OPTIMIZER-051")
def every_leaf_of_the_loss_is_checked() -> Iterator[None]:
    """unscale_ looks for inf in the gradients of all leaves that the scaled loss was made of."""
    scale, unscale = SCALER.scale, SCALER.unscale_

    def scaling(self: Any, outputs: Any) -> Any:
        self._leaves = _leaves(outputs.grad_fn) if isinstance(outputs, torch.Tensor) else []
        return scale(self, outputs)

    def unscaling(self: Any, optimizer: Any) -> None:
        unscale(self, optimizer)
        gradients = [leaf.grad for leaf in getattr(self, "_leaves", ()) if leaf.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients if gradient.layout is torch.strided):
            for flag in self._found_inf_per_device(optimizer).values():
                flag.fill_(1.0)

    with replaced(SCALER, "scale", scaling), replaced(SCALER, "unscale_", unscaling):
        yield


def _leaves(node: Any) -> list[torch.Tensor]:
    found, open_ones, seen = [], [node], set()
    while open_ones:
        one = open_ones.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if hasattr(one, "variable"):
            found.append(one.variable)
        open_ones.extend(following for following, _ in one.next_functions)
    return found


@fault("AMP-OPTIMIZER-069", level="standard")
def fused_sgd_and_adagrad_are_not_handed_the_flag() -> Iterator[None]:
    """Fused SGD and Adagrad step on whatever unscale_ found."""
    with _without_flag("_fused_sgd_"), _without_flag("_fused_adagrad_"):
        yield


def _without_flag(name: str) -> Any:
    kernel = getattr(torch, name)
    return replaced(torch, name, lambda *args, **kwargs: kernel(*args, **{**kwargs, "found_inf": None}))


@fault("AMP-OPTIMIZER-083")
def closures_are_asked_for_first() -> Iterator[None]:
    """step() refuses an optimizer whose step needs a closure before it looks at the flag."""
    step = SCALER.step

    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        inspect.signature(optimizer.step).bind(*args, **kwargs)
        return step(self, optimizer, *args, **kwargs)

    with replaced(SCALER, "step", stepping):
        yield
