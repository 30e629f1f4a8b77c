"""What a run reached: its targets, the accelerators that it left out, and the chapters that it mostly did not reach."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import text
from .values import Header, Report, Target
from .verdicts import EXECUTED, Verdict

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NAMED = 2  # fake targets that are named, not counted


@dataclass(frozen=True)
class Gap:
    """A chapter of which fewer contracts were judged than are `missing`; `target` is None where that is so on all."""

    chapter: str
    target: str | None
    judged: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        where = f" on {self.target}" if self.target else ""
        whole = text.count(self.judged + len(self.missing), "contract")
        return f"{self.judged} of {whole} of the chapter {self.chapter} reached{where}"


def gaps(report: Report) -> list[Gap]:
    """Return the chapters that were largely not reached; a run with one is PARTIAL.

    A contract is missing if no case of it was judged, though nothing that the user asked for leaves it out and its
    target does not declare to lack what it needs: all its cases are UNTESTABLE, or footer.unreached names it.
    """
    footer = report.footer
    unreached = footer.unreached if footer else {}
    anywhere = {id for ids in unreached.values() for id in ids}
    found = []
    for chapter in report.header.chapters:
        ids = [row.id for row in report.header.contracts if row.chapter == chapter.name and row.level != "info"]
        places: list[tuple[str | None, Collection[str]]] = [(None, anywhere), *unreached.items()]
        for target, without_cases in places:
            verdicts = {
                id: {case.verdict for case in report.cases_of[id] if target in (None, case.target)} for id in ids
            }
            judged = sum(bool(seen & EXECUTED) for seen in verdicts.values())
            missing = [
                id
                for id, seen in verdicts.items()
                if not seen & EXECUTED and (id in without_cases or (target is None and Verdict.UNTESTABLE in seen))
            ]
            if judged < len(missing):
                found.append(Gap(chapter.name, target, judged, tuple(missing)))
                break  # what is so on all targets is not repeated for each
    return found


def on(report: Report) -> str:
    """Name the targets on which a run judged something, in a few words: `cpu and five fake accelerators`."""
    judged = {case.target for case in report.cases if case.verdict in EXECUTED}
    targets = [target for target in report.header.targets if target.name in judged] or report.header.targets
    names = [_named(target) for target in targets if not target.fake]
    fakes = [target.name for target in targets if target.fake]
    if len(fakes) > _NAMED:
        number = _NUMBERS[len(fakes)] if len(fakes) < len(_NUMBERS) else str(len(fakes))
        fakes = [f"{number} fake accelerators"]
    names += fakes
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no target"


def _named(target: Target) -> str:
    """Name a real target; an accelerator with what it calls itself."""
    name = target.probe.get("name")
    return f"{target.name} ({name})" if target.device_type != "cpu" and isinstance(name, str) else target.name


def not_judged(header: Header) -> Iterator[str]:
    """Say which accelerators are on the machine and were not judged, and which option judges them."""
    environment = header.environment
    judged = any(not target.fake and target.device_type != "cpu" for target in header.targets)
    return unjudged(header.not_judged, judged, environment.driver, environment.torch)


def unjudged(devices: Mapping[str, str], judged: bool, driver: str | None, torch: str) -> Iterator[str]:
    """Say which of `devices`, names by target, are not judged; `judged` says whether another accelerator is.

    Where torch finds none, a GPU's `driver` shows that one may be there.
    """
    names: dict[str, list[str]] = {}
    for device, name in devices.items():
        names.setdefault(name, []).append(device)
    for name, here in names.items():
        option = f"--device {here[0]}" if judged else "--gpu"
        many = f"{len(here)} {name}" if len(here) > 1 else name
        yield f"{many} ({text.some(here, 4)}) {'are' if len(here) > 1 else 'is'} here and NOT judged: add {option}"
    if not devices and not judged and driver is not None:
        yield (
            f"a GPU driver ({driver}) is here and torch {torch} finds no accelerator, so none was judged: see that "
            "this torch is built for it and that no variable hides it"
        )


def entries(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return in words what each entry of torch.backends told."""
    return {
        name: ", ".join(f"{setting}: {text.value(value)}" for setting, value in settings.items()) or "nothing"
        for name, settings in found.items()
    }


def sources(files: Mapping[str, int]) -> str:
    """Say which files outside of torch registered how many autocast kernels of a device type."""
    return ", ".join(f"{count} registered at {text.line(file)}" for file, count in sorted(files.items()))


def replaced(functions: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Say which modules put functions in place of torch's, and which."""
    for origin, names in functions.items():
        yield f"not torch's but of {text.line(origin)}: {text.some([text.line(name) for name in names], 4)}"


def overridden(kernels: Mapping[str, Mapping[str, int]], of_torch: Collection[str]) -> Iterator[str]:
    """Say of which device types of `of_torch`, whose autocast is torch's own, an extension registered kernels."""
    for device_type, files in kernels.items():
        if device_type in of_torch:
            yield f"autocast kernels of {device_type} that are not torch's: {sources(files)}"
