"""Record the ops of a program and of its backward as eager runs them and as a compiled graph holds them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...oracles.trace.ops import Op, OpTrace

PARTS = ("forward", "backward")


@dataclass
class RecordedOps:
    """The ops that ran, by part ("forward" or "backward"), and the bytes that were kept for backward.

    `kept` counts each storage once, also those of the arguments, and not the gradients that backward is given. A
    `partitioned` graph is cut as inductor's is, and not where eager's forward ends.
    """

    ops: dict[str, list[Op]] = field(default_factory=lambda: {part: [] for part in PARTS})
    kept: int = 0
    partitioned: bool = False

    def computing(self, part: str) -> dict[str, int]:
        """Return how often each op with arithmetic ran, with its types.

        A graph has no operations in place, and its gradients are added in another order.
        """
        ops = (op for op in self.ops[part] if op.computes)
        return dict(sorted(Counter(_spelt(op) for op in ops).items()))

    def casts(self, part: str) -> dict[str, int]:
        """Return how often a tensor was cast from each type to another."""
        found = [op.conversion for op in self.ops[part] if op.conversion is not None]
        return dict(sorted(Counter(f"{one.source} to {one.target}" for one in found).items()))

    @contextlib.contextmanager
    def watch(self, part: str) -> Iterator[None]:
        """Record what eager runs inside the block as that part, and what a forward keeps."""
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.detach())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with self._recorded(part), hooks if part == "forward" else contextlib.nullcontext():
            yield
        self.kept += _bytes(saved)

    @contextlib.contextmanager
    def _recorded(self, part: str) -> Iterator[None]:
        with OpTrace() as trace:
            yield
        self.ops[part].extend(trace.ops)

    def backend(self) -> Any:
        """Return a backend of torch.compile like aot_eager, whose graphs record their ops when they run."""
        from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        def watched(part: str) -> Callable[..., Any]:
            def compile(graph: torch.fx.GraphModule, example: Any) -> Any:
                names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]

                def run(*arguments: Any) -> Any:
                    if part == "backward":
                        given = [each for name, each in zip(names, arguments, strict=True) if "tangents" not in name]
                        self.kept += _bytes(each for each in given if isinstance(each, torch.Tensor))
                    with self._recorded(part):
                        return graph(*arguments)

                return make_boxed_func(run)

            return compile

        return aot_autograd(
            fw_compiler=watched("forward"),
            bw_compiler=watched("backward"),
            partition_fn=min_cut_rematerialization_partition if self.partitioned else default_partition,
        )


def _spelt(op: Op) -> str:
    name, _, rest = str(op).partition("(")
    return f"{name.rstrip('_')}({rest}"


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({(each.device, each.data_ptr()): each.untyped_storage().nbytes() for each in tensors}.values())
