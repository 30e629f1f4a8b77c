"""The page of the kill matrix, written from its data: docs/evidence/kill-matrix.md."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from tabulate import tabulate

from conformance import data
from conformance.harness import catalogue
from conformance.harness.catalogue import Contract
from conformance.report import baselines
from conformance.report.verdicts import Verdict
from tests.faults import Fault
from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.faults.campaigns.kill_matrix import Row

_SHOWN = 4
_STOCK = "torch-2.13.0"
_WITHOUT = ROOT / "docs" / "evidence" / "kill-matrix-without.toml"
_Names = Mapping[str, Sequence[str]]
_PAGE = """# Contracts by faults

Written by `python -m tests.faults.campaigns.kill_matrix --resume docs/evidence/kill-matrix.csv --minutes 30 --page
docs/evidence/kill-matrix.md` on {date} with torch {torch}. The data, a line for each fault:
[kill-matrix.csv](kill-matrix.csv).

Under each fault contracts run at `quick`, in a forked child of one process: all of the fault's own chapters (scope
`chapter`), or those that the fault names and those of its chapters that no fault names (`named`, which takes a second
or two instead of ten). A contract **kills** a fault if it fails with the fault and not without it. A row that is
`fresh` was run again by itself, with the checks imported after torch was broken and at the fault's own level, because
no contract that the fault names failed at first. Cases that are timed or need most of the memory run in such rows only.
So do faults of the emulated card, of a backend of a third party and of a user's model, on those alone.

**Measured: {measured} of {faults} faults ({share})**, {whole} of them with all contracts of their chapters. What is
said below of contracts that kill alone or beside others holds for these {whole} faults: a fault of another chapter that
a contract may kill is not tried on it.

{by_chapter}

{missed}

## `must` contracts that alone kill a fault

{alone}

## `must` contracts that kill nothing which another contract does not kill

Each is to be questioned: a fault that it alone notices has to be found, or it belongs to the contract that stands
beside it. "Killed with" is the contract that kills most of the same faults.

{shared}

## `must` contracts that kill none of the measured faults

Faults of both scopes. "Own faults" counts those of `tests/faults` that name the contract. "On stock torch" is what the
contract comes to at `quick` without a GPU ({baseline}). Every `must` contract is the one that kills some fault that
names it, on an emulated card, a backend of a third party or a user's model where it needs one, but for those of
[kill-matrix-without.toml](kill-matrix-without.toml), whose reasons stand below.

{nothing}

{without}
{pytorch}"""
_PYTORCH = """
## The same faults against PyTorch's own AMP tests

Written from [kill-matrix-pytorch.csv](kill-matrix-pytorch.csv), measured by `python -m
tests.faults.campaigns.pytorch_tests` over `test_autocast.py` and the GradScaler tests of `test_torch.py` (those of 2026
in intel/torch-xpu-ops, a copy for another device, instantiated for the CPU; none of them is part of this repository).
{tests} tests are collected that do not fail on an unbroken torch; those that need a card skip themselves.

This is no neutral comparison. The faults are those of this suite, each written because a contract speaks of it, and
PyTorch's tests of CUDA, which are more, do not run here. The times are medians on a machine that was busy.

{table}

PyTorch kills what this suite does not: {only_theirs}.
"""


def page(rows: Sequence[Row], faults: Mapping[str, Fault], theirs: Sequence[Mapping[str, str]] = ()) -> str:
    """Return the page."""
    musts = {id: one for id, one in catalogue.load().contracts.items() if one.level == "must"}
    whole = [row for row in rows if row.scope == "chapter"]
    kills = {row.fault: row.killers.split() for row in whole}
    killed = _killed(musts, whole)
    alone = {id: [fault for fault in names if len(kills[fault]) == 1] for id, names in killed.items()}
    killing = {id for row in rows for id in row.killers.split()}
    return _PAGE.format(
        date=datetime.date.today(),
        torch=torch.__version__,
        measured=len(rows),
        whole=len(whole),
        faults=len(faults),
        share=f"{len(rows) / max(1, len(faults)):.0%}",
        by_chapter=_by_chapter(rows, faults),
        missed=_missed(rows, faults),
        alone=_table(musts, {id: names for id, names in alone.items() if names}, ("alone kills", "kills"), killed),
        shared=_shared(musts, {id: names for id, names in killed.items() if names and not alone[id]}, kills),
        baseline=_STOCK,
        without=_without(musts),
        nothing=_nothing(musts, [id for id in musts if id not in killing], rows, faults),
        pytorch=_pytorch(rows, theirs) if theirs else "",
    )


def _killed(musts: Mapping[str, Contract], rows: Iterable[Row]) -> dict[str, list[str]]:
    """Return the faults that each contract kills."""
    killed: dict[str, list[str]] = {id: [] for id in musts}
    for row in rows:
        for id in row.killers.split():
            killed.get(id, []).append(row.fault)
    return killed


def _by_chapter(rows: Sequence[Row], faults: Mapping[str, Fault]) -> str:
    """Count faults by the first chapter that they name."""
    table = []
    for chapter in dict.fromkeys(contract.chapter for contract in catalogue.load().contracts.values()):
        of_it = [fault for fault in faults.values() if fault.chapters[0] == chapter]
        found = [row for row in rows if row.chapters.split()[0] == chapter]
        whole = [len(row.killers.split()) for row in found if row.scope == "chapter"]
        killed = [number for number in whole if number]
        median = statistics.median(killed) if killed else "-"
        dead = sum(bool(row.killers) for row in found)
        table.append([chapter, len(of_it), len(found), dead, len(whole), whole.count(1), median])
    headers = ["chapter", "faults", "measured", "killed", "whole chapter", "by one contract alone", "killers, median"]
    return tabulate(table, headers=headers, tablefmt="github")


def _missed(rows: Sequence[Row], faults: Mapping[str, Fault]) -> str:
    missed = [row for row in rows if not row.killers]
    if not missed:
        return "Every measured fault is killed."
    names = [
        f"- `{row.fault}` ({', '.join(faults[row.fault].contracts)}): {row.note or 'no failure'}" for row in missed
    ]
    return "\n".join([f"Not killed here, {len(missed)} of {len(rows)}:", "", *names])


def _table(musts: Mapping[str, Contract], found: _Names, headers: tuple[str, str], killed: _Names) -> str:
    table = [[id, musts[id].title, _some(names), len(killed[id])] for id, names in found.items()]
    return f"{len(table)} contracts.\n\n" + tabulate(table, headers=["contract", "title", *headers], tablefmt="github")


def _shared(musts: Mapping[str, Contract], found: _Names, kills: _Names) -> str:
    table = []
    for id, names in found.items():
        beside = [other for name in names for other in kills[name] if other != id]
        most = max(sorted(set(beside)), key=beside.count)
        table.append([id, musts[id].title, len(names), f"{most} ({beside.count(most)})", _some(names)])
    return f"{len(table)} contracts.\n\n" + tabulate(
        table, headers=["contract", "title", "kills", "killed with", "faults"], tablefmt="github"
    )


def _nothing(
    musts: Mapping[str, Contract], ids: Iterable[str], rows: Sequence[Row], faults: Mapping[str, Fault]
) -> str:
    measured = {row.fault for row in rows}
    stock = _on_stock()
    table = []
    for id in ids:
        own = [name for name, fault in faults.items() if any(fnmatchcase(id, named) for named in fault.contracts)]
        table.append([id, musts[id].title, len(own), len(measured & set(own)), stock.get(id, "not reached")])
    if not table:
        return f"None: each of the {len(musts)} `must` contracts kills one of them."
    table.sort(key=lambda row: str(row[-1]))
    return f"{len(table)} of {len(musts)} contracts.\n\n" + tabulate(
        table, headers=["contract", "title", "own faults", "measured", "on stock torch"], tablefmt="github"
    )


def without_a_fault() -> dict[str, str]:
    """Return why no fault names a contract, of those that none names."""
    rows = data.read_toml(_WITHOUT)["contract"]
    return {row["id"]: row["reason"] for row in rows}


def _without(musts: Mapping[str, Contract]) -> str:
    table = [[id, musts[id].title, reason] for id, reason in without_a_fault().items()]
    return tabulate(table, headers=["contract", "title", "why no fault names it"], tablefmt="github")


def _on_stock() -> dict[str, str]:
    """Return what contracts come to in the stored run of stock torch: `judged` where a case passes, else a verdict."""
    found: dict[str, str] = {}
    for case in baselines.read(_STOCK, _STOCK.removeprefix("torch-"))[0].cases:
        if found.get(case.contract) != "judged":
            found[case.contract] = "judged" if case.verdict is Verdict.PASS else case.verdict.value.lower()
    return found


def _pytorch(rows: Sequence[Row], theirs: Sequence[Mapping[str, str]]) -> str:
    ours = {row.fault: row for row in rows}
    common = [row for row in theirs if row["fault"] in ours]
    table = []
    for chapter in [*dict.fromkeys(ours[row["fault"]].chapters.split()[0] for row in common), "all"]:
        of_it = [row for row in common if chapter in (ours[row["fault"]].chapters.split()[0], "all")]
        our_seconds = [ours[row["fault"]].seconds for row in of_it]
        table.append(
            [
                chapter,
                len(of_it),
                sum(bool(ours[row["fault"]].killers) for row in of_it),
                sum(bool(row["failed"]) for row in of_it),
                f"{statistics.median(our_seconds):.1f}",
                f"{statistics.median(float(row['seconds']) for row in of_it):.1f}",
            ]
        )
    headers = ["chapter", "faults", "killed by this suite", "by PyTorch's tests", "seconds here", "seconds there"]
    only = [f"`{row['fault']}`" for row in common if row["failed"] and not ours[row["fault"]].killers]
    return _PYTORCH.format(
        tests=max(int(row["tests"]) for row in common),
        table=tabulate(table, headers=headers, tablefmt="github", disable_numparse=True),
        only_theirs=", ".join(only) or "nothing",
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
