"""--waivers excuses known failures, in the open, and an excuse that has rotted fails the run."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from conformance.harness import catalogue, targets, waivers
from conformance.harness.run import Run
from tests.conftest import Outcome, Toy

_GOOD = {
    "contract": '"AMP-API-001"',
    "cases": '["*"]',
    "reason": '"a known failure"',
    "owner": '"the maintainers"',
    "link": '"https://example.org/1"',
    "expires": "2999-12-31",
}


def _suite(toy: Toy, second: str = "case.equal('y', 1, 2)") -> None:
    toy.contract("AMP-API-001")
    toy.contract("AMP-API-002")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 2)\n"
        f"@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    {second}\n"
        "@contract('AMP-API-002')\ndef test_c(case: Case) -> None:\n    case.equal('z', 1, 1)\n"
    )


def _write(toy: Toy, **keys: str | None) -> Path:
    rows = {**_GOOD, **keys}
    text = "[[waiver]]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items() if value is not None)
    (toy.path / "waivers.toml").write_text(text)
    return toy.path / "waivers.toml"


def _run(toy: Toy, *arguments: str, **keys: str | None) -> Outcome:
    _write(toy, **keys)
    return toy.run("--waivers", "waivers.toml", *arguments)


def test_waived_failure_is_shown_and_does_not_fail(toy: Toy) -> None:
    _suite(toy)

    outcome = _run(toy)

    assert outcome.status == 0
    assert outcome.verdicts()["AMP-API-001[a]"] == "WAIVED"
    assert outcome.report["footer"]["waivers"][0]["state"] == "used"
    assert "2 xfailed" in outcome.output
    assert "by the maintainers, until 2999-12-31: AMP-API-001 2 The toy contract" in " ".join(outcome.output.split())


def test_case_that_would_end_the_process_is_not_run(toy: Toy) -> None:
    _suite(toy, second="import os; os._exit(77)")

    outcome = _run(toy, cases='["AMP-API-001[b]"]', run="false")

    assert outcome.status == 1  # by AMP-API-001[a], which no waiver names
    assert outcome.verdicts() == {"AMP-API-001[a]": "FAIL", "AMP-API-001[b]": "WAIVED", "AMP-API-002[c]": "PASS"}
    (reason,) = (case["reason"] for case in outcome.report["cases"] if case["id"] == "AMP-API-001[b]")
    assert reason == "not run, as it would end the process or leave the device unusable"


@pytest.mark.parametrize(("build", "state"), [("cuda", "used"), ("hip", "idle")])
def test_waiver_of_a_build_is_not_for_another(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, build: str, state: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    _suite(toy)

    outcome = _run(toy, build=f'"{build}"')

    assert outcome.status == (0 if state == "used" else 1)
    assert outcome.report["footer"]["waivers"][0]["state"] == state


@pytest.mark.parametrize(("instructions", "state"), [("AVX512", "used"), ("AVX2", "idle")])
def test_waiver_of_a_cpu_is_not_for_another(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, instructions: str, state: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    _suite(toy)

    outcome = _run(toy, cpu=f'"{instructions}"')

    assert outcome.status == (0 if state == "used" else 1)
    assert outcome.report["footer"]["waivers"][0]["state"] == state


def test_waiver_that_a_passing_case_no_longer_needs_fails_the_run(toy: Toy) -> None:
    _suite(toy, second="case.equal('y', 1, 1)")

    outcome = _run(toy)

    assert outcome.status == 1
    assert outcome.report["footer"]["waivers"][0]["state"] == "unneeded"
    assert "no longer needed" in outcome.output


_EXTENDED = {"cuda": {"extension.cpp": 3}}


@pytest.mark.parametrize(("kernels", "status"), [({}, 1), (_EXTENDED, 0), ({"xpu": {"extension.cpp": 1}}, 1)])
def test_kernels_that_are_not_torchs_may_do_right_what_torch_breaks(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, dict[str, int]], status: int
) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001', on=('fake',))\n"
        "def test_a(case: Case, target: Target) -> None:\n    case.equal('x', 1, 1)\n"
    )
    expires = datetime.date(2999, 12, 31)
    of_torch = waivers.Waiver("AMP-API-001", ("*",), "why", "us", "https://example.org", expires, shipped=True)
    monkeypatch.setattr(waivers, "shipped", lambda known: (of_torch,))
    monkeypatch.setattr(Run, "autocast_kernels", kernels)

    assert toy.run("--device", "fake:cuda").status == status
    assert _run(toy, "--device", "fake:cuda").status == 1  # a waiver of the user's own is held against its word


def test_kernels_may_do_right_here_what_torch_breaks_elsewhere(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001', on=('cpu', 'fake'))\n"
        "def test_a(case: Case, target: Target) -> None:\n    case.equal('x', 1, 1)\n"
    )
    expires = datetime.date(2999, 12, 31)
    of_torch = waivers.Waiver("AMP-API-001", ("*",), "why", "us", "https://example.org", expires, shipped=True)
    monkeypatch.setattr(waivers, "shipped", lambda known: (of_torch,))

    assert toy.run("--device", "cpu").status == 0  # what a kernel computes depends on the instructions of the CPU
    assert toy.run("--device", "fake:cuda").status == 1  # fake tensors run no kernels
    assert _run(toy, "--device", "cpu").status == 1  # a waiver of the user's own is held against its word


@pytest.mark.parametrize(("cases", "status", "state"), [('["*"]', 0, "used"), ('["AMP-API-001[b]"]', 1, "idle")])
def test_waiver_of_a_failure_that_varies_is_not_stale_where_a_case_passes(
    toy: Toy, cases: str, status: int, state: str
) -> None:
    _suite(toy, second="case.equal('y', 1, 1)")

    outcome = _run(toy, varies='"on some CPUs"', cases=cases)

    assert outcome.status == status  # by AMP-API-001[a], which the second waiver does not name
    assert outcome.report["footer"]["waivers"][0]["state"] == state
    assert "no longer needed" not in outcome.output


_LATER = """
@contract('AMP-API-001')
def test_a(case: Case) -> None:
    case.equal('fp16: first', 1, 2)
    {later}
"""


@pytest.mark.parametrize(
    ("later", "verdict", "reason"),
    [
        ("case.equal('bf16: second', 1, 1)", "WAIVED", "fp16: first"),
        ("case.equal('fp16: second', 1, 2)", "WAIVED", "fp16: first"),
        ("case.equal('bf16: second', 1, 2)", "FAIL", "bf16: second"),
        ("raise RuntimeError('fp16: of another kind')", "FAIL", "raised RuntimeError: fp16"),
        ("case.unsupported('no bf16')", "WAIVED", "fp16: first"),
        ("case.raises('fp16: second', ValueError, lambda: None)", "WAIVED", "fp16: first"),
    ],
)
def test_waiver_of_some_evidence_leaves_the_rest_of_the_case_judged(
    toy: Toy, later: str, verdict: str, reason: str
) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_LATER.format(later=later))

    outcome = _run(toy, evidence='["fp16:*"]')

    (case,) = outcome.report["cases"]
    assert (case["verdict"], case["reason"].split(":")[:2]) == (verdict, reason.split(":"))
    assert outcome.status == (verdict == "FAIL")


def test_waiver_of_what_is_raised_names_it(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    raise RuntimeError('no such layout')\n")

    assert _run(toy, evidence='["raised RuntimeError: no such *"]').status == 0
    assert _run(toy, evidence='["fp16:*"]').status == 1


def test_two_waivers_excuse_a_case_of_which_each_names_a_part(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(_LATER.format(later="case.equal('bf16: second', 1, 2)"))
    first = _write(toy, evidence='["fp16:*"]').read_text()
    second = _write(toy, evidence='["bf16:*"]').read_text()
    (toy.path / "waivers.toml").write_text(first + second)

    assert toy.run("--waivers", "waivers.toml").status == 0


@pytest.mark.parametrize(
    ("keys", "state"),
    [
        ({"expires": "2020-01-01"}, "expired"),
        ({"cases": '["*no-such-case*"]'}, "unmatched"),
    ],
)
def test_rotten_waiver_fails_the_run(toy: Toy, keys: dict[str, str], state: str) -> None:
    _suite(toy)

    outcome = _run(toy, **keys)

    assert outcome.status == 1
    assert outcome.report["footer"]["waivers"][0]["state"] == state
    assert outcome.verdicts()["AMP-API-001[a]"] == "FAIL"


@pytest.mark.parametrize(
    "keys",
    [
        {"torch": '"<2.0"'},
        {"target": '["cuda", "fake:*"]'},
        {"torch": '"<2.0"', "expires": "2020-01-01"},
    ],
    ids=["version", "target", "version-expired"],
)
def test_waiver_outside_its_conditions_excuses_nothing(toy: Toy, keys: dict[str, str]) -> None:
    _suite(toy)

    outcome = _run(toy, **keys)

    assert outcome.status == 1
    assert outcome.report["footer"]["waivers"][0]["state"] == "idle"
    assert outcome.verdicts()["AMP-API-001[a]"] == "FAIL"


@pytest.mark.parametrize(
    ("own", "device_type", "target", "applies"),
    [
        ((), "npu", None, True),
        (("aten::mm",), "npu", None, False),
        ((), "cpu", None, False),
        ((), "npu", "cpu", True),
        ((), "cuda", "cpu", False),
    ],
)
def test_waiver_of_torchs_kernels_holds_on_devices_without_their_own(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, own: tuple[str, ...], device_type: str, target: str | None, applies: bool
) -> None:
    monkeypatch.setattr(targets, "has_kernel", lambda device_type, operator: operator in own)
    named = None if target is None else f'["{target}"]'
    file = _write(toy, kernels='["aten::mm", "aten::bmm"]', target=named)
    (waiver,) = waivers.read(file, ["AMP-API-001"])

    assert waiver.about_kernels_of("2.13.0", device_type) == applies
    assert waiver.in_conditions("2.13.0", "cpu") == (target == "cpu")


def test_shipped_waivers_name_operators_of_torch() -> None:
    """Each names one: a device may have a kernel of its own for another, whose cases are judged by that."""
    shipped = [waiver for waiver in waivers.shipped(catalogue.load().contracts) if waiver.kernels]
    named = {name for waiver in shipped for name in waiver.kernels}
    assert named
    assert [waiver for waiver in shipped if len(waiver.kernels) > 1] == []
    for name in named:  # torch's own kernel is the CPU's, or one for devices without their own
        keys = ("CPU", "CompositeExplicitAutograd")
        assert any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys), name


def test_waiver_names_several_targets(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001', on=('real', 'fake'))\n"
        "def test_a(case: Case, target: Target) -> None:\n    case.equal('type', target.device_type, 'mtia')\n"
    )

    outcome = _run(toy, target='["cpu", "fake:[cx]*"]')

    waived = {id for id, verdict in outcome.verdicts().items() if verdict == "WAIVED"}
    assert waived == {f"AMP-API-001[a:{slot}]" for slot in ("device", "fake-cuda", "fake-xpu")}
    assert outcome.verdicts()["AMP-API-001[a:fake-mps]"] == "FAIL"


@pytest.mark.parametrize("arguments", [("--chapter", "api", "--contract", "AMP-API-002"), ("-k", "test_c")])
def test_waiver_of_what_was_not_run_is_idle(toy: Toy, arguments: tuple[str, ...]) -> None:
    _suite(toy)

    outcome = _run(toy, *arguments)

    assert outcome.status == 0
    assert outcome.report["footer"]["waivers"][0]["state"] == "idle"


def test_waiver_of_deeper_cases_is_idle_at_a_shallow_level(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@pytest.mark.parametrize('op', ['a', deep('full', 'b')])\n"
        "@contract('AMP-API-001')\ndef test_a(case: Case, op: str) -> None:\n    case.equal('op', op, 'a')\n"
    )

    outcome = _run(toy, cases='["*:b*"]')

    assert outcome.status == 0
    assert outcome.report["footer"]["waivers"][0]["state"] == "idle"


def test_case_patterns_match_brackets_as_they_stand(toy: Toy) -> None:
    _suite(toy)

    outcome = _run(toy, cases='["AMP-API-001[a]"]')

    assert outcome.verdicts() == {"AMP-API-001[a]": "WAIVED", "AMP-API-001[b]": "FAIL", "AMP-API-002[c]": "PASS"}


@pytest.mark.parametrize("control", ["control: y", "control, fp16: y", "y (control)"])
def test_failed_control_is_never_waived(toy: Toy, control: str) -> None:
    _suite(toy, second=f"case.equal({control!r}, 1, 2)")

    outcome = _run(toy)

    assert outcome.verdicts()["AMP-API-001[a]"] == "WAIVED"
    assert outcome.verdicts()["AMP-API-001[b]"] == "FAIL"
    assert outcome.status == 1


def test_error_is_never_waived(toy: Toy) -> None:
    _suite(toy, second="undefined_name")

    outcome = _run(toy)

    assert outcome.verdicts()["AMP-API-001[b]"] == "ERROR"
    assert outcome.status == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"colour": '"red"'}, "unknown key 'colour'"),
        ({"reason": None}, "the key 'reason' is missing"),
        ({"reason": '"  "'}, "reason must be a text that is not empty"),
        ({"expires": '"2030-01-01"'}, "expires must be a date"),
        ({"expires": "2030-13-01"}, "not TOML"),
        ({"cases": '"*"'}, "cases must be a list"),
        ({"target": '"cpu"'}, "target must be a list of patterns over targets"),
        ({"target": "[]"}, "target must be a list of patterns over targets"),
        ({"target": '["*", "quda"]'}, "there is no target 'quda'"),
        ({"target": '"warp"'}, "target must be a list of patterns over targets"),
        ({"target": '["warp"]'}, "there is no target 'warp'"),
        ({"torch": '"new"'}, "torch must be version bounds"),
        ({"contract": '"AMP-API-999"'}, "matches nothing: there is no contract 'AMP-API-999'"),
        ({"build": '"metal"'}, "build must be one of cuda, hip"),
        ({"cpu": '"AMX"'}, "cpu must be one of AVX2, AVX512, SVE256"),
        ({"run": "true"}, "run must be false"),
        ({"run": "false", "evidence": '["x"]'}, "a case that is not run has no evidence to name"),
    ],
)
def test_bad_waiver_file_is_refused(toy: Toy, keys: dict[str, str | None], said: str) -> None:
    _suite(toy)

    outcome = _run(toy, **keys)

    assert outcome.status == 4
    assert "waivers.toml" in outcome.output
    assert said in outcome.output
    assert "Traceback" not in outcome.output
    assert not (toy.path / "report").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("[[waiver", "not TOML"),
        ("x = 1", "'x'"),
        ("", "holds at least one [[waiver]] table"),
        ("# nothing yet", "holds at least one [[waiver]] table"),
        ("waiver = []", "holds at least one [[waiver]] table"),
        ("#" * 2**20 + "#", "1048577 bytes, and a file of settings has at most 1048576"),
        ("x = " + "[" * 4000 + "]" * 4000, "not TOML that can be read: nested too deeply"),
    ],
    ids=["missing", "broken", "unknown", "empty", "comment", "no tables", "large", "nested"],
)
def test_file_that_is_no_waiver_file_is_refused(toy: Toy, text: str | None, said: str) -> None:
    _suite(toy)
    if text is not None:
        (toy.path / "bad.toml").write_text(text)

    outcome = toy.run("--waivers", "bad.toml")

    assert outcome.status == 4
    assert said in outcome.output
