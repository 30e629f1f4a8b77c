"""Check the types that the settings of mixed precision name, and means near the end of float16's range."""

from __future__ import annotations

import pytest

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from .precision_settings import GROUPS, LARGE, every_type, mean_of_large, promised, sampled, settings
from .processes import Groups
from .support import LISTED, absent, answers

pytestmark = pytest.mark.usefixtures("one_thread")


@contract("AMP-DISTRIBUTED-029", on="cpu")
@pytest.mark.parametrize("group", GROUPS)
def test_types_of_settings(case: Case, target: Target, ranks: Groups, group: str) -> None:
    if reason := absent(GROUPS[group][0]):
        case.unsupported(reason)
    turn = (list(GROUPS).index(group) + case.seed) % len(case.amp_dtypes)
    for dtype in case.amp_dtypes[turn:][:1] if case.level == "quick" else case.amp_dtypes:
        every = list(settings(group, dtype)) if case.level == "full" else sampled(group, dtype, case.seed)
        for rank, found in enumerate(answers(case, ranks, 2, every_type, group, every)):
            case.equal(f"rank {rank}, {dtype}: combinations of settings", len(found), len(every))
            wrong: dict[str, str] = {}
            for given, seen in zip(every, found, strict=True):
                right = promised(given)
                text = ", ".join(f"{name}={value}" for name, value in given.items())
                wrong |= {f"{part} with {text}": one for part, one in seen.items() if one != right[part]}
            case.equal(f"rank {rank}, {dtype}: dtypes that the settings do not name", _first(wrong), {})


def _first(found: dict[str, str]) -> dict[str, str]:
    return dict(list(found.items())[:LISTED])


def _large(case: Case, ranks: Groups, name: str, world: int) -> None:
    """The mean of gradients that float16 holds is finite, though it does not hold their sum."""
    for rank, found in enumerate(answers(case, ranks, world, mean_of_large, name)):
        case.at_least(f"rank {rank}: gradients", len(found), 1)
        case.equal(f"rank {rank}: other gradients than {LARGE:g}", [one for one in found if one != LARGE], [])


@contract("AMP-DISTRIBUTED-004", on="cpu")
@pytest.mark.parametrize("world", [2, deep("standard", 4)])
@pytest.mark.parametrize("hook", ["fp16_hook", "fp16_wrapper"])
def test_compressed_means_of_large_gradients(case: Case, target: Target, ranks: Groups, hook: str, world: int) -> None:
    _large(case, ranks, hook, world)


# Of two ranks: fully_shard divides by the root of the number of ranks before it adds up, and by the rest afterwards.
@contract("AMP-DISTRIBUTED-007", on="cpu")
def test_sharded_means_of_large_gradients(case: Case, target: Target, ranks: Groups) -> None:
    _large(case, ranks, "fsdp1", 2)


@contract("AMP-DISTRIBUTED-009", on="cpu")
def test_means_of_large_gradients_under_fully_shard(case: Case, target: Target, ranks: Groups) -> None:
    if reason := absent("fsdp2"):
        case.unsupported(reason)
    _large(case, ranks, "fsdp2", 2)
