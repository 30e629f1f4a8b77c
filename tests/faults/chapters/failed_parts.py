"""Faults of checkpoints that fail, of policies whose answers change, of choices, bags and resumed schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler, swa_utils
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_map

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original, kernel, replaced


@fault("AMP-BACKWARD-088")
def a_failed_checkpoint_keeps_its_hooks() -> Iterator[None]:
    """A checkpoint that is not reentrant leaves its generator where it is when the function raises."""
    with edited(checkpointing.checkpoint, "gen.throw(e)", "pass"):
        yield


@fault("AMP-BACKWARD-088")
def a_failed_recomputation_keeps_the_random_numbers_of_forward() -> Iterator[None]:
    """fork_rng restores the generator of the CPU after an early stop, and after no other error."""

    @contextlib.contextmanager
    def forked(*given: Any, enabled: bool = True, **named: Any) -> Iterator[None]:
        before = torch.get_rng_state()
        try:
            yield
        except checkpointing._StopRecomputationError:
            if enabled:
                torch.set_rng_state(before)
            raise
        if enabled:
            torch.set_rng_state(before)

    with replaced(torch.random, "fork_rng", forked):
        yield


@fault("AMP-BACKWARD-088")
def a_failed_reentrant_recomputation_leaves_its_region_open() -> Iterator[None]:
    """The backward of a reentrant checkpoint enters the region of forward and leaves it on success alone."""
    right = torch.amp.autocast_mode.autocast.__exit__

    def leave(region: Any, kind: Any, error: Any, trace: Any) -> Any:
        if (
            isinstance(error, RuntimeError)
            and trace.tb_frame.f_code is checkpointing.CheckpointFunction.backward.__code__
        ):
            torch.autocast_decrement_nesting()
            return None
        return right(region, kind, error, trace)

    with replaced(torch.amp.autocast_mode.autocast, "__exit__", leave):
        yield


def _asked_again(taken: str) -> Any:
    """Return create_selective_checkpoint_contexts whose recomputation asks the policy again.

    An op that is to be saved then has the first result that is left of it, or the `taken` one.
    """
    right = checkpointing.create_selective_checkpoint_contexts

    class Again(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self, policy: Any, storage: Any) -> None:
            super().__init__()
            self.policy, self.storage = policy, storage

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            answer = self.policy(checkpointing.SelectiveCheckpointContext(is_recompute=True), op, *args, **kwargs)
            kept = self.storage.get(op, {})
            left = [n for n, each in kept.items() if each not in (checkpointing._RECOMPUTE, checkpointing._CONSUMED)]
            if answer != checkpointing.CheckpointPolicy.MUST_SAVE or not left:
                return op(*args, **kwargs)
            place = left[0 if taken == "first" else -1]
            return tree_map(lambda each: each.get_val(False), kept.pop(place))

    def made(policy: Any, *given: Any, **named: Any) -> Any:
        ahead, again = right(policy, *given, **named)
        return ahead, (Again(policy, again.storage) if callable(policy) else again)

    return made


@fault("AMP-BACKWARD-056")
def the_policy_is_asked_again() -> Iterator[None]:
    """A selective checkpoint asks its policy in the recomputation too, and takes the next saved result."""
    with replaced(checkpointing, "create_selective_checkpoint_contexts", _asked_again("first")):
        yield


@fault("AMP-BACKWARD-056")
def a_saved_result_is_that_of_the_last_call() -> Iterator[None]:
    """A selective checkpoint takes the saved results of an op from the last to the first."""
    with replaced(checkpointing, "create_selective_checkpoint_contexts", _asked_again("last")):
        yield


def _chosen(name: str, first: Any, second: Any) -> Any:
    """Give a function of two tensors the gradients that `first` and `second` say of the operands."""
    right = getattr(torch, name)

    class Chosen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            ctx.save_for_backward(x, y)
            with torch._C._AutoDispatchBelowAutograd():
                return right(x, y)

        @staticmethod
        def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return incoming[0] * first(x, y), incoming[0] * second(x, y)

    return kernel(name, lambda x, y: Chosen.apply(x, y), "AutogradCPU")


@fault("AMP-NUMERICS-140")
def fmax_gives_a_gradient_to_a_nan() -> Iterator[None]:
    """The gradient of fmax is masked where an operand is less, which a NaN is not."""
    with _chosen("fmax", lambda x, y: ~(x < y), lambda x, y: x < y):
        yield


@fault("AMP-NUMERICS-140")
def equal_operands_of_minimum_get_the_gradient_twice() -> Iterator[None]:
    """The gradient of minimum goes to each operand that is no greater than the other, whole."""
    with _chosen("minimum", lambda x, y: ~(x > y), lambda x, y: ~(y > x)):
        yield


@fault("AMP-NUMERICS-135")
def rows_with_all_ends_lose_the_last_bag() -> Iterator[None]:
    """embedding_bag of indices of two dimensions takes the start of the last row for the end of the one before."""
    with edited(torch.nn.functional.embedding_bag, "include_last_offset = False", "pass"):
        yield


@fault("AMP-NUMERICS-135")
def rows_with_padding_and_weights_count_it() -> Iterator[None]:
    """embedding_bag of indices of two dimensions, with weights, drops padding_idx."""

    def bags(original: Any, input: Any, weight: Any, *given: Any, **named: Any) -> Any:
        if input.dim() == 2 and len(given) > 6 and given[6] is not None and given[-1] is not None:
            given = (*given[:-1], None)
        return original(input, weight, *given, **named)

    with given_the_original(torch.nn.functional, "embedding_bag", bags):
        yield


@fault("AMP-OPTIMIZER-127")
def a_saved_schedule_holds_its_function() -> Iterator[None]:
    """The state of SWALR holds the function that anneals the rate."""

    def state(original: Any, schedule: Any) -> Any:
        return {**original(schedule), "anneal": torch.cos}

    with given_the_original(swa_utils.SWALR, "state_dict", state):
        yield


@fault("AMP-OPTIMIZER-131")
def a_milestone_of_0_is_taken_for_1() -> Iterator[None]:
    """SequentialLR lets no scheduler take over before the first step."""

    def init(original: Any, schedule: Any, optimizer: Any, schedulers: Any, milestones: Any, *given: Any) -> None:
        original(schedule, optimizer, schedulers, [max(1, milestone) for milestone in milestones], *given)

    with given_the_original(lr_scheduler.SequentialLR, "__init__", init):
        yield
