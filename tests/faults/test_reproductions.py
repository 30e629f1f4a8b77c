"""The snippet of the first case that fails under a fault fails there, and passes without the fault."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.faults import load
from tests.faults.campaigns import reproductions
from tests.faults.campaigns.reproductions import REPRODUCES, Row, drawn, read, summary, tried

FAULTS = load()

# At least one a chapter, those that take least.
_CHOSEN = (
    "nesting_counter_returns_nothing",
    "cast_inputs_reaches_other_devices",
    "bf16_products_go_through_fp16",
    "cast_is_rounded_twice",
    "cuda_softmax_stays_16_bit",
    "kernel_below_asks_whether_autocast_is_on",
    "sparse_gradients_are_passed_over",
    "logits_stay_float32",
    "products_are_widened",
    "casts_flush_subnormals",
    "steps_on_inf",
    "amp_learns_nothing",
    "unscaled_by_65535",
    "region_keeps_its_dtype",
    "tracker_survives_a_skip",
    "recurrent_layers_stay_in_fp32",
    "traced_code_runs_outside_of_the_region",
    "leaves_of_lists_are_not_cast",
)
# A program of several processes is not written: its failed cases have the snippet of the catalogue.
_WITHOUT_PROGRAMS = {"distributed"}


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)  # a child of a process whose threads have worked hangs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the snippets run in forked children")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", _CHOSEN)
def test_a_snippet_fails_with_the_fault_and_passes_without(name: str) -> None:
    row = tried(FAULTS[name])

    assert row.result == REPRODUCES, row


def test_every_chapter_is_among_them() -> None:
    every = {fault.chapters[0] for fault in FAULTS.values()}

    assert {FAULTS[name].chapters[0] for name in _CHOSEN} == every - _WITHOUT_PROGRAMS


def test_a_beginning_of_what_is_drawn_has_every_chapter_and_the_seed_decides() -> None:
    faults = list(FAULTS.values())
    chapters = {fault.chapters[0] for fault in faults}

    assert {fault.chapters[0] for fault in drawn(faults, 1)[: len(chapters)]} == chapters
    assert drawn(faults, 1) == drawn(faults[::-1], 1)
    assert drawn(faults, 1) != drawn(faults, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the snippets run in forked children")
@pytest.mark.parametrize(
    ("snippet", "result"),
    [
        ("", "no snippet"),
        ("import pytest", "needs more than torch"),
        ("print(1)", "passes with the fault"),
        ("raise SystemExit('always')", "fails without the fault"),
        ("import torch\nif torch.amp.GradScaler('cpu').get_scale() != 65536.0:\n    raise SystemExit(1)", REPRODUCES),
    ],
    ids=["none", "pytest", "prints", "always", "judges"],
)
def test_what_becomes_of_a_snippet(snippet: str, result: str) -> None:
    fault = FAULTS["initial_scale_is_half"]

    assert reproductions.result(fault, snippet)[0] == result


def test_the_summary_counts_what_was_tried() -> None:
    rows = [
        Row("one", "cast", "A", 10, REPRODUCES, "", 1.0),
        Row("two", "cast", "B", 10, "passes with the fault", "", 1.0),
        Row("three", "cast", "", 0, "not caught", "", 1.0),
    ]

    assert summary(rows) == "1 of 2 snippets reproduce; passes with the fault: 1; not caught: 1"


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "none.csv") == []
