"""Compilers that lose the regions, gradients and flags of loops, decorators and tensors that are written to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import operator_kernel, replaced


@fault("AMP-COMPILE-070", level="standard")
def compiled_code_drops_the_regions_that_it_decorates_with() -> Iterator[None]:
    """A function that compiled code decorates with a region runs without it."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    def undecorated(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return args[0]

    with replaced(AutocastModeVariable, "call_function", undecorated):
        yield


@fault("AMP-COMPILE-084", level="standard")
def compiled_loops_run_outside_of_the_region() -> Iterator[None]:
    """The body of a while_loop in compiled code runs outside of the region around the loop."""
    from torch._higher_order_ops.while_loop import while_loop_op

    with operator_kernel(while_loop_op, "CompositeExplicitAutograd", torch.autocast("cpu", enabled=False)):
        yield


@fault("AMP-COMPILE-085")
def compiled_code_leaves_no_grad_out() -> Iterator[None]:
    """A block under no_grad in compiled code is computed with gradients."""
    from torch._dynamo.variables.ctx_manager import GradModeVariable

    create = GradModeVariable.create

    def created(tx: Any, target_value: Any, initialized: bool = False, **named: Any) -> Any:
        return create(tx, target_value if initialized else True, initialized, **named)

    with replaced(GradModeVariable, "create", staticmethod(created)):
        yield


@fault("AMP-COMPILE-086")
def compiled_tensors_keep_their_flags_when_they_are_written_to() -> Iterator[None]:
    """Dynamo keeps the flags that a tensor had before an operation in place."""
    from torch._dynamo.variables.tensor import TensorVariable

    with replaced(TensorVariable, "synchronize_attributes", lambda self, tx, target_cls=None: None):
        yield


@fault("AMP-COMPILE-095")
def compiled_branches_double_their_gradients() -> Iterator[None]:
    """The gradients that a branch of cond passes are twice what they should be."""
    from torch._higher_order_ops.cond import CondAutogradOp

    backward = CondAutogradOp.backward

    def doubled(ctx: Any, *incoming: Any) -> Any:
        return backward(ctx, *(one * 2 if isinstance(one, torch.Tensor) else one for one in incoming))

    with replaced(CondAutogradOp, "backward", staticmethod(doubled)):
        yield
