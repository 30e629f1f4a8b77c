"""Check that nested contexts of autocast, autograd, attention and libraries each restore what they found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.region import stack_model
from . import process_settings
from .nested_contexts import FAMILIES, HOOKS, READ, SavedBy, Setting, random_setting
from .support import Interruption, random_region

DEPTH = 5


class Nesting:
    """Random nestings of contexts, whose state is read before, inside and after each."""

    def __init__(self, target: Target, rng: torch.Generator) -> None:
        self.target, self.rng, self.saved = target, rng, SavedBy()
        self.wrong: list[str] = []
        self.left = 0

    def read(self) -> tuple[dict[str, Any], stack_model.State]:
        settings = process_settings.observe(self.target.device, READ) | {HOOKS: self.saved.read()}
        return settings, stack_model.observe()

    def chosen(self, family: str | None) -> Setting:
        """Return a random context, more often of this family than of another."""
        if family is None or torch.rand((), generator=self.rng) < 0.4:
            family = FAMILIES[int(torch.randint(len(FAMILIES), (), generator=self.rng))]
        if family == "regions":
            region = random_region(self.target, self.rng)
            return Setting(str(region), region.open)
        return random_setting(self.rng, self.saved, family)

    def _restored(self, before: tuple[dict[str, Any], stack_model.State], what: str) -> None:
        self.left += 1
        settings, state = self.read()
        found = process_settings.changes(before[0], settings) + state.differences(before[1])
        self.wrong += [f"{what}: {one}" for one in found]

    def visit(self, around: tuple[str, ...] = (), family: str | None = None) -> None:
        """Enter a context, visit others in it, and leave it, also by an exception that several contexts may pass on."""
        before, setting = self.read(), self.chosen(family)
        what = " in ".join((setting.name, *around))
        try:
            with setting.open():
                inside = self.read()[0]
                self.wrong += [
                    f"inside {what}: {name} is {inside[name]}, not {value}"
                    for name, value in setting.sets.items()
                    if name in inside and inside[name] != value
                ]
                if len(around) < DEPTH:
                    for _ in range(int(torch.randint(3, (), generator=self.rng))):
                        self.visit((setting.name, *around), setting.family)
                if torch.rand((), generator=self.rng) < 0.3:
                    raise Interruption(int(torch.randint(len(around) + 1, (), generator=self.rng)))
        except Interruption as error:
            self._restored(before, f"after an exception left {what}")
            if error.args[0] < len(around):
                raise
        else:
            self._restored(before, f"after {what}")


@contract("AMP-REGION-117")
@pytest.mark.filterwarnings(
    "ignore:Anomaly Detection has been enabled",
    "ignore:.*sdp_kernel.*:FutureWarning",
    "ignore:TF32 acceleration on top of oneDNN",  # of mkldnn.flags without an Intel GPU
)
def test_nested_contexts_restore_what_they_found(case: Case, target: Target, rng: torch.Generator) -> None:
    nesting = Nesting(target, rng)
    count = case.samples(quick=300, standard=2000, full=20000)
    while nesting.left < count:
        before = process_settings.observe(target.device)
        nesting.visit()
        changed = process_settings.changes(before, process_settings.observe(target.device))
        nesting.wrong += [f"after all contexts: {one}" for one in changed]
    case.note("contexts left", nesting.left)
    case.equal("what contexts did not set or restore", nesting.wrong[:3], [])
