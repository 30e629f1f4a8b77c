"""A case leaves nothing behind: a leak fails that case and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import state
from conformance.measure.compilers import without_torch_compile
from tests.conftest import Toy
from tests.faults import Fault
from tests.faults.breaking import replaced
from tests.faults.campaigns import campaign

_LEAKS = {
    "autocast enabled for cpu": "torch.set_autocast_enabled('cpu', True)",
    "autocast dtype for cuda": "torch.set_autocast_dtype('cuda', torch.bfloat16)",
    "autocast cache enabled": "torch.set_autocast_cache_enabled(False)",
    "autocast nesting depth": "torch.autocast_increment_nesting()",
    "open function transforms": "torch._C._functorch._vmap_increment_nesting(3, 'error')",
    "grad mode": "torch.set_grad_enabled(False)",
    "torch.get_default_dtype": "torch.set_default_dtype(torch.float64)",
    "torch.get_float32_matmul_precision": "torch.set_float32_matmul_precision('high')",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "torch.backends.cudnn.allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False"
    ),
    "torch.get_num_threads": "torch.set_num_threads(1 + torch.get_num_threads())",
    "anomaly mode": "torch.set_anomaly_enabled(True)",
}


@pytest.mark.parametrize("name", _LEAKS)
def test_leak_fails_the_case_that_leaks_and_no_other(toy: Toy, name: str) -> None:
    before = state.Snapshot()
    toy.contract("AMP-API-001")
    toy.checks(
        f"@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n    {_LEAKS[name]}\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
    )

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[a]": "FAIL", "AMP-API-001[b]": "PASS"}
    _, leaks = outcome.report["cases"][0]["reason"].split("leaves state behind: ")
    assert f"{name} was " in leaks
    assert before.leaks() == []


def test_global_random_state_is_put_back(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.between('x', torch.rand(1).item(), 0, 1)\n"
    )
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    toy.run()

    assert torch.equal(torch.rand(2), expected)


def test_failed_case_is_cleaned_up_after(toy: Toy) -> None:
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n"
        "    torch.set_autocast_enabled('cpu', True)\n    case.equal('x', 1, 2)\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n"
        "    case.equal('enabled', torch.is_autocast_enabled('cpu'), False)\n"
    )

    assert toy.run().verdicts() == {"AMP-API-001[a]": "FAIL", "AMP-API-001[b]": "PASS"}


def test_generators_of_a_failed_case_leave_their_regions_before_the_next_case(toy: Toy) -> None:
    """The inner one, dropped last, restores the state of its entry: the outer one's region."""
    toy.contract("AMP-API-001")
    toy.checks(
        "LEFT = []\n"
        "def work():\n    with torch.autocast('cpu'):\n        yield\n"
        "class Noted:\n    def __del__(self):\n        LEFT.append('left')\n"
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n"
        "    outer, inner, last = work(), work(), Noted()\n    next(outer)\n    next(inner)\n"
        "    case.equal('x', 1, 2)\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n"
        "    case.equal('local variables of the case before', LEFT, ['left'])\n"
        "    case.equal('enabled', torch.is_autocast_enabled('cpu'), False)\n"
    )

    assert toy.run().verdicts() == {"AMP-API-001[a]": "FAIL", "AMP-API-001[b]": "PASS"}


def test_region_that_opens_again_between_cases_is_a_failure_that_names_the_case_before(toy: Toy) -> None:
    """As the guard of a kernel does that raised, once its traceback is freed."""
    toy.contract("AMP-API-001")
    toy.checks(
        "@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
        "@contract('AMP-API-001')\ndef test_b(case: Case) -> None:\n    case.equal('x', 1, 1)\n"
        "@contract('AMP-API-001')\ndef test_c(case: Case) -> None:\n"
        "    case.equal('enabled', torch.is_autocast_enabled('cpu'), False)\n"
    )
    (toy.path / "conftest.py").write_text(
        "import torch\n\ndef pytest_runtest_teardown(item):\n"
        "    torch.set_autocast_enabled('cpu', item.name.startswith('test_a'))\n"
    )

    outcome = toy.run()

    assert outcome.verdicts() == {"AMP-API-001[a]": "PASS", "AMP-API-001[b]": "FAIL", "AMP-API-001[c]": "PASS"}
    assert "a region is open again after AMP-API-001[a], which left none (autocast enabled for cpu)" in outcome.output
    assert outcome.status == 1


# What user code sets, and what the run says of it.
_SET_BEFORE = {
    "torch.set_default_dtype(torch.float64)": "the default dtype: torch.float64, not torch.float32",
    "torch.device('cpu').__enter__()": "a default device (torch.set_default_device): True, not False",
    "torch.autocast('cpu').__enter__()": (
        "an autocast region is open in this thread, or its flags were set: "
        "autocast enabled for cpu, nesting depth 1, not none"
    ),
    "torch.set_autocast_enabled('cuda', True)": (
        "an autocast region is open in this thread, or its flags were set: autocast enabled for cuda, not none"
    ),
    "torch.set_autocast_cache_enabled(False)": (
        "an autocast region is open in this thread, or its flags were set: the weight cache disabled, not none"
    ),
    "torch.set_grad_enabled(False)": "gradients are recorded: False, not True",
    "torch.autograd.set_detect_anomaly(True)": "anomaly detection: True, not False",
    "torch.use_deterministic_algorithms(True)": "operations without a deterministic form are refused: True, not False",
}


@pytest.mark.parametrize("statement", _SET_BEFORE)
def test_what_was_set_before_the_run_is_refused_in_one_line(toy: Toy, statement: str) -> None:
    toy.contract("AMP-API-001")
    toy.checks("@contract('AMP-API-001')\ndef test_a(case: Case) -> None:\n    case.equal('x', 1, 1)\n")
    (toy.path / "conftest.py").write_text(f"import torch\n{statement}\n")
    with state.kept():
        outcome = toy.run()
        if torch._C._len_torch_function_stack():
            torch.device("cpu").__exit__(None, None, None)

    assert outcome.status == 4
    assert _SET_BEFORE[statement] in outcome.output
    assert outcome.report == {}


class _DispatchMode(TorchDispatchMode):
    """Calls each op as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [BaseTorchFunctionMode, _DispatchMode])
def test_modes_are_left_to_the_checks_but_for_compiled_ones(mode: Any) -> None:
    assert without_torch_compile() is None
    with mode():
        assert state.unlike_a_new_process() is None
        assert mode.__name__ in str(without_torch_compile())


@pytest.mark.parametrize(
    ("setter", "arguments"),
    [
        (torch.set_autocast_dtype, ("cpu", torch.float16)),
        (torch.set_float32_matmul_precision, ("high",)),
    ],
)
def test_other_settings_that_amp_sets_or_reads_are_left_to_the_checks(
    setter: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    with state.kept():
        setter(*arguments)
        assert state.unlike_a_new_process() is None


def test_a_thread_that_flushes_subnormal_numbers_is_noticed() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot set it on this processor")
    try:
        said = state.unlike_a_new_process()
    finally:
        torch.set_flush_denormal(False)

    assert said is not None
    assert "torch.set_flush_denormal" in said
    assert state.unlike_a_new_process() is None


def _defaults(change: Callable[[], None]) -> Callable[[], Iterator[None]]:
    """Break torch so that each thread starts with that change."""

    def breakage() -> Iterator[None]:
        right = threading.Thread.run

        def run(self: threading.Thread) -> None:
            change()
            right(self)

        with state.kept(), replaced(threading.Thread, "run", run):
            change()
            yield

    return breakage


@pytest.mark.parametrize(
    "change",
    [lambda: torch.set_autocast_cache_enabled(False), lambda: torch.set_autocast_enabled("cpu", True)],
    ids=["cache", "enabled"],
)
def test_a_torch_with_wrong_defaults_is_judged(change: Callable[[], None]) -> None:
    fault = Fault("defaults", "Each thread starts with other defaults.", ("AMP-REGION-040",), _defaults(change))

    assert campaign.run(fault).caught


def test_threads_alone_with_wrong_defaults_are_no_region_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = threading.Thread.run

    def run(self: threading.Thread) -> None:
        torch.set_autocast_enabled("cpu", True)
        right(self)

    monkeypatch.setattr(threading.Thread, "run", run)

    assert state.unlike_a_new_process() is None
