"""The data that are shipped, their split, and the models that learn from them."""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.chapters.parity import digits_data, text_data
from conformance.chapters.parity.models import TASKS, Run, Task, learn
from conformance.data import fixture
from tests.generators import digits_fixture

CPU = torch.device("cpu")


def _short(name: str) -> Task:
    return replace(TASKS[name], epochs=1, batches=2)


def _learn(task: Task, seed: int = 0, factor: float = 1.0) -> Run:
    return learn(task, CPU, seed, nullcontext, None, factor=factor)


def test_the_digits_are_the_published_ones() -> None:
    data = fixture("digits.csv").read_bytes()

    assert hashlib.sha256(data).hexdigest() == "9831c32a7ef1cfe7e4c988e67f9843dd49d680d2b45956c6b092e246fa73967f"
    rows = digits_data.rows()
    assert len(rows) == 1797
    assert {len(row) for row in rows} == {65}
    assert {pixel for row in rows for pixel in row[:64]} == set(range(17))
    assert Counter(row[64] for row in rows) == {
        0: 178,
        1: 182,
        2: 177,
        3: 183,
        4: 181,
        5: 182,
        6: 181,
        7: 179,
        8: 174,
        9: 180,
    }
    assert b"CC BY 4.0" in data


def test_the_script_makes_the_file(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    digits_fixture.main(tmp_path / "digits.csv")

    assert (tmp_path / "digits.csv").read_bytes() == fixture("digits.csv").read_bytes()


def test_no_digit_is_trained_on_and_tested() -> None:
    split = digits_data.split()
    train, test = ({tuple(row) for row in part.tolist()} for part in (split.train_images, split.test_images))

    assert (len(train), len(test)) == (1442, 355)
    assert train & test == set()
    assert min(Counter(split.test_labels.tolist()).values()) >= 34


def test_the_pixels_are_16_bit_numbers() -> None:
    images = digits_data.split().train_images

    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(images.to(dtype).float(), images)


def test_no_paragraph_is_trained_on_and_tested() -> None:
    corpus = text_data.corpus()
    train, test = ("".join(corpus.symbols[i] for i in part.tolist()) for part in (corpus.train, corpus.test))

    # But for the one that the border cuts.
    assert len(set(train.split("\n\n")[:-1]) & set(test.split("\n\n")[1:]) - {""}) == 0
    assert hashlib.sha256((train + test).encode()).hexdigest() == corpus.digest
    assert 4 < corpus.entropy < 5


def test_a_python_without_the_text_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)

    with pytest.raises(text_data.NoText, match="no pydoc_data"):
        text_data.corpus.__wrapped__()


def test_the_entropy_of_even_symbols_is_their_logarithm() -> None:
    assert text_data.entropy("abcdabcd") == pytest.approx(2.0)
    assert text_data.entropy("aaaa") == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_a_run(name: str) -> None:
    one, other, third = _learn(_short(name)), _learn(_short(name)), _learn(_short(name), seed=1)

    assert one == other
    assert one.curve != third.curve
    assert all(map(math.isfinite, (*one.curve, one.test_loss, one.accuracy)))


def test_a_power_of_two_on_the_loss_changes_no_bit_of_what_fp32_learns() -> None:
    task = replace(TASKS["mlp"], epochs=2)

    assert _learn(task) == _learn(task, factor=2.0**-20)


def test_a_scaler_that_does_not_scale_is_none_at_all() -> None:
    task = _short("mlp")
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    assert learn(task, CPU, 0, nullcontext, scaler) == _learn(task)


def test_the_schedule_ends_at_a_rate_of_almost_nothing() -> None:
    rates = []
    model = TASKS["mlp"].model
    task = replace(_short("mlp"), batches=4, model=model)
    torch_step = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *args: object) -> object:
        rates.append(self.param_groups[0]["lr"])
        return torch_step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        _learn(task)

    assert rates == [0.25 * (1 - number / 4) for number in range(4)]
