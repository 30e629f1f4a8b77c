"""One run: what was asked for, on which targets, what came of every case, and the verdict over all."""

from __future__ import annotations

import datetime
import gc
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ..measure.health import Watch
from ..report import consistency, diff, document, layout, rollup, terminal
from ..report.values import Case
from ..report.verdicts import Overall, Verdict
from ..workloads import user_workload as own_workloads
from . import catalogue as catalogues
from . import environment, expectations, lost_device, options, state, targets, waivers
from .catalogue import Catalogue, Contract
from .check import DEPTHS
from .contradictions import contradictions
from .measuring import Deadlines
from .options import Options
from .recorder import Recorder, ReportInUse
from .targets import Target
from .waivers import Waiver


class Run:
    """The state of one run; nothing of it outlives the pytest session."""

    def __init__(
        self,
        options: Options,
        catalogue: Catalogue,
        contracts: dict[str, Contract],
        run_targets: tuple[Target, ...],
        excuses: tuple[Waiver, ...],
        baseline: document.Report | None,
        own: own_workloads.Builder | None,
        expected: expectations.Expectations,
        pytest_options: dict[str, Any],
    ) -> None:
        self.options = options
        self.catalogue = catalogue
        self.contracts = contracts
        self.chapters = {contract.chapter for contract in contracts.values()}
        self.reasons: dict[str, str] = {}
        self.not_applicable: dict[str, str] = {}  # cases that this machine cannot have, each with the reason
        self.left_to_the_controller: set[str] = set()  # modules with cases that no worker runs
        self.collected: list[tuple[str, str, str]] = []
        self.depth = DEPTHS.index(options.level)
        self.interrupted = False  # by SIGTERM, also where something swallowed the exception
        self.own = own
        self.expectations = expected
        self.deadlines = Deadlines(options.level)
        self.shallow: set[str] = set()  # contracts of which the level leaves out cases
        self.accelerators = lost_device.watched(run_targets)
        self._targets = run_targets
        self._waivers = excuses
        self._baseline = baseline
        self._pytest_options = pytest_options
        self._records: list[dict[str, Any]] = []
        self._cases: list[Case] = []  # the records as the views have them
        self._problems: list[str] = []
        self._broke = False
        self._smoke_failed = False
        self._lost_a_device = False
        self._recorder: Recorder | None = None
        self._watches: list[Watch] = []
        self._started = time.monotonic()
        self._folder = Path()

    @classmethod
    def prepare(cls, asked: Options, config: pytest.Config) -> Run:
        """Resolve everything the user named; raises pytest.UsageError with one line and touches no file."""
        try:
            catalogue = catalogues.load()
            excuses = () if asked.strict else _excuses(asked, catalogue)
        except (catalogues.CatalogueError, waivers.WaiverError) as error:
            raise pytest.UsageError(str(error)) from None
        if (unlike := state.unlike_a_new_process()) is not None:
            raise pytest.UsageError(
                f"torch was set up before the run, by a plugin, a conftest.py or the like ({unlike}): run without that"
            )
        selected = {
            id: contract
            for id, contract in options.select(catalogue, asked).items()
            if contract.holds_for(torch.__version__)
        }
        run_targets = _targets(asked)
        if (clash := contradictions(run_targets)) is not None:
            raise pytest.UsageError(f"the settings of this process contradict each other: {clash}")
        return cls(
            asked,
            catalogue,
            selected,
            run_targets,
            excuses,
            _baseline(asked),
            _own(asked, run_targets, config),
            _expectations(asked, run_targets),
            {
                "selection": _selection(config, asked),
                "workers": _workers(config),
                "here": config.invocation_params.dir,
            },
        )

    # Targets and dtypes, as the checks are parametrised over them.

    def targets_for(self, kinds: tuple[str, ...]) -> list[Target]:
        """Return the run's targets that a check for `kinds` runs on."""
        return [target for target in self._targets if any(_fits(target, kind) for kind in kinds)]

    def dtypes_for(self, names: tuple[str, ...]) -> list[str]:
        """Return the amp dtypes among `names` that the run is to judge."""
        return [name for name in names if name in self.options.amp_dtypes]

    def amp_dtype(self, name: str) -> torch.dtype:
        return targets.AMP_DTYPES[name]

    def slot(self, target: Target) -> str:
        """Name the target's place in a case id: the same for every first real device of any machine."""
        if target.is_fake:
            return f"fake-{target.device_type}"
        place = [other for other in self._targets if not other.is_fake].index(target)
        return "device" if place == 0 else f"device{place + 1}"

    def target_names(self) -> str:
        return ", ".join(target.name for target in self._targets)

    def describe(self, parameters: Mapping[str, Any], own: bool) -> dict[str, Any]:
        """Turn the parameters of a case into short names; the target has a field of its own.

        `own` says whether the case is about the user's workload, which is then named.
        """
        short = {
            name: targets.DTYPE_NAMES.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in parameters.items()
            if name != "target"
        }
        return {**short, "workload": self.options.workload} if own else short

    def machine(self) -> dict[str, Any]:
        """Describe the software and the devices of the run as pytest-benchmark stores them beside its times."""
        return {
            **{name: value for name, value in environment.environment().items() if name != "packages"},
            "targets": [
                {"target": target.name, **target.probe, **targets.clocks(target)}
                for target in self._targets
                if not target.is_fake
            ],
        }

    # The way of the data.

    def heading(self) -> list[str]:
        """Say, in the lines above the run, what is judged and where."""
        dtypes = ", ".join(self.options.amp_dtypes)
        return [
            f"conformance: {len(self.contracts)} contracts, level {self.options.level}, {dtypes}, "
            f"seed {self.options.seed}, torch {torch.__version__}",
            *(f"target: {target.name}, {target.probe['name']}{_lacking(target)}" for target in self._targets),
        ]

    def begin(self) -> None:
        """Open the report and try the devices; where even the basics fail, the run ends here."""
        self._folder = self.options.report or _default_folder(self._pytest_options["here"])
        try:
            self._recorder = Recorder(self._folder, self._header())
        except ReportInUse as error:
            raise pytest.UsageError(f"--report: {self._folder}: {error}") from None
        except OSError as error:
            raise pytest.UsageError(f"--report: {self._folder} cannot be written to: {error.strerror}") from None
        real = [target for target in self._targets if not target.is_fake]
        watches = [Watch.begin(target.name, target.device) for target in real]
        self._watches = [watch for watch in watches if watch is not None]
        for target in real:
            if (broken := targets.smoke(target)) is not None:
                broken = environment.redact(broken)
                self._smoke_failed = True
                self._problems.append(f"smoke stage: {broken}; nothing else was run")
                self.finish(int(pytest.ExitCode.TESTS_FAILED))
                pytest.exit(f"smoke stage: {broken}", returncode=1)

    def add(self, record: dict[str, Any]) -> None:
        """Take a case that has ended."""
        self._records.append(record)
        self._cases.append(document.decoded(Case, record))
        if self._recorder is not None:
            self._recorder.add(record)

    def lost(self) -> str | None:
        """Say which of the run's devices no longer works, or None."""
        return lost_device.lost(self.accelerators)

    def lose(self, problem: str) -> None:
        """Note that a device died, after which nothing can be judged."""
        if not self._lost_a_device:
            self._problems.append(f"{problem}; nothing else was run")
        self._lost_a_device = True

    def broke(self, problem: str) -> None:
        """Note that the suite itself failed."""
        self._problems.append(environment.redact(problem))
        self._broke = True

    def collection(self) -> dict[str, Any]:
        """Return what was collected, for another process."""
        return {
            "reasons": self.reasons,
            "not_applicable": self.not_applicable,
            "left_to_the_controller": sorted(self.left_to_the_controller),
            "collected": [list(row) for row in self.collected],
            "shallow": sorted(self.shallow),
        }

    def merge(self, collection: dict[str, Any]) -> None:
        """Take over what an xdist worker collected; every worker collects the same, before this process does."""
        self.reasons = collection["reasons"]
        self.not_applicable = collection["not_applicable"]
        self.left_to_the_controller = set(collection["left_to_the_controller"])
        self.collected = [(row[0], row[1], row[2]) for row in collection["collected"]]
        self.shallow = set(collection["shallow"])

    def waiver_for(self, contract: str, case: str, target: str) -> Waiver | None:
        """Return the waiver in force that names this case."""
        today = waivers.today()
        for waiver in self._waivers:
            if waiver.names(contract, case) and waiver.in_conditions(torch.__version__, target):
                return None if waiver.expired(today) else waiver
        return None

    def finish(self, pytest_status: int) -> int:
        """Judge the run, write the footer and the summary; returns the exit status."""
        if self._recorder is None:
            return pytest_status
        gc.freeze()  # else each collection of garbage looks through all of torch, which takes as long as the rest
        stopped = pytest_status == pytest.ExitCode.INTERRUPTED and not self._lost_a_device
        interrupted = self.interrupted or stopped
        if pytest_status == pytest.ExitCode.INTERNAL_ERROR:
            self.broke("pytest ended with an internal error; what it printed above says where")
        for watch in self._watches:
            watch.finish()
            self._problems += watch.problems()
        # Workers end their cases in any order, and a plugin may have shuffled them.
        places = {id: place for place, id in enumerate(self.contracts)}
        self._records.sort(key=lambda record: (places[record["contract"]], record["id"]))
        self._cases.sort(key=lambda case: (places[case.contract], case.id))
        records: dict[str, list[dict[str, Any]]] = {id: [] for id in self.contracts}
        for record in self._records:
            records[record["contract"]].append(record)
        states = [self._waiver_state(waiver, records.get(waiver.contract, [])) for waiver in self._waivers]
        self._problems += [problem for state in states if (problem := _rotten(state)) is not None]
        footer: dict[str, Any] = {
            "finished": _now(),
            "duration_s": round(time.monotonic() - self._started, 3),
            "overall": Overall.INCOMPLETE.value,
            "exit_status": 0,
            "interrupted": interrupted,
            "contracts": self._roll_up(records, interrupted),
            "totals": dict(Counter(record["verdict"] for record in self._records)),
            "not_applicable": self.not_applicable,
            "waivers": states,
            "problems": self._problems,
            "baseline": None,
        }
        if self._watches:
            footer["health"] = [
                {"target": one.name, "before": dict(one.before), "after": dict(one.after), "xids": list(one.xids)}
                for one in self._watches
            ]
        whole = {
            "schema": document.SCHEMA,
            "header": self._header_written,
            "cases": self._records,
            "footer": footer,
        }
        report = document.parse({**whole, "cases": self._cases})
        if self._baseline is not None and not interrupted and not self._lost_a_device:
            found = diff.regressions(self._baseline, report)
            footer["baseline"] = {
                "path": Path(self.options.baseline or "").name,
                "regressed": [id for id in found.regressed if self._in_question(id)],
                "gone": [id for id in found.gone if self._in_question(id)],
            }
        footer["overall"] = rollup.overall(document.with_footer(report, footer)).value
        footer["exit_status"] = self._exit_status(footer, pytest_status)
        folded = layout.folded(whole)
        footer["digest"] = consistency.digest(folded)
        self._recorder.finish(folded)
        self._report = document.with_footer(report, footer)
        (self._folder / "summary.txt").write_text(self.summary(short=False, width=100) + "\n", encoding="utf-8")
        return int(footer["exit_status"])

    def summary(self, *, short: bool, width: int) -> str:
        """Return the terminal's account of the run."""
        path = os.path.relpath(self._folder / "report.json", self._pytest_options["here"])
        shown = path if not path.startswith("..") else str(self._folder / "report.json")
        return terminal.render(self._report, short=short, width=width, report_path=shown)

    def _header(self) -> dict[str, Any]:
        asked = self.options
        used = [chapter for chapter in self.catalogue.chapters if chapter.name in self.chapters]
        self._header_written: dict[str, Any] = {
            "suite": environment.suite(),
            "started": _now(),
            "environment": environment.environment(),
            "flags": environment.flags(),
            "variables": environment.variables(),
            "targets": [
                {
                    "slot": self.slot(target),
                    "name": target.name,
                    "device_type": target.device_type,
                    "fake": target.is_fake,
                    "probe": dict(target.probe),
                }
                for target in self._targets
            ],
            "options": {
                "level": asked.level,
                "amp_dtype": asked.amp_dtypes[0] if len(asked.amp_dtypes) == 1 else "both",
                "seed": asked.seed,
                "strict": asked.strict,
                "chapters": list(asked.chapters),
                "contracts": list(asked.contracts),
                "devices": list(asked.devices),
                "gpu": asked.gpu,
                "waivers": [path.name for path in asked.waivers],
                "workers": self._pytest_options["workers"],
                "selection": self._pytest_options["selection"],
            },
            "chapters": [
                {"name": chapter.name, "title": chapter.title, "summary": chapter.summary} for chapter in used
            ],
            "contracts": [
                {
                    "id": contract.id,
                    "chapter": contract.chapter,
                    "title": contract.title,
                    "statement": contract.statement,
                    "level": contract.level,
                    "authority": contract.authority,
                    "source": contract.source,
                    "failure": contract.failure,
                    "next_step": contract.next_step,
                }
                for contract in self.contracts.values()
            ],
        }
        return self._header_written

    def _roll_up(self, records: dict[str, list[dict[str, Any]]], interrupted: bool) -> dict[str, Any]:
        """Return the verdict of every contract, or why it has none."""
        rows = {}
        for id, cases in records.items():
            if cases:
                verdict = Verdict.worst(Verdict(case["verdict"]) for case in cases)
                # Of several reasons that of the first id, so that the order of the cases makes no difference.
                first = min((case for case in cases if case["verdict"] == verdict.value), key=lambda case: case["id"])
                rows[id] = {"verdict": verdict.value, "cases": len(cases), "reason": first["reason"]}
            else:
                rows[id] = {"verdict": None, "cases": 0, "reason": self._why_not_reached(id, interrupted)}
        return rows

    def _in_question(self, id: str) -> bool:
        """Whether a contract or case of the baseline is one that this run was asked for, or that no catalogue knows."""
        contract = id.split("[")[0]
        if id in self.not_applicable or (contract == id and self._wholly_not_applicable(id)):
            return False
        return contract in self.contracts or contract not in self.catalogue.contracts

    def _wholly_not_applicable(self, contract: str) -> bool:
        """Whether every collected case of a contract is one that this machine cannot have."""
        ids = [row[1] for row in self.collected if row[0] == contract]
        return bool(ids) and all(id in self.not_applicable for id in ids)

    def _why_not_reached(self, contract: str, interrupted: bool) -> str:
        if interrupted:
            return "the run was interrupted before"
        if contract in self.reasons:
            return self.reasons[contract]
        if self._lost_a_device:
            return "a device stopped working before"
        if any(row[0] == contract for row in self.collected):
            return "left out by the selection of tests, or the run stopped before"
        return "none of its checks was collected"

    def _waiver_state(self, waiver: Waiver, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Say what became of a waiver in this run, from the `records` of its contract."""
        applies = {target.name: waiver.in_conditions(torch.__version__, target.name) for target in self._targets} | {
            "host": waiver.in_conditions(torch.__version__, "host")
        }
        collected = [row for row in self.collected if row[0] == waiver.contract and applies[row[2]]]
        named = [row for row in collected if waiver.names(row[0], row[1])]
        ran = [
            record["verdict"]
            for record in records
            if waiver.names(record["contract"], record["id"]) and applies[record["target"]]
        ]
        # A case that the selection or the level left out may be the one that is named.
        narrowed = self._pytest_options["selection"] is not None or waiver.contract in self.shallow
        if waiver.expired(waivers.today()):
            state = "expired"
        elif collected and not named and not narrowed:
            state = "unmatched"
        elif Verdict.PASS.value in ran:
            state = "unneeded"
        elif Verdict.WAIVED.value in ran:
            state = "used"
        else:
            state = "idle"
        return {
            "contract": waiver.contract,
            "cases": list(waiver.cases),
            "reason": waiver.reason,
            "owner": waiver.owner,
            "link": waiver.link,
            "expires": waiver.expires.isoformat(),
            "state": state,
            "matched": len(ran),
        }

    def _exit_status(self, footer: dict[str, Any], pytest_status: int) -> int:
        if footer["interrupted"]:
            return int(pytest.ExitCode.INTERRUPTED)
        if pytest_status == pytest.ExitCode.USAGE_ERROR:
            return pytest_status
        judged = [r for r in self._records if self.contracts[r["contract"]].level != "info"]
        executed = any(Verdict(record["verdict"]) in rollup.EXECUTED for record in self._records)
        failed = any(record["verdict"] == Verdict.FAIL.value for record in judged)
        if failed or (footer["overall"] == Overall.NOT_CONFORMANT.value and executed and not self._broken()):
            return int(pytest.ExitCode.TESTS_FAILED)
        if self._broken() or pytest_status == pytest.ExitCode.INTERNAL_ERROR:
            return int(pytest.ExitCode.INTERNAL_ERROR)
        if not executed:
            return int(pytest.ExitCode.TESTS_FAILED if self._smoke_failed else pytest.ExitCode.NO_TESTS_COLLECTED)
        if footer["overall"] == Overall.INCONCLUSIVE.value and self.options.strict:
            return int(pytest.ExitCode.TESTS_FAILED)
        return int(pytest.ExitCode.OK)

    def _broken(self) -> bool:
        return self._broke or any(record["verdict"] == Verdict.ERROR.value for record in self._records)


def _excuses(asked: Options, catalogue: Catalogue) -> tuple[Waiver, ...]:
    known = catalogue.contracts
    named = [waiver for path in asked.waivers for waiver in waivers.read(path, known)]
    return (*named, *waivers.shipped(known))


def _targets(asked: Options) -> tuple[Target, ...]:
    """Resolve --gpu and --device; raises pytest.UsageError where a device is not there."""
    names = asked.devices or targets.DEFAULT_TARGETS
    if asked.gpu:
        device_type = targets.accelerator()
        if device_type is None:
            build = f"torch {torch.__version__}"
            raise pytest.UsageError(
                f"--gpu: {build} finds no accelerator on this machine; check the driver and that this build of torch "
                f"has support for it, or leave --gpu out to run on the cpu and on fake targets"
            )
        names = (f"{device_type}:0",)
    try:
        found = [targets.resolve(name) for name in names]
        for target in found:
            targets.declared(targets.device_module(target.device_type))
    except targets.TargetError as error:
        raise pytest.UsageError(f"--device: {error}") from None
    return tuple(dict.fromkeys(found))


def _lacking(target: Target) -> str:
    return f", which declares that it lacks {', '.join(target.probe['lacks'])}" if target.probe["lacks"] else ""


def _own(asked: Options, run_targets: tuple[Target, ...], config: pytest.Config) -> own_workloads.Builder | None:
    """Load the user's workload and try it in fp32 on every real target; raises pytest.UsageError with one line."""
    if asked.workload is None:
        return None
    real = [target for target in run_targets if not target.is_fake]
    if not real:
        raise pytest.UsageError("--workload: a model is trained, which fake targets cannot; name a real --device")
    try:
        function = own_workloads.load(asked.workload, config.invocation_params.dir)
        builder = own_workloads.Builder(asked.workload, function)
        for target in [] if config.option.collectonly else real:
            with state.kept():
                own_workloads.probe(builder, target.device)
    except own_workloads.OwnError as error:
        raise pytest.UsageError(f"--workload {asked.workload}: {error}") from None
    return builder


def _expectations(asked: Options, run_targets: tuple[Target, ...]) -> expectations.Expectations:
    """Read what speed-ups are held against; raises pytest.UsageError where the user's files judge no target."""
    try:
        found = expectations.load(asked.expectations)
    except expectations.ExpectationsError as error:
        raise pytest.UsageError(f"--expectations: {error}") from None
    devices = [
        (target.device_type, target.probe["name"], target.probe["capability"])
        for target in run_targets
        if not target.is_fake
    ]
    if (mismatch := found.mismatch(devices)) is not None:
        raise pytest.UsageError(f"--expectations: {mismatch}")
    return found


def _fits(target: Target, kind: str) -> bool:
    if target.is_fake:
        return kind in ("fake", target.name)
    return kind in ("real", target.device_type) or (kind == "accelerator" and target.device_type != "cpu")


def _baseline(asked: Options) -> document.Report | None:
    if asked.baseline is None:
        return None
    try:
        return document.read(asked.baseline)
    except document.ReportError as error:
        raise pytest.UsageError(f"--baseline: {error}") from None


def _selection(config: pytest.Config, asked: Options) -> str | None:
    """Return what narrowed the run beside our own options, or None."""
    option = config.option
    parts = [f"-k {option.keyword}"] * bool(option.keyword) + [f"-m {option.markexpr}"] * bool(option.markexpr)
    parts += [argument for argument in config.args if "::" in argument or argument.endswith(".py")]
    parts += [f"--deselect {name}" for name in option.deselect or ()]
    parts += [f"--workload {asked.workload}"] * (asked.workload is not None and not asked.chapters + asked.contracts)
    parts += ["--lf"] * bool(getattr(option, "lf", False)) + ["--sw"] * bool(getattr(option, "stepwise", False))
    return environment.redact(" ".join(parts)) if parts else None


def _workers(config: pytest.Config) -> int:
    return len(getattr(config.option, "tx", None) or ()) if getattr(config.option, "dist", "no") != "no" else 0


def _default_folder(here: Path) -> Path:
    """Name a folder of this run alone; where the current folder is read-only, below the system's temporary one."""
    name = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%dT%H%M%S}-{os.getpid()}"
    for parent in (here, Path(tempfile.gettempdir())):
        folder = parent / "conformance-reports" / name
        try:
            folder.mkdir(parents=True)
        except OSError:
            continue
        return folder
    return here / "conformance-reports" / name


def _rotten(state: dict[str, Any]) -> str | None:
    """Say why a waiver fails the run, or None."""
    name = f"the waiver of {state['contract']} ({', '.join(state['cases'])})"
    return {
        "expired": f"{name} expired on {state['expires']}",
        "unmatched": f"{name} matches no case of the contract",
        "unneeded": f"{name} is no longer needed: a case that it names passes",
    }.get(state["state"])


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
