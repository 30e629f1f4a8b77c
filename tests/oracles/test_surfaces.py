"""The rules of a surface that a device declares: in the lists, and in casts that are made manually."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from conformance.oracles.manual_cast import ManualCast
from conformance.oracles.policy import declared, overloads
from conformance.oracles.policy.declaration import Declaration, Undetermined
from conformance.oracles.policy.lists import Listing, by_surface, declared_policies, listings, sets_dtype

LOW, SINGLE = torch.bfloat16, torch.float32
DEVICE = "mtia"  # has no lists of its own
Declare = Callable[..., None]


@pytest.fixture
def declare() -> Iterator[Declare]:
    """Declare CUDA's rules for another device, but for some by overload."""

    def declared_with(**rules: str) -> None:
        # Dots are no part of a keyword's name.
        named = {overload.replace("__", "."): policy for overload, policy in rules.items()}
        policies = {**overloads.known("cuda"), **named}
        changed = overloads.other_rules(policies, "cuda")
        declared.declare({DEVICE: Declaration("cuda", "vendor.json", policies, changed)})

    yield declared_with
    declared.declare({})


def _row(name: str) -> Listing:
    return next(row for row in listings("cuda") if row.name == name)


def _types(*calls: Callable[[torch.Tensor], Any], given: torch.dtype = SINGLE) -> list[torch.dtype]:
    with FakeTensorMode(), ManualCast(DEVICE, LOW):
        x = torch.empty(2, 2, device=DEVICE, dtype=given)
        return [call(x).dtype for call in calls]


# Lists


def test_surface_of_the_lists_changes_none_of_them(declare: Declare) -> None:
    rows = listings("cuda")
    declare()

    assert declared.changed(DEVICE) == frozenset()
    assert listings(DEVICE) == rows


@pytest.mark.parametrize(("policy", "changed"), [("lower_precision", set()), ("fp32", {"conv2d"})])
def test_one_more_overload_of_the_policy_of_an_op_changes_it_not(
    declare: Declare, policy: str, changed: set[str]
) -> None:
    declare(conv2d__padding=policy)

    assert declared.changed(DEVICE) == changed


@pytest.mark.parametrize("policy", ["lower_precision", "fp32", "widest"])
def test_op_of_one_policy_is_on_its_list(declare: Declare, policy: str) -> None:
    before = _row("mm")
    declare(mm=policy)

    assert declared.changed(DEVICE) == (frozenset() if policy == "lower_precision" else {"mm"})
    seen = by_surface(before, DEVICE)
    assert seen is not None
    assert (seen.policy, seen.name, seen.sample) == (policy, "mm", before.sample)
    assert [row.policy for row in listings(DEVICE) if row.name == "mm"] == [policy]
    assert "mm" in {row.name for row in listings(DEVICE, policy)}


def test_op_that_is_not_changed_keeps_its_row(declare: Declare) -> None:
    before = _row("bmm")
    declare(mm="fp32")

    assert by_surface(before, DEVICE) is before


@pytest.mark.parametrize("policy", ["unlisted", "banned"])
def test_op_that_casts_no_argument_is_on_no_list(declare: Declare, policy: str) -> None:
    before = _row("mm")
    declare(mm=policy)

    assert by_surface(before, DEVICE) is None
    assert "mm" not in {row.name for row in listings(DEVICE)}


def test_op_whose_overloads_have_several_policies_is_on_no_list(declare: Declare) -> None:
    before = _row("pow")
    declare(pow__Tensor_Scalar="lower_precision")

    assert declared_policies("pow", DEVICE) == {"fp32", "lower_precision"}
    assert by_surface(before, DEVICE) is None


def test_op_that_is_given_a_dtype_is_on_the_list_of_another_policy_alone(declare: Declare) -> None:
    before = _row("softmax")
    assert sets_dtype(before)
    every = {one.replace(".", "__"): "lower_precision" for one in overloads.known("cuda") if one.startswith("softmax.")}
    declare(**every)

    seen = by_surface(before, DEVICE)
    assert seen is not None
    assert seen.policy == "lower_precision"


def test_rule_rests_on_the_ops_that_are_named(declare: Declare) -> None:
    before = _row("mm")
    declare(mm="fp32")

    assert by_surface(before, DEVICE, ["bmm"]) is before


def test_another_device_has_its_own_lists(declare: Declare) -> None:
    before = listings("cpu")
    declare(mm="fp32")

    assert listings("cpu") == before


# Manual casts


def test_manual_casts_follow_a_rule_that_moved(declare: Declare) -> None:
    declare(exp="lower_precision", linear="fp32")

    assert _types(torch.exp, lambda x: F.linear(x, x), lambda x: x @ x) == [LOW, SINGLE, LOW]
    assert _types(lambda x: F.linear(x, x), given=LOW) == [SINGLE]


def test_manual_casts_leave_an_op_alone_whose_rule_is_gone(declare: Declare) -> None:
    assert _types(torch.exp, torch.log, given=LOW) == [SINGLE, SINGLE]
    declare(exp="unlisted")

    assert _types(torch.exp, torch.log, given=LOW) == [LOW, SINGLE]


def test_manual_casts_know_a_rule_that_was_added(declare: Declare) -> None:
    declare(relu="lower_precision")

    assert _types(torch.relu, torch.sin) == [LOW, SINGLE]


def test_op_made_of_others_that_have_rules_is_undetermined_without_one(declare: Declare) -> None:
    declare(linear="unlisted")

    x = torch.ones(2, 2)

    words = "has no rule for linear, and rules for ops that it is made of"
    with pytest.raises(Undetermined, match=words), ManualCast(DEVICE, LOW):
        F.linear(x, x)


def test_op_without_a_rule_that_is_made_of_none_with_one_is_left_alone(declare: Declare) -> None:
    declare(linear="unlisted")

    with ManualCast(DEVICE, LOW):
        assert torch.ones(2, 2, dtype=LOW).relu().dtype == LOW


def test_rule_that_depends_on_the_overload_is_undetermined(declare: Declare) -> None:
    declare(pow__Tensor_Scalar="lower_precision")

    with pytest.raises(Undetermined, match="has no one rule of a list for pow"):
        _types(lambda x: torch.pow(x, x))


def test_without_a_surface_nothing_is_undetermined() -> None:
    assert _types(lambda x: torch.pow(x, x), given=LOW) == [SINGLE]
