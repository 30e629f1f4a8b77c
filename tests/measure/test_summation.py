"""Simulated matrix units of known width, rounding, alignment and order are recognised for what they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conformance.measure import fingerprint, summation
from conformance.measure.fingerprint import product_rows
from conformance.measure.summation import Accumulator, Swamping
from tests.simulation.matrix_units import A100, A100_TF32, H100, H100_TF32, V100, Unit

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NEAREST, ZERO = "fp32, to nearest even", "fp32, toward zero"
RUNNING = "one running sum"


def _blocks(length: int, extra: str) -> dict[str, str]:
    return {
        "accumulator": ZERO,
        "order of 64 terms": f"blocks of {length} added at once",
        "added at once": f"{length} products",
        "extra alignment bits": extra,
        "partial sums": "none",
    }


CLEAN = {
    "accumulator": NEAREST,
    "partial sums": "none",
    "order of 64 terms": RUNNING,
    "order of 1024 terms": RUNNING,
    "added at once": "1 product",
    "extra alignment bits": "none to see",
    "subnormal operands": "kept",
    "subnormal products": "kept",
    "subnormal results": "kept",
}


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_an_fp32_accumulator_that_adds_one_after_the_other(dtype: torch.dtype) -> None:
    found = product_rows(Unit(), dtype)

    assert {name: found[name] for name in CLEAN} == CLEAN
    assert found.get("result", "to nearest even") == "to nearest even"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("unit", "length", "extra"), [(V100, 4, "0"), (A100, 8, "1"), (H100, 16, "2")], ids=["V100", "A100", "H100"]
)
def test_tensor_cores(unit: Unit, length: int, extra: str, dtype: torch.dtype) -> None:
    """Block lengths and alignment bits of Khattak and Mikaitis's models, truncation of Fasi et al."""
    found = product_rows(unit, dtype)

    expected = CLEAN | _blocks(length, extra) | {"result": "to nearest even"}
    assert {name: found[name] for name in expected if name != "order of 1024 terms"} == {
        name: value for name, value in expected.items() if name != "order of 1024 terms"
    }


@pytest.mark.parametrize(("unit", "length", "extra"), [(A100_TF32, 4, "1"), (H100_TF32, 8, "2")], ids=["A100", "H100"])
def test_tensor_cores_in_tf32(unit: Unit, length: int, extra: str) -> None:
    found = product_rows(unit, FP32)

    expected = _blocks(length, extra) | {"operands": "11 bits (fp16)"}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("unit", "dtype", "rows"),
    [
        (Unit(bits=11, largest=65504.0), FP16, {"accumulator": "fp16, to nearest even", "order of 64 terms": RUNNING}),
        (Unit(bits=8), BF16, {"accumulator": "bf16, to nearest even"}),
        (Unit(bits=11, mode="zero", largest=65504.0), FP16, {"accumulator": "fp16, toward zero"}),
        (Unit(bits=19), BF16, {"accumulator": "19 bits, to nearest even"}),
        (Unit(bits=40), FP16, {"accumulator": "40 bits, to nearest even"}),
        (Unit(bits=40), FP32, {"accumulator": "40 bits, to nearest even"}),
        (Unit(mode="zero"), FP16, {"accumulator": ZERO}),
        (Unit(mode="away"), FP16, {"accumulator": "fp32, to nearest, ties away"}),
        (Unit(mode="up"), BF16, {"accumulator": "fp32, up"}),
        (Unit(mode="odd"), BF16, {"accumulator": "fp32, to odd"}),
        (Unit(result_mode="zero"), FP16, {"result": "toward zero"}),
        (Unit(result_mode="away"), BF16, {"result": "to nearest, ties away"}),
        (Unit(flushes_inputs=True), FP16, {"subnormal operands": "flushed", "subnormal results": "kept"}),
        (Unit(flushes_inputs=True), BF16, {"subnormal operands": "flushed"}),
        (Unit(flushes_results=True), FP16, {"subnormal operands": "kept", "subnormal results": "flushed"}),
        (Unit(input_bits=8), FP16, {"operands": "8 bits (bf16)"}),
        (Unit(input_bits=8), FP32, {"operands": "8 bits (bf16)"}),
        (
            Unit(parts=2, partial_bits=11),
            FP16,
            {"accumulator": NEAREST, "partial sums": "fp16, to nearest even"},
        ),
        (
            Unit(parts=4, partial_bits=8),
            BF16,
            {
                "partial sums": "bf16, to nearest even",
                "order of 1024 terms": "partial sums of 256, added one after the other",
            },
        ),
        (
            Unit(parts=8, interleaved=True),
            FP16,
            {"order of 64 terms": "8 interleaved partial sums, added one after the other", "partial sums": NEAREST},
        ),
        (
            dataclasses.replace(H100, parts=2),
            BF16,
            {
                "order of 64 terms": "partial sums of 32, each blocks of 16 added at once, added one after the other",
                "added at once": "16 products",
            },
        ),
        (Unit(block=8, extra=3), FP16, {"extra alignment bits": "3", "accumulator": NEAREST}),
        (Unit(block=32, extra=1, mode="zero"), BF16, _blocks(32, "1")),
        (Unit(block=16, extra=8, mode="zero"), BF16, _blocks(16, "8 or more")),
        (
            Unit(bits=50),
            FP16,
            {"accumulator": "43 bits or more", "order of 64 terms": "no order: no term swamps another"},
        ),
    ],
)
def test_other_units(unit: Unit, dtype: torch.dtype, rows: dict[str, str]) -> None:
    found = product_rows(unit, dtype)

    assert {name: found[name] for name in rows} == rows


@pytest.mark.parametrize("parts", [2, 4, 8, 16])
@pytest.mark.parametrize("outer", [summation.running, summation.halves, summation.folded])
@pytest.mark.parametrize("inner", [summation.running, summation.halves])
def test_orders_are_found_again(parts: int, outer: object, inner: object) -> None:
    """A sum made by a known tree gives that tree back, whatever it is."""
    places = list(range(64))
    made = summation.sorted_tree(outer([inner(places[at::parts]) for at in range(parts)]))  # type: ignore[operator]

    def evaluate(node: summation.Tree, products: torch.Tensor) -> torch.Tensor:
        if isinstance(node, int):
            return products[:, node]
        total = evaluate(node[0], products)
        for part in node[1:]:
            total = total + evaluate(part, products)
        return total

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.diag(evaluate(made, left.float() * right.float().t()).to(left.dtype))

    found = summation.tree(Swamping(product, BF16, 64))

    assert summation.sorted_tree(found) == made
    assert "mark" not in summation.described(found, 64)


def test_an_order_without_a_name_has_a_mark_of_its_own() -> None:
    strange = ((0, 5), ((1, 4), (2, 3)))
    other = ((0, 5), ((1, 3), (2, 4)))

    assert summation.described(strange, 6).startswith("an order of its own (mark ")
    assert summation.described(strange, 6) != summation.described(other, 6)


def test_results_that_fit_no_order_are_said_to_be_irregular() -> None:
    generator = torch.Generator().manual_seed(0)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.float() @ right.float()) + torch.randn(64, 64, generator=generator)

    assert product_rows(product, BF16)["order of 64 terms"].startswith("irregular: of 64 equal terms ")


@pytest.mark.parametrize(
    ("found", "terms", "bound"),
    [
        (Accumulator(24, "to nearest even"), 1000, 1000 * 2.0**-24 / (1 - 1000 * 2.0**-24)),
        (Accumulator(24, "toward zero"), 1000, None),
        (Accumulator(None, "not seen"), 1000, None),
    ],
)
def test_the_bound_that_an_accumulator_implies(found: Accumulator, terms: int, bound: float | None) -> None:
    assert found.error(terms) == bound


@pytest.mark.parametrize(
    ("unit", "share"),
    [(Unit(), 0.25), (Unit(mode="zero"), 0.5), (V100, 0.75), (A100, 0.34375), (H100, 0.1640625), (Unit(bits=11), 1.0)],
)
def test_the_bound_of_a_unit_only_tightens_the_known_one(unit: Unit, share: float) -> None:
    """Shares of n 2^-22: 1.5, 0.69 and 0.33 of n 2^-23 for the three tensor cores, as derived from their models."""
    found = fingerprint.summation(unit, BF16)

    assert found.error(1024) / (1024 * 2.0**-22) == pytest.approx(share, rel=1e-3)


def test_this_processor_is_recognised() -> None:
    """fp32 products are exact in fp32 and summed to nearest by every library that torch uses on a CPU."""
    found = product_rows(torch.mm, FP32)

    assert found["accumulator"] == NEAREST
    assert found["operands"] == "24 bits (fp32)"
