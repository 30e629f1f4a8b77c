"""A pytest item as a case: its contract, its id, its target and its parameters, read off its marks once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .check import DEPTHS

CHAPTERS = Path(__file__).resolve().parent.parent / "chapters"
# What each check of a chapter needs of a device, beside what the check itself names (check.needs).
_OF_CHAPTERS = {"COMPILE": ("traced tensors",)}
"""The folder of the checks."""

_MARKS = (
    "contract(id, on, dtypes): the contract that a check asserts",
    "per_target(name, values): values(target) parametrises the check on each target",
    "depth(level): the case is left out below this --level",
    "by_seed(level, count): from this --level to below full the seed chooses `count` of the parameters with this mark",
    "needs(capabilities): what the target must be capable of, or UNSUPPORTED",
    "applies(absent): absent(target) says what the machine cannot have, or None",
    "timed: the check takes times or peaks of memory, on a machine of its own",
    "trains(fewest, quick, standard, full): how many steps the check trains the user's workload, by level",
    "by_rules: the check takes the rule of each op from what the device declares, also from a surface",
    "alone: the check needs most of the memory, so that it runs after all others, in one process",
)


def register_marks(config: pytest.Config) -> None:
    """Tell pytest the marks of the suite; it refuses others."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    if not config.pluginmanager.has_plugin("warnings"):  # -p no:warnings, without which pytest knows the mark itself
        config.addinivalue_line("markers", "filterwarnings(warning): has no effect without pytest's plugin")


@dataclass(frozen=True)
class Facts:
    """What the marks and parameters of an item say."""

    contract: str
    kinds: tuple[str, ...]
    """The kinds of targets that the check runs on."""
    dtypes: tuple[str, ...]
    """The amp dtypes that the check is about, by their short names."""
    id: str
    parameters: Mapping[str, Any]
    depth: int
    """The place in DEPTHS of the level that the case needs."""
    stand_in: bool
    """Whether it is no case, but stands for those that the targets or dtypes of the run leave out."""
    timed: bool
    alone: bool
    """Whether the case runs after all others, in one process; those that are timed or of the user's workload do."""
    own: bool
    """Whether it is about the user's workload."""
    by_rules: bool
    """Whether the check takes the rule of each op from what the device declares."""
    steps: Mapping[str, int]
    """How many steps it trains the user's workload, by level, and the fewest; empty where nobody said."""
    by_target: bool
    needs: tuple[str, ...]
    """The capabilities of a target that the check is about."""
    absent: Callable[[Any], str | None] | None
    """Says of a target what the machine cannot have for the case, or None."""

    @property
    def target(self) -> Any:
        """The target, or None for a check without one."""
        return self.parameters.get("target")

    @property
    def target_name(self) -> str:
        return "host" if self.target is None else str(self.target.name)


_FACTS: pytest.StashKey[Facts | None] = pytest.StashKey()


def facts(item: pytest.Item) -> Facts | None:
    """Return what `item` is a case of, or None where it asserts no contract."""
    if _FACTS not in item.stash:
        item.stash[_FACTS] = _read(item)
    return item.stash[_FACTS]


def of_case(item: pytest.Item) -> Facts:
    """Return what `item`, which asserts a contract, is a case of."""
    found = facts(item)
    assert found is not None
    return found


def _read(item: pytest.Item) -> Facts | None:
    marks = list(item.iter_markers())
    closest = {mark.name: mark for mark in reversed(marks)}
    contract = closest.get("contract")
    if contract is None:
        return None
    callspec = getattr(item, "callspec", None)
    parameters = {} if callspec is None else dict(callspec.params)
    stand_in = any(name in parameters and parameters[name] is None for name in ("target", "amp_dtype"))
    own = "own" in getattr(item, "fixturenames", ()) and not stand_in
    name = getattr(item, "originalname", item.name).removeprefix("test_")
    return Facts(
        contract=contract.args[0],
        kinds=contract.kwargs["on"],
        dtypes=contract.kwargs["dtypes"],
        id=f"{contract.args[0]}[{name}:{callspec.id}]" if callspec else f"{contract.args[0]}[{name}]",
        parameters=parameters,
        depth=depth(marks),
        stand_in=stand_in,
        timed="timed" in closest and not stand_in,
        alone=own or (("timed" in closest or "alone" in closest) and not stand_in),
        own=own,
        by_rules="by_rules" in closest,
        steps=dict(closest["trains"].kwargs) if "trains" in closest else {},
        by_target="per_target" in closest,
        needs=(
            *_OF_CHAPTERS.get(contract.args[0].split("-")[1], ()),
            *(name for mark in marks if mark.name == "needs" for name in mark.args),
        ),
        absent=closest["applies"].args[0] if "applies" in closest and not stand_in else None,
    )


def depth(marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> int:
    """Return the deepest level, counted from 0, that `marks` name."""
    return max((DEPTHS.index(mark.args[0]) for mark in marks if mark.name == "depth"), default=0)
