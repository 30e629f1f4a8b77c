"""What takes the place of the harness in the program of a case; only the parts that the program uses are copied."""

from __future__ import annotations

import base64
import contextlib
import math
import random
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch


class Case:
    """Raise AssertionError at the first thing that is not as promised."""

    def __init__(self, contract: str, level: str, seed: int, amp_dtypes: tuple[torch.dtype, ...]) -> None:
        self.contract = SimpleNamespace(id=contract)
        self.level = level
        self.seed = seed
        self.amp_dtypes = amp_dtypes
        self.evidence: list[Any] = []
        self.broken: str | None = None
        self.allowance = math.inf
        self.now = time.monotonic

    def judge(self, holds: bool, words: str) -> None:
        if not holds:
            self.broken = words
            raise AssertionError(words)

    def equal(self, what: str, seen: Any, expected: Any) -> None:
        holds = bool(seen == expected) and isinstance(seen, bool) == isinstance(expected, bool)
        self.judge(holds, f"{what}: {seen}, not {expected}")

    def identical(self, what: str, seen: torch.Tensor, expected: torch.Tensor) -> None:
        self.judge(
            (seen.dtype, seen.shape) == (expected.dtype, expected.shape), f"{what}: {seen.dtype}, not {expected.dtype}"
        )
        ours, theirs = seen.detach().to_dense().cpu(), expected.detach().to_dense().cpu()
        holds = equal_elements(ours, theirs)
        self.judge(holds, f"{what}: {ours}, not bit for bit {theirs}")

    def at_most(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        self.judge(bool(measured <= bound), f"{what}: {measured} {unit}, not at most {bound}")

    def at_least(self, what: str, measured: float, bound: float, unit: str = "") -> None:
        self.judge(bool(measured >= bound), f"{what}: {measured} {unit}, not at least {bound}")

    def enough(self, target: Target, what: str, judged: int, least: int = 1) -> None:
        self.at_least(what, judged, least)

    def between(self, what: str, measured: float, low: float, high: float, unit: str = "") -> None:
        self.judge(bool(low <= measured <= high), f"{what}: {measured} {unit}, not between {low} and {high}")

    def true(self, what: str, condition: bool, seen: Any = "") -> None:
        self.judge(bool(condition), f"{what}: not so {seen}")

    def raises(
        self, what: str, exception: type[BaseException], call: Callable[[], object], *, names: Sequence[str] = ()
    ) -> BaseException:
        raised: Exception | None = None
        try:
            call()
        except Exception as error:
            raised = error
        self.judge(isinstance(raised, exception) and named(names, str(raised)), f"{what}: raised {raised!r}")
        assert raised is not None
        return raised

    def warns(self, what: str, category: type[Warning], call: Callable[[], Any], *, names: Sequence[str] = ()) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        fits = [one for one in caught if issubclass(one.category, category) and named(names, str(one.message))]
        self.judge(bool(fits), f"{what}: warned {[str(one.message) for one in caught]}")
        return result

    def samples(self, *, quick: int, standard: int, full: int) -> int:
        return {"quick": quick, "standard": standard, "full": full}[self.level]

    def supported(self, target: Target) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in self.amp_dtypes if target.supports(dtype))

    def require(self, target: Target, *dtypes: torch.dtype) -> None:
        if not all(map(target.supports, dtypes)):
            self.unsupported(f"{target.name} does not compute natively in {dtypes}")

    def require_arithmetic(self, target: Target, *dtypes: torch.dtype) -> None:
        if not all(map(target.computes_in, dtypes)):
            self.unsupported(f"{target.name} does not compute in {dtypes}")

    def require_subnormals(self, target: Target, dtype: torch.dtype | None = None) -> None:
        pass  # the device had them before the case failed

    def require_call(self, target: Target, what: str, call: Callable[[], object]) -> None:
        pass  # it was done before the case failed

    def with_kernels(self, target: Target, programs: Mapping[str, Callable[[], object]]) -> tuple[str, ...]:
        return tuple(programs)  # a failed case names what failed

    def require_fused(self, target: Target, optimizer: type[torch.optim.Optimizer]) -> None:
        pass

    def unsupported(self, reason: str) -> None:
        raise SystemExit(f"not judged: {reason}")

    def untestable(self, reason: str) -> None:
        raise SystemExit(f"not judged: {reason}")

    def inconclusive(self, reason: str) -> None:
        raise SystemExit(f"not judged: {reason}")

    def note(self, what: str, measured: Any, unit: str = "") -> None:
        print(what, measured, unit)

    def history(self, what: str, scales: Any) -> None:
        print(what, list(scales))

    def fingerprint(self, sections: Any) -> None:
        print(sections)

    def speedup(self, key: str, figures: Any) -> None:
        print(key, figures)

    def progress(self, words: str) -> None:
        print(words)

    def timings(self, seconds: Any, info: Any) -> None:
        print(info)

    def reproduce(self, snippet: str) -> None:
        print(snippet)


def equal_elements(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether all elements have the same bits; NaNs match NaNs of any payload."""
    if ours.is_complex():
        return equal_elements(torch.view_as_real(ours), torch.view_as_real(theirs))
    if not ours.is_floating_point():
        return bool(torch.equal(ours, theirs))
    same = (ours == theirs) & (ours.signbit() == theirs.signbit())
    return bool((same | (ours.isnan() & theirs.isnan())).all())


def named(names: Sequence[str], message: str) -> bool:
    """Whether a message has each name, in one of its spellings, as a word of its own."""
    return all(
        any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", message, re.IGNORECASE) for one in name.split("|"))
        for name in names
    )


class Target:
    """The device of the case; where it is fake, its autocast kernels are reached without the hardware."""

    def __init__(self, name: str, device_type: str, index: int | None, is_fake: bool, probe: dict[str, Any]) -> None:
        self.name = name
        self.device_type = device_type
        self.index = index
        self.is_fake = is_fake
        self.probe = probe
        self.device = torch.device(device_type) if index is None else torch.device(device_type, index)

    def supports(self, dtype: torch.dtype) -> bool:
        return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype) in self.probe["amp_dtypes"]

    def computes_in(self, dtype: torch.dtype) -> bool:
        return str(dtype) not in self.probe["without"]

    def lacks(self, capability: str) -> str | None:
        return None

    @contextlib.contextmanager
    def autocast(
        self, dtype: torch.dtype, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> Iterator[None]:
        if not self.is_fake:
            with torch.autocast(self.device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled):
                yield
            return
        # torch.autocast disables itself without the hardware.
        kind, cached = self.device_type, torch.is_autocast_cache_enabled()
        before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        torch.autocast_increment_nesting()
        try:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(cached if cache_enabled is None else cache_enabled)
            with self.dispatched() if enabled else contextlib.nullcontext():
                yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(kind, before[0])
            torch.set_autocast_dtype(kind, before[1])
            torch.set_autocast_cache_enabled(cached)

    def dispatched(self) -> contextlib.AbstractContextManager[Any]:
        if self.device_type != "maia":
            return contextlib.nullcontext()
        guard: contextlib.AbstractContextManager[Any] = torch._C._IncludeDispatchKeyGuard(
            torch._C._dispatch_key_parse("AutocastMAIA")
        )
        return guard

    def synchronize(self) -> None:
        if not self.is_fake and self.device_type != "cpu":
            torch.get_device_module(self.device_type).synchronize()

    def current(self) -> contextlib.AbstractContextManager[Any]:
        if self.is_fake or not self.index:
            return contextlib.nullcontext()
        made: contextlib.AbstractContextManager[Any] = torch.get_device_module(self.device_type).device(self.index)
        return made


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's global generators as the run did."""
    random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class DataFile(str):
    """The name of a file of the suite whose text is copied below, compressed."""

    def read_text(self, encoding: str = "utf-8") -> str:
        return zlib.decompress(base64.b85decode(FILES[self])).decode(encoding)


def fixture(name: str) -> DataFile:
    return DataFile(name)


def read_toml(path: str) -> Any:
    return FILES[path]


FILES: dict[str, Any] = {}
