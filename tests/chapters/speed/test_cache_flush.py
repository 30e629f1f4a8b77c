"""The sizes of last-level caches, from what drivers and kernels tell, and their flush."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.chapters.speed import cache_flush
from conformance.chapters.speed.cache_flush import LARGEST_BYTES, Flush, last_level_bytes


@pytest.mark.parametrize(
    ("properties", "nbytes"),
    [
        ({"L2_cache_size": 52428800}, 52428800),
        ({"L2_cache_size": 8388608, "gcnArchName": "gfx90a:sramecc+:xnack-"}, 8388608),
        ({"L2_cache_size": 4194304, "gcnArchName": "gfx942:sramecc+:xnack-"}, LARGEST_BYTES),
        ({"last_level_cache_size": 18874368}, 18874368),
        ({"L2_cache_size": 0}, LARGEST_BYTES),
        ({}, LARGEST_BYTES),
    ],
    ids=["NVIDIA", "MI250X", "MI300X", "XPU", "zero", "XPU before 2.13"],
)
def test_cards_tell_or_the_largest_is_taken(
    monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], nbytes: int
) -> None:
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    seen, words = last_level_bytes(torch.device("cuda:0"))
    assert seen == nbytes
    assert words.startswith("unknown") is (nbytes == LARGEST_BYTES)


@pytest.mark.parametrize("error", [RuntimeError("no such module"), AssertionError("not compiled"), AttributeError("x")])
def test_a_device_without_properties_gets_the_largest(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(device: object) -> Any:
        raise error

    monkeypatch.setattr(torch, "get_device_module", refuse)
    assert last_level_bytes(torch.device("mps"))[0] == LARGEST_BYTES


def _processor(root: Path, number: int, *levels: tuple[int, str, str]) -> None:
    for index, (level, shared, size) in enumerate(levels):
        folder = root / f"cpu{number}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("shared_cpu_list", shared), ("size", size)):
            (folder / name).write_text(text + "\n")


def test_processors_have_all_their_caches_of_the_last_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_flush, "_PROCESSORS", tmp_path)
    monkeypatch.setattr(cache_flush.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    for number, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        _processor(tmp_path, number, (1, str(number), "48K"), (2, str(number), "1024K"), (3, shared, "32M"))
    assert last_level_bytes(torch.device("cpu"))[0] == 64 * 2**20


@pytest.mark.parametrize("size", ["", "many", "12Q"])
def test_what_the_kernel_does_not_tell_is_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(cache_flush, "_PROCESSORS", tmp_path)
    _processor(tmp_path, 0, (3, "0", size))
    assert last_level_bytes(torch.device("cpu"))[0] == LARGEST_BYTES


def test_a_flush_reads_and_writes_twice_the_cache() -> None:
    flush = Flush(torch.device("cpu"), 1000)
    flush()
    flush()
    assert flush._buffer.nbytes == 2000
    assert flush._buffer.unique().tolist() == [2]
