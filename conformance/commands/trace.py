"""The command `trace`: name the first non-finite value of a training run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

from ..report import text
from .console import DIFFERENT, OK, UsageError, show, width
from .devices import first_device, real_target

_DTYPES = ("fp16", "bf16")
_CAUSES_SHOWN = 5
_INITIAL_SCALE = 65536.0
_LARGEST_SCALE = (2 - 2.0**-23) * 2.0**127


def add(commands: Any) -> None:
    """Add `trace` to the parser's commands."""
    command = commands.add_parser(
        "trace",
        help="train a model of your own with AMP and name what first makes an infinity or NaN",
        description="Train a model of your own as the documented AMP loop does, watch every op, and name the first "
        "non-finite value that reached a loss, a gradient or a weight: its module, op, operands and iteration, forward "
        "or backward. Exit status: 0 the run stays finite, or the scaler handled what overflowed; 1 it is lost; 4 a "
        "workload that cannot be used.",
    )
    command.add_argument("workload", metavar="MODULE:FUNCTION", help="builds the model, optimizer, loss and batches")
    command.add_argument("--steps", type=int, default=20, metavar="N", help="iterations to train (default 20)")
    command.add_argument("--amp-dtype", choices=_DTYPES, default="fp16", help="autocast's dtype (default fp16)")
    command.add_argument("--device", metavar="D", help="where to train (default: the accelerator, else cpu)")
    command.add_argument(
        "--scale", type=float, metavar="S", help="the loss scale to begin with, fp16 only (default 65536)"
    )
    command.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: a run has at least one iteration")
    if arguments.scale is not None and arguments.amp_dtype == "bf16":
        raise UsageError("--scale is of fp16: bf16 is trained without a scaler")
    scale = _INITIAL_SCALE if arguments.scale is None else arguments.scale
    if not 0 < scale <= _LARGEST_SCALE:
        raise UsageError(f"--scale {scale:g}: a loss scale is a positive number of fp32")
    target = real_target(arguments.device or first_device())
    import torch

    from ..measure import nonfinite
    from ..workloads import user_workload

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[arguments.amp_dtype]
    try:
        built = user_workload.Builder(arguments.workload, user_workload.load(arguments.workload)).build(target.device)
    except user_workload.OwnError as error:
        raise UsageError(f"{arguments.workload}: {error}") from None
    if built.dtype not in (None, dtype):
        raise UsageError(f"{arguments.workload}: its autocast settings have the dtype {built.dtype}: add --amp-dtype")
    if arguments.scale is None:
        scale = built.settings.get("init_scale", scale)
    account = _trained(
        nonfinite.trace,
        arguments.workload,
        built.model,
        built.optimizers[0],
        built.loss,
        built.batches,
        dtype=dtype,
        steps=arguments.steps,
        scale=scale if arguments.amp_dtype == "fp16" else None,
        **built.loop(),
    )
    show("\n".join(_told(account, f"{arguments.workload} on {target.name}, autocast in {arguments.amp_dtype}")))
    return DIFFERENT if account.spoiled else OK


def _trained(train: Callable[..., Any], name: str, *arguments: Any, **options: Any) -> Any:
    """Return the trace of the run; an exception of the user's model becomes a UsageError of one line."""
    try:
        return train(*arguments, **options)
    except Exception as error:
        from ..workloads.user_workload import told

        raise UsageError(f"{name}: the run raised {told(error)}") from None


def _told(account: Any, what: str) -> Iterator[str]:
    """The account of a traced run, line by line."""

    def wrapped(words: str) -> str:
        return text.wrap(words, width(), "", "  ")

    count = len(account.losses)
    yield wrapped(f"trace of {what}, {text.count(count, 'iteration')}")
    yield wrapped(f"loss: {account.losses[0]:.6g} in the first iteration, {account.losses[-1]:.6g} in the last")
    if account.scales:
        skipped = f"{len(account.skipped)} of {text.count(count, 'iteration')} skipped"
        first, last = account.scales[0], account.scales[-1]
        yield wrapped(f"loss scale: {first:g} before the first, {last:g} after the last, {skipped}")
    if account.peak is not None:
        yield wrapped(f"largest value in float16: {account.peak}")
    places: dict[tuple[str, ...], list[Any]] = {}
    for cause in account.causes:
        places.setdefault((cause.phase, cause.module, cause.op, cause.kind), []).append(cause)
    for number, causes in enumerate(list(places.values())[:_CAUSES_SHOWN]):
        which = "another one" if number else "first non-finite value"
        again = f" (the same place in {len(causes)} iterations)" if len(causes) > 1 else ""
        yield wrapped(f"{which}: {causes[0]}{again}")
    yield wrapped(_verdict(account))


def _verdict(account: Any) -> str:
    if account.bad_weight:
        return f"LOST: the weight {account.bad_weight} is not finite; nothing after it can be right."
    if not all(map(math.isfinite, account.losses)):
        return "LOST: a loss is not finite, and no loss scale helps against that."
    if account.collapsed:
        return f"LOST: the loss scale fell to {min(account.scales):g}; no scale suits these gradients."
    if account.spoiled:
        return "LOST: every iteration was skipped; give it more iterations, or look at what overflows."
    if account.causes:
        return "HANDLED: gradients overflowed, the scaler skipped these steps and found a scale at which they fit."
    return "FINITE: no infinity or NaN reached a loss, a gradient or a weight."
