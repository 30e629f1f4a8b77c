"""The assertions of a case: each holds, fails, and records what it saw either way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness.catalogue import Contract
from conformance.harness.check import Case
from conformance.harness.endings import ContractViolation, Unsupported

_CONTRACT = Contract("AMP-API-001", "api", "T", "S", "must", "documented", "src", "f", "n", "print('$device')")


@pytest.fixture
def case() -> Case:
    return Case(_CONTRACT, level="quick", seed=0, substitutions={"device": "cuda:0", "amp_dtype": "torch.float16"})


def _raise() -> None:
    raise RuntimeError("found dtype Half")


def _warn() -> int:
    warnings.warn("use torch.amp instead", FutureWarning, stacklevel=1)
    return 3


_HOLDS: dict[str, Callable[[Case], Any]] = {
    "equal": lambda case: case.equal("x", torch.float16, torch.float16),
    "identical": lambda case: case.identical("x", torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan])),
    "identical complex": lambda case: case.identical("x", torch.tensor([1 + 2j]), torch.tensor([1 + 2j])),
    "identical bool": lambda case: case.identical("x", torch.tensor([True]), torch.tensor([True])),
    "identical scalar": lambda case: case.identical("x", torch.tensor(1.0), torch.tensor(1.0)),
    "identical empty": lambda case: case.identical("x", torch.ones(0, 3), torch.ones(0, 3)),
    "identical strided": lambda case: case.identical("x", torch.ones(2, 3).t(), torch.ones(3, 2)),
    "at most": lambda case: case.at_most("x", 1, 1),
    "at least": lambda case: case.at_least("x", 1, 1),
    "between": lambda case: case.between("x", 1, 1, 2),
    "true": lambda case: case.true("x", True),
    "raises": lambda case: case.raises("x", RuntimeError, _raise, names=("half",)),
    "warns": lambda case: case.warns("x", FutureWarning, _warn, names=("torch.amp",)),
    "note": lambda case: case.note("x", float("nan")),
}

_FAILS: dict[str, Callable[[Case], Any]] = {
    "equal": lambda case: case.equal("x", torch.float32, torch.float16),
    "equal bool and int": lambda case: case.equal("x", True, 1),
    "identical dtype": lambda case: case.identical("x", torch.ones(1), torch.ones(1, dtype=torch.float16)),
    "identical shape": lambda case: case.identical("x", torch.ones(1), torch.ones(1, 1)),
    "identical value": lambda case: case.identical("x", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    "identical sign of zero": lambda case: case.identical("x", torch.tensor(-0.0), torch.tensor(0.0)),
    "identical nan": lambda case: case.identical("x", torch.tensor(math.nan), torch.tensor(0.0)),
    "identical complex": lambda case: case.identical("x", torch.tensor([1 + 2j]), torch.tensor([1 + 3j])),
    "at most": lambda case: case.at_most("x", 1.1, 1),
    "at most nan": lambda case: case.at_most("x", math.nan, 1),
    "at least": lambda case: case.at_least("x", 0.9, 1),
    "at least nan": lambda case: case.at_least("x", math.nan, 1),
    "between": lambda case: case.between("x", 3, 1, 2),
    "between nan": lambda case: case.between("x", math.nan, 1, 2),
    "true": lambda case: case.true("x", False, seen="nothing"),
    "raises nothing": lambda case: case.raises("x", RuntimeError, lambda: None),
    "raises another": lambda case: case.raises("x", ValueError, _raise),
    "raises another message": lambda case: case.raises("x", RuntimeError, _raise, names=("Float",)),
    "warns nothing": lambda case: case.warns("x", FutureWarning, lambda: None),
    "warns another": lambda case: case.warns("x", DeprecationWarning, _warn),
    "warns another message": lambda case: case.warns("x", FutureWarning, _warn, names=("torch.cuda",)),
}


@pytest.mark.parametrize("name", _HOLDS)
def test_holds_and_is_recorded(case: Case, name: str) -> None:
    _HOLDS[name](case)

    assert [evidence.holds for evidence in case.evidence] == [True]
    assert case.evidence[0].name.startswith("x")


@pytest.mark.parametrize("name", _FAILS)
def test_fails_and_is_recorded(case: Case, name: str) -> None:
    with pytest.raises(ContractViolation, match=r"^x"):
        _FAILS[name](case)

    assert [evidence.holds for evidence in case.evidence] == [False]


def test_messages_say_what_was_seen_and_what_was_promised(case: Case) -> None:
    with pytest.raises(ContractViolation) as caught:
        case.at_most("relative error", 0.25, 0.125, unit="u")

    assert str(caught.value) == "relative error: 0.25 u, NOT <= 0.125 u"


def test_difference_names_the_first_wrong_element(case: Case) -> None:
    with pytest.raises(ContractViolation, match=r"1 of 3 elements differ; the first, at 2: 9\.0 in place of 3\.0"):
        case.identical("x", torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 2.0, 3.0]))


def test_snippet_is_filled_in_and_can_be_replaced(case: Case) -> None:
    assert case.reproduction == "print('cuda:0')"

    case.reproduce("print($amp_dtype)")

    assert case.reproduction == "print(torch.float16)"


def test_results_of_calls_are_handed_back(case: Case) -> None:
    assert str(case.raises("x", RuntimeError, _raise)) == "found dtype Half"
    assert case.warns("y", FutureWarning, _warn) == 3


class _Float16Only:
    name = "toy:0"

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        return dtype is torch.float16

    @staticmethod
    def computes_in(dtype: torch.dtype) -> bool:
        return dtype is not torch.float64


def test_missing_dtypes_make_a_case_unsupported() -> None:
    target: Any = _Float16Only()
    both = (torch.float16, torch.bfloat16)
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={}, amp_dtypes=both)

    case.require(target, torch.float16)
    assert case.supported(target) == (torch.float16,)
    with pytest.raises(Unsupported, match=r"^toy:0 does not compute natively in torch\.bfloat16$"):
        case.require(target, *both)
    case.amp_dtypes = (torch.bfloat16,)
    with pytest.raises(Unsupported, match="toy:0"):
        case.supported(target)


def test_missing_arithmetic_makes_a_case_unsupported() -> None:
    target: Any = _Float16Only()
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={})

    case.require_arithmetic(target, torch.float32, torch.bfloat16)
    with pytest.raises(Unsupported, match=r"^toy:0 does not compute in torch\.float64$"):
        case.require_arithmetic(target, torch.bfloat16, torch.float64)


class _Device:
    """A device that takes subnormal numbers for zero, or does not."""

    name = "toy:0"

    def __init__(self, flushes: bool) -> None:
        self.flushes_subnormals = lambda: flushes


def test_device_without_subnormal_numbers_makes_a_case_of_them_unsupported() -> None:
    flushing: Any = _Device(True)
    keeping: Any = _Device(False)
    case = Case(_CONTRACT, level="quick", seed=0, substitutions={})

    case.require_subnormals(flushing, torch.float16)
    case.require_subnormals(keeping)
    for dtype in (None, torch.bfloat16, torch.float32):
        with pytest.raises(Unsupported, match=r"^toy:0 takes subnormal float32 numbers for zero"):
            case.require_subnormals(flushing, dtype)
