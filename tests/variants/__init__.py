"""Correct AMPs that differ from today's torch where its documentation leaves the choice: none fails a contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.faults import Fault, import_modules
from tests.faults.campaigns.campaign import run
from tests.variants import chapters

Uses = Counter[str]
Change = Callable[[Uses], Iterator[None]]


@dataclass(frozen=True)
class Variant:
    """One correct AMP: what differs and what allows it, and the contracts that are the most likely to object.

    `uses` counts the calls of what was put in torch's place: a variant that nothing calls shows nothing.
    """

    name: str
    summary: str
    contracts: tuple[str, ...]
    change: Change
    possible: Callable[[], bool] = lambda: True
    uses: Uses = field(default_factory=Counter)

    def objection(self) -> str:
        """Run its contracts with the variant in torch's place, put torch back, and return what is wrong or nothing."""
        self.uses.clear()
        outcome = run(Fault(self.name, self.summary, self.contracts, lambda: self.change(self.uses)))
        if outcome.status or outcome.failed or outcome.errors:
            return f"exit status {outcome.status}\n{outcome.output}"
        judged = {case["contract"] for case in outcome.cases if case["verdict"] in ("PASS", "WAIVED")}
        if unjudged := sorted(set(self.contracts) - judged):
            return f"{', '.join(unjudged)}: not judged\n{outcome.output}"
        return "" if self.uses.total() else "nothing called the variant"


_REGISTRY: dict[str, Variant] = {}


def variant(*contracts: str, possible: Callable[[], bool] = lambda: True) -> Callable[[Change], Change]:
    """Register a generator function that changes torch, yields, and puts it back.

    Its docstring says what differs and, in a second paragraph, what allows it. It counts in its argument each call of
    what it put in place.
    """

    def register(change: Change) -> Change:
        name = change.__name__
        if name in _REGISTRY:
            raise ValueError(f"two variants are named {name}")
        summary, _, allowed = (change.__doc__ or "").strip().partition("\n\n")
        if not allowed:
            raise ValueError(f"the docstring of {name} does not say what allows it")
        _REGISTRY[name] = Variant(name, summary, contracts, change, possible)
        return change

    return register


def load() -> dict[str, Variant]:
    """Import every module of variants and return all of them by name."""
    import_modules(chapters)
    return dict(_REGISTRY)
