"""The failures of a run by their likely common cause: what failed cases share that passing cases do not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from . import rollup, text
from .values import Case, Evidence, Report
from .verdicts import Verdict

Facet = tuple[str, str]
"""What a case is about: a role (`op`, `optimizer`, `target`...) and its value."""

# The names under which checks take an op; its values are ops wherever else they stand.
_OP_PARAMETERS = frozenset({"op", "overload", "loss", "chain", "composite"})
_OPTIMIZER = re.compile(
    r"\b(ASGD|Adadelta|Adafactor|Adagrad|Adam|AdamW|Adamax|LBFGS|Muon|NAdam|RAdam|RMSprop|Rprop|SGD|SparseAdam)\b"
)
_IMPLEMENTATION = re.compile(r"\b(foreach|for-loop|fused|capturable)\b")
_FRAME = re.compile(r'File "[^"]*?\b(torch/[\w/]+\.py)", line \d+, in (\S+)')
_STATE = re.compile(r"the case leaves state behind: ([^;]*?) was ")
_STATE_OF_REGION = re.compile(r"\bautocast (?:state that differs|dtype for|flag for|enabled for|nesting|cache flag)")
_DTYPE = re.compile(r"(?:torch\.)?(?:float|bfloat|int|uint|complex|bool)\d*")
# In the order of a title; what stands early is also preferred where two facets explain as much.
_ROLES = ("op", "optimizer", "implementation", "state", "raised", "target", "dtype")
_PREFERENCE = {role: 1.0 - 0.02 * place for place, role in enumerate(_ROLES)}
_QUALIFIERS = frozenset({"target", "dtype"})
# A facet explains its failures if most cases that have it fail; or, as a broken step shows only where something skips,
# if it has most of the failures and fails so many times as often as the whole run.
_MOST = 0.5
_OFTEN = 4.0
_MANY = 0.3
_SHOWN = 6
_FEW = 2
_NEARLY_ALL = 0.7
# What is not named by a facet is named by a part of AMP: the first whose words a contract's source and title hold.
_COMPONENTS = (
    ("GradScaler", re.compile(r"GradScaler|\b_amp_(?:update|foreach)"), "scale"),
    ("autocast weight cache", re.compile(r"cached_cast|clear_cache|\bcache[ds]?\b"), "cache"),
    ("autocast region", re.compile(r"autocast_mode\.py|torch\.autocast docstring|autocast regions?\b"), "region"),
)
_WORD = re.compile(r"[a-z_]{5,}")
# Words of so many promises that they tell nothing of one.
_PLAIN = re.compile(
    "after|before|contract|every|other|their|there|these|through|under|where|which|while|whose|with|without|values?|"
    "order|takes|keeps|gives|holds|results?|documented|torch|cases|exactly|equals|several|given|wrong|"
    "differs?|differences?|model|first|leaves?|allow|works|scaler|autocast|regions?|gradscaler|whatever|between|"
    "iterations?|shortest|found"
)
_FACETS_AT_MOST = 3
_SYMPTOM_LENGTH = 70


@dataclass(frozen=True)
class Cause:
    """Failed cases that share what passing cases do not; `title` says what, in one line."""

    title: str
    contracts: tuple[str, ...]
    cases: tuple[str, ...]


def groups(report: Report) -> list[Cause]:
    """Return the failures that make the run not conformant, grouped by likely cause, the largest group first.

    Each failed case is in one group. A group without anything in common beyond its contract is that contract. Errors of
    the suite are in none.
    """
    failing = (case for cases in rollup.failing(report).values() for case in cases)
    return explained(report, {case.id for case in failing if case.verdict is not Verdict.ERROR})


def brief(causes: list[Cause], width: int, margin: str = "  ") -> list[str]:
    """Return a line for each cause, the first ones alone where there are many."""
    rows = [
        text.wrap(
            f"{cause.title}: {text.count(len(cause.contracts), 'contract')}, {text.count(len(cause.cases), 'case')}",
            width,
            margin,
            margin * 3,
        )
        for cause in causes[:_SHOWN]
    ]
    if len(causes) > _SHOWN:
        rest = sum(len(cause.cases) for cause in causes[_SHOWN:])
        rows.append(f"{margin}... and {text.count(len(causes) - _SHOWN, 'more cause')} of {text.count(rest, 'case')}")
    return rows


def explained(report: Report, ids: Collection[str]) -> list[Cause]:
    """Return the cases of `report` with these ids grouped by likely cause, the largest group first."""
    failed = [case for case in report.cases if case.id in ids]
    passed = [case for case in report.cases if case.verdict in (Verdict.PASS, Verdict.WAIVED) and case.id not in ids]
    if not failed:
        return []
    ops = _ops(report)
    facets = {case.id: _facets(case, ops) for case in (*failed, *passed)}
    # Others cannot be shared by failed cases.
    relevant = {facet for case in failed for facet in facets[case.id]}
    passing = [facets[case.id] & relevant for case in passed]
    rate = len(failed) / (len(failed) + len(passed))
    found = []
    while failed:
        shared = _shared([facets[case.id] for case in failed], passing, rate)
        if not shared:
            break
        members = [case for case in failed if shared <= facets[case.id]]
        found.append(_cause(shared, members, facets))
        failed = [case for case in failed if not shared <= facets[case.id]]
    found += _by_component(report, failed, {case.contract for case in passed})
    return sorted(found, key=lambda cause: (-len(cause.contracts), -len(cause.cases)))


def _ops(report: Report) -> frozenset[str]:
    return frozenset(
        value for case in report.cases for name, value in case.parameters.items() if name in _OP_PARAMETERS
    )


def _facets(case: Case, ops: frozenset[str]) -> frozenset[Facet]:
    found: set[Facet] = {("target", case.target)}
    for name, value in case.parameters.items():
        if name == "amp_dtype":
            found.add(("dtype", value))
        elif name in _OP_PARAMETERS or value in ops:
            found.add(("op", value))
        found |= _optimizer(value)
    if case.parameters.get("fused") == "True":
        found.add(("implementation", "fused"))
    if case.verdict is Verdict.FAIL:
        wrong = [item for item in case.evidence if not item.holds]
        seen = " ".join([case.reason, *(f"{item.name} {item.measured}" for item in wrong)])
        found |= _optimizer(seen)
        if _STATE_OF_REGION.search(seen):
            found.add(("state", "autocast state after a region"))
        elif match := _STATE.search(seen):
            found.add(("state", match[1]))
        if raised := _raised(case):
            found.add(("raised", raised))
    return frozenset(found)


def _optimizer(words: str) -> set[Facet]:
    """Return the optimizers that a text names, and how they are implemented."""
    named = {("optimizer", name) for name in _OPTIMIZER.findall(words)}
    return named | {("implementation", name) for name in _IMPLEMENTATION.findall(words)} if named else named


def _raised(case: Case) -> str | None:
    """Return which error which function of torch raised, where the case ended by one."""
    frames = _FRAME.findall(case.detail or "")
    match = re.match(r"raised (\w+)", case.reason)
    return f"{match[1]} in {frames[-1][0]}, {frames[-1][1]}" if match and frames else None


def _shared(failing: list[frozenset[Facet]], passing: list[frozenset[Facet]], rate: float) -> frozenset[Facet]:
    """Return the facets that together explain most failures, empty where none does."""
    best: frozenset[Facet] = frozenset()
    score = 0.0
    while len(best) < _FACETS_AT_MOST:
        wrong = Counter(facet for facets in failing if best <= facets for facet in facets - best)
        right = Counter(facet for facets in passing if best <= facets for facet in facets - best)
        options = [
            (_worth(number, right[facet], rate, {facet, *best}), facet) for facet, number in sorted(wrong.items())
        ]
        worth, facet = max(options, default=(0.0, ("", "")))
        if worth <= score * 1.02:
            break
        best, score = best | {facet}, worth
    if all(role in _QUALIFIERS for role, _ in best):
        return frozenset()  # everything runs somewhere, in some dtype
    failed = sum(best <= facets for facets in failing)
    share = failed / (failed + sum(best <= facets for facets in passing))
    convincing = share >= _MOST or (share >= rate * _OFTEN and failed >= _MOST * len(failing))
    return best if convincing else frozenset()


def _worth(failed: int, passed: int, rate: float, facets: Collection[Facet]) -> float:
    """How much facets explain: the failures that have them, weighed by how much oftener such cases fail than all."""
    share = failed / (failed + passed)
    return failed * math.log(share / rate) * max(_PREFERENCE[role] for role, _ in facets)


def _cause(shared: frozenset[Facet], members: list[Case], facets: dict[str, frozenset[Facet]]) -> Cause:
    contracts = tuple(dict.fromkeys(case.contract for case in members))
    # What all members have in common names them better than what was enough to separate them.
    common = frozenset.intersection(*(facets[case.id] for case in members))
    named = shared | {facet for facet in common if facet[0] not in _QUALIFIERS}
    ending = "" if any(role == "raised" for role, _ in named) else _ending(members)
    return Cause(f"{_subject(named)}{ending}", contracts, tuple(case.id for case in members))


def _subject(shared: Iterable[Facet]) -> str:
    """Return what the cases share in words: `softmax on fake:cuda`."""
    by_role: dict[str, list[str]] = {}
    for role, value in sorted(shared):
        by_role.setdefault(role, []).append(value)
    words = [value for role in _ROLES[:4] for value in by_role.get(role, ())]
    words += [f"on {value}" for value in by_role.get("target", ())] if words else []
    words += [f"in {value}" for value in by_role.get("dtype", ())] if words else []
    return text.line(": ".join([" ".join(words)] * bool(words) + by_role.get("raised", [])))


def _by_component(report: Report, failed: list[Case], passed: Collection[str]) -> list[Cause]:
    """Group failures whose parameters share nothing by the part of AMP that their contracts are about."""
    found: dict[str, list[Case]] = {}
    for case in failed:
        found.setdefault(_component(report, case.contract), []).append(case)
    return [_part(report, name, cases, passed) for name, cases in found.items()]


def _component(report: Report, id: str) -> str:
    contract = report.contracts[id]
    words = f"{contract.source} {contract.title}"
    titles = {chapter.name: chapter.title for chapter in report.header.chapters}
    return next(
        (name for name, pattern, chapter in _COMPONENTS if contract.chapter == chapter or pattern.search(words)),
        titles.get(contract.chapter, contract.chapter),
    )


def _part(report: Report, name: str, cases: list[Case], passed: Collection[str]) -> Cause:
    contracts = tuple(dict.fromkeys(case.contract for case in cases))
    ids = tuple(case.id for case in cases)
    if len(contracts) == 1:
        return Cause(f"{text.line(report.contracts[contracts[0]].title)}{_ending(cases)}", contracts, ids)
    others = [id for id in passed if id not in contracts and _component(report, id) == name]
    wrong = Counter(word for id in contracts for word in _words(report, id, [c for c in cases if c.contract == id]))
    right = Counter(word for id in others for word in _words(report, id, []))
    telling = [
        (number * math.log(number / (number + right[word]) * (len(contracts) + len(others)) / len(contracts)), word)
        for word, number in sorted(wrong.items())
        if number >= 2 and number >= _NEARLY_ALL * len(contracts)
    ]
    named = len(contracts) > _FEW and any(name == component for component, *_ in _COMPONENTS)
    words = [f" ({word})" for worth, word in sorted(telling, reverse=True)[:1] if named and worth > 1]
    return Cause(f"{name}{''.join(words)}{_ending(cases)}", contracts, ids)


def _words(report: Report, id: str, failed: list[Case]) -> set[str]:
    """Return the words by which a contract tells what it is about, and what its failed cases saw."""
    contract = report.contracts[id]
    seen = [item.name for case in failed for item in case.evidence if not item.holds]
    words = " ".join([contract.title, contract.statement, *seen]).lower()
    return {word for word in _WORD.findall(words) if not _PLAIN.fullmatch(word)}


def _ending(cases: list[Case]) -> str:
    """Return what many of the cases saw, without their figures; empty where each saw something else."""
    counted = Counter(map(_saw, cases))
    words = max(counted, key=lambda saw: counted[saw])
    return f": {words}" if counted[words] >= _MANY * len(cases) else ""


def _saw(case: Case) -> str:
    wrong = next((item for item in case.evidence if not item.holds), None)
    if wrong is not None:
        return _kind(wrong)
    reason = text.line(case.reason) or "no reason is given"
    if match := _STATE.search(reason):
        return f"{match[1]} is changed and not restored"
    return _short(re.sub(r"^(raised \w+): .*", r"\1", reason))


def _kind(evidence: Evidence) -> str:
    seen, bound = str(evidence.measured), str(evidence.bound)
    if _DTYPE.fullmatch(seen) and _DTYPE.fullmatch(bound):
        return f"{seen} in place of {bound}"
    name = _short(text.line(evidence.name.split(" (seen")[0]))
    if evidence.relation in ("<=", ">=", "in"):
        return f"{name} is out of bounds"
    return f"wrong {name}"


def _short(words: str) -> str:
    return text.cut("", words, _SYMPTOM_LENGTH)
