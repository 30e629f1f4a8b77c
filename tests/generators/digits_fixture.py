"""Write fixtures/digits.csv from scikit-learn's copy of the digits.

`python -m tests.generators.digits_fixture fixtures/digits.csv`

Needs scikit-learn, which nothing else of the suite does; the file was made with 1.9.1.
"""

from __future__ import annotations

import sys
from pathlib import Path

HEADER = """\
# Optical Recognition of Handwritten Digits: 8 by 8 images in 0..16, row by row, then the digit.
# Source: E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49.
# Licence: Creative Commons Attribution 4.0 International (CC BY 4.0), https://creativecommons.org/licenses/by/4.0/.
# The repository's test set as scikit-learn ships it (sklearn.datasets.load_digits), unchanged but for its format.
"""


def lines() -> list[str]:
    """The 1797 rows as text: 64 pixels and the label, in scikit-learn's order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = []
    for pixels, label in zip(digits.data.tolist(), digits.target.tolist(), strict=True):
        whole = [int(pixel) for pixel in pixels]
        if whole != pixels:
            raise ValueError("a pixel is not a whole number")
        rows.append(",".join(map(str, [*whole, label])))
    return rows


def main(path: Path) -> None:
    path.write_text(HEADER + "\n".join(lines()) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
