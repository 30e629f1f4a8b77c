"""The pytest plugin: its options, how a session is set up, and the modules that hold its other hooks."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import benchmarks, parallel, progress, watchdog
from . import catalogue as catalogues
from . import options as options_module
from .controller import Controller
from .items import CHAPTERS, register_marks
from .keys import RUN

if TYPE_CHECKING:
    from .run import Run

# By name, in a checkout and in an installation.
pytest_plugins = tuple(f"{__package__}.{name}" for name in ("collection", "execution", "fixtures", "pipes"))
_SUITE = CHAPTERS.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    options_module.add(parser)


def _refuse_unknown_checks(config: pytest.Config) -> None:
    """Refuse a node id of a check that its module has not; raises pytest.UsageError with one line."""
    for argument in config.args:
        place, *names = argument.split("[")[0].split("::")
        module = Path(config.invocation_params.dir, place)
        if not names or CHAPTERS not in module.resolve().parents or not module.is_file():
            continue
        checks = re.findall(r"^def (test_\w+)\(", module.read_text(encoding="utf-8"), re.MULTILINE)
        if names[-1] not in checks:
            near = difflib.get_close_matches(names[-1], checks, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise pytest.UsageError(f"{argument}: there is no check {names[-1]!r} in {place}{hint}")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.option.list_contracts:
        _refuse_unknown_checks(config)
        if parallel.possible(config) and _only_conformance(config):
            options = options_module.read(config)
            parallel.engage(config, options, len(options_module.select(catalogues.load(), options)))
        return None
    catalogue = catalogues.load()
    for contract in options_module.named(catalogue, options_module.read(config)).values():
        bounds = [f"since {contract.since}"] * bool(contract.since) + [f"until {contract.until}"] * bool(contract.until)
        bounds += ["with --workload"] * (contract.needs == "workload")
        tail = f"  ({', '.join(bounds)})" if bounds else ""
        print(f"{contract.id:<20} {contract.level:<6} {contract.authority:<11} {contract.title}{tail}")
    return 0


def pytest_configure(config: pytest.Config) -> None:
    register_marks(config)
    options = options_module.read(config)
    _wait_without_spinning()
    _symbolize_without_addr2line()
    options_module.require_packages()
    options_module.require_docstrings()
    options_module.require_names_of_folders()
    options_module.require_cache_folder()
    options_module.require_torch()
    from .session import prepare

    run = config.stash[RUN] = prepare(options, config)
    if parallel.is_worker(config):
        config.pluginmanager.register(parallel.Worker(run), "conformance-worker")
        _watch(config, run, watchdog.of_worker(config))
    elif not config.option.collectonly:
        controller = Controller(run)
        config.pluginmanager.register(controller, "conformance-controller")
        config.pluginmanager.register(progress.Meter(run, config, controller.folder), "conformance-progress")
        _watch(config, run, functools.partial(controller.hung, config))
    if parallel.is_controller(config):
        config.pluginmanager.register(parallel.Alone(run), "conformance-alone")
    # Hypothesis keeps notes on the modules it sees; a run leaves nothing in the folder where it was started.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(tempfile.gettempdir(), "conformance-hypothesis")))
    # A chapter that this torch cannot even import must not keep the others from running.
    config.option.continue_on_collection_errors = True
    if _only_conformance(config):
        _quieten(config)
    if benchmarks.present(config):
        config.pluginmanager.register(benchmarks.Benchmarks(run, config), "conformance-benchmarks")
    if config.option.noconftest:
        _register_fixtures_of_chapters(config)
    config.add_cleanup(parallel.collect_all_again)
    if threading.current_thread() is threading.main_thread():
        # A process in the background may have been started with SIGINT ignored.
        taken = [signal.SIGTERM] + [signal.SIGINT] * (signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        for number in taken:
            before = signal.signal(number, functools.partial(_interrupt, run))
            config.add_cleanup(functools.partial(_restore_signal, number, before))
        # One that falls into a callback of the interpreter is lost there; the flag ends the run all the same.
        lost = "(?s)Exception ignored.*KeyboardInterrupt.*(terminated|interrupted)"
        config.addinivalue_line("filterwarnings", f"ignore:{lost}:pytest.PytestUnraisableExceptionWarning")


def _register_fixtures_of_chapters(config: pytest.Config) -> None:
    """Register the conftest.py of the chapters, where pytest was told to load none, as `amp-conformance` tells it."""
    suite = Path(__file__).resolve().parent.parent
    package = __package__.rpartition(".")[0]
    for path in sorted(suite.glob("chapters/*/conftest.py")):
        name = ".".join(path.relative_to(suite).with_suffix("").parts)
        config.pluginmanager.register(importlib.import_module(f"{package}.{name}"), f"conformance-{path.parent.name}")


def _watch(config: pytest.Config, run: Run, ended: watchdog.Ended) -> None:
    """End a case that hangs, unless a debugger holds it or the user wants none to be ended."""
    debugged = getattr(config.option, "usepdb", False) or getattr(config.option, "trace", False)
    if run.options.case_timeout != 0 and not debugged:
        config.pluginmanager.register(watchdog.Watchdog(run, ended), "conformance-watchdog")


def _wait_without_spinning() -> None:
    """Let OpenMP threads sleep while they wait; on a busy machine spinning makes small operations many times slower."""
    if "torch" not in sys.modules:  # the OpenMP runtime reads these once, when torch loads it
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("KMP_BLOCKTIME", "0")


def _symbolize_without_addr2line() -> None:
    """Let torch's stack traces do without addr2line: forked ranks would share its pipes, and wait for one another."""
    if "TORCH_SHOW_CPP_STACKTRACES" in os.environ:
        os.environ.setdefault("TORCH_DISABLE_ADDR2LINE", "1")


def _restore_signal(number: signal.Signals, handler: Any) -> None:
    signal.signal(number, handler)


def _interrupt(run: Run, number: int, frame: object) -> None:
    """End the run; when all cases have ended, the first signal changes nothing and the second ends the process."""
    if run.ending and not run.interrupted_at_its_end:
        run.interrupted_at_its_end = True
        return
    if run.ending:
        os._exit(int(pytest.ExitCode.INTERRUPTED) if run.status is None else run.status)
    run.interrupted = True
    raise KeyboardInterrupt("terminated" if number == signal.SIGTERM else "interrupted")


def _only_conformance(config: pytest.Config) -> bool:
    places = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return config.option.pyargs or all(place == _SUITE or _SUITE in place.parents for place in places)


def _quieten(config: pytest.Config) -> None:
    """Leave the account of failures to the suite's own summary, unless the user asked for pytest's."""
    option = config.option
    if not hasattr(option, "tbstyle"):  # -p no:terminal
        return
    if option.tbstyle == "auto":
        option.tbstyle = "no"
    if option.reportchars == "fE":
        option.reportchars = ""
    option.disable_warnings = True


def pytest_report_header(config: pytest.Config) -> list[str]:
    from .header import heading

    return [*heading(config.stash[RUN]), parallel.heading(config)]


def pytest_sessionstart(session: pytest.Session) -> None:
    if _only_conformance(session.config):
        _drop_log_capture(session.config)
        _leave_asserts_as_they_are(session.config)


def _drop_log_capture(config: pytest.Config) -> None:
    """Take pytest's capture of log records away, which costs a case as much as its check, unless it is asked for."""
    capture = config.pluginmanager.get_plugin("logging-plugin")
    if capture is None:
        return
    asked = (config.option.log_level, config.option.log_cli_level, config.option.log_file)
    if not any(asked) and not config.getini("log_cli"):
        config.pluginmanager.unregister(capture)


def _leave_asserts_as_they_are(config: pytest.Config) -> None:
    """Take pytest's rewriting of asserts away: checks judge by `case`, and compiling them anew takes a second."""
    hook = getattr(config.pluginmanager, "rewrite_hook", None)
    if hook in sys.meta_path:
        sys.meta_path.remove(hook)
