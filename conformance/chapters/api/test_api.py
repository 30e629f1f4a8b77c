"""Check the public API of AMP: names, signatures, getters and setters, deprecations and argument errors."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.policy.declared import third_party
from ...oracles.policy.devices import DeviceType, device_types
from ...oracles.region.stack_model import observe, probe_product, product_in
from .documented_api import Deprecated, Signature, deprecated, is_optional, lookup, parameters, signatures

DEVICES = device_types()
AVAILABLE = [device for device in DEVICES if device.dtype is not None]
# A third party's device may have any type as its default, and none in common with torch's.
SET_BY_TORCH = [device for device in AVAILABLE if device.type != third_party()]
DEPRECATED = deprecated()
STATEFUL = [entry for entry in DEPRECATED if entry.use in ("read", "write")]
AMP_DTYPES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def kept(device_type: str) -> Iterator[None]:
    """Restore autocast's flag and dtype of a device type at the end."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def reader(entry: Deprecated) -> Callable[[str], Any]:
    """Return the current getter of the setting that a deprecated getter or setter uses."""
    return torch.get_autocast_dtype if entry.about == "dtype" else torch.is_autocast_enabled


def call(entry: Deprecated) -> Any:
    """Call a deprecated name without changing any state."""
    function = lookup(entry.name)
    if entry.use == "open":
        return function(enabled=False)
    if entry.use == "decorate":
        return function(lambda context: context)
    if entry.use == "write":
        return function(reader(entry)(entry.device))
    return function()


def quietly(function: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


# Deprecations


def names_its_replacement(case: Case, entry: Deprecated) -> None:
    names = (entry.name, entry.function, f"'{entry.device}'|\"{entry.device}\"")
    for use in ("first", "second"):
        case.warns(f"{entry.name}, {use} use", entry.category, lambda: call(entry), names=names)


@contract("AMP-API-001")
@pytest.mark.parametrize("entry", [entry for entry in DEPRECATED if entry.documented], ids=str)
def test_documented_deprecation(case: Case, entry: Deprecated) -> None:
    names_its_replacement(case, entry)


@contract("AMP-API-002")
@pytest.mark.parametrize("entry", STATEFUL, ids=str)
def test_deprecated_getters_and_setters(case: Case, entry: Deprecated) -> None:
    names_its_replacement(case, entry)


@contract("AMP-API-003")
@pytest.mark.parametrize("entry", STATEFUL, ids=str)
def test_deprecated_means_the_same(case: Case, entry: Deprecated) -> None:
    values = AMP_DTYPES if entry.about == "dtype" else (True, False)
    write = torch.set_autocast_dtype if entry.about == "dtype" else torch.set_autocast_enabled
    read = reader(entry)
    with kept(entry.device):
        for value in (*values, *values):
            if entry.use == "read":
                write(entry.device, value)
                case.equal(f"{entry.name}() after setting {value}", quietly(lookup(entry.name)), value)
            else:
                quietly(functools.partial(lookup(entry.name), value))
                case.equal(f"{entry.replacement}, read back", read(entry.device), value)


@contract("AMP-API-004")
def test_current_names_do_not_warn(case: Case) -> None:
    with warnings.catch_warnings(record=True) as caught, kept("cpu"):
        warnings.simplefilter("always")
        with torch.autocast("cpu"):
            torch.amp.GradScaler("cpu")
        torch.amp.custom_fwd(lambda context: context, device_type="cpu")
        torch.amp.custom_bwd(lambda context: context, device_type="cpu")
        torch.amp.is_autocast_available("cpu")
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_cache_enabled(torch.is_autocast_cache_enabled())
    case.equal("warnings", [f"{warning.category.__name__}: {warning.message}" for warning in caught], [])


@contract("AMP-API-005")
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["autocast", "GradScaler"])
def test_deprecated_classes(case: Case, name: str, device_type: str) -> None:
    old = lookup(f"torch.{device_type}.amp.{name}")
    instance = quietly(lambda: old(enabled=False))
    case.true(
        f"torch.{device_type}.amp.{name}() is a torch.amp.{name}", isinstance(instance, lookup(f"torch.amp.{name}"))
    )


# Names and signatures


@contract("AMP-API-010")
@pytest.mark.parametrize("documented", signatures(), ids=str)
def test_signature(case: Case, documented: Signature) -> None:
    seen = parameters(lookup(documented.name))
    count = len(documented.parameters)
    case.equal(f"documented parameters of {documented.name}", seen[:count], documented.parameters)
    case.equal("further parameters that a call needs", [one for one in seen[count:] if not is_optional(one)], [])


@contract("AMP-API-011")
def test_names(case: Case) -> None:
    for name in ("autocast", "GradScaler", "custom_fwd", "custom_bwd", "is_autocast_available"):
        case.true(f"torch.amp.{name} is there and can be called", callable(getattr(torch.amp, name, None)))
    for name in ("autocast", "GradScaler"):
        case.true(f"torch.{name} is torch.amp.{name}", getattr(torch, name, None) is getattr(torch.amp, name))
    case.true("torch.amp.autocast is a class", isinstance(torch.amp.autocast, type))


PUBLIC = ("autocast", "GradScaler", "custom_fwd", "custom_bwd", "is_autocast_available")


@contract("AMP-API-012")
@pytest.mark.parametrize("module", ["torch.amp", "torch.cuda.amp", "torch.cpu.amp"])
def test_star_import(case: Case, module: str) -> None:
    own = importlib.import_module(module)
    promised = {name: getattr(own, name) for name in PUBLIC if module == "torch.amp" or hasattr(own, name)}
    given: dict[str, object] = {}
    exec(f"from {module} import *", given)
    case.equal("names that are missing", sorted(promised.keys() - given.keys()), [])
    case.equal("names of another object", sorted(name for name in promised if given[name] is not promised[name]), [])
    case.at_least("control: names compared", len(promised), 2)


@contract("AMP-API-013")
def test_older_namespaces(case: Case) -> None:
    older = {"cuda": ("autocast", "GradScaler", "custom_fwd", "custom_bwd"), "cpu": ("autocast", "GradScaler")}
    for device_type, names in older.items():
        module = getattr(torch, device_type).amp
        missing = [name for name in names if not callable(getattr(module, name, None))]
        case.equal(f"names missing in torch.{device_type}.amp", missing, [])


# Availability


@contract("AMP-API-020")
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_is_autocast_available(case: Case, device: DeviceType) -> None:
    promised = device.dtype is not None
    case.equal(f"is_autocast_available({device.type!r})", torch.amp.is_autocast_available(device.type), promised)
    with torch.autocast("cpu"):
        inside = torch.amp.is_autocast_available(device.type)
    case.equal("the same in a region", inside, promised)
    if promised:
        case.equal("its flag can be read", torch.is_autocast_enabled(device.type), False)
    else:
        case.raises("reading its flag", RuntimeError, lambda: torch.is_autocast_enabled(device.type))
        case.raises("reading its dtype", RuntimeError, lambda: torch.get_autocast_dtype(device.type))


# Getters and setters


@contract("AMP-API-021")
@pytest.mark.parametrize("device", SET_BY_TORCH, ids=str)
def test_default_dtype(case: Case, device: DeviceType) -> None:
    case.equal(f"get_autocast_dtype({device.type!r})", torch.get_autocast_dtype(device.type), device.dtype)
    seen = torch.get_autocast_dtype(device_type=device.type)
    case.equal("the same with the argument named", seen, device.dtype)


def default_dtype(case: Case, device: DeviceType) -> None:
    seen = {"this thread": torch.get_autocast_dtype(device.type)}
    with ThreadPoolExecutor(max_workers=1) as pool:
        seen["a new thread"] = pool.submit(torch.get_autocast_dtype, device.type).result(timeout=60.0)
    seen["a region with no dtype"] = quietly(lambda: dtype_in_region(device.type))
    for where, dtype in seen.items():
        case.equal(f"autocast dtype for {device.type} in {where}", dtype, device.dtype)


def dtype_in_region(device_type: str) -> torch.dtype:
    with torch.autocast(device_type):
        return torch.get_autocast_dtype(device_type)


@contract("AMP-API-021")
@pytest.mark.parametrize("device", [device for device in SET_BY_TORCH if device.documented], ids=str)
def test_documented_default_dtype(case: Case, device: DeviceType) -> None:
    default_dtype(case, device)


@contract("AMP-API-021")
@pytest.mark.parametrize("device", [device for device in SET_BY_TORCH if not device.documented], ids=str)
def test_registered_default_dtype(case: Case, device: DeviceType) -> None:
    default_dtype(case, device)


def others(device: DeviceType) -> dict[str, tuple[bool, torch.dtype]]:
    return {
        other.type: (torch.is_autocast_enabled(other.type), torch.get_autocast_dtype(other.type))
        for other in AVAILABLE
        if other != device
    }


@contract("AMP-API-022")
@pytest.mark.parametrize("device", AVAILABLE, ids=str)
def test_dtype_round_trip(case: Case, device: DeviceType) -> None:
    before, enabled = others(device), torch.is_autocast_enabled(device.type)
    with kept(device.type):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
            torch.set_autocast_dtype(device.type, dtype)
            case.equal("dtype read back", torch.get_autocast_dtype(device.type), dtype)
        case.equal("its enabled flag", torch.is_autocast_enabled(device.type), enabled)
        case.equal("flags and dtypes of the other device types", others(device), before)


@contract("AMP-API-022")
def test_set_dtype_is_used(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    with kept(target.device_type):
        torch.set_autocast_enabled(target.device_type, True)
        torch.set_autocast_dtype(target.device_type, amp_dtype)
        case.identical("a product of float32 tensors", probe_product(target.device), product_in(amp_dtype))


@contract("AMP-API-023")
@pytest.mark.parametrize("device", AVAILABLE, ids=str)
def test_enabled_round_trip(case: Case, device: DeviceType) -> None:
    before, dtype = others(device), torch.get_autocast_dtype(device.type)
    with kept(device.type):
        for enabled in (True, False, True):
            torch.set_autocast_enabled(device.type, enabled)
            case.equal("enabled read back", torch.is_autocast_enabled(device.type), enabled)
        case.equal("its dtype", torch.get_autocast_dtype(device.type), dtype)
        case.equal("flags and dtypes of the other device types", others(device), before)


@contract("AMP-API-023")
@pytest.mark.parametrize("device", AVAILABLE, ids=str)
def test_enabled_leaves_the_cache_flag(case: Case, device: DeviceType) -> None:
    before = torch.is_autocast_cache_enabled()
    with kept(device.type):
        try:
            for flag in (False, True):
                torch.set_autocast_cache_enabled(flag)
                for enabled in (True, False):
                    torch.set_autocast_enabled(device.type, enabled)
                    torch.set_autocast_dtype(device.type, torch.bfloat16)
                    case.equal(f"cache flag, enabled={enabled}", torch.is_autocast_cache_enabled(), flag)
        finally:
            torch.set_autocast_cache_enabled(before)


@contract("AMP-API-023")
def test_enabled_is_used(case: Case, target: Target, amp_dtype: torch.dtype) -> None:
    with kept(target.device_type):
        torch.set_autocast_dtype(target.device_type, amp_dtype)
        for enabled, dtype in ((True, amp_dtype), (False, torch.float32), (True, amp_dtype)):
            torch.set_autocast_enabled(target.device_type, enabled)
            case.identical(f"a product, enabled={enabled}", probe_product(target.device), product_in(dtype))


@contract("AMP-API-024")
def test_no_device_type_means_cuda(case: Case) -> None:
    with kept("cuda"), kept("cpu"):
        for cuda, cpu in ((True, False), (False, True)):
            torch.set_autocast_enabled("cuda", cuda)
            torch.set_autocast_enabled("cpu", cpu)
            case.equal(f"is_autocast_enabled() with CUDA {cuda} and CPU {cpu}", torch.is_autocast_enabled(), cuda)
        for cuda in (True, False):
            torch.set_autocast_enabled(cuda)
            seen = (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))
            case.equal(f"CUDA's and the CPU's flag after set_autocast_enabled({cuda})", seen, (cuda, True))


@contract("AMP-API-025")
def test_cache_round_trip(case: Case) -> None:
    before = torch.is_autocast_cache_enabled()
    case.equal("cache enabled outside any region", before, True)
    try:
        for enabled in (False, True, False):
            torch.set_autocast_cache_enabled(enabled)
            case.equal("cache enabled read back", torch.is_autocast_cache_enabled(), enabled)
    finally:
        torch.set_autocast_cache_enabled(before)


@contract("AMP-API-026")
def test_nesting_counters(case: Case) -> None:
    start = observe().depth
    seen = [torch.autocast_increment_nesting() for _ in range(3)]
    seen += [torch.autocast_decrement_nesting() for _ in range(3)]
    case.equal("depths that the counters return", seen, [start + one for one in (1, 2, 3, 2, 1, 0)])


# Argument errors

Call = Callable[[], object]

TYPE_ERRORS: dict[str, tuple[Call, str]] = {
    "autocast_no_device": (lambda: torch.autocast(), "device_type"),
    "autocast_keyword": (lambda: torch.autocast("cpu", precision=16), "precision"),
    "available_number": (lambda: torch.amp.is_autocast_available(3), "str"),
    "available_device": (lambda: torch.amp.is_autocast_available(torch.device("cpu")), "str"),
    "custom_fwd_no_device": (lambda: torch.amp.custom_fwd(print), "device_type"),
    "custom_bwd_no_device": (lambda: torch.amp.custom_bwd(print), "device_type"),
    "get_dtype_no_device": (lambda: torch.get_autocast_dtype(), "device_type"),
    "get_dtype_device": (lambda: torch.get_autocast_dtype(torch.device("cpu")), "str"),
    "set_dtype_text": (lambda: torch.set_autocast_dtype("cpu", "float16"), "dtype"),
    "set_dtype_device": (
        lambda: torch.set_autocast_dtype(torch.device("cpu"), torch.bfloat16),
        "str",
    ),
    "set_enabled_text": (lambda: torch.set_autocast_enabled("cpu", "yes"), "bool"),
    "scaler_keyword": (lambda: torch.amp.GradScaler("cpu", scale=2.0), "scale"),
}


@contract("AMP-API-030")
@pytest.mark.parametrize("name", list(TYPE_ERRORS))
def test_type_error(case: Case, name: str) -> None:
    refused, named = TYPE_ERRORS[name]
    before = observe()
    case.raises(name.replace("_", " "), TypeError, refused, names=(named,))
    case.equal("autocast state that differs after it", observe().differences(before), [])


UNKNOWN: dict[str, Callable[[str], object]] = {
    "is_autocast_available": lambda name: torch.amp.is_autocast_available(name),
    "get_autocast_dtype": lambda name: torch.get_autocast_dtype(name),
    "set_autocast_dtype": lambda name: torch.set_autocast_dtype(name, torch.float16),
    "is_autocast_enabled": lambda name: torch.is_autocast_enabled(name),
    "set_autocast_enabled": lambda name: torch.set_autocast_enabled(name, True),
}


@contract("AMP-API-032")
@pytest.mark.parametrize("name", ["nonsense", deep("standard", "CUDA"), deep("standard", "", id="empty")])
@pytest.mark.parametrize("function", list(UNKNOWN))
def test_unknown_device_type(case: Case, function: str, name: str) -> None:
    before = observe()
    case.raises(f"{function}({name!r})", RuntimeError, lambda: UNKNOWN[function](name))
    case.equal("autocast state that differs after it", observe().differences(before), [])
