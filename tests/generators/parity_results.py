"""Extract the loss curves and the parity figures from a report.

`python -m tests.generators.parity_results REPORT.json OUT.json`

The report is that of `pytest conformance --chapter parity --level full`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests import reports

ENDS, LEARNED, CURVES = "AMP-PARITY-010", "AMP-PARITY-011", "AMP-PARITY-012"
CONTROLS = ("AMP-PARITY-013", "AMP-PARITY-014", "AMP-PARITY-015")
_CASE = re.compile(r"\[(?P<check>\w+):device-(?:(?P<dtype>fp16|bf16)-)?(?P<what>[\w-]+)\]$")
_CURVE = re.compile(r"log of the training loss by epoch, (fp32|AMP), seed (\d+)$")


def extract(report: dict[str, Any]) -> dict[str, Any]:
    """Per model and amp dtype the compared figures, what was learned, and the curves; the controls with their margins.

    `curves` holds the log of the mean training loss of each epoch, run by run in the order of the seeds.
    """
    models: dict[str, Any] = {}
    controls: dict[str, Any] = {}
    for case in report["cases"]:
        found = _CASE.search(case["id"])
        if found is None or case["contract"] not in (ENDS, LEARNED, CURVES, *CONTROLS):
            continue
        name, dtype = found["what"], found["dtype"] or "fp16"
        if case["contract"] in CONTROLS:
            controls[f"{case['contract']} {name} {dtype}"] = {"verdict": case["verdict"], **_figures(case["evidence"])}
            continue
        entry = models.setdefault(name, {}).setdefault(dtype, {"verdicts": {}})
        entry["verdicts"][case["contract"]] = case["verdict"]
        if case["contract"] == ENDS:
            entry["differences"] = _figures(case["evidence"])
        elif case["contract"] == LEARNED:
            entry["learned"] = {e["name"]: [e["measured"], e["bound"]] for e in case["evidence"] if _bounded(e)}
        else:
            models[name].setdefault("fp32 curves", _curves(case["evidence"], "fp32"))
            entry["curves"] = _curves(case["evidence"], "AMP")
            entry["envelope"] = {e["name"]: e["measured"] for e in case["evidence"] if _bounded(e)}
    return {"run": _run(report.get("header", {})), "models": models, "controls": controls}


def _run(header: dict[str, Any]) -> dict[str, Any]:
    """When, from which commit, on what and with which seed."""
    machine, options = header.get("environment", {}), header.get("options", {})
    return {
        "started": header.get("started"),
        "commit": header.get("suite", {}).get("commit"),
        **{name: machine.get(name) for name in ("torch", "python", "cpu", "os")},
        **{name: options.get(name) for name in ("level", "seed")},
    }


def _bounded(evidence: dict[str, Any]) -> bool:
    return evidence["relation"] in ("<=", ">=")


def _figures(evidence: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure: what was seen, under the words of the evidence after the figure's name."""
    figures: dict[str, Any] = {}
    for found in evidence:
        figure, colon, what = found["name"].partition(": ")
        if not colon:
            continue
        entry = figures.setdefault(figure, {})
        if what.startswith("mean difference"):
            entry.update(
                zip(("mean", "standard deviation", "power", "pairs that would suffice"), found["measured"], strict=True)
            )
        else:
            entry[what] = found["measured"]
        if _bounded(found):
            entry["margin"] = found["bound"]
    return figures


def _curves(evidence: list[dict[str, Any]], arm: str) -> list[list[float]]:
    found = ((_CURVE.match(one["name"]), one["measured"]) for one in evidence)
    return [curve for match, curve in found if match is not None and match[1] == arm]


def main(source: Path, destination: Path) -> None:
    text = json.dumps(extract(reports.written(source)), indent=1, sort_keys=True, ensure_ascii=False)
    # A list of numbers on one line.
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text)
    destination.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
