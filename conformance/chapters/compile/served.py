"""Models for inference, and the ways of inductor to compile one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from .programs import PROGRAMS, Amp, Program, Tensors

Call: TypeAlias = Callable[..., Any]


def vision(
    amp: Amp,
    x: torch.Tensor,
    w: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
) -> Tensors:
    """A convolution and the normalization behind it, which compilers fold into one, and a linear layer with a bias."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.conv2d(x, w, bias)
        h = functional.relu(functional.batch_norm(h, mean, scale.square() + 0.5, scale, bias))
        h = functional.linear(h.mean((2, 3)), v, bias)
        return functional.softmax(h, -1), functional.layer_norm(h, h.shape[-1:]), h


def sequence(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Layers with weights of each type, of which one is stored transposed, and scores that are float32."""
    with torch.autocast(amp.kind, dtype=amp.dtype, cache_enabled=amp.cache):
        h = functional.gelu(functional.linear(x, w)) + x
        scores = functional.scaled_dot_product_attention(h[None, None], h[None, None], torch.mm(h, v.t())[None, None])
        with torch.autocast(amp.kind, enabled=False):
            exact = functional.linear(scores[0, 0].float(), v)
        return functional.linear(exact, v.to(amp.dtype)), exact, scores


def wide(amp: Amp, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A part of a model that is float32 throughout, in a disabled region of an enabled one."""
    with torch.autocast(amp.kind, dtype=amp.dtype), torch.autocast(amp.kind, enabled=False):
        h = functional.layer_norm(functional.linear(x, w), w.shape[:1])
        return functional.softmax(torch.mm(h, v), -1), h


MODELS: tuple[Program, ...] = (
    Program("vision", vision, ((2, 3, 5, 5), (4, 3, 3, 3), (4,), (4,), (4, 4), (4,)), frozen=(2,)),
    Program("sequence", sequence, ((4, 4),) * 3),
    Program("wide", wide, ((4, 4),) * 3),
    PROGRAMS["nested"],
)
"""Programs whose arguments but the first are the weights of a model."""


class Models(torch.nn.Module):
    """Programs whose arguments after the first are parameters, each run on an input of its own."""

    def __init__(self, programs: Sequence[Call], arguments: Sequence[Tensors]) -> None:
        super().__init__()
        weights = [each.detach() for some in arguments for each in some[1:]]
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(each, False) for each in weights])
        self.programs = programs
        self.counts = [len(some) - 1 for some in arguments]

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        first = 0
        for number in range(len(self.counts)):
            after = first + self.counts[number]
            found.extend(self.programs[number](inputs[number], *[self.weights[k] for k in range(first, after)]))
            first = after
        return found


def _compiled(**options: Any) -> Callable[[Models, Tensors], Call]:
    return lambda model, inputs: torch.compile(model, fullgraph=True, options=options)


def _ahead_of_time(model: Models, inputs: Tensors) -> Call:
    """Export the models, compile them into a package, and load that."""
    from torch import _inductor
    from torch.export import export

    with tempfile.TemporaryDirectory() as folder:
        package = _inductor.aoti_compile_and_package(
            export(model, inputs, strict=False), package_path=str(Path(folder, "model.pt2"))
        )
        call: Call = _inductor.aoti_load_package(package)
    return call


WAYS_FOR_INFERENCE: Mapping[str, Callable[[Models, Tensors], Call]] = {
    "as-it-is": _compiled(),
    "frozen": _compiled(freezing=True),
    "cpp-wrapper": _compiled(cpp_wrapper=True),
    "autotuned": _compiled(max_autotune=True),
    "ahead-of-time": _ahead_of_time,
}
"""Ways of inductor to compile a model for inference, by name."""
