"""The likely causes of failures: what failed cases share and passing cases do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import pytest

from conformance.report import causes, comparison, diff, terminal
from conformance.report.values import Case, Contract, Evidence, Report
from conformance.report.verdicts import Verdict
from tests import reports

_WRONG = Evidence("type of the output", "torch.float16", "==", "torch.float32", "", False)
_OPS = ("softmax", "mm", "linear", "sum", "exp")
_TARGETS = ("cpu", "fake:cuda", "fake:xpu")


def _case(
    contract: str,
    parameters: Mapping[str, str],
    *,
    target: str = "cpu",
    evidence: Evidence | None = None,
    reason: str = "",
    detail: str | None = None,
) -> Case:
    verdict = Verdict.FAIL if evidence or reason else Verdict.PASS
    id = f"{contract}[check:{target}-{'-'.join(parameters.values())}]"
    found = (evidence,) if evidence else ()
    return Case(id, contract, "node", target, parameters, verdict, reason, detail, found, None, None, 0.0)


def _report(cases: Iterable[Case], source: str = "docs") -> Report:
    whole = tuple(cases)
    ids = dict.fromkeys(case.contract for case in whole)
    contracts = tuple(Contract(id, id.split("-")[1].lower(), id, "", "must", "documented", source) for id in ids)
    sample = reports.sample("conformant")
    return dataclasses.replace(sample, header=dataclasses.replace(sample.header, contracts=contracts), cases=whole)


def _ops(broken: str, on: str) -> Report:
    return _report(
        _case(contract, {name: op}, target=target, evidence=_WRONG if (op, target) == (broken, on) else None)
        for contract, name in (("AMP-CAST-001", "op"), ("AMP-CAST-002", "overload"), ("AMP-LOSS-001", "name"))
        for op in _OPS
        for target in _TARGETS
    )


def test_an_op_that_fails_on_one_target_is_named_with_it() -> None:
    (found,) = causes.groups(_ops("softmax", "fake:cuda"))

    assert found.title == "softmax on fake:cuda: torch.float16 in place of torch.float32"
    assert found.contracts == ("AMP-CAST-001", "AMP-CAST-002", "AMP-LOSS-001")
    assert len(found.cases) == 3


def test_an_op_that_fails_everywhere_is_named_alone() -> None:
    report = _report(
        _case("AMP-CAST-001", {"op": op}, target=target, evidence=_WRONG if op == "mm" else None)
        for op in _OPS
        for target in _TARGETS
    )

    assert [cause.title for cause in causes.groups(report)] == ["mm: torch.float16 in place of torch.float32"]


def test_an_optimizer_is_named_with_its_implementation() -> None:
    kinds = [f"{name}-default-{way}" for name in ("Adam", "SGD", "RMSprop") for way in ("foreach", "fused", "for-loop")]
    report = _report(
        _case(f"AMP-OPTIMIZER-{number:03}", {"kind": kind}, evidence=_WRONG if kind == "Adam-default-fused" else None)
        for number in range(4)
        for kind in kinds
    )

    assert [cause.title.split(":")[0] for cause in causes.groups(report)] == ["Adam fused"]


def test_state_that_is_left_behind_is_a_cause_of_its_own() -> None:
    left = "the case leaves state behind: grad mode was True, is False"
    report = _report(
        _case(f"AMP-SCALE-{number:03}", {"part": str(number)}, reason=left if number < 6 else "")
        for number in range(12)
    )

    (found,) = causes.groups(report)
    assert found.title == "grad mode: grad mode is changed and not restored"


def test_an_error_is_named_by_the_function_of_torch_that_raised_it() -> None:
    trace = 'File "<site-packages>/torch/optim/adamw.py", line 36, in __init__\n  x\nTypeError: eps\n'
    report = _report(
        _case(f"AMP-RECIPE-{number:03}", {}, reason="raised TypeError: eps" if number < 4 else "", detail=trace)
        for number in range(9)
    )

    assert [cause.title for cause in causes.groups(report)] == ["TypeError in torch/optim/adamw.py, __init__"]


def test_failures_without_shared_parameters_are_named_by_their_part_of_amp() -> None:
    seen = [Evidence(f"finding {number}", 1, "==", 0, "", False) for number in range(12)]
    report = _report(
        (_case(f"AMP-SCALE-{number:03}", {}, evidence=seen[number] if number < 5 else None) for number in range(12)),
        source="torch.amp.GradScaler docstring",
    )

    (found,) = causes.groups(report)
    assert found.title.startswith("GradScaler")
    assert len(found.contracts) == 5


def test_a_target_alone_explains_nothing() -> None:
    report = _report(
        _case(f"AMP-CAST-{number:03}", {}, target="fake:cuda", evidence=_WRONG if number in (1, 5) else None)
        for number in range(9)
    )

    assert all("fake:cuda" not in cause.title for cause in causes.groups(report))


def test_every_failed_case_is_in_one_group_and_errors_are_in_none() -> None:
    sample = reports.sample("failing")
    grouped = [id for cause in causes.groups(sample) for id in cause.cases]

    assert sorted(grouped) == sorted(case.id for case in sample.cases if case.verdict is Verdict.FAIL)
    assert causes.groups(reports.sample("conformant")) == []


@pytest.mark.parametrize("number", [7, 20])
def test_many_causes_are_cut(number: int) -> None:
    found = [causes.Cause(f"cause {place}", ("AMP-A-001",), ("one",)) for place in range(number)]

    assert causes.brief(found, 80)[-1] == f"  ... and {number - 6} more cause{'s' * (number > 7)} of {number - 6} " + (
        "case" if number == 7 else "cases"
    )


def test_the_terminal_and_the_comparison_show_them() -> None:
    broken = _ops("softmax", "fake:cuda")
    line = "softmax on fake:cuda: torch.float16 in place of torch.float32: 3 contracts, 3 cases"

    assert line in terminal.render(broken, short=False, width=120, report_path="r")
    whole = _ops("", "")
    assert line in diff.render(whole, broken, comparison.compare(whole, broken), names=("a", "b"), width=120)
