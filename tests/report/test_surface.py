"""Surface files: one spelling, strict reading, and a comparison in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.report import document, surface, surface_diff
from conformance.report.surface_diff import Kind
from tests import reports
from tests.paths import ROOT
from tests.report.surfaces import ABSENT, changed, small

STORED = sorted(
    (ROOT / "fixtures" / "surfaces").glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")]
)


def _file(folder: Path, content: str | bytes | dict[str, Any]) -> Path:
    file = folder / "surface.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    page = surface.render(small())

    assert surface.read(_file(tmp_path, page)) == small()
    assert page.endswith("}\n")
    assert page.count("\n") == len(page.splitlines())


def test_spelling_does_not_hang_on_the_order() -> None:
    turned = dict(reversed(changed().items()))
    turned["backends"] = dict(reversed(turned["backends"].items()))

    assert surface.render(surface.parse(turned)) == surface.render(small())


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        ("", document.NotJSON, "not a JSON document"),
        (surface.render(small())[:400], document.NotJSON, "not a JSON document"),
        (b"\x80\x00\xff\xfe" * 9, document.NotJSON, "not a JSON document: not UTF-8"),
        ("[" * 100_000, document.NotJSON, "not a JSON document"),
        ('{"kind": 1, "kind": 2}', document.NotJSON, "the key 'kind' stands twice"),
        ('{"kind": NaN}', document.NotJSON, "the number NaN is not finite"),
        ("[]", document.WrongKind, "not a surface: a list, not an object"),
        ("null", document.WrongKind, "not a surface: no JSON object"),
        ("{}", document.WrongKind, "not a surface: its \"kind\" is not 'autocast-surface'"),
        (reports.raw("conformant"), document.WrongKind, "this is a report, which python -m conformance diff compares"),
    ],
    ids=["empty", "truncated", "binary", "deep", "twice", "nan", "list", "null", "object", "report"],
)
def test_what_is_no_surface_is_refused(
    content: str | bytes | dict[str, Any], error: type[document.ReportError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        surface.read(_file(tmp_path, content))

    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "value", "error", "said"),
    [
        ("kind", "autocast", document.WrongKind, "its \"kind\" is not 'autocast-surface'"),
        ("schema", 2, document.NewerSchema, "written by a newer suite (schema 2); this one reads schema 1"),
        ("schema", 10**400, document.NewerSchema, "written by a newer suite"),
        ("schema", "1", document.WrongTypes, "schema: must be a whole number"),
        ("schema", True, document.WrongTypes, "schema: must be a whole number"),
        ("schema", 0, document.WrongTypes, "schema: must be a whole number"),
        ("torch", 2.13, document.WrongTypes, "torch: must be a text, not 2.13"),
        ("build/mkldnn", "yes", document.WrongTypes, "build.mkldnn: must be true or false, not 'yes'"),
        ("build/python", "3.11", document.UnknownKeys, "build: unknown key 'python'; allowed: cuda, hip"),
        ("build/git", ABSENT, document.WrongTypes, "build: the key 'git' is missing"),
        ("note", "", document.UnknownKeys, "unknown key 'note'; allowed: kind, schema"),
        ("backends", [], document.WrongTypes, "backends: must be an object, not a list"),
        (
            "backends/tpu",
            {},
            document.WrongTypes,
            "backends: must be one of cuda, cpu, xpu, mps, mtia, maia, not 'tpu'",
        ),
        ("backends/maia", ABSENT, document.WrongTypes, "backends: the key 'maia' is missing"),
        ("backends/cuda/extra", 1, document.UnknownKeys, "backends.cuda: unknown key 'extra'"),
        ("backends/cuda/overloads", ["mm"], document.WrongTypes, "backends.cuda.overloads: must be an object"),
        (
            "backends/cuda/overloads/mm",
            "low",
            document.WrongTypes,
            "backends.cuda.overloads.mm: must be one of lower_pre",
        ),
        ("backends/cuda/overloads/mm", None, document.WrongTypes, "must be one of lower_precision"),
        ("backends/cuda/overloads/mm", "unknown", document.WrongTypes, "backends.cuda: 'mm' is in only one of"),
        ("backends/cuda/undetermined/mm", "why", document.WrongTypes, "backends.cuda: 'mm' is in only one of"),
        ("backends/cuda/overloads/", "fp32", document.WrongTypes, "backends.cuda: an op without a name"),
        ("backends/cuda/documented/sum", "unlisted", document.WrongTypes, "backends.cuda.documented.sum: must be one"),
        (
            "backends/cuda/amp_dtype",
            "half",
            document.WrongTypes,
            "must be one of float16, bfloat16, float32, not 'half'",
        ),
        ("backends/cuda/amp_dtype", None, document.WrongTypes, "backends.cuda: a dispatch key without an amp dtype"),
        ("backends/cuda/key", None, document.WrongTypes, "backends.cuda: overloads or an amp dtype without a dispatch"),
    ],
)
def test_wrong_form_is_refused(
    where: str, value: Any, error: type[document.ReportError], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        surface.read(_file(tmp_path, changed((where, value))))

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_large_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "surface.json"
    with file.open("wb") as stream:
        stream.truncate(100 * 2**20)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("the file was read"))

    with pytest.raises(document.TooLarge, match="104857600 bytes, and a surface has at most 4194304"):
        surface.read(file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(document.MissingReport, match=r"absent\.json: there is no such file"):
        surface.read(tmp_path / "absent.json")
    with pytest.raises(document.MissingReport, match="not a regular file"):
        surface.read(tmp_path)


CUDA, CPU, XPU = "backends/cuda/", "backends/cpu/", "backends/xpu/"


@pytest.mark.parametrize(
    ("changes", "kind", "sentences"),
    [
        (
            [(f"{CUDA}overloads/rms_norm", "fp32"), (f"{XPU}overloads/rms_norm", "fp32")],
            Kind.ADDED,
            ["cuda, xpu: rms_norm: now autocasts to float32"],
        ),
        (
            [(f"{CPU}overloads/a", "fp32"), (f"{CPU}overloads/b", "fp32"), (f"{CPU}overloads/c", "unlisted")],
            Kind.ADDED,
            [
                "cpu: a, b: now autocast to float32",
                "cpu: c: now has a kernel that changes nothing: the type of the inputs stays",
            ],
        ),
        ([(f"{CPU}overloads/qr", ABSENT)], Kind.REMOVED, ["cpu: qr: no longer autocasts to float32"]),
        ([(f"{XPU}overloads/binary_cross_entropy", ABSENT)], Kind.REMOVED, ["no longer raises an error"]),
        (
            [(f"{CUDA}overloads/_cudnn_rnn", ABSENT), (f"{CUDA}undetermined", {})],
            Kind.REMOVED,
            ["cuda: _cudnn_rnn: no rule any more; the suite could not observe what it was"],
        ),
        (
            [(f"{CUDA}overloads/mm", "fp32"), (f"{CPU}overloads/mm", "fp32"), (f"{XPU}overloads/mm", "widest")],
            Kind.MOVED,
            [
                "cuda, cpu: mm: lower_precision -> fp32: now in float32, before in the amp dtype; the type of the",
                "xpu: mm: lower_precision -> widest: now in the widest type among its inputs, before in the amp dtype",
            ],
        ),
        (
            [(f"{XPU}overloads/exp", "fp32_append_dtype")],
            Kind.MOVED,
            ["xpu: exp: fp32 -> fp32_append_dtype: in float32 as before, and so is the result; only the way to it"],
        ),
        ([(f"{CUDA}amp_dtype", "bfloat16")], Kind.AMP_DTYPE, ["cuda: torch.autocast without a dtype means bfloat16"]),
        ([(f"{CUDA}key", "AutocastX")], Kind.KEY, ["cuda: the dispatch key is AutocastX, before AutocastCUDA"]),
        (
            [(f"{CUDA}documented/mm", ABSENT), (f"{CPU}documented/cat", "widest"), (f"{CUDA}documented/sum", "widest")],
            Kind.PAGE,
            [
                "cuda: mm: not listed now, listed under lower_precision before",
                "cuda: sum: listed under widest now, listed under fp32 before",
                "cpu: cat: listed under widest now, not listed before",
            ],
        ),
    ],
    ids=[
        "added",
        "added alike",
        "removed",
        "ban lifted",
        "unknown",
        "moved",
        "moved alike",
        "amp dtype",
        "key",
        "page",
    ],
)
def test_change_is_said_in_words(changes: list[tuple[str, Any]], kind: Kind, sentences: list[str]) -> None:
    old, new = small(), small(*changes)

    said = list(surface_diff.sentences(surface_diff.changes(old, new)))

    assert [of for of, _ in said] == [kind] * len(sentences)
    for (_, words), expected in zip(said, sentences, strict=True):
        assert expected in words
    page = surface_diff.render(old, new, names=("a", "b"), width=1000)
    assert all(words in page for _, words in said)
    assert kind.value in page


@pytest.mark.parametrize("policy", surface.POLICIES)
@pytest.mark.parametrize("other", [None, *surface.POLICIES])
def test_every_move_has_words_of_its_own(policy: str, other: str | None) -> None:
    def with_policy(policy: str | None) -> surface.Surface:
        if policy is None:
            return small()
        reasons = {"_cudnn_rnn": "", **({"tan": "why"} if policy == "unknown" else {})}
        return small((f"{CUDA}overloads/tan", policy), (f"{CUDA}undetermined", reasons))

    there, back = (
        [words for _, words in surface_diff.sentences(surface_diff.changes(with_policy(old), with_policy(new)))]
        for old, new in ((other, policy), (policy, other))
    )

    assert (there == back) is (policy == other)
    assert len(there) == (policy != other)


def test_key_that_is_new_is_one_line_with_its_rules_counted() -> None:
    backend = {
        "key": "AutocastMTIA",
        "amp_dtype": "float16",
        "overloads": {"mm": "lower_precision", "exp": "fp32", "log": "fp32"},
        "documented": {},
        "undetermined": {},
    }
    old, new = small(), small(("backends/mtia", backend), ("backends/maia", {**backend, "key": "AutocastMAIA"}))

    there = list(surface_diff.sentences(surface_diff.changes(old, new)))
    back = list(surface_diff.sentences(surface_diff.changes(new, old)))

    counts = "with 3 overloads (2 fp32, 1 lower_precision)"
    assert there == [(Kind.KEY, f"mtia, maia: the dispatch key is new, {counts}")]
    assert back == [(Kind.KEY, f"mtia, maia: the dispatch key is gone, {counts}")]


def test_key_of_another_name_hides_no_rule() -> None:
    new = small((f"{CUDA}key", "AutocastX"), (f"{CUDA}overloads/tan", "fp32"))

    said = [words for _, words in surface_diff.sentences(surface_diff.changes(small(), new))]

    assert said == [
        "cuda: the dispatch key is AutocastX, before AutocastCUDA",
        "cuda: tan: now autocasts to float32",
    ]


def test_nothing_changed_is_said_and_the_build_is_a_caveat() -> None:
    other = small(("torch", "2.13.0+cu130"), ("build/cuda", "13.0"), ("build/mkldnn", False), ("build/git", "x" * 40))

    assert surface_diff.changes(small(), other) == []
    page = surface_diff.render(small(), other, names=("a.json", "b.json"), width=1000)
    assert page.splitlines()[0] == "old: a.json, torch 2.13.0+cpu (CPU build, git cf30153c)"
    assert page.splitlines()[1] == "new: b.json, torch 2.13.0+cu130 (cuda 13.0 build, git xxxxxxxx)"
    assert "Caveat: the builds differ (cuda: without -> with; mkldnn: with -> without): a build registers only" in page
    assert page.splitlines()[-1] == "NOTHING CHANGED: the same keys, amp dtypes, rules and documented names."
    newer = small(("build/cuda", "13.2"), ("build/git", "y" * 40))
    assert "Caveat" not in surface_diff.render(small(("build/cuda", "13.0")), newer, names=("a", "b"))


def test_last_line_counts_each_backend() -> None:
    new = small(
        (f"{CUDA}overloads/rms_norm", "fp32"),
        (f"{XPU}overloads/rms_norm", "fp32"),
        (f"{CPU}overloads/qr", ABSENT),
        (f"{CPU}overloads/cat", "fp32"),
        (f"{CPU}documented/cat", "fp32"),
    )

    last = surface_diff.render(small(), new, names=("a", "b"), width=1000).splitlines()[-1]

    assert last == (
        "CHANGED: 2 rules added, 1 rule removed, 1 rule moved, 1 documented name changed (each backend counts)."
    )


def test_text_of_a_file_moves_no_cursor() -> None:
    new = small((f"{CUDA}overloads/\x1b[2J\u202emm\nnext", "fp32"), ("torch", "2.13\x1b[31m"), ("build/cuda", "\x07"))

    page = surface_diff.render(small(), new, names=("a\x1b", "b"))

    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "\x07" not in page


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_surface_is_in_the_one_spelling(path: Path) -> None:
    stored = surface.read(path)

    assert surface.render(stored) == path.read_text(encoding="utf-8")
    assert stored.torch.split("+")[0] == path.stem
    assert stored.backends["cuda"].overloads


def test_page_of_the_docs_says_what_the_stored_surfaces_differ_in() -> None:
    page = (ROOT / "docs" / "surfaces.md").read_text(encoding="utf-8")

    assert len(STORED) == 10
    for row in _rows():
        assert row in page, f"docs/surfaces.md lacks this row of its table:\n{row}"


def _rows() -> list[str]:
    """The table of docs/surfaces.md: each stored surface with its build and what changed since the one before."""
    stored = [surface.read(path) for path in STORED]
    rows = []
    for number, new in enumerate(stored):
        found = surface_diff.changes(stored[number - 1], new) if number else []
        said = "; ".join(words for _, words in surface_diff.sentences(found)) or ("nothing" if number else "")
        build = f"CUDA {new.build.cuda}" if new.build.cuda else "CPU"
        counts = " / ".join(str(len(new.backends[name].overloads)) for name in surface.BACKENDS)  # type: ignore[index]
        rows.append(f"| {new.torch.split('+')[0]} | {build} | {counts} | {said} |")
    return rows
