"""Driving scalers of others: what agrees with GradScaler's documentation, what does not, and what is left out."""

from __future__ import annotations

import functools
import re
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.scaler import CAPABILITIES, GradScalerModel, drive, machine, state_machine
from tests.paths import ROOT
from tests.scaler import own_scaler

torch_scaler = functools.partial(torch.amp.GradScaler, "cpu")
few = functools.partial(drive, histories=6, length=8)


def test_torchs_scaler_agrees() -> None:
    driven = few(torch_scaler)

    driven.check()
    assert driven.mismatch is None
    assert driven.not_driven == ()
    assert driven.steps > 2000
    assert driven.states > 300
    assert len(driven.rules) > 15
    assert "no mismatch with the model" in str(driven)


def test_independent_scaler_agrees() -> None:
    driven = few(own_scaler.PageScaler, without=own_scaler.LACKS)

    driven.check()
    assert [name for name, _ in driven.not_driven] == list(own_scaler.LACKS)
    assert "not driven: sparse: sparse gradients" in str(driven)
    assert not {"update_to", "save", "load", "pickle", "scale_containers"} & dict(driven.rules).keys()


@pytest.mark.parametrize("broken", own_scaler.BROKEN, ids=lambda kind: kind.__name__)
def test_broken_scaler_departs(broken: Callable[..., Any]) -> None:
    driven = few(broken, without=own_scaler.LACKS)

    assert driven.mismatch is not None
    assert len(driven.mismatch.calls) <= 10
    assert driven.mismatch.program[0].startswith("scaler = factory(init_scale=")
    assert driven.mismatch.differences
    with pytest.raises(AssertionError, match="differs from GradScaler's documentation after\nscaler = factory"):
        driven.check()


def test_departure_is_the_shortest_history() -> None:
    driven = few(own_scaler.ClearsSkipped, without=own_scaler.LACKS)

    assert driven.mismatch is not None
    assert [call[0] for call in driven.mismatch.calls] == ["scale", "backward", "step"]
    assert str(driven.mismatch.differences[0]).startswith("gradients of ")


def test_departure_is_a_program_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    driven = few(own_scaler.ClearsSkipped, without=own_scaler.LACKS)

    assert driven.mismatch is not None
    exec(driven.mismatch.script('lambda **settings: torch.amp.GradScaler("cpu", **settings)'), {})
    assert capsys.readouterr().out.startswith("4.0 {'scale': 4.0")


def test_same_seed_same_histories() -> None:
    one, two, other = (few(torch_scaler, without=CAPABILITIES, seed=seed) for seed in (3, 3, 4))

    assert one == two != other


@pytest.mark.parametrize("name", CAPABILITIES)
def test_each_capability_can_be_switched_off(name: str) -> None:
    found = state_machine.search(torch_scaler, torch.device("cpu"), histories=6, length=8, without=frozenset([name]))

    assert found.mismatch is None
    assert found.steps > 100


def test_scaler_without_any_capability_is_driven() -> None:
    driven = few(torch_scaler, without=CAPABILITIES)

    driven.check()
    assert driven.steps > 500
    assert {"iterations", "clean_iterations", "update"} <= dict(driven.rules).keys()


def test_refused_call_may_have_unscaled_gradients_where_that_is_left_out() -> None:
    without = (*own_scaler.LACKS, "intact_gradients")

    few(own_scaler.DividesFirst, without=without).check()
    for broken, lacks in ((own_scaler.DividesFirst, own_scaler.LACKS), (own_scaler.ClearsRefused, without)):
        mismatch = few(broken, without=lacks).mismatch
        assert mismatch is not None
        assert str(mismatch.differences[0]).startswith("gradients of plain")


def test_unknown_capability_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown capability 'pickle'; there are arguments, bf16"):
        drive(torch_scaler, without=["pickle"])


def test_short_histories_are_of_every_kind() -> None:
    long, short = (few(torch_scaler, depth=depth) for depth in ("long", "short"))

    short.check()
    assert long.rules == short.rules
    assert long.steps / 3 < short.steps < long.steps
    assert len(long.not_driven) == len(short.not_driven) == 0


@pytest.mark.parametrize("broken", own_scaler.BROKEN, ids=lambda kind: kind.__name__)
def test_broken_scaler_departs_in_short_histories(broken: Callable[..., Any]) -> None:
    assert few(broken, without=own_scaler.LACKS, depth="short").mismatch is not None


def test_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown depth 'deep'; there are 'short' and 'long'"):
        drive(torch_scaler, depth="deep")  # type: ignore[arg-type]


def test_missing_method_departs_and_names_it() -> None:
    driven = few(own_scaler.PageScaler)

    assert driven.mismatch is not None
    assert "AttributeError" in str(driven.mismatch)


def test_text_of_an_exception_in_the_scaler_is_shown() -> None:
    class Refusing(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            raise RuntimeError("the master weights are elsewhere")

    driven = few(lambda **settings: Refusing("cpu", **settings))

    assert "raises RuntimeError: the master weights are elsewhere" in str(driven.mismatch)


def test_factory_that_raises_is_the_callers() -> None:
    def factory(**settings: Any) -> Any:
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        few(factory)


def test_machine_runs_as_a_test_case() -> None:
    kind = machine(torch_scaler)
    result = unittest.TestResult()

    unittest.defaultTestLoader.loadTestsFromTestCase(_shallow(kind.TestCase)).run(result)

    assert (result.testsRun, result.failures, result.errors) == (1, [], [])


def test_machine_of_a_broken_scaler_fails() -> None:
    kind = machine(own_scaler.ClearsSkipped, without=own_scaler.LACKS)
    result = unittest.TestResult()

    unittest.defaultTestLoader.loadTestsFromTestCase(_shallow(kind.TestCase)).run(result)

    assert len(result.failures) + len(result.errors) == 1
    assert "scaler = factory(" in (result.failures + result.errors)[0][1]


def test_model_is_a_scaler_by_itself() -> None:
    model = GradScalerModel(init_scale=8.0, growth_interval=1)
    assert (model.scale(0.5), model.get_scale()) == (4.0, 8.0)


def _shallow(case: Any) -> Any:
    import hypothesis

    case.settings = hypothesis.settings(
        case.settings, max_examples=20, stateful_step_count=10, derandomize=True, database=None
    )
    return case


PAGE = ROOT / "docs" / "scalers.md"


def test_page_lists_every_capability() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)

    assert dict(rows) == CAPABILITIES


def test_snippets_of_the_page_print_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch}
    for snippet in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(snippet, names)

    out = capsys.readouterr().out
    assert "no mismatch with the model" in out
    assert out.partition("no mismatch with the model\n")[2] in page
