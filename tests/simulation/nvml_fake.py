"""A stand-in for NVIDIA's management library: the functions of nvidia-ml-py that the suite asks, over plain values."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

UUID = "12345678-9abc-def0-1234-56789abcdef0"


class NVMLError(Exception):
    """What the package raises for everything that goes wrong."""


def card(name: str, major: int, minor: int, processors: int, **more: Any) -> types.SimpleNamespace:
    """Properties of a device as torch gives them."""
    return types.SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=processors, uuid=UUID, gcnArchName="", **more
    )


def install(
    monkeypatch: pytest.MonkeyPatch,
    properties: types.SimpleNamespace,
    answers: dict[Any, Any] | None = None,
    *,
    hip: str | None = None,
) -> dict[Any, Any]:
    """Let torch.cuda have `properties`, and pynvml give `answers` by name of the function, with its arguments if any.

    Returns the answers, to be changed while a test runs; an answer that is an exception is raised, one that can be
    called is, one that is absent is refused as not supported. Without answers there is no package.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    if answers is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
        return {}
    library: Any = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    constants = {
        "CLOCK_SM": 1,
        "CLOCK_MEM": 2,
        "TEMPERATURE_GPU": 0,
        "PERF_POLICY_POWER": 0,
        "PERF_POLICY_THERMAL": 1,
        "PERF_POLICY_RELIABILITY": 5,
        "MEMORY_ERROR_TYPE_CORRECTED": 0,
        "MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "VOLATILE_ECC": 0,
        "PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR": 1,
    }
    for name, value in constants.items():
        setattr(library, f"NVML_{name}", value)

    def asked(function: str) -> Any:
        def answer(handle: str, *arguments: Any) -> Any:
            assert handle == "handle"
            found = answers.get((function, *arguments), answers.get(function, NVMLError("not supported")))
            if isinstance(found, Exception):
                raise found
            return found(*arguments) if callable(found) else found

        return answer

    def by_uuid(uuid: str) -> str:
        if uuid != answers.get("uuid", f"GPU-{UUID}"):
            raise NVMLError("not found")
        return "handle"

    library.nvmlInit = lambda: None
    library.nvmlDeviceGetHandleByUUID = by_uuid
    for function in (
        "MaxClockInfo",
        "ClockInfo",
        "MemoryBusWidth",
        "Temperature",
        "PowerUsage",
        "CurrentClocksEventReasons",
        "CurrentClocksThrottleReasons",
        "ViolationStatus",
        "ComputeRunningProcesses",
        "ProcessUtilization",
        "TotalEccErrors",
        "RemappedRows",
        "RetiredPages",
    ):
        setattr(library, f"nvmlDeviceGet{function}", asked(function))
    _give_events(library, answers)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return answers


def _give_events(library: Any, answers: dict[Any, Any]) -> None:
    """Let the library report the numbers of `answers["xids"]` as critical errors, to a set that they are kept in."""
    registered: list[Any] = []

    def register(handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("handle", 8, "events")
        registered.append(events)

    def wait(events: str, milliseconds: int) -> Any:
        assert (registered, milliseconds) == ([events], 0)
        if not answers.get("xids"):
            raise NVMLError("timeout")
        return types.SimpleNamespace(eventData=answers["xids"].pop(0))

    library.nvmlEventTypeXidCriticalError = 8
    library.nvmlEventSetCreate = lambda: "events"
    library.nvmlDeviceRegisterEvents = register
    library.nvmlEventSetWait_v2 = wait
    library.nvmlEventSetFree = registered.remove
