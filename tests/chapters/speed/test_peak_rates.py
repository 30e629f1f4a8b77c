"""Ceilings of devices: bounds that hold for every card, published peaks by name, and the batch that AMP needs."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from conformance.chapters.speed.clocks import BrokenTiming
from conformance.chapters.speed.peak_rates import UNKNOWN, break_even_rows, ceilings, published, rate
from conformance.data import fixture, read_toml
from tests.simulation.nvml_fake import NVMLError, card, install

CUDA = torch.device("cuda", 0)

# Name, capability, processors, clock and memory clock as the driver tells them in kHz, bits of the memory's bus.
CARDS = [
    ("Tesla V100-SXM2-16GB", (7, 0), 80, 1530000, 877000, 4096),
    ("Tesla T4", (7, 5), 40, 1590000, 5001000, 256),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1410000, 1215000, 5120),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410000, 1593000, 5120),
    ("NVIDIA A30", (8, 0), 56, 1440000, 1215000, 3072),
    ("NVIDIA A10", (8, 6), 72, 1695000, 6251000, 384),
    ("NVIDIA A10G", (8, 6), 80, 1710000, 6251000, 384),
    ("NVIDIA A40", (8, 6), 84, 1740000, 7251000, 384),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695000, 9751000, 384),
    ("NVIDIA L4", (8, 9), 58, 2040000, 6251000, 192),
    ("NVIDIA L40S", (8, 9), 142, 2520000, 9001000, 384),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520000, 10501000, 384),
    ("NVIDIA H100 PCIe", (9, 0), 114, 1755000, 1593000, 5120),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1980000, 2619000, 5120),
    ("NVIDIA H200", (9, 0), 132, 1980000, 3201000, 6144),
    ("NVIDIA B200", (10, 0), 148, 1965000, 3996000, 8192),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407000, 14001000, 512),
]


@pytest.mark.parametrize(("name", "capability", "processors", "clock", "memory", "bits"), CARDS)
def test_no_published_peak_exceeds_the_bound(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    processors: int,
    clock: int,
    memory: int,
    bits: int,
) -> None:
    more = {"clock_rate": clock, "memory_clock_rate": memory, "memory_bus_width": bits}
    install(monkeypatch, card(name, *capability, processors, **more))

    bound, peak = ceilings(CUDA), published(name)

    for mode in ("fp16", "bf16", "tf32", "fp32"):
        most, claimed = bound.flops(mode), peak.flops(mode)
        assert claimed is None or (most is not None and claimed <= most)
    assert bound.bytes_per_second is not None
    assert peak.bytes_per_second is not None
    # Data sheets round down by up to 2 % and count stacks; the bound is one all the same, and not far off.
    assert 0.98 <= bound.bytes_per_second / peak.bytes_per_second <= 1.3
    assert (bound.flops("tf32") is None) == (capability[0] < 8)


@pytest.mark.parametrize(
    ("capability", "processors", "clock", "tera"),
    [((7, 0), 80, 1530000, 125.3), ((8, 0), 108, 1410000, 311.9), ((9, 0), 132, 1830000, 989.4)],
)
def test_the_formula_gives_the_published_peaks(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], processors: int, clock: int, tera: float
) -> None:
    install(monkeypatch, card("a data-centre card", *capability, processors, clock_rate=clock))

    assert ceilings(CUDA).low_flops == pytest.approx(tera * 1e12 * 1.02, rel=2e-3)


def test_each_kind_of_work_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, card("NVIDIA H100 80GB HBM3", 9, 0, 132, clock_rate=1000000))
    bound, peak = ceilings(CUDA), published("NVIDIA H100 80GB HBM3")
    unit = 132 * 1e9 * 1.02

    modes = ("fp16", "bf16", "tf32", "fp32")
    assert [bound.flops(mode) for mode in modes] == pytest.approx([4096 * unit, 4096 * unit, 2048 * unit, 256 * unit])
    assert [peak.flops(mode) for mode in modes] == pytest.approx([989.4e12, 989.4e12, 494.7e12, 67e12])
    assert peak.bytes_per_second == pytest.approx(3.35e12)
    assert bound.source == "132 processors of 9.0 at 1.000 GHz (the device's properties)"


@pytest.mark.parametrize("name", ["NVIDIA RTX A6000", "NVIDIA TITAN RTX", "Quadro RTX 8000", "NVIDIA GeForce RTX 4090"])
def test_boards_for_desks_have_the_widest_bound(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, card(name, 8, 6, 84, clock_rate=1800000))

    assert ceilings(CUDA).fp32_flops == pytest.approx(84 * 256 * 3.2e9 * 1.02)


def test_a_card_that_tells_no_clock_has_a_wider_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108))

    bound = ceilings(CUDA)

    assert bound.low_flops == pytest.approx(108 * 2048 * 3.2e9 * 1.02)
    assert bound.bytes_per_second is None
    assert "assumed" in bound.source


def test_boards_that_boost_are_not_bound_by_the_clock_that_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 3090 tells 1695 MHz and runs at 1900 and more."""
    install(monkeypatch, card("NVIDIA GeForce RTX 3090", 8, 6, 82, clock_rate=1695000), {("MaxClockInfo", 1): 2100})

    assert (ceilings(CUDA).fp32_flops or 0) > 82 * 256 * 2.1e9 * 1.02


def test_nvml_knows_the_clocks_where_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[Any, Any] = {("MaxClockInfo", 1): 1410, ("MaxClockInfo", 2): 1215, "MemoryBusWidth": 5120}
    install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108), answers)

    bound = ceilings(CUDA)

    assert bound.low_flops == pytest.approx(108 * 2048 * 1.41e9 * 1.02)
    assert bound.bytes_per_second == pytest.approx(1.215e9 * 2 * 640 * 1.02)
    assert "NVML" in bound.source
    answers["MaxClockInfo", 1] = NVMLError("lost")
    assert "assumed" in ceilings(CUDA).source


@pytest.mark.parametrize("uuid", ["GPU-of-somebody-else", "MIG-12345678-9abc-def0-1234-56789abcdef0"])
def test_a_device_is_looked_up_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    answers: dict[Any, Any] = {("MaxClockInfo", 1): 1410, "uuid": uuid}
    install(monkeypatch, card("NVIDIA A100-SXM4-40GB", 8, 0, 108, clock_rate=1300000), answers)

    assert ("NVML" in ceilings(CUDA).source) == uuid.startswith("MIG")


def test_amd_devices_go_by_their_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = card("AMD Instinct MI300X", 9, 4, 304, clock_rate=2100000, memory_clock_rate=1300000)
    properties.gcnArchName = "gfx942:sramecc+:xnack-"
    install(monkeypatch, properties, hip="6.4")

    bound, peak = ceilings(CUDA), published("AMD Instinct MI300X")

    assert bound.low_flops == pytest.approx(1307.4e12 * 1.02, rel=1e-3)
    assert bound.fp32_flops == pytest.approx(163.4e12 * 1.02, rel=1e-3)
    assert bound.bytes_per_second == pytest.approx((peak.bytes_per_second or 0) * 1.02)


def test_an_unknown_device_has_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, card("NVIDIA Rubin", 99, 0, 200, clock_rate=2000000))

    assert [ceilings(CUDA).flops(mode) for mode in ("fp16", "tf32", "fp32")] == [None, None, None]
    assert published("NVIDIA Rubin") == UNKNOWN
    for other in ("cpu", "mps", "xpu"):
        assert ceilings(torch.device(other)) == UNKNOWN


@pytest.mark.parametrize("name", [row[0] for row in CARDS])
def test_a_name_fits_one_row_of_the_published_peaks(name: str) -> None:
    rows = read_toml(fixture("peaks.toml"))["card"]

    assert sum(any(fnmatchcase(name, pattern) for pattern in row["names"]) for row in rows) == 1


def test_names_that_contain_another_are_not_taken_for_it() -> None:
    assert published("NVIDIA L40S").low_flops == 362e12
    assert published("NVIDIA L40") == UNKNOWN
    assert published("NVIDIA A10G").low_flops == 70e12
    assert published("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == UNKNOWN


def test_a_rate_above_the_ceiling_is_broken() -> None:
    assert rate(1e12, 0.5, 2.5e12) == 2e12
    assert rate(1e15, 1.0, None) == 1e15
    with pytest.raises(BrokenTiming, match=r"3.0 TFLOP/s where the device can do 2.0 at most"):
        rate(6e12, 2.0, 2e12)
    with pytest.raises(BrokenTiming, match=r"3.0 TFLOP/s where"):
        rate(6e12, 2.0, 2e12)
    for seconds in (0.0, -1.0, math.nan):
        with pytest.raises(BrokenTiming, match="no time"):
            rate(1e12, seconds, None)


# 20 bytes a weight over 6 FLOP a weight and row: 3.33 / (bandwidth x (1/P32 - 1/P16)).
@pytest.mark.parametrize(
    ("baseline", "amp", "bandwidth", "rows"),
    [
        (15.7, 125, 0.9, 66.5),
        (19.5, 312, 2.039, 34),
        (156, 312, 2.039, 510),
        (67, 989.4, 3.35, 71.5),
        (60, 121, 0.3, 1322),
    ],
)
def test_rows_at_which_amp_breaks_even(baseline: float, amp: float, bandwidth: float, rows: float) -> None:
    seen = break_even_rows(baseline * 1e12, amp * 1e12, bandwidth * 1e12)

    assert seen == pytest.approx(rows, rel=0.01)


def test_break_even_follows_what_is_moved() -> None:
    whole = break_even_rows(1e12, 2e12, 1e12)

    assert break_even_rows(1e12, 2e12, 1e12, scaler=False) == pytest.approx(whole * 12 / 20)
    assert break_even_rows(1e12, 2e12, 1e12, training=False) == pytest.approx(whole * 6 / 20 * 3)
    assert break_even_rows(2e12, 2e12, 1e12) == math.inf
    assert break_even_rows(3e12, 2e12, 1e12) == math.inf
