"""The report as frozen values: what `report.json` holds, one class for each object in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from .verdicts import Overall, Verdict

Scalar = str | int | float | bool | None
# What the JSON schema says beyond the type: pairs of keyword and value.
Count = Annotated[int, ("minimum", 0)]
Seconds = Annotated[float, ("minimum", 0)]
Time = Annotated[str, ("format", "date-time"), ("pattern", r"^\d{4}-\d{2}-\d{2}T")]
Day = Annotated[str, ("format", "date"), ("pattern", r"^\d{4}-\d{2}-\d{2}$")]
Digest = Annotated[str, ("pattern", "^[0-9a-f]{64}$")]
Relation = Literal["==", "identical", "<=", ">=", "in", "raises", "warns", None]
Measured = Any  # a scalar, or nested tuples of scalars; a float that is not finite is "nan", "inf" or "-inf"


@dataclass(frozen=True)
class Suite:
    """Which suite judged: its version, and in a git checkout its commit and whether the tree was clean.

    `digest` is the SHA-256 of the suite's own files (data.digest), `catalogue` that of its catalogue of contracts.
    """

    version: str
    commit: str | None
    clean: bool | None
    digest: Digest | None = None
    catalogue: Digest | None = None


@dataclass(frozen=True)
class Environment:
    """The versions and the hardware that a result depends on."""

    torch: str
    torch_git: str | None
    cuda_build: str | None
    hip_build: str | None
    python: str
    os: str
    machine: str
    cpu: str
    driver: str | None
    packages: Mapping[str, str]


@dataclass(frozen=True)
class Target:
    """What cases ran on, its place in case ids (`slot`), and the capabilities that were probed."""

    slot: str
    name: str
    device_type: str
    fake: bool
    probe: Mapping[str, Measured]


@dataclass(frozen=True)
class Options:
    """What the run was asked for; `selection` is what narrowed it besides the suite's own options.

    `labels` are the user's own words for the machine, such as its host or its rack. `op_policies` has, by device type,
    the backend whose op policy was declared to hold for it; `imports` has the modules that were imported first.
    """

    level: str
    amp_dtype: str
    seed: int
    no_waivers: bool
    require_conclusive: bool
    chapters: tuple[str, ...]
    contracts: tuple[str, ...]
    devices: tuple[str, ...]
    gpu: bool
    waivers: tuple[str, ...]
    workers: int
    selection: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    op_policies: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """A family of contracts."""

    name: str
    title: str
    summary: str


@dataclass(frozen=True)
class Contract:
    """One promise as the catalogue of that run stated it; where all of its cases passed, without the advice."""

    id: str
    chapter: str
    title: str
    statement: str
    level: Literal["must", "should", "info"]
    authority: Literal["documented", "registered", "engineering"]
    source: str
    failure: str = ""
    next_step: str = ""


@dataclass(frozen=True)
class OpPolicy:
    """The autocast rules of one backend, as the run observed them: each policy with the overloads that follow it.

    `key` is None in a torch without a dispatch key for the backend, which has no rules and no amp dtype then.
    `not_in_force` has ops and overloads with a rule in other versions of torch, each with the versions.
    """

    key: str | None
    amp_dtype: str | None
    overloads: Mapping[str, tuple[str, ...]]
    not_in_force: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """What was known when the run began.

    `not_judged` holds the accelerators of the machine that are no target of the run, each with what it calls itself.
    `op_policy` has, by backend, the rules of those that the run has targets of; None where this torch does not tell
    which rules it has, and in a run without the chapter cast. `not_in_force` has contracts that were asked for and are
    about other versions of torch, each with the versions. `autocast_kernels` has, by device type, the files outside of
    torch that registered the autocast kernels in force, each with their number. `replaced_functions` has, by the module
    outside of torch that they come from, the names of torch's functions and classes that an extension put its own in
    place of. `torch_backends` has, by entry of torch.backends, what it tells besides the flags, and nothing for an
    entry that is not loaded.
    """

    suite: Suite
    started: Time
    environment: Environment
    flags: Mapping[str, Scalar]
    variables: Mapping[str, str]
    targets: tuple[Target, ...]
    options: Options
    chapters: tuple[Chapter, ...]
    contracts: tuple[Contract, ...]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    op_policy: Mapping[str, OpPolicy] | None = None
    not_in_force: Mapping[str, str] = field(default_factory=dict)
    autocast_kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    replaced_functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    torch_backends: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """One measured number or fact; `relation` and `bound` are None where nothing was required of it.

    `identical` is said of tensors: every bit is as expected, and the bound says how many elements of which dtype.
    """

    name: str
    measured: Measured
    relation: Relation
    bound: Measured
    unit: str
    holds: bool

    @property
    def judged(self) -> bool:
        """Whether anything was required of it."""
        return self.relation is not None


@dataclass(frozen=True)
class Case:
    """One contract on one target with one set of parameters, and what it came to.

    `node` (what pytest calls it), `detail`, `snippet` and `waiver` are None where it passed.
    """

    id: str
    contract: str
    node: str | None
    target: str
    parameters: Mapping[str, str]
    verdict: Verdict
    reason: str
    detail: str | None
    evidence: tuple[Evidence, ...]
    snippet: str | None
    waiver: str | None
    duration_s: Seconds


@dataclass(frozen=True)
class ContractResult:
    """What a contract came to; a verdict of None means not reached, and the reason says why."""

    verdict: Verdict | None
    cases: Count
    reason: str


@dataclass(frozen=True)
class Waiver:
    """A written excuse and what became of it in the run; `matched` counts the cases that it named."""

    contract: str
    cases: tuple[str, ...]
    reason: str
    owner: str
    link: str
    expires: Day
    state: Literal["used", "expired", "unmatched", "unneeded", "idle"]
    matched: Count


AcceptedState = Literal["used", "unused", "expired", "idle"]


@dataclass(frozen=True)
class AcceptedChange:
    """A line of a file of accepted changes, and what became of it in a comparison.

    It accepts that cases of a contract, or those of an op, went from the verdict `before` to `after`; None is gone.
    `cases` are patterns over case ids; `matched` counts the changes that it names.
    """

    contract: str | None
    op: str | None
    cases: tuple[str, ...]
    before: Verdict
    after: Verdict | None
    reason: str
    owner: str
    link: str
    expires: Day
    state: AcceptedState = "idle"
    matched: Count = 0


@dataclass(frozen=True)
class KnownChange:
    """A contract or case that passed there, does not here, and is excused by a waiver or an accepted change."""

    id: str
    after: Verdict | None
    excuse: str


@dataclass(frozen=True)
class Baseline:
    """How the run compares with an earlier report: what passed there and does not, or is not there, now.

    `known` is excused and counts as neither. `accepted` has the lines of the files of accepted changes.
    """

    path: str
    regressed: tuple[str, ...]
    gone: tuple[str, ...]
    known: tuple[KnownChange, ...] = ()
    accepted: tuple[AcceptedChange, ...] = ()


@dataclass(frozen=True)
class Health:
    """What the driver of a device counted before the run and after it, and the critical errors (Xid) meanwhile."""

    target: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    xids: tuple[int, ...]


SelfCheckState = Literal["caught", "missed", "not planted"]


@dataclass(frozen=True)
class PlantedFault:
    """A fault that the self-check planted on a target, the contracts that have to notice, and the case that did.

    The case failed with the fault and passed without it. `reason` says why none did, or why it was not planted.
    """

    name: str
    summary: str
    target: str
    contracts: tuple[str, ...]
    state: SelfCheckState
    case: str | None
    reason: str


@dataclass(frozen=True)
class SelfCheck:
    """What the self-check before the scored run came to."""

    faults: tuple[PlantedFault, ...]
    duration_s: Seconds


@dataclass(frozen=True)
class Footer:
    """What was known when the run ended; a report without one is of a run that did not end.

    `health` has a row for each device whose driver has counters. `not_applicable` holds, by id, the cases that need
    what the machine cannot have, each with the reason: they were not run. `digest` is that of the whole report
    (consistency.digest), None in those of suites that wrote none. `self_check` is None where none was asked for.
    `unreached` names, by target, the contracts that have no case there though neither an option nor the choice of
    targets leaves them out.
    """

    finished: Time
    duration_s: Seconds
    overall: Overall
    exit_status: int
    interrupted: bool
    contracts: Mapping[str, ContractResult]
    totals: Mapping[Verdict, Count]
    waivers: tuple[Waiver, ...]
    problems: tuple[str, ...]
    baseline: Baseline | None
    health: tuple[Health, ...] = ()
    digest: Digest | None = None
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    self_check: SelfCheck | None = None
    unreached: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """A whole run."""

    schema: str
    header: Header
    cases: tuple[Case, ...]
    footer: Footer | None

    @cached_property
    def contracts(self) -> dict[str, Contract]:
        """The contracts of the run by id, in the order of the catalogue."""
        return {contract.id: contract for contract in self.header.contracts}

    @cached_property
    def cases_of(self) -> dict[str, list[Case]]:
        """The cases of each contract, an empty list where it was not reached."""
        found: dict[str, list[Case]] = {id: [] for id in self.contracts}
        for case in self.cases:
            found[case.contract].append(case)
        return found
