"""Broken instruments of the suite itself: each is noticed, by the self-check, by the run or by a contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from conformance.harness import judge, self_check, waivers
from conformance.harness.check import Case
from conformance.harness.reporting import Reporter
from conformance.oracles.trace import casts, ops
from conformance.report.verdicts import Verdict
from conformance.self_check import planting, registry
from tests.conftest import Toy
from tests.faults import Fault
from tests.faults.breaking import replaced
from tests.faults.campaigns.campaign import run

_CHECKS = """
@contract("AMP-SCALE-001")
def test_scale(case: Case) -> None:
    case.equal("scale", torch.amp.GradScaler("cpu", init_scale=8.0).get_scale(), 8.0)

@contract("AMP-REGION-001")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_number(case: Case, target: Target, number: int) -> None:
    case.equal("scale", torch.amp.GradScaler("cpu", init_scale=8.0).get_scale(), 8.0)
"""


def _scale_is_doubled(device_type: str) -> Iterator[None]:
    """get_scale is twice what it is."""
    seen = torch.amp.GradScaler.get_scale
    with planting.replaced(torch.amp.GradScaler, "get_scale", lambda self: 2 * seen(self)):
        yield


@pytest.fixture
def suite(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy suite of contracts that hold, with a fault to plant that they notice."""
    toy.contract("AMP-SCALE-001")
    toy.contract("AMP-REGION-001")
    toy.checks(_CHECKS)
    fault = registry.Fault("scale_is_doubled", "", ("AMP-REGION-001",), "real", "", _scale_is_doubled)
    monkeypatch.setattr(self_check, "faults", lambda: (fault,))
    return toy


def test_nothing_is_noticed_of_instruments_that_work(suite: Toy) -> None:
    outcome = suite.run("--self-check", "--device", "cpu")

    assert (outcome.status, outcome.report["footer"]["problems"]) == (0, [])
    assert "caught 1 of 1 planted fault" in outcome.output


def _agree(self: Case, what: str, measured: Any, relation: Any, bound: Any, unit: str, holds: bool) -> None:
    _judge(self, what, bound, relation, bound, unit, True)


def _pass(case: Case, error: BaseException | None) -> judge.Judgement:
    return judge.Judgement(Verdict.PASS, "")


_judge = Case._judge
_DEAD: dict[str, tuple[Any, str, Any]] = {
    "a comparison that always holds": (Case, "_judge", _agree),
    "a verdict that is always PASS": (judge, "judge", _pass),
    "a waiver that excuses every case": (waivers.Waiver, "names", lambda self, contract, case: True),
}
_WIDE = """
[[waiver]]
contract = "AMP-SCALE-001"
cases = ["AMP-SCALE-001[scale]"]
reason = "A reason."
owner = "somebody"
link = "https://example.org"
expires = 2099-12-31
"""


@pytest.mark.parametrize("name", _DEAD)
def test_the_self_check_notices_dead_judgement(name: str, suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, value = _DEAD[name]
    monkeypatch.setattr(owner, attribute, value)
    (suite.path / "wide.toml").write_text(_WIDE)

    outcome = suite.run("--self-check", "--device", "cpu", *(["--waivers", "wide.toml"] if "waiver" in name else []))

    assert "caught 0 of 1 planted fault" in outcome.output
    assert "1 of 1 planted fault NOT CAUGHT" in outcome.output
    assert outcome.report["footer"]["overall"] != "CONFORMANT"


def test_a_bound_that_takes_nan_contradicts_its_own_record(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(
        '@contract("AMP-SCALE-001")\ndef test_nan(case: Case) -> None:\n    case.at_most("nan", float("nan"), 1)\n'
    )

    def lenient(self: Case, what: str, measured: float, bound: float, unit: str = "") -> None:
        self._judge(what, measured, "<=", bound, unit, not measured > bound)

    assert toy.run().status == 1
    monkeypatch.setattr(Case, "at_most", lenient)
    outcome = toy.run(report="lenient")

    assert outcome.status == 3
    assert "the records contradict themselves" in outcome.output


def test_a_failure_that_is_recorded_as_pass_contradicts_its_evidence(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks('@contract("AMP-SCALE-001")\ndef test_one(case: Case) -> None:\n    case.equal("one", 1, 2)\n')
    monkeypatch.setattr(judge, "judge", _pass)

    outcome = toy.run()

    assert (outcome.status, outcome.report["footer"]["overall"]) == (3, "NOT CONFORMANT")
    assert "passes although its 'one' does not hold" in outcome.report["footer"]["problems"][0]


def test_evidence_that_is_lost_is_an_error(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "_judge", lambda *_: None)

    outcome = suite.run()

    assert (outcome.status, set(outcome.verdicts().values())) == (3, {"ERROR"})


@pytest.mark.parametrize("swallowed", ["pass", "pytest.skip('no reason')", "raise Untestable('no reason')"])
def test_a_check_cannot_swallow_its_own_failure(swallowed: str, toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(
        "from conformance.harness.endings import Untestable\n"
        '@contract("AMP-SCALE-001")\ndef test_one(case: Case) -> None:\n'
        f'    try:\n        case.equal("one", 1, 2)\n    except Exception:\n        {swallowed}\n'
    )

    outcome = toy.run()

    assert (outcome.status, list(outcome.verdicts().values())) == (1, ["FAIL"])
    assert outcome.report["cases"][0]["reason"] == "one: 1, NOT == 2"


def test_a_waiver_that_is_too_wide_fails_the_run_while_a_case_passes(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(
        '@contract("AMP-SCALE-001")\n@pytest.mark.parametrize("number", [1, 2])\n'
        'def test_one(case: Case, number: int) -> None:\n    case.equal("one", number, 1)\n'
    )
    (toy.path / "wide.toml").write_text(_WIDE.replace("AMP-SCALE-001[scale]", "*"))

    outcome = toy.run("--waivers", "wide.toml")

    assert outcome.status == 1
    assert "no longer needed: a case that it names passes" in outcome.report["footer"]["problems"][0]


def _dropping(last: Callable[[dict[str, Any]], bool]) -> Any:
    add = Reporter.add

    def dropped(self: Reporter, record: dict[str, Any]) -> None:
        if not last(record):
            add(self, record)

    return dropped


def test_a_record_that_is_lost_is_an_error(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reporter, "add", _dropping(lambda record: record["id"].endswith("device-2]")))

    outcome = suite.run("--device", "cpu")

    assert (outcome.status, len(outcome.report["cases"])) == (3, 3)
    assert "1 case left no record: AMP-REGION-001[number:device-2]" in outcome.output


def test_a_record_that_comes_twice_is_an_error(suite: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Reporter.add
    monkeypatch.setattr(Reporter, "add", lambda self, record: (add(self, record), add(self, record)))

    outcome = suite.run("--device", "cpu", "--contract", "AMP-SCALE-001")

    assert outcome.status == 3
    assert "1 case left more than one record: AMP-SCALE-001[scale]" in outcome.output


_WORKERS: dict[str, tuple[str, str]] = {
    "records of a worker": (
        """
import pytest
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if hasattr(item.config, "workerinput") and "number" in item.name:
        vars(report).pop("conformance", None)
    return report
""",
        "3 cases left no record",
    ),
    "what workers collected": (
        """
from conformance.harness import parallel
parallel.Worker.pytest_sessionfinish = lambda self, session: None
""",
        "no worker process said what it collected",
    ),
}


@pytest.mark.parametrize("lost", _WORKERS)
def test_what_workers_lose_is_an_error(lost: str, toy: Toy) -> None:
    pytest.importorskip("xdist")
    toy.contract("AMP-SCALE-001")
    toy.contract("AMP-REGION-001")
    toy.checks(_CHECKS)
    plugin, said = _WORKERS[lost]

    outcome = toy.spawn(plugin, "-n", "2", "--device", "cpu", "test_toy.py")

    assert outcome.status == 3, outcome.output
    assert said in outcome.output


def test_a_plugin_that_ends_the_run_with_status_0_hides_nothing(suite: Toy) -> None:
    (suite.path / "conftest.py").write_text(
        "import pytest\ndef pytest_runtest_setup(item):\n"
        "    if 'device-3' in item.name:\n        pytest.exit('enough', returncode=0)\n"
    )

    outcome = suite.run("--device", "cpu")

    assert outcome.status == 3
    assert "left no record" in outcome.output


def test_a_run_that_stops_at_a_failure_lost_nothing(toy: Toy) -> None:
    toy.contract("AMP-SCALE-001")
    toy.checks(
        '@contract("AMP-SCALE-001")\n@pytest.mark.parametrize("number", [2, 1])\n'
        'def test_one(case: Case, number: int) -> None:\n    case.equal("one", number, 1)\n'
    )

    outcome = toy.run("-x")

    assert (outcome.status, outcome.report["footer"]["problems"]) == (1, [])


def _trace_records_nothing() -> Iterator[None]:
    """The recorder of dispatched ops has seen nothing."""
    with replaced(ops.OpTrace, "casts_of", lambda self, tensor: []):
        yield


def _casts_record_nothing() -> Iterator[None]:
    """The recorder of casts of arguments has seen nothing."""
    with replaced(casts, "arguments", lambda *_, **__: []):
        yield


@pytest.mark.parametrize(
    ("breakage", "contract"),
    [(_trace_records_nothing, "AMP-CACHE-003"), (_casts_record_nothing, "AMP-CAST-038")],
    ids=["ops", "casts"],
)
def test_a_trace_that_records_nothing_fails_on_a_whole_torch(breakage: Any, contract: str) -> None:
    outcome = run(Fault(breakage.__name__, "", (contract,), breakage))

    assert outcome.caught, outcome.output
