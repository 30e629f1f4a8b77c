"""Check that the loss of a user's workload is float32 in dtype and value."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...harness.check import Case, contract, trains
from ...harness.targets import Target
from ...oracles.numbers.formats import FORMATS
from ...oracles.trace.ops import OpTrace
from ...workloads.user_workload import Builder

WIDE = (torch.float32, torch.float64)


@contract("AMP-LOSS-018")
@trains(fewest=2, quick=8, standard=16, full=64)
def test_the_loss_is_fp32(case: Case, target: Target, amp_dtype: torch.dtype, own: Builder) -> None:
    if words := own.raises(target.device, amp_dtype):
        case.untestable(words)
    built, unit = own.build(target.device, case.seed), FORMATS[amp_dtype].unit_roundoff
    work = built.workload()
    worst, found, narrow = 0.0, 0, 0
    with torch.no_grad():
        for number, (inputs, expected) in enumerate(work.batches[: case.samples(quick=8, standard=16, full=64)]):
            if number and not case.allowance:
                case.note("batches that fit the time limit", number)
                break
            with built.region(amp_dtype):
                output = work.model(inputs)
                losses = []
                wide_output = widened(output)
                # The same loss function in the same region, on the output and on the widened output.
                for given in (output, wide_output):
                    torch.manual_seed(case.seed)
                    losses.append(work.loss(given, expected))
            with OpTrace() as trace:
                work.loss(wide_output, expected)
            narrowed = [str(op) for op in trace.ops if {torch.float16, torch.bfloat16} & set(op.outputs)]
            case.equal("ops of the loss that give 16 bits of a fp32 output, outside any region", narrowed[:3], [])
            leaves = list(tensors(output))
            found, narrow = found + len(leaves), narrow + sum(leaf.dtype == amp_dtype for leaf in leaves)
            case.equal("the loss is fp32, or wider", losses[0].dtype in WIDE, True)
            seen, wide = (float(loss) for loss in losses)
            worst = max(worst, abs(seen - wide) / max(abs(wide), torch.finfo(torch.float32).tiny))
    if not found:
        case.untestable("no tensor is found in the output of the model, so nothing can be widened")
    # A model that widens its output itself hides its 16-bit output from this check.
    case.note("tensors in the outputs of the model, and those of 16 bits, widened for the comparison", [found, narrow])
    # Rounding to 16 bit has an error of 0.2 u on average; fp32 sums and functions lose far less.
    case.at_most("largest difference to the loss of the output in fp32, relative", worst / unit, 0.1, "u")


def tensors(output: Any, within: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: in tuples, lists, mappings, dataclasses and other objects that hold them."""
    if isinstance(output, torch.Tensor):
        yield output
    for part in _parts(output, within).values():
        yield from tensors(part, (*within, id(output)))


def widened(output: Any, within: tuple[int, ...] = ()) -> Any:
    """Return the output with every 16-bit tensor in it as float32, and nothing else changed."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    parts = {key: widened(part, (*within, id(output))) for key, part in _parts(output, within).items()}
    if not parts:
        return output
    if isinstance(output, tuple):
        return type(output)(*parts.values()) if hasattr(output, "_fields") else tuple(parts.values())
    if isinstance(output, list):
        return list(parts.values())
    if isinstance(output, Mapping) and not dataclasses.is_dataclass(output):
        mapping: Any = type(output)
        return mapping(parts)
    made = copy.copy(output)
    for key, part in parts.items():
        object.__setattr__(made, key, part)
    return made


def _parts(output: Any, within: tuple[int, ...]) -> dict[Any, Any]:
    """Return the parts of an object, or none if its id is in `within`, the objects that contain it."""
    if id(output) in within:
        return {}
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    if isinstance(output, Mapping) and not dataclasses.is_dataclass(output):
        return dict(output)
    held = getattr(output, "__dict__", {})
    return {} if isinstance(output, (torch.Tensor, torch.nn.Module, type)) or callable(output) else dict(held)
