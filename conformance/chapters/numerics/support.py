"""Steps that several checks of the numerics chapter share: run, measure and judge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ...harness.check import Case
from ...harness.judge import lacks_kernel
from ...harness.targets import Target, has_kernel, is_foreign
from ...measure.precision import full_precision
from ...oracles.numbers import error_bounds
from ...oracles.numbers.formats import FORMATS, FP32, Format
from ...oracles.policy import lists as op_policy
from ...oracles.policy.declared import followed
from ...oracles.relations import outcomes
from ...oracles.relations.programs import Program
from ...oracles.relations.values import weights
from . import op_error
from .attention_kernels import attempts
from .bounds_loss import LOSSES
from .matmul_ops import Product
from .op_error import Measured, Op

T = TypeVar("T")


def by_kernel(case: Case, target: Target, rng: torch.Generator, measure: Callable[[], T]) -> dict[str, T]:
    """Return the result of `measure` on each kernel, torch's choice first, from the same random numbers.

    Fails the case if a kernel that accepts the inputs raises and another does not; an error of all is raised.
    """
    state = rng.get_state()

    def again() -> T:
        rng.set_state(state)
        return measure()

    tried = list(attempts(again, target.device_type))
    found = {one.kernel: one.found for one in tried if one.found is not None}
    raised = {one.kernel: one.raised for one in tried if one.raised is not None}
    if (error := next(iter(raised.values()), None)) is not None and not found:
        raise error
    chosen, *others = tried
    ran = [one.kernel for one in others if one.found is not None]
    case.note("attention kernel that torch chooses", chosen.kernel)
    case.note("other kernels that accept the inputs", ran)
    wrong = {name: f"{type(error).__name__}: {error}" for name, error in raised.items()}
    case.equal("attention kernels that raise on inputs that they accept", wrong, {})
    case.true("an attention kernel accepts the inputs", bool(found))
    return found


def compare(case: Case, what: str, figures: Mapping[str, float], unit: str = "") -> None:
    """Record one figure of every kernel, before any is judged."""
    case.note(f"{what}, by kernel", {name: float(figure) for name, figure in figures.items()}, unit)


_OWN_CONVOLUTIONS = ("convolution_backward", "convolution_backward_overrideable")


def without_kernels(target: Target, dtype: torch.dtype) -> str:
    """Return what the name of evidence says where a CPU has no instructions of a type for oneDNN's convolutions.

    Devices of third parties without a kernel of their own for the gradients of convolutions have the CPU's.
    """
    own = any(has_kernel(target.device_type, f"aten::{name}") for name in _OWN_CONVOLUTIONS)
    here = target.device_type == "cpu" or (is_foreign(target.device_type) and not own)
    named = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    has = getattr(torch.ops.mkldnn, f"_is_mkldnn_{named}_supported", lambda: False)
    return f" without {named} kernels" if here and not has() else ""


def leaves_on(target: Target, *sources: Tensor) -> list[Tensor]:
    return [source.detach().clone().to(target.device).requires_grad_() for source in sources]


def run_product(target: Target, dtype: torch.dtype, product: Product, *operands: Tensor) -> Tensor:
    with full_precision(target.device_type), target.autocast(dtype):
        return product.call(*operands)


def within_window(
    case: Case, what: str, seen: Tensor, expected: Tensor, window: tuple[float, float], unit: float
) -> None:
    """Check that the normwise error, in units of the type's roundoff, lies within `window`."""
    error = error_bounds.normwise_error(seen, expected) / unit
    case.between(f"{what}: normwise error", error, window[0] / unit, window[1] / unit, "u")


def keeps_subnormals(target: Target, dtype: torch.dtype) -> bool:
    """Return whether products keep the subnormal numbers of the type.

    Not MI200 (torch's notes on numerical accuracy), and not those of bf16, which are fp32's as well: x86's VDPBF16PS
    flushes them to zero (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
    """
    return dtype is torch.float16 and not str(target.probe["capability"]).startswith("gfx90a")


# A control must be out of bounds by more than the slack between a bound's first order and the truth.
TELLING = 2.0


def slug(name: str) -> str:
    """Return a name as part of a case id."""
    return name.replace(" ", "_")


def by_name(table: dict[str, Op]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("op", list(table.values()), ids=map(slug, table))


def by_loss() -> pytest.MarkDecorator:
    """Parametrize by loss function, one case for each."""
    return pytest.mark.parametrize("loss", list(dict.fromkeys(name.split(" ")[0] for name in LOSSES)))


def is_listed(op: Op, target: Target) -> bool:
    """Return whether autocast turns a 16-bit input of the op into an fp32 result on this target."""
    return any(one.name == op.policy for one in op_policy.listings(target.device_type, "fp32"))


def formats(op: Op, target: Target, amp_dtype: torch.dtype, *, is_loss: bool = False) -> list[Format]:
    """Return the operand types for which there is a promise.

    fp32 everywhere. 16 bits where the op is listed as fp32, and where the device is known to keep the statistics of a
    16-bit tensor in fp32 without a list; neither is known of third parties' devices.
    """
    known = followed(target.device_type) in op_policy.BACKENDS and not is_loss and op.policy != "rms_norm"
    return [FP32, FORMATS[amp_dtype]] if known or is_listed(op, target) else [FP32]


def runs(
    case: Case, target: Target, rng: torch.Generator, op: Op, *, backward: bool, is_loss: bool = False
) -> Iterator[tuple[Format, list[Measured]]]:
    """Measure the op on the data of this depth, in regions of every amp dtype; yield the type of the operands too.

    An op that a third party's device cannot do in float32 outside of regions ends the case as UNSUPPORTED.
    """
    if is_foreign(target.device_type):
        operands = op_error.operands(op, op.kinds[0], FP32, torch.Generator().manual_seed(0))
        case.require_call(
            target, f"compute {op.name}", lambda: op.call(*(tensor.to(target.device) for tensor in operands))
        )
    kinds = op.kinds[: case.samples(quick=1 if is_loss else 2, standard=9, full=9)]
    for dtype in case.supported(target):
        for form in formats(op, target, dtype, is_loss=is_loss):
            for kind in kinds:
                for _ in range(case.samples(quick=1, standard=3, full=25)):
                    region = functools.partial(target.autocast, dtype)
                    found = op_error.measure(op, kind, form, rng, target.device, region, backward=backward)
                    _type_of_result(case, target, op, form, found[0])
                    yield form, found


def _type_of_result(case: Case, target: Target, op: Op, form: Format, result: Measured) -> None:
    if form is FP32 or is_listed(op, target):
        case.equal(f"{result.what}: dtype", result.dtype, torch.float32)


def hold(case: Case, what: str, found: Sequence[Measured]) -> None:
    """Check the worst of all measured tensors against its bounds."""
    for figure, name in (
        (lambda one: one.error, "error of an element"),
        (lambda one: one.gain, "systematic scale error"),
    ):
        ratio, where = op_error.worst(found, figure)
        case.at_most(f"{what}: worst {name} of {len(found)} tensors ({where})", ratio, 1.0, "of the bound")


def control(case: Case, op: Op, rng: torch.Generator) -> None:
    """Check that an fp32 op with operands rounded to 16 bits is out of bounds."""
    for dtype in case.amp_dtypes:
        ratio = max(op_error.lowered(op, kind, FORMATS[dtype], rng) for kind in op.kinds)
        case.at_least(f"control: operands rounded to {FORMATS[dtype].name}, error", ratio, TELLING, "of the bound")


def largest_share(seen: Tensor, exact: Tensor, bound: Tensor, judged: Tensor) -> tuple[float, int]:
    """Return the largest error as a share of its bound, of the elements that are judged, and where it is."""
    share = (seen - exact).abs() / bound
    share = torch.where(seen.isfinite(), share, torch.full_like(share, float("inf")))
    share = torch.where(judged, share, torch.zeros_like(share))
    at = int(share.argmax())
    return float(share[at]), at


# In roundings of the largest number: of an op and of what it is composed of; a gradient is of more ops.
_OF_RESULTS, _OF_GRADIENTS = 4.0, 16.0


def too_far(seen: Tensor, exact: Tensor, dtype: torch.dtype, *, gradient: bool) -> str:
    """Return how far a result, or a gradient, of a type is from the exact one where that is too far."""
    error = float((seen - exact).abs().max()) / (torch.finfo(dtype).eps * float(exact.abs().max()) + 1e-30)
    return "" if error <= (_OF_GRADIENTS if gradient else _OF_RESULTS) else f"{error:.4g} roundings"


def raised(program: Program, device: torch.device) -> Exception | None:
    """Return what a program raises in its own types on the device, outside of any region, forward or backward."""
    placed = program.changed(lambda tensor: tensor.to(device))
    return outcomes.run(placed, gradients=True, weights=weights).exception


def call_for_refusal(program: Program, device: torch.device) -> None:
    """Call a program in its own types on the device, outside of any region, and its backward.

    Raises NotImplementedError where the device has no kernel; all else is judged elsewhere.
    """
    if isinstance(error := raised(program, device), NotImplementedError):
        raise error


def is_refused(error: RuntimeError) -> bool:
    """Whether a call raises for want of a kernel of its types."""
    return lacks_kernel(error) is not None


class Findings:
    """What programs that are judged one by one were found to do wrong, by kind, and which could not be judged."""

    def __init__(self) -> None:
        self.judged = 0
        self._left_out: dict[str, Callable[[], None]] = {}
        self._wrong: dict[str, dict[str, str]] = {}

    def leave_out(self, program: Program, device: torch.device) -> None:
        """Note that a program could not be judged, for want of a kernel or otherwise."""
        self._left_out[program.name] = functools.partial(call_for_refusal, program, device)

    def add(self, kind: str, what: str, how: str) -> None:
        """Note what one program does wrong."""
        self._wrong.setdefault(kind, {})[what] = how

    def hold(self, case: Case, target: Target, counted: str, said: str) -> None:
        """Judge what was found; `said` names the evidence of a kind, which stands in it as {}."""
        if not self.judged:
            case.with_kernels(target, self._left_out)
        case.enough(target, counted, self.judged)
        for kind, found in self._wrong.items():
            case.equal(said.format(kind), found, {})
