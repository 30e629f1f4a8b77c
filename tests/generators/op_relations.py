"""Survey which programs each torch fails AMP-CAST-090 to 096 and AMP-NUMERICS-119 on, and make the fixture's rows.

`python -m tests.generators.op_relations survey OUT.json` runs every relation on this torch, on the CPU and on fake
devices. `python -m tests.generators.op_relations table SURVEY.json ...` reads the surveys of several versions and
prints the rows of `single` for fixtures/op_relations.toml, and with `--waivers` the waivers that name their cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conformance.chapters.numerics.test_database import EVERY, MOST
from conformance.harness.targets import Target, resolve
from conformance.oracles.numbers.formats import FORMATS
from conformance.oracles.relations import groups, values
from conformance.oracles.relations.sweep import sweep, sweep_routes, sweep_vmap

RELATIONS = {
    "AMP-CAST-090": "refused",
    "AMP-CAST-091": "broken",
    "AMP-CAST-092": "forms",
    "AMP-CAST-093": "differs",
    "AMP-CAST-094": "unclosed",
    "AMP-CAST-095": "vmap",
    "AMP-CAST-096": "routes",
    "AMP-NUMERICS-119": "values",
}
TOGETHER = ("AMP-CAST-090", "AMP-CAST-091", "AMP-CAST-092", "AMP-CAST-093", "AMP-CAST-094")
TARGETS = {
    "cpu": ("bf16", "fp16"),
    **dict.fromkeys(("fake:cuda", "fake:xpu", "fake:mps", "fake:mtia", "fake:maia"), ("fp16",)),
}
REASONS = {
    "AMP-CAST-090": "The op is on no list of the device, and its kernel refuses tensors of two dtypes",
    "AMP-CAST-091": "Autocast casts the call, or an op inside it, to a dtype or layout for which there is no kernel",
    "AMP-CAST-092": "The op is written with different listed ops for different shapes or options",
    "AMP-CAST-093": "The call differs from the one with manual casts",
    "AMP-CAST-094": "The op is on no list of the CPU and has no 16-bit kernel there",
    "AMP-CAST-095": "The batching rule of vmap takes the op apart before its autocast rule runs",
    "AMP-CAST-096": "A spelling of the op differs from the function",
    "AMP-NUMERICS-119": "The 16-bit kernel, or the formula of its gradient, rounds or overflows on the way",
}
OLDEST = "2.6"
LINK = "https://docs.pytorch.org/docs/stable/amp.html#torch.autocast"


@dataclass(frozen=True, order=True)
class Failure:
    """One program that a contract does not hold for on a backend."""

    contract: str
    backend: str
    dtype: str
    group: str
    name: str


def survey(targets: list[str], contracts: list[str]) -> dict[str, Any]:
    """Run relations at the depth of a single program, and return the names found, by target, dtype and group."""
    found: dict[str, Any] = {"torch": torch.__version__.split("+")[0], "parts": {}}
    for text in targets:
        target = resolve(text)
        for dtype in TARGETS[text]:
            for group in groups.GROUPS:
                if group == "inference" and target.device_type not in groups.WITH_FAST_PATHS:
                    continue
                part = groups.Part(group, dtype)
                makers = groups.makers(part, target.device_type, "full", 0)
                names: dict[str, list[str]] = {relation: [] for relation in RELATIONS.values()}
                if not set(contracts).isdisjoint(TOGETHER):
                    swept = sweep(target, part.amp_dtype, makers, every=True)
                    names |= {relation: sorted(getattr(swept, relation, ())) for relation in names}
                if group == "samples" and text == "cpu" and "AMP-CAST-095" in contracts:
                    batched = sweep_vmap(target, part.amp_dtype, makers)
                    names["vmap"] = sorted(batched.broken | batched.forms)
                if group == "operators" and "AMP-CAST-096" in contracts:
                    spellings = groups.spellings(makers, target.device_type, part.amp_dtype)
                    names["routes"] = sorted(sweep_routes(target, part.amp_dtype, makers, spellings).differs)
                if group in ("operators", "modules") and text == "cpu" and "AMP-NUMERICS-119" in contracts:
                    names["values"] = _inexact(target, part)
                found["parts"][f"{target.device_type} {dtype} {group}"] = {"programs": sorted(makers), **names}
    return found


def _inexact(target: Target, part: groups.Part) -> list[str]:
    exceptions = groups.exceptions("AMP-NUMERICS-119")
    found = groups.makers(part, target.device_type, "full", 0, samples=EVERY)
    makers = {name: make for name, make in found.items() if name not in exceptions}
    region = partial(target.autocast, part.amp_dtype) if part.group == "modules" else None
    swept = values.sweep(target.device, FORMATS[part.amp_dtype], makers, samples=MOST, seed=0, region=region)
    return sorted(swept.found)


def failures(surveys: list[dict[str, Any]]) -> dict[Failure, tuple[set[str], set[str]]]:
    """Return for each failure the versions that fail and those that have the program and pass."""
    made: dict[Failure, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for one in surveys:
        for part, names in one["parts"].items():
            backend, dtype, group = part.split()
            for contract, relation in RELATIONS.items():
                if contract == "AMP-CAST-092" and group not in ("layouts", "operators"):
                    continue
                exempt = groups.exceptions(contract)
                for name in set(names[relation]) - exempt:
                    made[Failure(contract, backend, dtype, group, name)][0].add(_minor(one["torch"]))
    for one in surveys:
        for failure, (fails, passes) in made.items():
            part = one["parts"].get(f"{failure.backend} {failure.dtype} {failure.group}", {"programs": ()})
            if failure.name in part["programs"] and _minor(one["torch"]) not in fails:
                passes.add(_minor(one["torch"]))
    return dict(made)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def specifiers(fails: set[str], passes: set[str]) -> list[str]:
    """Return version specifiers that hold the failing versions and none of the passing ones.

    A program that the oldest torch of the suite lacks has a first version.
    """
    found: list[list[str]] = []
    oldest = _order(OLDEST)
    before = None
    for version in sorted(fails | passes, key=_order):
        if version in fails:
            if before is None:
                found.append([version if _order(version) > oldest else ""])
            before = version
        elif before is not None:
            found[-1].append(version)
            before = None
    texts = []
    for first, *after in found:
        bounds = [f">={first or OLDEST}"] * (not after or bool(first)) + [f"<{one}" for one in after]
        texts.append(",".join(bounds))
    return texts


def rows(made: dict[Failure, tuple[set[str], set[str]]]) -> str:
    """Return the rows of `single`, with the backends and dtypes of equal names in one."""
    names: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
    for one in made:
        for dtype in (one.dtype,) if one.backend == "cpu" else groups.DTYPES:
            names[one.contract, one.group, one.backend, dtype].add(one.name)
    merged: dict[tuple[str, str, tuple[str, ...]], list[tuple[str, str]]] = defaultdict(list)
    for (contract, group, backend, dtype), programs in names.items():
        merged[contract, group, tuple(sorted(programs))].append((backend, dtype))
    text = []
    for (contract, group, found), places in sorted(merged.items()):
        for dtypes in sorted({tuple(sorted(d for b, d in places if b == backend)) for backend, _ in places}):
            backends = sorted({b for b, _ in places if tuple(sorted(d for x, d in places if x == b)) == dtypes})
            text.append(
                f'[[single]]\ncontract = "{contract}"\ngroup = "{group}"\nbackends = {json.dumps(backends)}\n'
                f"dtypes = {json.dumps(list(dtypes))}\nnames = {_wrapped(list(found))}\n"
            )
    return "\n".join(text)


def waivers(made: dict[Failure, tuple[set[str], set[str]]]) -> str:
    """Return the waivers of the failures: one for each contract, target and range of versions."""
    cases: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for one, (fails, passes) in made.items():
        for specifier in specifiers(fails, passes):
            real = one.backend == "cpu"
            place = f"device-{one.dtype}" if real else f"fake-{one.backend}-*"
            cases[one.contract, "cpu" if real else f"fake:{one.backend}", specifier].add(
                f"*:{place}-{one.group}-{one.name}]"
            )
    return "\n".join(
        f'[[waiver]]\ncontract = "{contract}"\ncases = {_wrapped(sorted(found))}\ntorch = "{specifier}"\n'
        f'target = ["{target}"]\nreason = "{REASONS[contract]}. Seen on torch {specifier} of 2.6 to 2.15."\n'
        f'owner = "amp-conformance maintainers"\nlink = "{LINK}"\nexpires = 2027-12-31\n'
        for (contract, target, specifier), found in sorted(cases.items())
    )


def _wrapped(names: list[str]) -> str:
    lines: list[str] = []
    line = ""
    for name in names:
        word = f"{json.dumps(name)},"
        if len(line) + len(word) > 110:
            lines, line = [*lines, line], ""
        line = f"{line} {word}" if line else word
    return "[\n" + "\n".join(f"    {one}" for one in [*lines, line]) + "\n]"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generators.op_relations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("survey", help="run every relation on this torch")
    one.add_argument("out", type=Path)
    one.add_argument("--target", action="append", choices=list(TARGETS))
    one.add_argument("--contract", action="append", choices=list(RELATIONS))
    table = commands.add_parser("table", help="print the rows of the fixture, or the waivers")
    table.add_argument("surveys", type=Path, nargs="+")
    table.add_argument("--waivers", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "survey":
        warnings.simplefilter("ignore")
        arguments.out.write_text(
            json.dumps(survey(arguments.target or list(TARGETS), arguments.contract or list(RELATIONS)), indent=1)
            + "\n"
        )
        return 0
    made = failures([json.loads(path.read_text()) for path in arguments.surveys])
    print(waivers(made) if arguments.waivers else rows(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
