"""The options of a run: how they read on the command line and what they come to."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..invocation import COMMAND
from ..oracles.policy.declaration import Declaration
from ..report import surface as surfaces
from ..report.document import ReportError
from . import catalogue as catalogues
from .catalogue import Catalogue, Contract
from .check import DEPTHS
from .requirements import torch_problem

REPORT_FILES = (
    "report.json",
    "report.previous.json",
    "report.whole",
    "progress.json",
    "progress.new",
    "summary.txt",
    "checklist.md",
)
_DTYPES = ("fp16", "bf16")
_GROUP = "AMP conformance"
_LABEL_KEY = re.compile(r"[a-z][a-z0-9_.-]{0,39}")
_LABEL_VALUE = re.compile(r"[!-~]([ -~]{0,78}[!-~])?")


@dataclass(frozen=True)
class Options:
    """What the user asked for, checked as far as it can be without looking at a device."""

    gpu: bool
    devices: tuple[str, ...]
    amp_dtypes: tuple[str, ...]
    level: str
    chapters: tuple[str, ...]
    contracts: tuple[str, ...]
    report: Path | None
    seed: int
    waivers: tuple[Path, ...]
    no_waivers: bool
    require_conclusive: bool
    baseline: Path | None
    accepted_changes: tuple[Path, ...]
    workload: str | None
    time_limit: float | None
    expectations: tuple[Path, ...]
    self_check: bool
    case_timeout: float | None
    labels: tuple[tuple[str, str], ...]
    imports: tuple[str, ...]
    op_policies: tuple[tuple[str | None, Declaration], ...]


def add(parser: pytest.Parser) -> None:
    """Declare every option under one heading of `pytest --help`."""
    group = parser.getgroup(_GROUP)
    group.addoption("--gpu", action="store_true", help="run on the accelerator that torch finds; refuse without one")
    group.addoption(
        "--device",
        action="append",
        default=[],
        metavar="D",
        help="run on this target: cpu, cuda:1, xpu, mps, fake:cuda, fake:xpu... "
        "(repeatable; default: cpu and each fake accelerator)",
    )
    group.addoption(
        "--amp-dtype",
        metavar="fp16|bf16|both",
        default="both",
        help="the low-precision dtypes to judge (default both)",
    )
    group.addoption(
        "--level",
        metavar="quick|standard|full",
        default="standard",
        help="depth of the run (default standard); two processes on idle cores take 2 min, 7 min, an hour and more",
    )
    group.addoption(
        "--chapter",
        action="append",
        default=[],
        metavar="C",
        help="only this chapter (repeatable, wildcards)",
    )
    group.addoption(
        "--contract",
        action="append",
        default=[],
        metavar="ID",
        help="only this contract (repeatable, wildcards)",
    )
    group.addoption(
        "--report",
        metavar="DIR",
        help="folder for report.json and summary.txt (default conformance-reports/<time>)",
    )
    group.addoption("--seed", default="0", metavar="N", help="seed of every random input (default 0)")
    group.addoption(
        "--waivers",
        action="append",
        default=[],
        metavar="FILE",
        help="also apply the waivers of this TOML file (repeatable)",
    )
    group.addoption(
        "--no-waivers",
        action="store_true",
        help="ignore all waivers, those that the suite ships too: known failures of torch fail",
    )
    group.addoption(
        "--require-conclusive",
        action="store_true",
        help="end an INCONCLUSIVE run with exit status 6 (default 0); a PARTIAL one always does",
    )
    group.addoption(
        "--baseline",
        metavar="OLD.json",
        help="fail where a contract or case that passed in this report no longer does; stock, or torch-2.12.1 and the "
        "like, name a stored one",
    )
    group.addoption(
        "--accepted-changes",
        action="append",
        default=[],
        metavar="FILE",
        help="with --baseline: excuse the changes that this TOML file names (repeatable)",
    )
    group.addoption(
        "--workload",
        metavar="MODULE:FUNCTION",
        help="judge AMP on a model, data and optimizer of your own, which this function builds; alone, unless "
        "--chapter or --contract say what else",
    )
    group.addoption(
        "--time-limit",
        metavar="SECONDS",
        help="with --workload: how long its judgement may take (default 120, 600, 3000 by level); seeds and steps are "
        "fewer where that is short",
    )
    group.addoption(
        "--expectations",
        action="append",
        default=[],
        metavar="FILE",
        help=f"hold speed-ups against this TOML file as well, such as `{COMMAND} calibrate` writes (repeatable)",
    )
    group.addoption(
        "--self-check",
        action="store_true",
        help="first plant faults in this torch and see that the contracts notice; INCONCLUSIVE where they do not",
    )
    group.addoption(
        "--case-timeout",
        metavar="SECONDS",
        help="end a case that hangs, with its stack, after so long (default 600, 1200, 3600 by level; 0: never)",
    )
    group.addoption(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="your own word for the machine, kept in the report, such as host=node17 or rack=B3 (repeatable)",
    )
    group.addoption(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this before anything is judged, such as torch_xla: what registers a device with torch; may be "
        "repeated",
    )
    group.addoption(
        "--op-policy",
        action="append",
        default=[],
        metavar="[TYPE=]like:BACKEND",
        help="judge a device without lists of its own by those of this backend (like:cuda), or, as "
        "[TYPE=]surface:FILE:BACKEND, by the rules of a backend in a surface file; where several such devices are "
        "judged, TYPE names one",
    )
    group.addoption("--list-contracts", action="store_true", help="print the catalogue of contracts and exit")


def read(config: pytest.Config) -> Options:
    """Read and check the options; raises pytest.UsageError (exit status 4) with one line."""
    option = config.option
    if option.gpu and option.device:
        raise pytest.UsageError("--gpu and --device exclude each other: --gpu takes the accelerator torch finds")
    if option.no_waivers and option.waivers:
        raise pytest.UsageError("--no-waivers and --waivers exclude each other: --no-waivers ignores all waivers")
    for name, given, allowed in (
        ("--amp-dtype", option.amp_dtype, (*_DTYPES, "both")),
        ("--level", option.level, DEPTHS),
    ):
        if given not in allowed:
            raise pytest.UsageError(f"{name}: {given!r} is none of {', '.join(allowed)}")
    if getattr(option, "dist", "no") == "each":
        raise pytest.UsageError("--dist each runs every case in every worker, and a run judges it once: leave it out")
    if getattr(option, "forked", False):
        raise pytest.UsageError("--forked loses what a case records in its process: leave it out")
    if getattr(option, "reruns", None):
        raise pytest.UsageError("--reruns runs a case until it passes, and a run judges it once: leave it out")
    if not config.pluginmanager.has_plugin("skipping"):
        raise pytest.UsageError("-p no:skipping takes away how waivers are shown: leave it out")
    if option.report == "":
        raise pytest.UsageError("--report: the name of the folder is empty")
    try:
        seed = int(option.seed)
    except ValueError:
        raise pytest.UsageError(f"--seed: {option.seed!r} is not a whole number") from None
    if not 0 <= seed < 2**63:
        raise pytest.UsageError(f"--seed: {seed} is not between 0 and 2**63 - 1")
    if option.time_limit is not None and option.workload is None:
        raise pytest.UsageError("--time-limit bounds the judgement of a model of your own: add --workload")
    here = config.invocation_params.dir
    if option.report is not None and option.baseline is not None:
        written = (here / option.report / "report.json").resolve()
        if (here / option.baseline).resolve() in (written, written.parent):
            raise pytest.UsageError(
                f"--baseline: {option.baseline} is the report that this run writes; keep the old one"
            )
    return Options(
        gpu=option.gpu,
        devices=tuple(option.device),
        amp_dtypes=_DTYPES if option.amp_dtype == "both" else (option.amp_dtype,),
        level=option.level,
        chapters=tuple(option.chapter),
        contracts=tuple(option.contract),
        report=None if option.report is None else _report_folder(here / option.report),
        seed=seed,
        waivers=tuple(here / path for path in option.waivers),
        no_waivers=option.no_waivers,
        require_conclusive=option.require_conclusive,
        baseline=None if option.baseline is None else here / option.baseline,
        accepted_changes=tuple(here / path for path in option.accepted_changes),
        workload=option.workload,
        time_limit=_seconds("--time-limit", option.time_limit, 1),
        expectations=tuple(here / path for path in option.expectations),
        self_check=option.self_check,
        case_timeout=_seconds("--case-timeout", option.case_timeout, 0),
        labels=_labels(option.label),
        imports=tuple(option.imports),
        op_policies=tuple(_op_policy(one, here) for one in option.op_policy),
    )


def _seconds(name: str, given: str | None, least: int) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 10**6:
        raise pytest.UsageError(f"{name}: {given!r} is not a number of seconds from {least} to 1000000")
    return seconds


# How a declaration begins.
_SAYS = ("like:", "surface:")


def declaration(text: str, here: Path) -> Declaration | None:
    """Return what like:BACKEND or surface:FILE:BACKEND declares, or None for other words; FILE is relative to `here`.

    Raises ReportError where FILE cannot be read, or knows no such backend.
    """
    word, _, rest = text.partition(":")
    if word == "like" and rest:
        return Declaration(rest)
    file, _, backend = rest.rpartition(":")
    if word != "surface" or not file or not backend:
        return None
    block = {str(name): one for name, one in surfaces.read(here / file).backends.items()}.get(backend)
    if block is None or not block.overloads:
        raise ReportError(f"{file}: the surface has no overloads of {backend[:80]!r}")
    return Declaration(backend, Path(file).name, dict(block.overloads))


def _op_policy(given: str, here: Path) -> tuple[str | None, Declaration]:
    """Return the device type, or None for every one without lists, and what is declared for it."""
    name, equals, text = ("", "", given) if given.startswith(_SAYS) else given.partition("=")
    try:
        said = declaration(text, here)
    except ReportError as error:
        raise pytest.UsageError(f"--op-policy: {error}") from None
    if (equals and not name) or said is None:
        raise pytest.UsageError(
            f"--op-policy: {given[:80]!r} is not like:BACKEND or TYPE=like:BACKEND (like:cuda), "
            "nor surface:FILE:BACKEND"
        )
    return name or None, said


def _labels(given: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the labels as pairs; raises pytest.UsageError for one that is none and for a key that comes twice."""
    found: dict[str, str] = {}
    for label in given:
        key, equals, value = label.partition("=")
        if not equals or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise pytest.UsageError(
                f"--label: {label[:80]!r} is no KEY=VALUE of a word and at most 80 printable characters (host=node17)"
            )
        if key in found:
            raise pytest.UsageError(f"--label: {key!r} is given twice")
        found[key] = value
    return tuple(found.items())


def _report_folder(path: Path) -> Path:
    """Accept a folder that is absent, empty, or holds an earlier report of ours and nothing else."""
    nearest = _existing(path)
    if not nearest.is_dir():
        raise pytest.UsageError(f"--report: {nearest} is not a folder")
    if not _writable(nearest):
        raise pytest.UsageError(f"--report: {nearest} cannot be written to")
    if nearest == path:
        strange = sorted(entry.name for entry in path.iterdir() if entry.name not in REPORT_FILES)
        if strange:
            raise pytest.UsageError(
                f"--report: {path} holds something else ({strange[0]}); name a new folder or one with a report only"
            )
    return path


def _existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that is there."""
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))


def _writable(folder: Path) -> bool:
    """Try, rather than ask, since permission bits do not bind every user and every file system."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def select(catalogue: Catalogue, options: Options) -> dict[str, Contract]:
    """Return the contracts that a run is to judge; raises pytest.UsageError for unknown names.

    Those that need a workload of the user's are judged where there is one, and then alone unless others are named.
    """
    selected = named(catalogue, options)
    if options.workload is None:
        selected = {id: contract for id, contract in selected.items() if contract.needs is None}
    elif not options.chapters and not options.contracts:
        selected = {id: contract for id, contract in selected.items() if contract.needs == "workload"}
    if not selected:
        raise pytest.UsageError(
            f"--contract: {', '.join(options.contracts)} judges a model of your own: add --workload MODULE:FUNCTION"
        )
    return selected


def named(catalogue: Catalogue, options: Options) -> dict[str, Contract]:
    """Return the contracts that --chapter and --contract leave; raises pytest.UsageError for unknown names."""
    chapters = [chapter.name for chapter in catalogue.chapters]
    for pattern in options.chapters:
        if not _known(pattern, chapters):
            raise pytest.UsageError(f"--chapter: there is no chapter {pattern!r}; there are {', '.join(chapters)}")
    for pattern in options.contracts:
        if not catalogue.select((), (pattern,)):
            near = _nearest(pattern, catalogue.contracts)
            raise pytest.UsageError(f"--contract: there is no contract {pattern!r}; {near}; see --list-contracts")
    selected = catalogue.select(options.chapters, options.contracts)
    if not selected:
        raise pytest.UsageError("--chapter and --contract leave no contract: none of the contracts is in the chapters")
    return selected


def _known(pattern: str, chapters: Iterable[str]) -> bool:
    return any(catalogues.matches(chapter, (pattern,)) for chapter in chapters)


def _nearest(pattern: str, ids: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern.upper(), list(ids), n=3, cutoff=0.5)
    return f"the nearest are {', '.join(near)}" if near else "ids read AMP-<CHAPTER>-NNN"


def require_packages() -> None:
    """Refuse to run without the test packages; raises pytest.UsageError."""
    missing = [name for name in ("hypothesis", "tabulate") if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}; the suite needs pip install {' '.join(missing)}")


def require_docstrings() -> None:
    """Refuse to run under python -OO, where torch has no docstrings; raises pytest.UsageError."""
    if sys.flags.optimize > 1:
        raise pytest.UsageError("python -OO takes torch's docstrings away: run without it, or unset PYTHONOPTIMIZE")


def require_names_of_folders() -> None:
    """Refuse folders whose names are no text to Python, since torch takes no others; raises pytest.UsageError."""
    for folder in (str(Path(__file__).resolve().parent), tempfile.gettempdir()):
        try:
            folder.encode()
        except UnicodeEncodeError:
            raise pytest.UsageError(
                f"the name of a folder cannot be read in the encoding {sys.getfilesystemencoding()}: {folder!a}; "
                "set PYTHONUTF8=1, or use a folder with another name"
            ) from None


def require_cache_folder() -> None:
    """Refuse a folder of compiled code that torch cannot make as it imports Dynamo; raises pytest.UsageError."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        nearest = _existing(Path(named).absolute())
        if not (nearest.is_dir() and (nearest == Path(named).absolute() or _writable(nearest))):
            raise pytest.UsageError(
                f"TORCHINDUCTOR_CACHE_DIR={named} is no folder and cannot be made: name another, or unset it"
            )


def require_torch() -> None:
    """Refuse to run without torch, or with one that is too old; raises pytest.UsageError."""
    if (problem := torch_problem()) is not None:
        raise pytest.UsageError(problem)
