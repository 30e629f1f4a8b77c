"""No contract fails on a correct AMP that differs from today's torch, and each variant is in use while it is judged."""

from __future__ import annotations

import pytest

from conformance.harness import catalogue
from tests.variants import Variant, load

VARIANTS = load()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_correct_variant_fails_no_contract(variant: Variant) -> None:
    if not variant.possible():
        pytest.skip("this torch lacks what the variant replaces")
    outcome = variant.judged()

    assert (outcome.status, outcome.failed, outcome.errors) == (0, frozenset(), frozenset()), outcome.output
    judged = {case["contract"] for case in outcome.cases if case["verdict"] in ("PASS", "WAIVED")}
    assert judged == set(variant.contracts), outcome.output
    assert variant.uses.total() > 0, "nothing called the variant"


def test_variants_name_contracts_that_exist() -> None:
    known = catalogue.load()

    assert [
        (variant.name, contract)
        for variant in VARIANTS.values()
        for contract in variant.contracts
        if not known.select((), (contract,))
    ] == []
