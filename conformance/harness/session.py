"""Set up a run: resolve what the user named into targets, waivers, a baseline, a workload and expectations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ..oracles.policy import declared
from ..report import baselines, comparison, document, values
from ..workloads import user_workload
from . import accepted, backends, environment, expectations, options, parallel, state, targets, waivers
from . import catalogue as catalogues
from .catalogue import Catalogue
from .contradictions import contradictions
from .items import CHAPTERS
from .options import Options
from .run import Run, Surroundings, limit_of
from .targets import Target
from .waivers import Waiver


def prepare(asked: Options, config: pytest.Config) -> Run:
    """Resolve everything the user named; raises pytest.UsageError with one line and touches no file."""
    try:
        backends.import_first(asked.imports, config.invocation_params.dir)
    except backends.BackendError as error:
        raise pytest.UsageError(str(error)) from None
    # Before anything is probed: what a broken torch leaves behind there is its own doing.
    if (unlike := state.unlike_a_new_process()) is not None:
        raise pytest.UsageError(
            f"torch was set up before the run, by a plugin, a conftest.py or the like ({unlike}): run without that"
        )
    run_targets = _targets(asked)
    found = _declared(asked, run_targets)
    targets.declare(found.lacks)
    declared.declare({**backends.without_lists(run_targets), **found.op_policies})
    try:
        catalogue = catalogues.load()
        known_failures = () if asked.no_waivers else _waivers((*asked.waivers, *found.waivers), catalogue)
    except (catalogues.CatalogueError, waivers.WaiverError) as error:
        raise pytest.UsageError(str(error)) from None
    selected = {
        id: contract
        for id, contract in options.select(catalogue, asked).items()
        if contract.holds_for(torch.__version__)
    }
    if (clash := contradictions(run_targets)) is not None:
        raise pytest.UsageError(f"the settings of this process contradict each other: {clash}")
    return Run(
        asked,
        catalogue,
        selected,
        run_targets,
        found.op_policies,
        known_failures,
        _baseline(asked),
        _accepted(asked),
        _user_workload(asked, run_targets, config),
        _expectations(asked, run_targets),
        Surroundings(config.invocation_params.dir, _selection(config, asked), _workers(config)),
    )


def _declared(asked: Options, run_targets: tuple[Target, ...]) -> backends.Declared:
    try:
        return backends.declared(asked.op_policies, run_targets)
    except backends.BackendError as error:
        raise pytest.UsageError(str(error)) from None


def _waivers(files: Iterable[Path], catalogue: Catalogue) -> tuple[Waiver, ...]:
    known = catalogue.contracts
    named = [waiver for path in files for waiver in waivers.read(path, known)]
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


def _user_workload(
    asked: Options, run_targets: tuple[Target, ...], config: pytest.Config
) -> user_workload.Builder | None:
    """Load the user's workload and try it in fp32 on every real target; raises pytest.UsageError with one line."""
    if asked.workload is None:
        return None
    real = [target for target in run_targets if not target.is_fake]
    if not real:
        raise pytest.UsageError("--workload: a model is trained, which fake targets cannot; name a real --device")
    try:
        function = user_workload.load(asked.workload, config.invocation_params.dir)
        builder = user_workload.Builder(asked.workload, function)
        for target in [] if config.option.collectonly else real:
            _say(config, f"workload: {asked.workload} on {target.name}: one pass over its batches in fp32")
            with state.kept():
                for words in _tried(builder, target, asked):
                    _say(config, f"  {words}")
    except user_workload.OwnError as error:
        raise pytest.UsageError(f"--workload {asked.workload}: {error}") from None
    return builder


def _tried(builder: user_workload.Builder, target: Target, asked: Options) -> Iterator[str]:
    """Try the workload in fp32, and two steps in each dtype that is to be judged, each told before it begins."""
    seconds = user_workload.TRIED * limit_of(asked)
    user_workload.probe(builder, target.device, seconds)
    only = builder.only[target.device]
    for name in asked.amp_dtypes:
        dtype = targets.AMP_DTYPES[name]
        if only in (None, dtype) and target.supports(dtype):
            yield f"two steps in {name}"
            builder.raises(target.device, dtype, seconds)


def _say(config: pytest.Config, words: str) -> None:
    """Write a line before pytest writes its own: a model may take a minute to build."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if getattr(config.option, "verbose", 0) < 0 or parallel.is_worker(config):
        return
    with nullcontext() if capture is None else capture.global_and_fixture_disabled():
        print(words, flush=True)


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


def _baseline(asked: Options) -> tuple[document.Report, str] | None:
    """Read what the run is compared with, and what to call it; raises pytest.UsageError with one line."""
    if asked.baseline is None:
        return None
    try:
        found, name = baselines.read(asked.baseline, torch.__version__)
    except document.ReportError as error:
        raise pytest.UsageError(f"--baseline: {error}") from None
    if comparison.incomplete(found):
        raise pytest.UsageError(
            f"--baseline: {name} is INCOMPLETE, of a run that did not end, and compares with nothing"
        )
    return found, name


def _accepted(asked: Options) -> tuple[values.AcceptedChange, ...]:
    if asked.accepted_changes and asked.baseline is None:
        raise pytest.UsageError("--accepted-changes excuses changes against a baseline: add --baseline OLD.json")
    try:
        return accepted.read(asked.accepted_changes)
    except accepted.AcceptedError as error:
        raise pytest.UsageError(f"--accepted-changes: {error}") from None


def _selection(config: pytest.Config, asked: Options) -> str | None:
    """Return what narrowed the run besides our own options, or None."""
    option = config.option
    parts = [f"-k {option.keyword}"] * bool(option.keyword) + [f"-m {option.markexpr}"] * bool(option.markexpr)
    parts += [argument for argument in config.args if _is_a_part(config, argument)]
    parts += [f"--deselect {name}" for name in option.deselect or ()]
    parts += [f"--workload {asked.workload}"] * (asked.workload is not None and not asked.chapters + asked.contracts)
    parts += ["--lf"] * bool(getattr(option, "lf", False)) + ["--sw"] * bool(getattr(option, "stepwise", False))
    return environment.redact(" ".join(parts)) if parts else None


def _is_a_part(config: pytest.Config, argument: str) -> bool:
    """Return whether an argument names a check, a file, or a folder or package below that of all chapters."""
    if "::" in argument or argument.endswith(".py"):
        return True
    if config.option.pyargs and ".chapters." in argument:
        return True
    return CHAPTERS in Path(config.invocation_params.dir, argument).resolve().parents


def _workers(config: pytest.Config) -> int:
    return len(getattr(config.option, "tx", None) or ()) if getattr(config.option, "dist", "no") != "no" else 0
