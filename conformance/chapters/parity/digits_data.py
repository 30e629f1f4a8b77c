"""Handwritten digits, 8 by 8: E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998 (CC BY 4.0)."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch

from ...data import fixture

PIXELS, CLASSES, BRIGHTEST = 64, 10, 16
TEST_SHARE = 5  # one in so many images of each digit is kept for the test


@dataclass(frozen=True)
class Split:
    """Images [n, 64] with pixels k/16, which every 16-bit type holds exactly, and their labels [n], on the CPU."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def rows() -> list[list[int]]:
    """Return the 1797 rows of fixtures/digits.csv: 64 pixels of 0 to 16, then the digit."""
    text = fixture("digits.csv").read_text(encoding="utf-8")
    return [[int(field) for field in line.split(",")] for line in text.splitlines() if not line.startswith("#")]


@functools.cache
def split() -> Split:
    """Return the training and the test images: every fifth of each digit, in file order, is for the test.

    Fixed, so that no seed moves an image across; by digit, as parts of the file go round the digits in order. No
    image is there twice. Nothing is fitted to the data before training: pixels are divided by 16.
    """
    seen: Counter[int] = Counter()
    held_out = []
    table = rows()
    for row in table:
        held_out.append(seen[row[-1]] % TEST_SHARE == TEST_SHARE - 1)
        seen[row[-1]] += 1
    test = torch.tensor(held_out)
    data = torch.tensor(table)
    images, labels = data[:, :PIXELS].float() / BRIGHTEST, data[:, PIXELS]
    return Split(images[~test], labels[~test], images[test], labels[test])
