"""What each op and module gives in a region, by torch version: surveys, and the page of what changed.

`python -m tests.generators.versions survey OUT.json` calls every program of the groups samples, operators and modules
on this torch, in a bfloat16 region of the CPU and a float16 region of fake CUDA: dtypes or class of the error, category
of each warning, and on the CPU the bytes saved for backward.
`python -m tests.generators.versions page SURVEY.json ...` writes docs/evidence/versions.md: every change between two
versions for the same call, with the judgement of docs/evidence/version-changes.toml.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from conformance.data import read_toml
from conformance.harness.targets import Target, resolve
from conformance.oracles.policy.overloads import mode_of, quiet
from conformance.oracles.relations import groups
from conformance.oracles.relations.outcomes import run
from conformance.oracles.relations.programs import Program, is_dense, mixes, placed_on
from tests.paths import ROOT

TARGETS = {"cpu": "bf16", "fake:cuda": "fp16"}
GROUPS = ("samples", "operators", "modules")
KINDS = ("float32", "16-bit", "argument 0 16-bit", "inputs 16-bit")
JUDGEMENTS = ROOT / "docs" / "evidence" / "version-changes.toml"
PAGE = ROOT / "docs" / "evidence" / "versions.md"


def survey() -> dict[str, Any]:
    """Return for each target and call what a region gave."""
    found: dict[str, Any] = {"torch": torch.__version__.split("+")[0]}
    for text, dtype in TARGETS.items():
        target, calls = resolve(text), {}
        for group in GROUPS:
            part = groups.Part(group, dtype)
            exempt = groups.exceptions("AMP-CAST-096")
            for name, make in groups.makers(part, target.device_type, "standard", 0).items():
                if name not in exempt:
                    calls.update(_calls(target, part.amp_dtype, f"{group} {name}", list(make())))
        found[text] = calls
    return found


def _calls(target: Target, amp_dtype: torch.dtype, name: str, made: list[Program]) -> dict[str, str]:
    calls = {}
    for one in made:
        if target.is_fake and not is_dense(one):
            continue
        with mode_of(target), quiet():
            placed = one.changed(partial(placed_on, target))
            for kind, program in mixes(placed, amp_dtype).items():
                if kind in KINDS:
                    calls[f"{name}: {kind}: {program.described()}"] = _seen(target, amp_dtype, program)
    return calls


def _seen(target: Target, amp_dtype: torch.dtype, program: Program) -> str:
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with warnings.catch_warnings(record=True) as caught, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        warnings.simplefilter("always")
        outcome = run(program, partial(target.autocast, amp_dtype), gradients=not target.is_fake)
    words = [outcome.dtypes]
    words += [f"{sum(saved)} bytes saved"] if saved and not target.is_fake and outcome.error is None else []
    words += sorted({f"warns {one.category.__name__}" for one in caught})
    return "; ".join(words)


def changes(surveys: list[dict[str, Any]]) -> dict[tuple[str, str, str, str, str], list[str]]:
    """Return the changes between neighbouring versions: (target, from, to, what was, what is) and the calls."""
    ordered = sorted(surveys, key=lambda one: tuple(map(int, one["torch"].split("."))))
    found: dict[tuple[str, str, str, str, str], list[str]] = defaultdict(list)
    for target in TARGETS:
        for old, new in itertools.pairwise(ordered):
            for call in old[target].keys() & new[target].keys():
                was, now = old[target][call], new[target][call]
                # On fake tensors an error may be the build's: a library that it lacks.
                if was != now and not (target != "cpu" and ("Error" in was + now or "Exception" in was + now)):
                    found[target, old["torch"], new["torch"], was, now].append(call)
    return dict(found)


def page(surveys: list[dict[str, Any]]) -> str:
    """Return the page in Markdown."""
    judged: list[dict[str, Any]] = read_toml(JUDGEMENTS)["change"]
    counts = [[one["torch"], *(len(one[target]) for target in TARGETS)] for one in surveys]
    rows = []
    for (target, old, new, was, now), calls in sorted(changes(surveys).items()):
        for name in sorted({call.split(": ")[0] for call in calls}):
            own = [call for call in calls if call.startswith(f"{name}: ")]
            judgement = _judgement(judged, name.split(" ")[1], was, now)
            rows.append([target, f"{old} to {new}", name, len(own), _kinds(own), was, now, judgement])
    head = ["target", "versions", "program", "calls", "arguments", "was", "is", "judgement"]
    return "\n".join(
        [
            "# What each torch version gives in a region",
            "",
            "Written by `python -m tests.generators.versions`. Each row is a change between two versions for the same",
            "call: dtypes of the outputs or the class of the error, bytes saved for backward (CPU), warnings. The",
            "judgements, with sources, are in `version-changes.toml`: a fix, a break, or a choice. Errors on fake",
            "tensors are left out: they may be those of a build that lacks a library.",
            "",
            tabulate(counts, ["torch", *(f"calls on {target}" for target in TARGETS)], tablefmt="github"),
            "",
            tabulate(rows, head, tablefmt="github"),
            "",
        ]
    )


def _judgement(judged: list[dict[str, Any]], name: str, was: str, now: str) -> str:
    if {was, now} <= {"RuntimeError", "NotImplementedError"}:
        return "choice: a missing kernel raises NotImplementedError, a RuntimeError, since 2.8"
    row = next((one for one in judged if name in one["names"]), None)
    return f"{row['judgement']}: {row['reason']}" if row else "not judged"


def _kinds(calls: list[str]) -> str:
    return ", ".join(sorted({call.split(": ")[1] for call in calls}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generators.versions", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("survey", help="call every program on this torch").add_argument("out", type=Path)
    commands.add_parser("page", help="write the page").add_argument("surveys", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "survey":
        arguments.out.write_text(json.dumps(survey(), indent=1) + "\n", encoding="utf-8")
    else:
        PAGE.write_text(page([json.loads(path.read_text()) for path in arguments.surveys]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
