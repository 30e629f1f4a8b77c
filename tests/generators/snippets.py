"""Lint and format the snippets of the contracts as the code that they are.

`python -m tests.generators.snippets` says what ruff finds in them and exits 1 where it finds anything;
`python -m tests.generators.snippets --fix` writes them back corrected and formatted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.paths import ROOT

_SNIPPET = re.compile(r'^id = "(?P<id>[^"]+)"$|^snippet = \'\'\'\n(?P<code>.*?)^\'\'\'$', re.MULTILINE | re.DOTALL)
# `$amp_dtype` stands for an expression; a name of the same length keeps the lines as long as they are.
_STAND_IN = "xamp_dtype"


def main(arguments: list[str]) -> int:
    """Check every snippet, or correct them with --fix; returns 1 where ruff finds anything that stays."""
    parser = argparse.ArgumentParser(prog="python -m tests.generators.snippets", description=__doc__)
    parser.add_argument("--fix", action="store_true", help="write the snippets back corrected and formatted")
    fix = parser.parse_args(arguments).fix
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        files = sorted(ROOT.glob("conformance/chapters/*/contracts.toml"))
        for file in files:
            for id, code in _snippets(file).items():
                (place / f"{id}.py").write_text(code.replace("$amp_dtype", _STAND_IN), encoding="utf-8")
        config = ["--config", str(ROOT / "pyproject.toml")]
        lint = ["ruff", "check", *config, "--config", f'builtins = ["{_STAND_IN}"]', "--no-cache", "--quiet"]
        lint += ["--ignore", "SIM905"]  # it would split the text that $device stands in, before it is filled in
        form = ["ruff", "format", *config, "--no-cache", "--quiet"]
        found = subprocess.run([*lint, *(["--fix"] if fix else []), "--output-format", "concise", "."], cwd=place)
        formed = subprocess.run([*form, *([] if fix else ["--check"]), "."], cwd=place)
        if formed.returncode and not fix:
            print("snippets are not formatted: run python -m tests.generators.snippets --fix", file=sys.stderr)
        if fix:
            for file in files:
                file.write_text(_corrected(file, place), encoding="utf-8")
    return int(bool(found.returncode or formed.returncode))


def _snippets(file: Path) -> dict[str, str]:
    """Return the snippets of a chapter by contract."""
    found, id = {}, ""
    for match in _SNIPPET.finditer(file.read_text(encoding="utf-8")):
        if match["id"] is not None:
            id = match["id"]
        else:
            found[id] = match["code"]
    return found


def _corrected(file: Path, place: Path) -> str:
    """Return the text of a chapter with the snippets of the folder `place`."""
    id = ""

    def corrected(match: re.Match[str]) -> str:
        nonlocal id
        if match["id"] is not None:
            id = match["id"]
            return match[0]
        code = (place / f"{id}.py").read_text(encoding="utf-8").replace(_STAND_IN, "$amp_dtype")
        return f"snippet = '''\n{code}'''"

    return _SNIPPET.sub(corrected, file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
