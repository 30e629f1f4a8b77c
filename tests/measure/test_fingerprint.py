"""Each way of breaking this CPU's arithmetic shows in its fingerprint, in the row that it belongs to."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import pytest
import torch

from conformance.measure import fingerprint as module
from conformance.measure.fingerprint import NAMES, Fingerprint, fingerprint
from conformance.measure.precision import full_precision
from tests.faults.breaking import kernel
from tests.faults.chapters.numerics_fingerprint import LOW, flushing, plain, products, read_in, rounded, summed
from tests.paths import ROOT
from tests.simulation.matrix_units import Unit

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clean() -> Fingerprint:
    return fingerprint(CPU)


def _reversed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return plain(left.flip(1), right.flip(0))


def _noisy(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return plain(left, right) * (1 + 0.01 * torch.rand(()).to(left.dtype))


def _canonical(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    found = plain(left, right)
    canonical = torch.tensor(0x7FFF, dtype=torch.int16).view(found.dtype)
    return torch.where(found.isnan(), canonical, found)


def _few_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return plain(left, right) if left.shape[0] > 8 else _reversed(left, right)


_sixteen_bits = summed(11, "nearest", step=4)


@pytest.mark.parametrize(
    ("broken", "dtypes", "section", "row", "value"),
    [
        (_sixteen_bits, (FP16,), "fp16", "accumulator", "fp16, to nearest even"),
        (summed(8, "nearest"), (BF16,), "bf16", "accumulator", "bf16, to nearest even"),
        (summed(24, "zero"), (FP16,), "fp16", "accumulator", "fp32, toward zero"),
        (summed(24, "zero"), (FP32,), "fp32", "accumulator", "fp32, toward zero"),
        (summed(19, "nearest"), (BF16,), "bf16", "accumulator", "19 bits, to nearest even"),
        (summed(24, "nearest", step=256, partial=8), (BF16,), "bf16", "partial sums", "bf16, to nearest even"),
        (flushing(True, False), (FP16,), "fp16", "subnormal operands", "flushed"),
        (flushing(False, True), (FP16,), "fp16", "subnormal results", "flushed"),
        (flushing(True, True), (FP32,), "fp32", "subnormal operands", "flushed"),
        (rounded("zero"), LOW, "fp16", "result", "toward zero"),
        (rounded("away"), LOW, "bf16", "result", "to nearest, ties away"),
        (read_in(11), (FP32,), "fp32", "operands", "11 bits (fp16)"),
        (read_in(8), (FP32,), "machine", "fp32 operands, precision high", "8 bits (bf16)"),
        (_noisy, (FP16,), "fp16", "repeated", "OTHER BITS"),
        (_canonical, (FP16,), "fp16", "NaN times 1", "0x7FFF, 0x7FFF"),
        (_few_rows, (BF16,), "bf16", "fewer rows", "other bits with 1, 3 of 64 rows"),
        (_reversed, (FP32,), "fp32", "order of 64 terms", None),
    ],
)
def test_broken_products_change_the_fingerprint(
    clean: Fingerprint, broken: object, dtypes: tuple[torch.dtype, ...], section: str, row: str, value: str | None
) -> None:
    with products(broken, "mm", dtypes=dtypes):  # type: ignore[arg-type]
        found = fingerprint(CPU)

    assert found[section][row] != clean[section][row]
    assert value is None or found[section][row] == value
    untouched = [name for name, dtype in NAMES.items() if dtype not in dtypes]
    assert {name: found[name] for name in untouched} == {name: clean[name] for name in untouched}


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    def addcmul(start: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, value: float = 1) -> torch.Tensor:
        return start + left * right

    with kernel("addcmul", addcmul, "CPU"):
        yield


def test_contraction_that_is_lost_is_seen(clean: Fingerprint) -> None:
    with _unfused():
        found = fingerprint(CPU, (FP32,))

    assert "addcmul rounds twice" in found["machine"]["multiply and add"]
    assert clean["machine"]["multiply and add"] != found["machine"]["multiply and add"]


def test_convolution_is_compared_with_the_product(clean: Fingerprint) -> None:
    with products(_sixteen_bits, "conv2d", dtypes=(FP16,)):
        found = fingerprint(CPU)

    assert "accumulator: fp16, to nearest even" in found["fp16"]["convolution"]


def test_only_the_dtypes_that_a_device_has_are_measured() -> None:
    assert list(fingerprint(CPU, (BF16,))) == ["bf16", "fp32", "machine"]


def test_flags_and_threads_are_put_back() -> None:
    torch.set_float32_matmul_precision("high")
    threads = torch.get_num_threads()
    try:
        fingerprint(CPU)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision("highest")

    assert (after, torch.get_num_threads()) == ("high", threads)


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="settings that torch has from 2.9 on")
def test_newer_settings_of_precision_are_put_back() -> None:
    owners = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [owner.fp32_precision for owner in owners]

    fingerprint(CPU)

    assert [owner.fp32_precision for owner in owners] == before


@pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])
def test_reductions_that_flags_allow_are_measured_with_the_flags_on(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    flags = torch.backends.cuda.matmul
    width = "fp16" if dtype is FP16 else "bf16"
    name = f"allow_{width}_reduced_precision_reduction"
    split, whole = Unit(parts=4, partial_bits=module.BITS[dtype]), Unit(parts=4)

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (split if getattr(flags, name) else whole)(left, right)

    monkeypatch.setattr(module, "matrix_product", lambda device: product)
    before = getattr(flags, name)
    with full_precision("cuda"):
        plain = module.product_rows(product, dtype)

    assert module._reduced(torch.device("cuda"), dtype, plain) == f"partial sums: {width}, to nearest even"
    assert getattr(flags, name) == before


def test_an_nvidia_gpu_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)

    found = module._libraries(torch.device("cuda", 0))

    assert found["instructions"] == "sm_90"
    assert found["libraries"].startswith("CUDA 13.0")


def test_every_row_is_explained_in_the_docs(clean: Fingerprint) -> None:
    page = (ROOT / "docs" / "fingerprint.md").read_text(encoding="utf-8")
    explained = page.split("## The rows")[1].split("## The bound")[0]

    words = {row.removesuffix(" high").removesuffix(" medium") for section in clean.values() for row in section}
    # Rows of a kind share a line: "subnormal operands, products, results", "NaN cast to fp16, bf16".
    kinds = {" ".join(row.replace(",", "").split()[:2]) for row in words} - {"subnormal products", "subnormal results"}
    assert [kind for kind in kinds if kind not in explained] == []


def test_it_is_quick() -> None:
    """Well under a second, without a clock: so many products and no more."""
    counted = [0]

    def counting(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        counted[0] += 1
        return plain(left, right)

    with products(counting, "mm", dtypes=(FP16, BF16, FP32)), full_precision("cpu"):
        fingerprint(CPU)

    assert counted[0] < 600
