"""No contract fails on a correct AMP that differs from today's torch, and each variant is in use while it is judged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.harness import catalogue
from conformance.self_check.planting import replaced
from tests.variants import Uses, Variant, load

VARIANTS = load()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_correct_variant_fails_no_contract(variant: Variant) -> None:
    if not variant.possible():
        pytest.skip("this torch lacks what the variant replaces")

    if objection := variant.objection():
        pytest.fail(objection, pytrace=False)


def test_variants_name_contracts_that_exist() -> None:
    known = catalogue.load()

    assert [
        (variant.name, contract)
        for variant in VARIANTS.values()
        for contract in variant.contracts
        if not known.select((), (contract,))
    ] == []


def test_variant_that_nothing_calls_is_told() -> None:
    def nothing(uses: Uses) -> Iterator[None]:
        yield

    assert (
        Variant("nothing", "Nothing differs.", ("AMP-SCALE-001",), nothing).objection() == "nothing called the variant"
    )


def test_contract_that_is_not_judged_is_told() -> None:
    def counted(uses: Uses) -> Iterator[None]:
        uses["change"] += 1
        yield

    (complaint, *_) = Variant("counted", "Nothing differs.", ("AMP-REGION-100",), counted).objection().splitlines()

    assert complaint.startswith(("exit status", "AMP-REGION-100"))


def test_failure_is_told() -> None:
    def broken(uses: Uses) -> Iterator[None]:
        with replaced(torch.amp.GradScaler, "get_scale", lambda self: 1.0):
            yield

    complaint = Variant("broken", "The scale is 1.", ("AMP-SCALE-001",), broken).objection()

    assert "FAIL AMP-SCALE-001" in complaint
