"""Compilers that lose a type, the default type, or the sign of zero."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.chapters.compile.support import default_type
from tests.faults import fault
from tests.faults.breaking import decomposed, edited, given_the_original, replaced
from tests.faults.chapters.compile import around_compiled, keys_in


@contextlib.contextmanager
def _nodes(change: Callable[[torch.fx.Node], None]) -> Iterator[None]:
    """Change each node of the graphs that Dynamo captures, before their backend compiles them."""
    original = torch.compile

    def compile(function: Any = None, *, backend: str = "inductor", **options: Any) -> Any:
        if function is None:
            return functools.partial(compile, backend=backend, **options)

        def changing(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            for node in graph.graph.nodes:
                change(node)
            graph.recompile()
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

        return original(function, backend=changing, **options)

    with replaced(torch, "compile", compile):
        yield


@fault("AMP-COMPILE-078")
def compiled_sums_lose_their_type() -> Iterator[None]:
    """Sums and products of a compiled program ignore dtype= (pytorch 189518)."""

    def change(node: torch.fx.Node) -> None:
        if node.target in ("sum", "prod", "cumsum", "cumprod", "mean"):
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}

    with _nodes(change):
        yield


@fault("AMP-COMPILE-078")
def the_first_default_type_stays() -> Iterator[None]:
    """A compiled program runs under the default dtype of its first call (pytorch 184405)."""

    def around(call: Any) -> Any:
        first: list[torch.dtype] = []

        def run(*given: Any, **named: Any) -> Any:
            first.append(torch.get_default_dtype())
            with default_type(first[0]):
                return call(*given, **named)

        return run

    with around_compiled(around):
        yield


def _without_negative_zero(found: Any) -> Any:
    if isinstance(found, torch.Tensor) and found.is_floating_point():
        return found + 0.0
    return {name: _without_negative_zero(one) for name, one in found.items()} if isinstance(found, dict) else found


def _positive_zeros() -> Any:
    return around_compiled(lambda call: lambda *given, **named: _without_negative_zero(call(*given, **named)))


@fault("AMP-COMPILE-004")
def compiled_zeros_have_no_sign() -> Iterator[None]:
    """Compiled code returns every zero as the positive one."""
    with _positive_zeros():
        yield


@fault("AMP-COMPILE-005", level="standard")
def zeros_of_inductor_have_no_sign() -> Iterator[None]:
    """Compiled code returns every zero as the positive one, from the kernels of inductor too."""
    with _positive_zeros():
        yield


def _promoting_normal(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return torch.normal(mean.to(torch.result_type(mean, std)), std)


@fault("AMP-COMPILE-069")
def compiled_normal_promotes_its_type() -> Iterator[None]:
    """torch.normal of a mean and a deviation of two types has the wider one when it is compiled (pytorch 194547)."""

    def change(node: torch.fx.Node) -> None:
        if node.target is torch.normal:
            node.target = _promoting_normal

    with _nodes(change):
        yield


@fault("AMP-COMPILE-050")
def keys_of_graphs_leave_the_default_type_out() -> Iterator[None]:
    """The key of a graph in AOTAutograd's cache is the same for every default dtype (pytorch 184405)."""
    with keys_in(lambda: default_type(torch.float32)):
        yield


@fault("AMP-COMPILE-069", level="standard")
def decomposed_cat_ignores_the_type_of_empty_tensors() -> Iterator[None]:
    """A decomposed cat of one tensor and empty ones is that tensor, in its own type."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def cat(tensors: list[torch.Tensor], dim: int = 0) -> Any:
            filled = [one for one in tensors if one.numel()]
            if len(filled) == 1 and len(tensors) > 1:
                return filled[0].clone()
            return before(tensors, dim)

        return cat

    with decomposed(torch.ops.aten.cat.default, change):
        yield


@fault("AMP-COMPILE-069", level="standard")
def decomposed_select_scatter_promotes() -> Iterator[None]:
    """A decomposed select_scatter has the wider type of the tensor and of what is written to it."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def select_scatter(self: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
            found = self.to(torch.result_type(self, src)).clone()
            found.select(dim, index).copy_(src)
            return found

        return select_scatter

    with decomposed(torch.ops.aten.select_scatter.default, change):
        yield


@fault("AMP-COMPILE-083", level="standard")
def decomposed_running_means_are_narrow() -> Iterator[None]:
    """A decomposed batch normalization rounds the mean of a batch to 16 bits before it adds it to the running mean."""
    from torch._decomp import decompositions

    with edited(
        decompositions.native_batch_norm_helper,
        "momentum * save_mean + (1 - momentum) * running_mean",
        "momentum * save_mean.to(input.dtype) + (1 - momentum) * running_mean",
    ):
        yield


@fault("AMP-COMPILE-083")
def decomposed_evaluations_are_narrow() -> Iterator[None]:
    """A decomposed batch normalization in evaluation rounds the running statistics to the type of its input."""
    from torch._decomp import decompositions

    def narrow(right: Callable[..., Any], x: torch.Tensor, *given: Any) -> Any:
        weight, bias, mean, variance, training, *options = given
        if not training and mean is not None:
            mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        output, *saved = right(x, weight, bias, mean, variance, training, *options)
        return output, *saved[:2], *given[2:4]

    with given_the_original(decompositions, "native_batch_norm_helper", narrow):
        yield


@fault("AMP-COMPILE-083", level="standard")
def decomposed_group_norm_sums_in_16_bits() -> Iterator[None]:
    """A decomposed group normalization rounds the mean of a group to 16 bits before it subtracts it."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def group_norm(x: torch.Tensor, *given: Any) -> Any:
            output, mean, deviation = before(x, *given)
            groups = x.reshape(x.shape[0], given[5], -1).float()
            middle = groups.mean(-1, keepdim=True)
            off = (middle - middle.to(x.dtype)) * groups.var(-1, keepdim=True).rsqrt()
            return (output + off.expand_as(groups).reshape(x.shape)).to(output.dtype), mean, deviation

        return group_norm

    with decomposed(torch.ops.aten.native_group_norm.default, change):
        yield


def _promoting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function on operands of the widest of their floating types."""

    def floating(given: Any) -> bool:
        return isinstance(given, torch.Tensor) and given.is_floating_point()

    def promoted(*given: Any, **named: Any) -> Any:
        widest = functools.reduce(torch.promote_types, (one.dtype for one in given if floating(one)))
        return call(*(one.to(widest) if floating(one) else one for one in given), **named)

    return promoted


@fault("AMP-COMPILE-091", level="standard")
def compiled_products_promote_their_operands() -> Iterator[None]:
    """Dynamo captures calls on operands of two types as calls on the wider type."""

    def change(node: torch.fx.Node) -> None:
        if node.op == "call_function" and callable(node.target):
            node.target = _promoting(node.target)

    with _nodes(change):
        yield


@fault("AMP-COMPILE-091", level="standard")
def decomposed_products_promote_their_operands() -> Iterator[None]:
    """Every product of matrices is decomposed into a sum of products of elements, as those of one row are."""

    def change(before: Callable[..., Any]) -> Callable[..., Any]:
        def mm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
            return (self.unsqueeze(2) * mat2.unsqueeze(0)).sum(1)

        return mm

    with decomposed(torch.ops.aten.mm.default, change):
        yield
