"""The verdict names the targets; accelerators and chapters that were not reached are said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conformance.report import consistency, document, reach, rollup, terminal
from conformance.report.values import Report, Target
from conformance.report.verdicts import Overall, Verdict
from tests import reports

_FAKES = tuple(f"fake:{kind}" for kind in ("cuda", "xpu", "mps", "mtia", "maia"))


def _target(name: str, device: str = "") -> Target:
    device_type = name.removeprefix("fake:").split(":")[0]
    return Target(name, name, device_type, name.startswith("fake:"), {"name": device or device_type})


def _on(*targets: Target, **header: Any) -> Report:
    report = reports.sample("conformant")
    return replace(report, header=replace(report.header, targets=targets, **header))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("cpu",), "cpu"),
        (("cpu", "fake:cuda"), "cpu and fake:cuda"),
        (("cpu", "fake:cuda", "fake:xpu"), "cpu, fake:cuda and fake:xpu"),
        (("cpu", *_FAKES), "cpu and five fake accelerators"),
        (("cuda:0",), "cuda:0 (NVIDIA H100)"),
        (("fake:cuda",), "fake:cuda"),
    ],
)
def test_verdict_names_the_targets(names: tuple[str, ...], words: str) -> None:
    report = _on(*(_target(name, "NVIDIA H100") for name in names))
    case = next(case for case in report.cases if case.verdict is Verdict.PASS)
    report = replace(report, cases=(*report.cases, *(replace(case, id=name, target=name) for name in names)))

    assert reach.on(report) == words
    shown = terminal.render(report, short=False, width=100, report_path="report.json").splitlines()
    assert any(row.startswith(f"CONFORMANT on {words}: ") for row in shown)


def test_verdict_names_no_target_on_which_nothing_was_judged() -> None:
    report = _on(_target("cpu", "a CPU"), *(_target(name, "fake tensors") for name in _FAKES))

    assert reach.on(replace(report, cases=tuple(case for case in report.cases if case.target == "cpu"))) == "cpu"


@pytest.mark.parametrize(
    ("devices", "judged", "driver", "words"),
    [
        ({}, False, None, []),
        ({}, True, "550.54", []),
        ({"cuda:0": "NVIDIA H100"}, False, "550.54", ["NVIDIA H100 (cuda:0) is here and NOT judged: add --gpu"]),
        ({"cuda:1": "H100"}, True, None, ["H100 (cuda:1) is here and NOT judged: add --device cuda:1"]),
        (
            {"cuda:1": "H100", "cuda:2": "H100", "cuda:3": "L4"},
            True,
            None,
            [
                "2 H100 (cuda:1, cuda:2) are here and NOT judged: add --device cuda:1",
                "L4 (cuda:3) is here and NOT judged: add --device cuda:3",
            ],
        ),
    ],
)
def test_accelerators_that_are_not_judged_are_said(
    devices: dict[str, str], judged: bool, driver: str | None, words: list[str]
) -> None:
    targets = [_target("cuda:0")] if judged else [_target("cpu"), _target("fake:cuda")]
    environment = replace(reports.sample("conformant").header.environment, driver=driver)
    report = _on(*targets, not_judged=devices, environment=environment)

    shown = terminal.render(report, short=True, width=80, report_path="report.json").splitlines()

    assert shown[-1 - len(words) : -1] == words
    assert [row for row in shown if "NOT judged" in row] == words


def test_driver_of_an_accelerator_that_torch_does_not_find_is_said() -> None:
    said = list(reach.unjudged({}, judged=False, driver="550.54", torch="2.13.0+cpu"))

    assert said[0].startswith("a GPU driver (550.54) is here and torch 2.13.0+cpu finds no accelerator")


def _without(report: Report, *, untestable: int = 0, unreached: int = 0) -> Report:
    """Return the sample with contracts of the chapter scale, which has three, untestable or without a case."""
    ids = [contract.id for contract in report.header.contracts if contract.chapter == "scale"]
    gone, none = ids[:untestable], ids[untestable : untestable + unreached]
    cases = [
        replace(case, verdict=Verdict.UNTESTABLE, reason="no package", evidence=()) if case.contract in gone else case
        for case in report.cases
        if case.contract not in none
    ]
    assert report.footer is not None
    footer = replace(report.footer, unreached={"cpu": tuple(none)} if none else {})
    return Report(report.schema, report.header, tuple(cases), footer)


@pytest.mark.parametrize(
    ("untestable", "unreached", "overall"),
    [
        (0, 0, Overall.CONFORMANT),
        (1, 0, Overall.CONFORMANT),
        (0, 1, Overall.CONFORMANT),
        (2, 0, Overall.PARTIAL),
        (1, 1, Overall.PARTIAL),
        (0, 3, Overall.PARTIAL),
    ],
)
def test_run_with_a_chapter_that_is_mostly_not_reached_is_partial(
    untestable: int, unreached: int, overall: Overall
) -> None:
    report = _without(reports.sample("improved"), untestable=untestable, unreached=unreached)

    assert rollup.overall(report) is overall
    shown = terminal.render(report, short=False, width=80, report_path="report.json")
    said = f"only {3 - untestable - unreached} of 3 contracts of the chapter scale reached, so this is no pass"
    assert (said in " ".join(shown.split())) is (overall is Overall.PARTIAL)


def test_a_target_without_policies_beside_one_with_them_is_partial() -> None:
    report = reports.sample("improved")
    header = replace(report.header, targets=(*report.header.targets, _target("npu:0")))
    assert report.footer is not None
    footer = replace(report.footer, unreached={"npu:0": ("AMP-SCALE-001",)})
    report = Report(report.schema, header, report.cases, footer)

    assert rollup.overall(report) is Overall.PARTIAL
    assert [str(gap) for gap in reach.gaps(report)] == ["0 of 1 contract of the chapter scale reached on npu:0"]


def test_what_the_target_declares_to_lack_or_the_user_left_out_is_not_missing() -> None:
    whole = reports.raw("narrowed")

    assert reach.gaps(document.parse(whole)) == []
    assert {case["verdict"] for case in whole["cases"] if case["contract"] == "AMP-BF16-001"} == {"UNSUPPORTED"}


@pytest.mark.parametrize(
    ("unreached", "said"),
    [
        ({"npu:9": ["AMP-SCALE-001"]}, "is no target of the run"),
        ({"cpu": ["AMP-SCALE-999"]}, "and is none of the run"),
        ({"cpu": ["AMP-SCALE-001"]}, "is said to have no case on cpu, and has one"),
    ],
)
def test_false_claims_of_what_was_not_reached_contradict_the_report(unreached: dict[str, Any], said: str) -> None:
    report = document.parse(reports.changed("conformant", "footer/unreached", unreached))

    assert any(said in problem for problem in consistency.contradictions(report))


@pytest.mark.parametrize(("status", "sound"), [(6, True), (4, True), (0, False), (1, False)])
def test_exit_status_of_a_partial_run(status: int, sound: bool) -> None:
    report = _without(reports.sample("improved"), untestable=2)
    assert report.footer is not None
    footer = replace(report.footer, overall=Overall.PARTIAL, exit_status=status)

    problems = list(consistency.contradictions(replace(report, footer=footer)))

    assert any("exit status" in problem for problem in problems) is not sound
