"""The figures of parity as they come out of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.generators.parity_results import extract, main


def _seen(name: str, measured: Any, relation: str | None = None, bound: float | None = None) -> dict[str, Any]:
    return {"name": name, "measured": measured, "relation": relation, "bound": bound, "unit": "", "holds": True}


def _case(contract: str, case: str, *evidence: dict[str, Any]) -> dict[str, Any]:
    return {"contract": contract, "id": f"{contract}[{case}]", "verdict": "PASS", "evidence": list(evidence)}


REPORT = {
    "header": {
        "started": "2026-11-21T20:00:00+00:00",
        "suite": {"commit": "abc"},
        "environment": {"torch": "2.13.0", "python": "3.11.7", "cpu": "a CPU", "os": "an OS", "driver": None},
        "options": {"level": "full", "seed": 7},
    },
    "cases": [
        _case("AMP-PARITY-002", "hand:device-fp16-P1", _seen("loss", 1.0)),
        _case(
            "AMP-PARITY-010",
            "ends:device-bf16-mlp",
            _seen("log loss: standard deviation over 16 fp32 seeds", 0.05),
            _seen("log loss: AMP minus fp32, pair by pair", [0.01, -0.01]),
            _seen(
                "log loss: mean difference, its standard deviation, power, pairs that would suffice",
                [0.0, 0.01, 1.0, 3],
            ),
            _seen("log loss: farthest end of the interval of AMP minus fp32", 0.02, "<=", 0.04),
        ),
        _case("AMP-PARITY-011", "learn:device-bf16-mlp", _seen("mean test accuracy, AMP", 97.7, ">=", 97.0)),
        _case(
            "AMP-PARITY-012",
            "curves:device-bf16-mlp",
            _seen("log of the training loss by epoch, fp32, seed 0", [0.5, 0.25]),
            _seen("log of the training loss by epoch, AMP, seed 0", [0.5, 0.26]),
            _seen("farthest point of an AMP curve", 0.3, "<=", 1.0),
        ),
        _case("AMP-PARITY-014", "small:device-no-scaler", _seen("log loss: nearest end (control)", 0.3, ">=", 0.02)),
    ],
}


def test_figures_and_curves_are_taken_from_the_evidence() -> None:
    found = extract(REPORT)

    assert found["run"] == {
        "started": "2026-11-21T20:00:00+00:00",
        "commit": "abc",
        "torch": "2.13.0",
        "python": "3.11.7",
        "cpu": "a CPU",
        "os": "an OS",
        "level": "full",
        "seed": 7,
    }
    mlp = found["models"]["mlp"]
    assert list(found["models"]) == ["mlp"]
    assert mlp["fp32 curves"] == [[0.5, 0.25]]
    assert mlp["bf16"]["curves"] == [[0.5, 0.26]]
    assert mlp["bf16"]["learned"] == {"mean test accuracy, AMP": [97.7, 97.0]}
    assert mlp["bf16"]["verdicts"] == {f"AMP-PARITY-{number:03}": "PASS" for number in (10, 11, 12)}
    figure = mlp["bf16"]["differences"]["log loss"]
    assert (figure["mean"], figure["standard deviation"], figure["power"], figure["margin"]) == (0.0, 0.01, 1.0, 0.04)
    assert figure["AMP minus fp32, pair by pair"] == [0.01, -0.01]
    control = found["controls"]["AMP-PARITY-014 no-scaler fp16"]
    assert control["log loss"] == {"nearest end (control)": 0.3, "margin": 0.02}


def test_the_file_has_a_curve_on_a_line(tmp_path: Path) -> None:
    source, destination = tmp_path / "report.json", tmp_path / "parity.json"
    source.write_text(json.dumps(REPORT))

    main(source, destination)

    assert json.loads(destination.read_text()) == extract(REPORT)
    assert "[0.5, 0.26]" in destination.read_text()
