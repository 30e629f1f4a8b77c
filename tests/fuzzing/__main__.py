"""Fuzz a reader under coverage: python -m tests.fuzzing READER FOLDER [options of libFuzzer]; needs atheris.

FOLDER keeps the inputs that reached new code, and begins with the reader's samples. libFuzzer ends after
-max_total_time=SECONDS, or at the first exception that is not the reader's own, whose input it then keeps.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["conformance", "tomllib", "json"]):
    from tests.fuzzing.readers import READERS, attempt


def main() -> None:
    """Fuzz the reader that the command line names."""
    name, folder, *options = sys.argv[1:]
    reader, corpus = READERS[name], Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate(reader.samples()):
        (corpus / f"sample-{number}").write_bytes(sample)
    file = Path(tempfile.mkdtemp(), "input")

    def one(data: bytes) -> None:
        file.write_bytes(data)
        attempt(reader, file)

    atheris.Setup([sys.argv[0], str(corpus), *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
