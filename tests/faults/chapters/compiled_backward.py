"""Faults of the partition of a compiled graph into forward and backward, and of what is removed from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.faults import fault
from tests.faults.breaking import edited, given_the_original

LOW = (torch.float16, torch.bfloat16)


@fault("AMP-COMPILE-090")
def casts_are_kept_in_place_of_activations() -> Iterator[None]:
    """The partition of a graph keeps the 16-bit cast of a float32 activation for backward, and widens it there."""
    from torch._functorch import partitioners

    widen = torch.ops.prims.convert_element_type.default
    casts = (widen, torch.ops.aten._to_copy.default)
    is_backward = partitioners._has_tag_is_backward

    def narrow(value: Any) -> Any:
        kind = getattr(value.meta.get("val"), "dtype", None)
        if value.op != "call_function" or kind is not torch.float32:
            return None
        kept = [one for one in value.users if one.target in casts and one.meta["val"].dtype in LOW]
        return next((one for one in kept if not is_backward(one)), None)

    def split(extract: Any, joint: Any, saved_values: Any, *args: Any, **named: Any) -> Any:
        graph = joint.graph
        for at, value in enumerate(saved_values):
            cast, users = narrow(value), [one for one in value.users if is_backward(one)]
            if cast is None or cast in saved_values or not users:
                continue
            order = {node: number for number, node in enumerate(graph.nodes)}
            with graph.inserting_before(min(users, key=order.__getitem__)):
                wide = graph.call_function(widen, (cast, torch.float32))
            wide.meta = {**value.meta, "partitioner_tag": "is_backward"}
            for one in users:
                one.replace_input_with(value, wide)
            saved_values[at] = cast
        return extract(joint, saved_values, *args, **named)

    with given_the_original(partitioners, "_extract_fwd_bwd_modules", split):
        yield


@fault("AMP-COMPILE-069", level="standard")
def products_with_ones_are_removed_whatever_their_type() -> Iterator[None]:
    """inductor takes x * ones for x, also where the ones are of a wider type than x."""
    from torch._inductor.fx_passes import joint_graph

    with edited(joint_graph.remove_no_ops, 'fields=("shape", "dtype", "device")', 'fields=("shape", "device")'):
        yield


@fault("AMP-COMPILE-069", level="standard")
def vectors_are_added_in_the_type_of_the_product() -> Iterator[None]:
    """inductor takes a 16-bit product and a float32 vector for addmm, and rounds the vector to 16 bits."""
    from torch._inductor.fx_passes import post_grad

    alike = 'if inp_dtype != mat1.meta["val"].dtype or inp_dtype != mat2.meta["val"].dtype:'
    with (
        edited(post_grad.is_valid_addmm_fusion, alike, "if False:"),
        edited(post_grad.addmm, "aten.addmm(inp, mat1, mat2)", "aten.addmm(inp.to(mat1.dtype), mat1, mat2)"),
    ):
        yield
