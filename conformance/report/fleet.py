"""Many machines' reports in one: which contracts fail anywhere, and which machine stands out among its like."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from . import document, lines, rollup, text
from .values import Header
from .verdicts import Overall, Verdict

FEWEST = 3
"""The fewest machines of a kind whose evidence is compared."""

_MINORITY = 0.05  # machines of a kind that differ from all the others; at least one
_MOST_VALUES = 32  # different values of a measurement beyond which it is one that varies
_FEWEST_TIMED = 5
_FAR = 3.5  # deviations from the median, as in Iglewicz and Hoaglin (1993)
_SLOWER = 1.05  # over the median: less is of no use to anybody
_MUCH_SLOWER = 1.5  # over the median, of a single measurement
_SPREAD = 0.005  # the least deviation, of the logarithm
_NORMAL = 1.4826  # standard deviations over median absolute deviations, of a normal distribution


@dataclass(frozen=True)
class Machine:
    """What a report says of one machine; `failing` has the contracts that make it not conformant, with a reason."""

    name: str
    file: str
    gpu: str
    driver: str
    torch: str
    level: str
    labels: Mapping[str, str]
    overall: Overall
    cases: int
    waived: int
    failing: Mapping[str, str]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Unusable:
    """A report that could not be used, and why."""

    file: str
    reason: str


@dataclass(frozen=True)
class Suspect:
    """A measured value of one machine that differs where the other machines of its kind agree."""

    machine: str
    case: str
    target: str
    evidence: str
    measured: str
    others: str
    agreeing: int


@dataclass(frozen=True)
class Slow:
    """A machine that is slower than its like: `times` over their median, and the single measurements that stand out."""

    machine: str
    times: float
    deviations: float
    measurements: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """A contract that fails on at least one machine; `groups` counts the machines by GPU and driver."""

    contract: str
    title: str
    machines: tuple[str, ...]
    groups: Mapping[str, int]
    reason: str


@dataclass(frozen=True)
class Fleet:
    """The table of many machines; `compared` counts those that have enough of their like."""

    machines: tuple[Machine, ...]
    unusable: tuple[Unusable, ...]
    failures: tuple[Failure, ...]
    suspects: tuple[Suspect, ...]
    slow: tuple[Slow, ...]
    compared: int

    @property
    def stands_out(self) -> bool:
        """Whether there is a machine that anybody has to look at."""
        conformant = all(machine.overall is Overall.CONFORMANT for machine in self.machines)
        return bool(not conformant or self.unusable or self.suspects or self.slow)

    def groups(self) -> dict[str, dict[str, list[Machine]]]:
        """Return the machines by GPU, by driver, by torch and by each label that several machines share."""
        found: dict[str, dict[str, list[Machine]]] = {}
        keys = sorted({key for machine in self.machines for key in machine.labels})
        for what in ("gpu", "driver", "torch", *(f"label {key}" for key in keys)):
            rows: dict[str, list[Machine]] = defaultdict(list)
            for machine in self.machines:
                label = machine.labels.get(what.removeprefix("label "), "(none)")
                rows[label if what.startswith("label ") else getattr(machine, what)].append(machine)
            if not what.startswith("label ") or len(rows) < len(self.machines) or len(self.machines) == 1:
                found[what] = dict(sorted(rows.items()))
        return found


def files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the reports that `paths` name: a file, the folder of one report, or a folder of these."""
    found: list[Path] = []
    for path in paths:
        file = document.locate(path)
        if os.path.isdir(path) and not os.path.exists(file):
            inside = sorted(os.scandir(path), key=lambda entry: entry.name)
            reports = [document.locate(entry.path) for entry in inside if entry.is_dir()]
            reports += [Path(entry.path) for entry in inside if entry.name.endswith((".json", ".json.gz"))]
            found += [report for report in reports if os.path.isfile(report)] or [file]
        else:
            found.append(file)
    return list(dict.fromkeys(found))


def merge(paths: Sequence[Path], *, processes: int = 1) -> Fleet:
    """Read the reports one after another, each checked as `verify` does, and keep what the table needs.

    With more than one of `processes` the reports are shared among as many.
    """
    if processes == 1 or len(paths) < 2 * processes:
        return _merged(paths, None, 1)
    with ProcessPoolExecutor(processes) as pool:
        return _merged(paths, pool, processes)


@dataclass(frozen=True)
class _Task:
    """Reports of machines of one kind, by number, and the file that their evidence is compared with (None: none)."""

    files: tuple[tuple[int, Path], ...]
    reference: Path | None


@dataclass
class _Votes:
    """What machines of one kind measured where they differ from the reference.

    By case, then by evidence: the number of machines and the first few of them for each value, None where too many
    values differ. `seen` counts the machines that have a case, `reference` holds what the reference measured.
    """

    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: dict[tuple[str, str, str], dict[Any, list[int]] | None] = field(default_factory=dict)
    reference: dict[tuple[str, str, str], Any] = field(default_factory=dict)


@dataclass
class _Result:
    """What a task came to."""

    machines: dict[int, Machine] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    unusable: dict[int, Unusable] = field(default_factory=dict)
    times: dict[int, dict[str, float]] = field(default_factory=dict)
    votes: _Votes = field(default_factory=_Votes)


def _merged(paths: Sequence[Path], pool: Executor | None, processes: int) -> Fleet:
    run = map if pool is None else pool.map
    result = _Result()
    share = math.ceil(len(paths) / processes)
    numbered = list(enumerate(paths))
    kinds: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for found in run(_kinds, [numbered[at : at + share] for at in range(0, len(paths), share)]):
        for number, kind in found:
            if isinstance(kind, Unusable):
                result.unusable[number] = kind
            else:
                kinds[kind].append((number, paths[number]))
    tasks = [(kind, task) for kind, some in sorted(kinds.items()) for task in _tasks(some, processes)]
    suspects: list[Suspect] = []
    slow: list[Slow] = []
    compared = 0
    ended = zip(tasks, run(_work, [task for _, task in tasks]), strict=True)
    for _, of_kind in groupby(ended, key=lambda pair: pair[0][0]):
        group = _Result()
        for _, part in of_kind:
            _add(group, part)
        _leave_copies_out(group, result)
        if len(group.machines) >= FEWEST:
            compared += len(group.machines)
            suspects += _suspects(group)
            slow += _slow(group)
        result.machines.update(group.machines)
        result.titles.update(group.titles)
        result.unusable.update(group.unusable)
    machines = _named(result.machines)
    return Fleet(
        tuple(machines.values()),
        tuple(unusable for _, unusable in sorted(result.unusable.items())),
        tuple(_failures(machines.values(), result.titles)),
        tuple(_renamed(suspects, machines)),
        tuple(_renamed(slow, machines)),
        compared,
    )


def _kinds(numbered: list[tuple[int, Path]]) -> list[tuple[int, str | Unusable]]:
    """Return the kind of machine of each report: what has to be equal for its evidence to be."""
    reader = lines.Reader()
    found: list[tuple[int, str | Unusable]] = []
    for number, file in numbered:
        try:
            found.append((number, _kind(reader.header(file))))
        except document.ReportError as error:
            found.append((number, Unusable(str(file), _without(file, error))))
    return found


def _kind(header: Header) -> str:
    environment, options = header.environment, header.options
    targets = [[target.name, target.probe.get("name")] for target in header.targets]
    software = [environment.torch, environment.torch_git, environment.driver, environment.cpu, header.suite.catalogue]
    asked = [options.level, options.amp_dtype, options.seed, options.no_waivers, options.selection]
    return json.dumps([targets, software, asked, options.chapters, options.contracts, len(header.contracts)])


def _without(file: Path, error: Exception) -> str:
    return text.line(str(error).removeprefix(f"{file}: "))


def _tasks(some: list[tuple[int, Path]], processes: int) -> Iterator[_Task]:
    """Share the machines of one kind among the processes; all compare with the one whose report says most."""
    reference = None
    if len(some) >= FEWEST:
        reference = max(some, key=lambda pair: (os.path.getsize(pair[1]), -pair[0]))[1]
    share = max(math.ceil(len(some) / processes), 8)
    for at in range(0, len(some), share):
        yield _Task(tuple(some[at : at + share]), reference)


@cache
def _reader() -> lines.Reader:
    """Return the reader of this process: machines of different kinds have most lines in common too."""
    return lines.Reader()


def _work(task: _Task) -> _Result:
    """Read the reports of a task."""
    reader, result = _reader(), _Result()
    reference: dict[str, dict[str, lines.Line]] = {}
    if task.reference is not None:
        try:
            reference = reader.read(task.reference).cases
        except document.ReportError:
            reference = {}  # it is among those that are read below
    for number, file in task.files:
        try:
            read = reader.read(file)
        except document.ReportError as error:
            result.unusable[number] = Unusable(str(file), _without(file, error))
            continue
        result.machines[number] = _machine(file, read)
        result.titles.update({id: read.reduced.contracts[id].title for id in result.machines[number].failing})
        if read.footer is not None:
            result.digests[number] = read.footer.digest or ""
            if task.reference is not None:
                result.times[number] = {**dict(lines.times(read)), "the whole run": read.footer.duration_s}
        _vote(result.votes, number, read, reference)
    return result


def _machine(file: Path, read: lines.Read) -> Machine:
    header = read.header
    real = [target for target in header.targets if not target.fake and target.device_type != "cpu"]
    names = dict.fromkeys(text.line(str(target.probe.get("name", target.name))) for target in real)
    waived = sum(case.verdict is Verdict.WAIVED for case in read.reduced.cases)
    failing = rollup.failing(read.reduced)
    return Machine(
        name=text.line(header.options.labels.get("host", "")) or _name(file),
        file=str(file),
        gpu=", ".join(names) or f"none ({text.line(header.environment.cpu)})",
        driver=text.line(header.environment.driver or "none"),
        torch=text.line(header.environment.torch),
        level=text.line(header.options.level),
        labels={text.line(key): text.line(value) for key, value in header.options.labels.items()},
        overall=read.overall,
        cases=read.count,
        waived=waived,
        failing={id: text.cut("", text.sighting(cases[0]), 200) for id, cases in failing.items()},
        problems=tuple(text.cut("", problem, 200) for problem in (read.footer.problems if read.footer else ())),
    )


def _name(file: Path) -> str:
    """Name a machine after its report: the file, or where that is `report.json` the folder."""
    name = file.name.removesuffix(".gz").removesuffix(".json")
    return text.line(file.resolve().parent.name if name == "report" else name)


def _vote(votes: _Votes, number: int, read: lines.Read, reference: Mapping[str, Mapping[str, lines.Line]]) -> None:
    for check, cases in read.cases.items():
        like = reference.get(check, {})
        for place, line in cases.items():
            other = like.get(place)
            if other is line:
                votes.seen[check, place] += 1
            elif other is not None:
                votes.seen[check, place] += 1
                for name, value in line.values.items():
                    if name in other.values and value != other.values[name]:
                        _count(votes, (check, place, name), other.values[name], value, [number])


def _count(votes: _Votes, key: tuple[str, str, str], expected: Any, value: Any, numbers: list[int]) -> None:
    values = votes.found.setdefault(key, {})
    votes.reference[key] = expected
    if values is not None:
        values.setdefault(value, []).extend(numbers)
        if len(values) > _MOST_VALUES:
            votes.found[key] = None


def _add(whole: _Result, part: _Result) -> None:
    for name in ("machines", "titles", "digests", "unusable", "times"):
        getattr(whole, name).update(getattr(part, name))
    whole.votes.seen.update(part.votes.seen)
    for key, values in part.votes.found.items():
        if values is None:
            whole.votes.found[key] = None
        for value, numbers in (values or {}).items():
            _count(whole.votes, key, part.votes.reference[key], value, numbers)


def _leave_copies_out(group: _Result, result: _Result) -> None:
    """A report that is there twice is no second machine; what it measured counts in its kind no more."""
    first: dict[str, int] = {}
    for number in sorted(group.machines):
        digest = group.digests.get(number)
        if digest and first.setdefault(digest, number) != number:
            machine = group.machines.pop(number)
            group.times.pop(number, None)
            same = group.machines[first[digest]].file
            result.unusable[number] = Unusable(machine.file, f"the same report as {same}")


def _suspects(group: _Result) -> Iterator[Suspect]:
    for (check, place, name), values in group.votes.found.items():
        seen = group.votes.seen[check, place]
        if values is None or seen < FEWEST:
            continue
        differing = {number for numbers in values.values() for number in numbers}
        expected = group.votes.reference[check, place, name]
        holders = {expected: [number for number in group.machines if number not in differing], **values}
        counts = {value: len(numbers) for value, numbers in values.items()}
        counts[expected] = seen - len(differing)
        agreed = max(counts, key=lambda value: counts[value])
        if seen - counts[agreed] > max(1, _MINORITY * seen) or counts[agreed] < FEWEST - 1:
            continue
        for value, numbers in holders.items():
            for number in numbers if value != agreed and counts[value] == len(numbers) else ():
                if number in group.machines:
                    yield _suspect(number, check, place, name, value, agreed, counts[agreed])


def _suspect(number: int, check: str, place: str, name: str, value: Any, agreed: Any, agreeing: int) -> Suspect:
    said = json.loads(f"{{{check}}}")
    id, target = json.loads(f"[{place}]")
    case = f"{said['contract']}[{said['check']}{'' if id is None else f':{id}'}]"
    measured, others = (text.cut("", _shown(one), 120) for one in (value, agreed))
    return Suspect(str(number), text.line(case), text.line(target), text.line(name), measured, others, agreeing)


def _shown(value: Any) -> str:
    """Return a value with all of its digits: values that differ in the last bit must not read alike."""
    return repr(value) if isinstance(value, float) else text.value(value)


def _slow(group: _Result) -> Iterator[Slow]:
    """Find machines that are slow in most measurements, or far slower in one, by median and absolute deviation."""
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for number, found in group.times.items():
        for name, value in found.items():
            if value > 0:
                by_name[name][number] = math.log(value)
    relative: dict[int, dict[str, float]] = defaultdict(dict)
    single: dict[int, list[str]] = defaultdict(list)
    for name, values in by_name.items():
        if len(values) < _FEWEST_TIMED:
            continue
        middle, deviation = _robust(values.values())
        for number, value in values.items():
            relative[number][name] = value - middle
            if value - middle > max(_FAR * deviation, math.log(_MUCH_SLOWER)):
                single[number].append(f"{name}: {math.exp(value - middle):.2f} times the median")
    overall = {number: statistics.median(found.values()) for number, found in relative.items()}
    if len(overall) < _FEWEST_TIMED:
        return
    middle, deviation = _robust(overall.values())
    for number, value in overall.items():
        apart = value - middle
        whole = apart > max(_FAR * deviation, math.log(_SLOWER))
        if whole or single[number]:
            yield Slow(str(number), math.exp(apart), apart / deviation, tuple(text.line(one) for one in single[number]))


def _robust(values: Iterable[float]) -> tuple[float, float]:
    """Return the median of `values`, and from their absolute deviations what their standard deviation would be."""
    found = list(values)
    middle = statistics.median(found)
    deviation = _NORMAL * statistics.median(abs(value - middle) for value in found)
    return middle, max(deviation, _SPREAD)


def _named(machines: Mapping[int, Machine]) -> dict[int, Machine]:
    """Return the machines in the order of the reports; those of one name get the name of their file too."""
    counts = Counter(machine.name for machine in machines.values())
    return {
        number: machine
        if counts[machine.name] == 1
        else _with_name(machine, f"{machine.name} ({text.line(machine.file)})")
        for number, machine in sorted(machines.items())
    }


def _with_name(machine: Machine, name: str) -> Machine:
    return Machine(**{**vars(machine), "name": name})


def _renamed(found: Sequence[Any], machines: Mapping[int, Machine]) -> list[Any]:
    """Return suspects and slow machines by name, those with most findings first."""
    counts = Counter(one.machine for one in found)
    ordered = sorted(found, key=lambda one: (-counts[one.machine], int(one.machine)))
    return [type(one)(**{**vars(one), "machine": machines[int(one.machine)].name}) for one in ordered]


def _failures(machines: Iterable[Machine], titles: Mapping[str, str]) -> Iterator[Failure]:
    where: dict[str, list[Machine]] = defaultdict(list)
    for machine in machines:
        for id in machine.failing:
            where[id].append(machine)
    for id, some in sorted(where.items(), key=lambda item: (-len(item[1]), item[0])):
        groups = Counter(f"{machine.gpu}, driver {machine.driver}" for machine in some)
        names = tuple(machine.name for machine in some)
        yield Failure(id, text.line(titles[id]), names, dict(groups.most_common()), some[0].failing[id])
