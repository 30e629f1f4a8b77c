"""What a check is written with: the contract it names, its case, and the ways in which it can end."""

from __future__ import annotations

import math
import re
import string
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from ..report import consistency, fingerprint, scale_history, speed
from ..report.values import Evidence, Relation
from .catalogue import Contract
from .endings import ContractViolation, Inconclusive, Unsupported, Untestable
from .evidence import plain, sentence
from .time_limit import rounded

if TYPE_CHECKING:
    import torch

    from .targets import Target
    from .waivers import Waiver

Check = TypeVar("Check", bound=Callable[..., None])
Result = TypeVar("Result")

DEPTHS = ("quick", "standard", "full")


def contract(
    id: str, *, on: str | tuple[str, ...] = "real", dtypes: tuple[str, ...] = ("fp16", "bf16")
) -> Callable[[Check], Check]:
    """Say which contract a check asserts.

    `on` names the targets it runs on (`real`, `accelerator`, `fake`, a device type, or `fake:<device type>`; a
    tuple means any of them, and a device type in it also the devices that declare its op policy, where
    `torch.<device type>` means that type alone) and matters to checks that ask for `target`. `dtypes` are the amp
    dtypes it is about.
    """
    kinds = (on,) if isinstance(on, str) else on

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.contract(id, on=kinds, dtypes=dtypes)(check)
        return marked

    return mark


def timed(check: Check) -> Check:
    """Say that a check takes times or peaks of memory, which needs the machine for itself.

    Among xdist's workers its cases are UNTESTABLE. Else its case has a share of the chapter's deadline, a line of
    progress, and passes its times to pytest-benchmark where that is installed.
    """
    marked: Check = pytest.mark.timed(check)
    return marked


def by_rules(check: Check) -> Check:
    """Say that a check takes the rule of each op from what the device declares, also where that is a surface.

    Other checks rest on the lists of a backend. Where a surface has another rule for an op that they reach, their cases
    are UNSUPPORTED.
    """
    marked: Check = pytest.mark.by_rules(check)
    return marked


def alone(check: Check) -> Check:
    """Say that a check needs most of the machine's memory: its cases run after all others, in one process."""
    marked: Check = pytest.mark.alone(check)
    return marked


def deep(level: str, *values: Any, id: str | None = None) -> Any:
    """A parameter set that is left out below `level`."""
    return pytest.param(*values, id=id, marks=pytest.mark.depth(level))


def by_seed(level: str, count: int, *values: Any, id: str | None = None) -> Any:
    """A parameter set that is one of several from `level` on, of which --seed chooses `count`; at full all run.

    The several are those of one parametrize mark with the same level and count.
    """
    return pytest.param(*values, id=id, marks=(pytest.mark.depth(level), pytest.mark.by_seed(level, count)))


def per_target(name: str, values: Callable[[Any], Iterable[Any]]) -> Callable[[Check], Check]:
    """Parametrise a check that asks for `target` by `name` as well, with `values(target)` on each target of the run.

    A value is a string, or what `deep` or pytest.param makes of one. A target without values has no cases.
    """

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.per_target(name, values)(check)
        return marked

    return mark


def applies(absent: Callable[[Any], str | None]) -> Callable[[Check], Check]:
    """Say on what a check cannot apply: `absent(target)` returns what the machine cannot have, or None.

    `target` is None for a check without one. Such cases are not collected; the report lists them as not applicable
    here. What is missing but could be there (a package, memory) is `case.untestable` instead.
    """

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.applies.with_args(absent)(check)  # a callable alone would be decorated
        return marked

    return mark


def needs(*capabilities: str) -> Callable[[Check], Check]:
    """Say which capabilities (of targets.CAPABILITIES) a check is about: without one its cases are UNSUPPORTED."""

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.needs(*capabilities)(check)
        return marked

    return mark


def trains(*, fewest: int, quick: int, standard: int, full: int) -> Callable[[Check], Check]:
    """Say how many training steps a check of the user's workload takes by level, and the fewest that it can do with.

    Its case has a share of --time-limit and a line of progress; what it takes is estimated from these numbers.
    """

    def mark(check: Check) -> Check:
        marked: Check = pytest.mark.trains(fewest=fewest, quick=quick, standard=standard, full=full)(check)
        return marked

    return mark


@dataclass(frozen=True)
class Allotment:
    """What one case was given: when it has to end, where its progress shows, who else wants its times.

    `needs` says in words which option would give it that many seconds.
    """

    ends: float
    show: Callable[[str], None]
    publish: Callable[[Sequence[float], Mapping[str, Any]], None]
    now: Callable[[], float] = time.monotonic
    needs: Callable[[float], str] = lambda seconds: f"needs about {rounded(seconds)}"

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.ends - self.now())


class Case:
    """One contract on one target with one set of parameters: collects evidence and judges it."""

    def __init__(
        self,
        contract: Contract,
        *,
        level: str,
        seed: int,
        substitutions: dict[str, str],
        amp_dtypes: tuple[torch.dtype, ...] = (),
        waivers: tuple[Waiver, ...] = (),
    ) -> None:
        self.contract = contract
        self.level = level
        self.seed = seed
        self.amp_dtypes = amp_dtypes  # those of the run that the check is about, for a check that tries them all
        self.waivers = waivers  # those that name the case
        self.evidence: list[Evidence] = []
        self.excused: list[Evidence] = []  # what fails and a waiver names: the rest of the case is judged
        self.snippet: str | None = None
        self.allotment: Allotment | None = None  # of a check that is `timed`, or of the user's workload
        self._substitutions = substitutions

    def equal(self, what: str, seen: Any, expected: Any) -> None:
        """`seen` equals `expected` (the same type of bool, so that 1 is not True), also as the report writes them.

        A tensor in a table equals its number and does not read like it.
        """
        holds = bool(seen == expected) and isinstance(seen, bool) == isinstance(expected, bool)
        self._judge(what, seen, "==", expected, "", holds)

    def identical(self, what: str, seen: torch.Tensor, expected: torch.Tensor) -> None:
        """Both tensors have one dtype, one shape and the same bits; NaNs match NaNs of any payload."""
        promised = f"{expected.numel()} elements of {expected.dtype}"
        difference = _difference(seen, expected)
        self._judge(what, difference or promised, "identical", promised, "", difference is None)

    def at_most(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        """`measured` <= `bound`; NaN never holds."""
        self._judge(what, float(measured), "<=", float(bound), unit, bool(measured <= bound))

    def at_least(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        """`measured` >= `bound`; NaN never holds."""
        self._judge(what, float(measured), ">=", float(bound), unit, bool(measured >= bound))

    def enough(self, target: Target, what: str, judged: int, least: int = 1) -> None:
        """`judged` >= `least`, of what the check tried to judge.

        Fewer are UNSUPPORTED where a note of the case says that a third party's device has no kernel of some operator.
        """
        from .judge import named_kernel
        from .targets import is_foreign

        if judged < least and is_foreign(target.device_type) and (op := named_kernel(self.evidence)):
            self.unsupported(f"{target.name} has no kernel of {op}, and too little is left to judge: {what}: {judged}")
        self.at_least(what, judged, least)

    def between(self, what: str, measured: float, low: float, high: float, unit: str = "") -> None:
        """`low` <= `measured` <= `high`; NaN never holds."""
        holds = bool(low <= measured <= high)
        self._judge(what, float(measured), "in", [float(low), float(high)], unit, holds)

    def true(self, what: str, condition: bool, seen: Any = "") -> None:
        """`condition` holds; `seen` is what the report adds."""
        name = f"{what} (seen: {plain(seen)})" if seen != "" else what
        self._judge(name, bool(condition), "==", True, "", bool(condition))

    def raises(
        self, what: str, exception: type[BaseException], call: Callable[[], object], *, names: Sequence[str] = ()
    ) -> BaseException:
        """`call()` raises `exception` with a message that contains all of `names`; returns what was raised.

        Where nothing was, and a waiver excuses it, that is an AssertionError that says so.

        A name is what the user needs to know, such as a dtype, an argument or a replacement, never a phrase: wording
        is no promise. Upper and lower case are one; "fp16|float16" are two spellings of one name.
        """
        promised = _promised(exception, names)
        raised: Exception | None = None
        try:
            call()
        except Exception as error:
            raised = error
        fits = isinstance(raised, exception) and _named(names, str(raised))
        nothing = "nothing was raised"
        seen = nothing if raised is None else f"{type(raised).__name__}: {_first_line(raised)}"
        self._judge(what, seen, "raises", promised, "", fits)
        return raised or AssertionError(nothing)

    def warns(
        self, what: str, category: type[Warning], call: Callable[[], Result], *, names: Sequence[str] = ()
    ) -> Result:
        """`call()` warns with `category` and a message that has all of `names`, as in `raises`; returns its result."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        fits = [
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, category) and _named(names, str(warning.message))
        ]
        seen = fits or [f"{warning.category.__name__}: {warning.message}" for warning in caught] or "no warning"
        promised = _promised(category, names)
        self._judge(what, seen, "warns", promised, "", bool(fits))
        return result

    def note(self, what: str, measured: Any, unit: str = "") -> None:
        """Record a fact that nothing is held against."""
        self._judge(what, measured, None, None, unit, True)

    def history(self, what: str, scales: Iterable[float]) -> None:
        """Record the history of a loss scale: its initial value, then its value after each iteration.

        `python -m conformance explain scale` shows it. It is not judged.
        """
        self._judge(what, [float(scale) for scale in scales], None, None, scale_history.UNIT, True)

    def fingerprint(self, sections: Mapping[str, Mapping[str, str]]) -> None:
        """Record the numerics fingerprint of the target, by section its rows and values; nothing is held against it.

        `python -m conformance fingerprint` shows it, and `diff` compares those of two reports.
        """
        for section, rows in sections.items():
            self._judge(section, [[row, value] for row, value in rows.items()], None, None, fingerprint.UNIT, True)

    def speedup(self, key: str, figures: Mapping[str, Any]) -> None:
        """Record by its figures how many times faster AMP is than a baseline; nothing is held against it.

        `key` is `<subject>/<size>/<dtype>/<baseline>`, such as `matmul/compute/bf16/tf32`. `figures` are numbers and
        texts: `ratio`, `low` and `high` at least, `diagnosis` in words. `python -m conformance explain speed`
        shows them, `calibrate` makes expectations of them.
        """
        self._judge(key, [[name, value] for name, value in figures.items()], None, None, speed.UNIT, True)

    @property
    def allowance(self) -> float:
        """Seconds that this case may still take; without end where nothing limits it."""
        return math.inf if self.allotment is None else self.allotment.seconds_left

    @property
    def now(self) -> Callable[[], float]:
        """The clock, in seconds, by which the time that a case has is counted."""
        return time.monotonic if self.allotment is None else self.allotment.now

    def progress(self, words: str) -> None:
        """Show, while it goes on, how far a long measurement is."""
        if self.allotment is not None:
            self.allotment.show(f"{self.contract.id}: {words}")

    def timings(self, seconds: Sequence[float], info: Mapping[str, Any]) -> None:
        """Hand the times of the AMP arm, and what is known of them as JSON values, to pytest-benchmark; once a case."""
        if self.allotment is not None:
            self.allotment.publish(seconds, info)

    def samples(self, *, quick: int, standard: int, full: int) -> int:
        """The number of samples at the depth of this run."""
        return {"quick": quick, "standard": standard, "full": full}[self.level]

    def reproduce(self, snippet: str) -> None:
        """Replace the catalogue's snippet for this very case; `$device` and `$amp_dtype` are filled in."""
        self.snippet = snippet

    @property
    def reproduction(self) -> str:
        """The snippet that shows the failure with torch alone."""
        template = string.Template(self.snippet if self.snippet is not None else self.contract.snippet)
        return template.safe_substitute(self._substitutions).strip()

    def supported(self, target: Target) -> tuple[torch.dtype, ...]:
        """Return those of `amp_dtypes` that `target` computes in natively; without one, end the case as UNSUPPORTED."""
        found = tuple(dtype for dtype in self.amp_dtypes if target.supports(dtype))
        if not found:
            self.require(target, *self.amp_dtypes)
        return found

    def require(self, target: Target, *dtypes: torch.dtype) -> None:
        """End the case as UNSUPPORTED unless `target` computes natively in every one of `dtypes`."""
        if missing := [str(dtype) for dtype in dtypes if not target.supports(dtype)]:
            self.unsupported(f"{target.name} does not compute natively in {', '.join(missing)}")

    def require_arithmetic(self, target: Target, *dtypes: torch.dtype) -> None:
        """End the case as UNSUPPORTED unless `target` computes in every one of `dtypes`, natively or by emulation."""
        if missing := [str(dtype) for dtype in dtypes if not target.computes_in(dtype)]:
            self.unsupported(f"{target.name} does not compute in {', '.join(missing)}")

    def require_subnormals(self, target: Target, dtype: torch.dtype | None = None) -> None:
        """End the case as UNSUPPORTED where a device takes subnormal float32 numbers, and `dtype`'s, for zero.

        float16's are normal numbers of float32. No region makes or loses them: the device does.
        """
        import torch

        if dtype is not torch.float16 and target.flushes_subnormals():
            self.unsupported(f"{target.name} takes subnormal float32 numbers for zero, outside of regions too")

    def require_call(self, target: Target, what: str, call: Callable[[], object]) -> None:
        """End the case as UNSUPPORTED where a third party's device cannot do `call()`, made outside of any region."""
        from .targets import is_foreign

        try:
            call()
        except Exception as error:
            if not is_foreign(target.device_type):
                raise
            self.unsupported(f"{target.name} cannot {what}, without autocast too: {_first_line(error)}")

    def with_kernels(self, target: Target, programs: Mapping[str, Callable[[], object]]) -> tuple[str, ...]:
        """Return the names of the programs of which a third party's device has every kernel, outside of any region.

        What it has no kernel of, or sparse tensors for, is noted; without a program left the case ends as UNSUPPORTED.
        """
        from .judge import lacks_kernel, lacks_sparse, lacks_tangent
        from .targets import is_foreign

        if not is_foreign(target.device_type):
            return tuple(programs)
        lacking = {}
        for name, run in programs.items():
            try:
                run()
            except (RuntimeError, TypeError) as error:
                if op := lacks_kernel(error) or lacks_tangent(error, target.device_type):
                    lacking[name] = f"no kernel of {op}"
                elif lacks_sparse(error, target.device):
                    lacking[name] = "no sparse tensors"
                else:
                    raise
        if lacking:
            self.note("programs left out", lacking)
        if lacking.keys() == programs.keys():
            self.unsupported(f"{target.name} has {', '.join(sorted(set(lacking.values())))}")
        return tuple(name for name in programs if name not in lacking)

    def require_fused(self, target: Target, optimizer: type[torch.optim.Optimizer]) -> None:
        """End the case as UNSUPPORTED where a third party's device has no fused `optimizer`: a step of one is tried."""
        import torch

        parameter = torch.nn.Parameter(torch.zeros(1, device=target.device))
        parameter.grad = torch.zeros_like(parameter)
        make: Any = optimizer
        self.require_call(target, f"run a fused {optimizer.__name__}", lambda: make([parameter], fused=True).step())

    def unsupported(self, reason: str) -> NoReturn:
        """End the case: the target declares that it lacks this; the reason may quote an error of any length."""
        raise Unsupported(_brief(reason))

    def untestable(self, reason: str) -> None:
        """End the case: something needed is missing; the reason may quote an error of any length."""
        raise Untestable(_brief(reason))

    def inconclusive(self, reason: str) -> None:
        """End the case: the measurement is too noisy to decide."""
        raise Inconclusive(reason)

    def out_of_time(self, what: str, seconds: float) -> None:
        """End the case: it was not given the `seconds` that `what`, the least that decides, takes."""
        words = f"needs about {rounded(seconds)}" if self.allotment is None else self.allotment.needs(seconds)
        raise Inconclusive(f"{what} {words}")

    def _judge(self, what: str, measured: Any, relation: Relation, bound: Any, unit: str, holds: bool) -> None:
        seen, wanted = plain(measured), plain(bound)
        if relation == "==":
            holds = holds and consistency.alike(seen, wanted)
        found = Evidence(what, seen, relation, wanted, unit, holds)
        self.evidence.append(found)
        if holds:
            return
        if not any(waiver.excuses_a_part(what) for waiver in self.waivers):
            raise ContractViolation(sentence(found))
        self.excused.append(found)


def _promised(kind: type[BaseException], names: Sequence[str]) -> str:
    spelled = [" or ".join(name.split("|")) for name in names]
    return kind.__name__ + (f" that names {', '.join(spelled)}" if spelled else "")


def _named(names: Sequence[str], message: str) -> bool:
    """Return whether each name stands in the message as a word of its own, in one of its spellings."""
    return all(
        any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", message, re.IGNORECASE) for one in name.split("|"))
        for name in names
    )


def _brief(reason: str) -> str:
    """Return the first line of a reason: torch's dispatcher prints all kernels of an op into its error."""
    return textwrap.shorten(reason.strip().partition("\n")[0], 300, placeholder=" ...")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def _difference(seen: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Describe how `seen` differs from `expected` in dtype, shape or bits, or return None where it does not."""
    import torch

    from ..oracles.numbers.bits import equal_elements

    if not isinstance(seen, torch.Tensor):
        return f"{type(seen).__name__} in place of a tensor"
    if seen.dtype != expected.dtype:
        return f"{seen.dtype} in place of {expected.dtype}"
    if seen.shape != expected.shape:
        return f"shape {tuple(seen.shape)} in place of {tuple(expected.shape)}"
    ours, theirs = seen.detach().to_dense().cpu(), expected.detach().to_dense().cpu()
    equal = equal_elements(ours, theirs)
    if equal is None:
        return None
    wrong = int((~equal).sum())
    at = int((~equal).flatten().nonzero()[0])
    pair = f"{ours.flatten()[at].item()!r} in place of {theirs.flatten()[at].item()!r}"
    return f"{wrong} of {equal.numel()} elements differ; the first, at {at}: {pair}"
