"""Expectations files: what may stand in them, which devices they are for, and what a bad one is told."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from conformance.data import fixture, read_toml
from conformance.harness.expectations import KEYS, LARGEST_FACTOR, ExpectationsError, load, read

TODAY = datetime.date(2026, 12, 1)

# Names as the drivers give them, with the compute capability and the classes that the suite's own file has for them.
DEVICES = [
    ("Tesla V100-SXM2-16GB", "7.0", "nvidia-v100"),
    ("Tesla V100S-PCIE-32GB", "7.0", "nvidia-v100"),
    ("NVIDIA TITAN V", "7.0", None),
    ("Tesla T4", "7.5", "nvidia-t4"),
    ("NVIDIA GeForce RTX 2080 Ti", "7.5", None),
    ("NVIDIA GeForce GTX 1660 Ti", "7.5", None),
    ("A100-SXM4-40GB", "8.0", "nvidia-a100"),
    ("NVIDIA A100 80GB PCIe", "8.0", "nvidia-a100"),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "8.0", None),
    ("NVIDIA A30", "8.0", "nvidia-a30"),
    ("NVIDIA A10", "8.6", "nvidia-a10-a40"),
    ("NVIDIA A10G", "8.6", None),
    ("NVIDIA A40", "8.6", "nvidia-a10-a40"),
    ("NVIDIA A40-8Q", "8.6", None),
    ("NVIDIA GeForce RTX 3090", "8.6", None),
    ("NVIDIA L4", "8.9", "nvidia-l4-l40"),
    ("NVIDIA L40", "8.9", "nvidia-l4-l40"),
    ("NVIDIA L40S", "8.9", "nvidia-l4-l40"),
    ("NVIDIA GeForce RTX 4090", "8.9", None),
    ("NVIDIA H100 80GB HBM3", "9.0", "nvidia-h100"),
    ("NVIDIA H100 PCIe", "9.0", "nvidia-h100"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "9.0", None),
    ("NVIDIA H20", "9.0", None),
    ("NVIDIA H200", "9.0", "nvidia-h200-gh200"),
    ("NVIDIA GH200 480GB", "9.0", "nvidia-h200-gh200"),
    ("NVIDIA B200", "10.0", "nvidia-b200-gb200"),
    ("NVIDIA GeForce RTX 5090", "12.0", None),
    ("AMD Instinct MI300X", "9.4", None),
]

GOOD = """
[[class]]
id = "ours"
device_type = "cuda"
names = ["NVIDIA H100*"]
capability = ["9.0"]
how = "published"
source = "the maker's page"
date = 2026-01-01
expires = 2027-12-31
[[class.ratio]]
keys = ["matmul/*/bf16/fp32"]
at_least = 3.5
"""
DIGEST = "0123456789abcdef" * 4


def _file(folder: Path, text: str, name: str = "ours.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "capability", "expected"), DEVICES)
def test_shipped_classes_are_of_the_cards_that_their_sources_speak_of(
    name: str, capability: str, expected: str | None
) -> None:
    found = load(today=TODAY).of("cuda", name, capability, TODAY)

    assert (None if found is None else found.id) == expected


def test_shipped_factors_are_the_claims() -> None:
    expectations = load(today=TODAY)
    h100 = expectations.of("cuda", "NVIDIA H100 PCIe", "9.0", TODAY)
    l4 = expectations.of("cuda", "NVIDIA L4", "8.9", TODAY)
    t4 = expectations.of("cuda", "Tesla T4", "7.5", TODAY)

    assert h100 is not None
    assert l4 is not None
    assert t4 is not None
    assert [h100.expected(key).factor for key in ("matmul/compute/fp16/fp32", "matmul/compute/fp16/tf32")] == [2, 1]  # type: ignore[union-attr]
    assert h100.expected("step-cnn/compute/bf16/fp32").factor == 1.5  # type: ignore[union-attr]
    assert "AMP recipe of the PyTorch tutorials" in str(h100.expected("step-cnn/compute/bf16/fp32"))
    assert h100.expected("matmul/launch/fp16/fp32") is None
    assert l4.expected("step-cnn/compute/bf16/fp32") is None
    assert t4.expected("matmul/compute/bf16/fp32") is None


def test_shipped_factors_hold_where_the_published_peaks_leave_room() -> None:
    """No class promises more than half of the ratio of the peaks: a guess would."""
    for one in read(fixture("expectations.toml")):
        assert one.how == "published"
        assert all(expectation.factor <= 2 for expectation in one.expectations.values())
        assert not any("launch" in key or "small" in key or "middle" in key for key in one.expectations)


def test_a_class_counts_on_its_first_and_last_day_only(tmp_path: Path) -> None:
    expectations = load([_file(tmp_path, GOOD)], today=TODAY)
    device = ("cuda", "NVIDIA H100 PCIe", "9.0")
    days = [datetime.date(2025, 12, 31), datetime.date(2026, 1, 1), datetime.date(2027, 12, 31)]
    after = datetime.date(2028, 1, 1)

    found = [expectations.of(*device, day) for day in (*days, after)]
    assert ["ours" in one.id if one else None for one in found] == [None, True, True, False]
    assert "ended on 2027-12-31" in expectations.why_none(*device, after)
    assert "begin on 2026-01-01" in expectations.why_none(*device, days[0])
    assert "no expectations are known for NVIDIA X (cuda, 9.9)" in expectations.why_none(
        "cuda", "NVIDIA X", "9.9", TODAY
    )
    for day in days[1:]:  # and is read on these
        load([tmp_path / "ours.toml"], today=day)


def test_a_device_without_capability_goes_by_its_name(tmp_path: Path) -> None:
    text = GOOD.replace('"cuda"', '"xpu"').replace('capability = ["9.0"]\n', "")
    expectations = load([_file(tmp_path, text)], today=TODAY)

    assert expectations.of("xpu", "NVIDIA H100 of another make", None, TODAY) is not None
    assert expectations.of("xpu", "NVIDIA H100 of another make", "7.0", TODAY) is not None
    assert expectations.of("cuda", "NVIDIA H100 of another make", None, TODAY) is None


def test_the_users_factor_goes_before_the_suites(tmp_path: Path) -> None:
    found = load([_file(tmp_path, GOOD)], today=TODAY).of("cuda", "NVIDIA H100 PCIe", "9.0", TODAY)

    assert found is not None
    assert found.id == "ours, nvidia-h100"
    assert found.expected("matmul/compute/bf16/fp32").factor == 3.5  # type: ignore[union-attr]
    assert found.expected("matmul/launch/bf16/fp32").factor == 3.5  # type: ignore[union-attr]
    assert found.expected("matmul/compute/fp16/fp32").factor == 2.0  # type: ignore[union-attr]


def test_a_measurement_that_there_is_not_is_no_question(tmp_path: Path) -> None:
    found = load([_file(tmp_path, GOOD)], today=TODAY).of("cuda", "NVIDIA H100 PCIe", "9.0", TODAY)

    assert found is not None
    with pytest.raises(KeyError, match="matmul/compute/fp8/fp32"):
        found.expected("matmul/compute/fp8/fp32")


def test_a_file_for_other_machines_only_is_a_mismatch(tmp_path: Path) -> None:
    expectations = load([_file(tmp_path, GOOD)], today=TODAY)

    assert expectations.mismatch([("cpu", "cpu", None), ("cuda", "NVIDIA H100 NVL", "9.0")]) is None
    assert load(today=TODAY).mismatch([("cpu", "cpu", None)]) is None
    problem = expectations.mismatch([("cuda", "NVIDIA A100-SXM4-40GB", "8.0")])
    assert problem == "these expectations are for NVIDIA H100*, and this run is on NVIDIA A100-SXM4-40GB (cuda, 8.0)"
    assert "no real device" in str(expectations.mismatch([]))


BAD = [
    ("[[class", "not TOML"),
    ("", "at least one [[class]] table"),
    ("class = 3", "at least one [[class]] table"),
    ("class = []", "at least one [[class]] table"),
    (GOOD + "[other]\nx = 1", "unknown key 'other'"),
    (GOOD + GOOD, "'ours' is there twice"),
    (GOOD.replace("id =", "ids ="), "unknown key 'ids'"),
    (GOOD.replace('names = ["NVIDIA H100*"]\n', ""), "'names' is missing"),
    (GOOD.replace('capability = ["9.0"]\n', ""), "'capability' is missing"),
    (GOOD.replace('["NVIDIA H100*"]', "[]"), "names must be a list"),
    (GOOD.replace('["NVIDIA H100*"]', '"NVIDIA H100*"'), "names must be a list"),
    (GOOD.replace('["9.0"]', "[9.0]"), "capability must be a list"),
    (GOOD.replace('"the maker\'s page"', '" "'), "source must be a text"),
    (GOOD.replace('"published"', '"guessed"'), "how must be"),
    (GOOD.replace('"published"', '["published"]'), "how must be"),
    (GOOD.replace('"published"', '"calibrated"'), "'driver' is missing"),
    (GOOD.replace("2027-12-31", '"2027-12-31"'), "expires must be a date"),
    (GOOD.replace("2027-12-31", "2027-12-31T00:00:00"), "expires must be a date"),
    (GOOD.replace("2027-12-31", "2025-12-31"), "before it begins"),
    (GOOD.replace("2027-12-31", "2026-11-30"), "ended on 2026-11-30: look whether its source still stands"),
    (GOOD.replace("2026-01-01", "2027-01-01"), "yet to come"),
    (GOOD.split("[[class.ratio]]")[0], "'ratio' is missing"),
    (GOOD.split("[[class.ratio]]")[0] + "ratio = []", "at least one [[class.ratio]] table"),
    (GOOD.split("[[class.ratio]]")[0] + "ratio = 2.0", "at least one [[class.ratio]] table"),
    (GOOD.replace("matmul/*", "matmul/huge"), "the nearest is matmul/"),
    (GOOD.replace("matmul/*/bf16/fp32", "*"), "is no <subject>/<size>/<dtype>/<baseline>"),
    (GOOD.replace("matmul/*/bf16/fp32", 'matmul/*/*/*", "linear/small/*/*'), "'linear/small/*/*' is no"),
    (GOOD + '[[class.ratio]]\nkeys = ["*/compute/*/fp32"]\nat_least = 2', "has a factor already, 3.5"),
    (GOOD + "[[class.ratio]]\nat_least = 2", "'keys' is missing"),
    (GOOD + "factor = 2", "unknown key 'factor'"),
    (GOOD + 'source = ""', "source must be a text"),
    (GOOD + "seen = [4.0, 5.0]", "seen must be three numbers"),
    (GOOD + "seen = [5.0, 4.0, 6.0]", "must rise"),
    (GOOD + "seen = [3.0, 4.0, 6.0]", "must rise"),
    (GOOD + "seen = [4.0, nan, 6.0]", "seen must be three numbers"),
    (GOOD.replace("[[class.ratio]]", "reached = 3\n[[class.ratio]]"), "reached must be a table"),
    (GOOD.replace("[[class.ratio]]", "reached = { fp8 = 3 }\n[[class.ratio]]"), "reached must be a table"),
    (GOOD.replace("[[class.ratio]]", "reached = { fp16 = nan }\n[[class.ratio]]"), "reached must be a table"),
    (GOOD.replace("[[class.ratio]]", "reached = { fp16 = true }\n[[class.ratio]]"), "reached must be a table"),
    (GOOD + "noise = 11.0", "noise must be"),
    (GOOD + "pairs = true", "pairs must be"),
    (GOOD + "noise = -0.1", "noise must be"),
    (GOOD + "pairs = 0", "pairs must be"),
    (GOOD + "pairs = 2.5", "pairs must be"),
    *(
        (GOOD.replace("3.5", number), "at_least must be a number above 0")
        for number in (
            "0",
            "0.0",
            "-2.0",
            "nan",
            "inf",
            "-inf",
            "true",
            '"2"',
            "1e9",
            "9" * 400,
            f"{LARGEST_FACTOR + 1}",
        )
    ),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_bad_file_is_told_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = _file(tmp_path, text)

    with pytest.raises(ExpectationsError) as caught:
        load([path], today=TODAY)

    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [10_000])
def test_nested_file_is_told(tmp_path: Path, depth: int) -> None:
    with pytest.raises(ExpectationsError, match="not TOML"):
        read(_file(tmp_path, "class = " + "[" * depth))


def test_missing_and_binary_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ExpectationsError, match="cannot be read: No such file"):
        read(tmp_path / "absent.toml")
    with pytest.raises(ExpectationsError, match="cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(ExpectationsError, match="not TOML"):
        read(tmp_path / "binary.toml")


def test_calibrated_class_names_its_report(tmp_path: Path) -> None:
    more = f'how = "calibrated"\ntorch = "2.13.0"\ndriver = "580.1"\nreports = ["{DIGEST}"]'
    text = GOOD.replace('how = "published"', more) + "seen = [3.6, 3.7, 3.8]\nnoise = 0.01\npairs = 30\n"

    (found,) = read(_file(tmp_path, text))

    assert (found.how, found.reports, found.torch) == ("calibrated", (DIGEST,), "2.13.0")
    with pytest.raises(ExpectationsError, match="no SHA-256"):
        read(_file(tmp_path, text.replace(DIGEST, DIGEST.upper())))
    with pytest.raises(ExpectationsError, match="calibrate again"):
        load([_file(tmp_path, text)], today=datetime.date(2028, 1, 1))


def test_keys_are_unique_and_complete() -> None:
    assert len(set(KEYS)) == len(KEYS) == 7 * 3 * 2 * 2 + 4 * 2 * 2 * 2
    assert read_toml(fixture("expectations.toml")).keys() == {"class"}
