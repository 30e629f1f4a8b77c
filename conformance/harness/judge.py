"""How a case that has run becomes a verdict, a reason and a record of the report."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from ..measure.refusals import dtype_refusals, sparse_refusals
from ..oracles.policy import declared
from ..oracles.policy.declaration import Undetermined
from ..report import values
from ..report.verdicts import Verdict
from ..workloads import user_workload
from . import blame, exhaustion
from .check import Case
from .endings import ContractViolation, Inconclusive, SuiteError, Unsupported, Untestable
from .environment import redact, redact_folders
from .evidence import plain, sentence
from .targets import has_kernel
from .waivers import Waiver

# In the words of torch's dispatcher (OperatorEntry.cpp), of the operators that torch leaves to backends
# (ConvolutionMM2d.cpp, attention.cpp), and of the fallbacks of backends. An operator that stops at an Autocast key has
# a kernel outside of regions: a backend that registers no fallthrough for it is at fault.
_NO_KERNEL = re.compile(
    r"Could not run '([\w:.]+)' with arguments from the '(?!Autocast)\w+' backend|"
    r"^(\w+_overrideable(?:_backward)?) not implemented|"
    r"[Oo]perator '?(aten::[\w.]+)'? is not (?:currently |yet )?(?:implemented|supported)"
)
# The same in evidence, which may hold its beginning alone, and in the words of checks.
_KERNEL_NAMED = re.compile(
    r"Could not run \\?'([\w:.]+)\\?' (?!with arguments from the \\?'Autocast)|"
    r"(\w+_overrideable(?:_backward)?) not implemented|"
    r"[Oo]perator \\?'?(aten::[\w.]+)\\?'? is not (?:currently |yet )?(?:implemented|supported)|"
    r"no kernel of ([\w:.]+)"
)
# In the words of autograd (VariableType), of an operator whose derivatives have no formula for forward mode.
_NO_TANGENT = re.compile(r"Trying to use forward AD with (\w+) that does not support it")
# In the words of PrivateUse1HooksInterface.h, of what a third party registers for generators, storages and memory.
_NO_HOOK = re.compile(r"You should register `PrivateUse1HooksInterface`.*implement `(\w+)` at the same time")
# How evidence of a check's control is named: "control: the first step", "control, fp16: ...", "... (control)".
_CONTROL = re.compile(r"^control\b|\(control\b[^()]*\)$")
_ENDINGS: tuple[tuple[type[BaseException], Verdict], ...] = (
    (ContractViolation, Verdict.FAIL),
    (Unsupported, Verdict.UNSUPPORTED),
    (Undetermined, Verdict.UNSUPPORTED),
    (Untestable, Verdict.UNTESTABLE),
    (Inconclusive, Verdict.INCONCLUSIVE),
    (pytest.skip.Exception, Verdict.UNTESTABLE),
    (pytest.fail.Exception, Verdict.ERROR),  # of a plugin that ends cases, such as pytest-timeout: no check fails so
    (SuiteError, Verdict.ERROR),
    (NameError, Verdict.ERROR),
    (SyntaxError, Verdict.ERROR),
    (ImportError, Verdict.ERROR),
)
# A case that ends so has what failed before, in a waiver, as its verdict.
_WITHOUT_A_VERDICT = (Unsupported, Undetermined, Untestable, Inconclusive, pytest.skip.Exception)

_NEVER_CAST_TO = (torch.float64, torch.complex128, torch.complex64, torch.complex32)
# What makes tensors or converts them, which no region does otherwise than asked.
_MAKING = (
    *("to", "half", "bfloat16", "float", "double", "type", "type_as"),
    *("tensor", "as_tensor", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "arange", "linspace", "eye"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_tensor", "new_zeros", "new_ones", "new_full", "new_empty"),
)
# Of torch's Python code, what computes in a dtype of its own choice: the reciprocal of the scale, the products of Muon.
_OUTSIDE_REGIONS = ("torch.amp.grad_scaler", "torch.optim.")

_SUITE = __name__.split(".")[0]
# What stands between such code and the operator that it calls: modes, and what keeps the compiler away.
_BETWEEN = (
    *("torch._ops", "torch._compile", "torch._dynamo.", "torch.utils._device"),
    *(f"{_SUITE}.oracles.trace.", f"{_SUITE}.measure."),
)


@dataclass(frozen=True)
class Judgement:
    """What a case came to, why, and the traceback where the reason alone would not explain it.

    `place` is the end of the reason that says where in the code of the suite or of a user's workload an exception came
    up; waivers do not see it.
    """

    verdict: Verdict
    reason: str
    detail: str | None = None
    place: str = ""


def by_other_rules(case: Case, device_type: str, ops: Iterable[str]) -> Judgement:
    """Judge a case by the lists of a backend that reached ops for which other rules hold on the device."""
    case.evidence.clear()  # what it measured is evidence of neither
    return Judgement(
        Verdict.UNSUPPORTED,
        f"{declared.source_of_rules(device_type)} has another rule for {', '.join(sorted(ops))}, "
        "and the case rests on that of the lists",
    )


def judge(case: Case, error: BaseException | None) -> Judgement:
    """Judge a case by how its check ended; any exception that is not the suite's own (`blame`) is torch's failure."""
    unheeded = next((one for one in case.evidence if not one.holds and one not in case.excused), None)
    if unheeded is None and case.excused and (error is None or isinstance(error, _WITHOUT_A_VERDICT)):
        unheeded, error = case.excused[0], None
    if unheeded is not None and not isinstance(error, ContractViolation):
        return Judgement(Verdict.FAIL, redact(sentence(unheeded)), None if error is None else _trace(error))
    if error is None:
        if any(evidence.judged for evidence in case.evidence) or (case.evidence and not case.contract.judges):
            return Judgement(Verdict.PASS, "")
        return Judgement(Verdict.ERROR, "the check judged no evidence, so it cannot have checked anything")
    if exhaustion.ran_out(error):
        return Judgement(Verdict.UNTESTABLE, f"the device has too little memory: {_first_line(error)}")
    verdict = next((verdict for kind, verdict in _ENDINGS if isinstance(error, kind)), None)
    if isinstance(error, NameError) and _raised_in_torch(error):
        verdict = None
    if verdict is None and blame.is_own(error):
        verdict = Verdict.ERROR
    if verdict is Verdict.ERROR:
        return Judgement(verdict, f"{type(error).__name__}: {_first_line(error)}", _trace(error))
    if verdict is Verdict.INCONCLUSIVE and not case.contract.judges:
        verdict = Verdict.UNTESTABLE  # nothing was to be judged: a fact was to be recorded
    if verdict is not None:
        return Judgement(verdict, redact(str(error)))
    place = user_workload.place(error) if case.contract.needs == "workload" else ""
    if not place and (found := blame.place(error)):
        place = f" (in the suite's own code, {found})"
    return Judgement(Verdict.FAIL, f"raised {type(error).__name__}: {_first_line(error)}{place}", _trace(error), place)


def lacks_kernel(error: BaseException | None) -> str | None:
    """Return the operator of which a device has no kernel at all, where the dispatcher says so."""
    found = _NO_KERNEL.search(str(error)) if isinstance(error, NotImplementedError) else None
    return next(filter(None, found.groups())) if found else None


def lacks_kernel_of_dtype(error: BaseException) -> bool:
    """Return whether a kernel says that it has no such dtype; a RuntimeError before 2.8, and a subclass of it since."""
    return isinstance(error, RuntimeError) and "not implemented for" in str(error)


def named_kernel(evidence: Iterable[values.Evidence]) -> str | None:
    """Return the operator of which some evidence says, in its name or its measurement, that a device has no kernel."""
    found = (_KERNEL_NAMED.search(f"{one.name} {one.measured}") for one in evidence)
    return next((next(filter(None, one.groups())) for one in found if one), None)


def lacks_sparse(error: BaseException | None, device: torch.device) -> bool:
    """Return whether an error is what a device says of sparse tensors, none of which it has."""
    return error is not None and (type(error), str(error)) in sparse_refusals(device)


def lacks_tangent(error: BaseException | None, device_type: str) -> str | None:
    """Return the operator that torch has no forward derivative of, where a device has a kernel of its own for it.

    torch composes `linear` of operators that have one, unless the device has a kernel of the whole.
    """
    found = _NO_TANGENT.search(str(error)) if isinstance(error, NotImplementedError) else None
    return found[1] if found and has_kernel(device_type, f"aten::{found[1]}") else None


def lacks_hook(error: BaseException | None) -> str | None:
    """Return the function of torch's hooks for a third party's device that is not implemented, where torch says so."""
    found = _NO_HOOK.search(str(error)) if isinstance(error, NotImplementedError) else None
    return found[1] if found else None


def lacks_function(error: BaseException | None, module: ModuleType | None) -> str | None:
    """Return the function that a device module (`torch.cuda`) lacks, where torch, or a check, looked for it."""
    found = isinstance(error, AttributeError) and module is not None and error.obj is module
    return error.name if found else None  # type: ignore[union-attr]


def lacks_dtype(error: BaseException | None, device: torch.device) -> tuple[str | None, torch.dtype] | None:
    """Return a dtype of which a device refuses all tensors and that was asked for, and the module of torch that did.

    Of 16-bit dtypes what scalers and optimizers ask for is meant, and what a call asks for that makes or converts a
    tensor: elsewhere a region may have cast to the dtype, which is a failure. No rule of autocast casts to float64 or
    to complex numbers: whoever asked, the device cannot be judged.
    """
    if error is None:
        return None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = list(zip(modules, traceback.extract_tb(error.__traceback__), strict=True))
    module, place = next((each for each in reversed(frames) if not each[0].startswith(_BETWEEN)), ("", None))
    asking = module if module.startswith(_OUTSIDE_REGIONS) else None
    named = asking is not None or (place is not None and _called(place) in _MAKING)
    dtypes = (*_NEVER_CAST_TO, torch.bfloat16, torch.float16) if named else _NEVER_CAST_TO
    return next(
        ((asking, dtype) for dtype in dtypes if (type(error), str(error)) in dtype_refusals(device, dtype)), None
    )


def _called(place: traceback.FrameSummary) -> str | None:
    """Return the name of the function whose call a frame stands in, where Python knows it (3.11 and later)."""
    first, last = place.lineno, getattr(place, "end_lineno", None)
    start, stop = getattr(place, "colno", None), getattr(place, "end_colno", None)
    if first is None or last is None or start is None or stop is None:
        return None
    lines = [linecache.getline(place.filename, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]  # columns count bytes
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(b"".join(lines), mode="eval").body
    except SyntaxError:
        return None
    function = call.func if isinstance(call, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", None))


def excuse(judgement: Judgement, case: Case | None) -> tuple[Judgement, Waiver | None]:
    """Turn a failure that waivers of the case speak of into WAIVED, by the first; none speaks of a failed control."""
    if case is None or judgement.verdict is not Verdict.FAIL or _control_failed(case):
        return judgement, None
    failed = [one for one in case.evidence if not one.holds]
    failures = [one.name for one in failed]
    if judgement.reason not in {redact(sentence(one)) for one in failed}:
        failures.append(judgement.reason.removesuffix(judgement.place))
    found = [next((waiver for waiver in case.waivers if waiver.excuses(failure)), None) for failure in failures]
    if None in found:
        return judgement, None
    return Judgement(Verdict.WAIVED, judgement.reason, judgement.detail), found[0]


def _control_failed(case: Case) -> bool:
    return any(not one.holds and _CONTROL.search(one.name) for one in case.evidence)


def set_up(unlike: str, judgement: Judgement) -> Judgement:
    """Judge a case that failed where `unlike` was set as it started, under which no check holds."""
    reason = f"torch was set up before the case, by a fixture, a hook or the like ({unlike}): run without that"
    return Judgement(Verdict.ERROR, reason, judgement.reason)


def broken(error: BaseException, phase: str) -> Judgement:
    """Judge a case whose check could not be set up."""
    if isinstance(error, pytest.skip.Exception):
        return Judgement(Verdict.UNTESTABLE, redact(str(error)))
    reason = f"{phase} raised {type(error).__name__}: {_first_line(error)}"
    return Judgement(Verdict.ERROR, reason, _trace(error))


def record(
    *,
    id: str,
    contract: str,
    node: str,
    target: str,
    parameters: dict[str, Any],
    case: Case | None,
    judgement: Judgement,
    waiver: Waiver | None,
    duration: float,
) -> values.Case:
    """Return the record of a case; the node only where it did not pass."""
    failed = judgement.verdict in (Verdict.FAIL, Verdict.WAIVED)
    return values.Case(
        id=id,
        contract=contract,
        node=None if judgement.verdict is Verdict.PASS else node,
        target=target,
        parameters={name: _short(value) for name, value in parameters.items()},
        verdict=judgement.verdict,
        reason=judgement.reason,
        detail=judgement.detail,
        evidence=tuple(map(_without_folders, case.evidence)) if case else (),
        snippet=case.reproduction or None if case and failed else None,
        waiver=waiver.reason if waiver and judgement.verdict is Verdict.WAIVED else None,
        duration_s=round(duration, 4),
    )


def _without_folders(one: values.Evidence) -> values.Evidence:
    """Redact what a check recorded: an error of compiled code holds a stack, which names files."""
    return replace(one, name=redact_folders(one.name), measured=_redacted(one.measured))


def _redacted(value: values.Measured) -> values.Measured:
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact_folders(value) if isinstance(value, str) else value


def _short(value: Any) -> str:
    """Return a parameter as a reader knows it: what has an id or a name is that, and not all that it holds."""
    names = (getattr(value, attribute, None) for attribute in ("__name__", "id", "name"))
    return next((name for name in names if isinstance(name, str)), str(plain(value)))


def _raised_in_torch(error: BaseException) -> bool:
    """Whether the code that raised is torch's own: a variable that it never set is its fault, not the suite's."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).split(".")[0] == "torch"


def _first_line(error: BaseException) -> str:
    lines = redact(str(error)).strip().splitlines()
    return lines[0] if lines else "(no message)"


def _trace(error: BaseException) -> str:
    return redact("".join(traceback.format_exception(error)))
