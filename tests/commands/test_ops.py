"""`python -m conformance ops`: in what precision an op runs, as table and in words; names that nothing has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.oracles.policy import lists as op_policy
from conformance.oracles.policy import overloads
from conformance.oracles.policy import surface as reader
from conformance.report import ops, surface
from tests.commands.running import exit_status
from tests.report.surfaces import small


def _view(
    *backends: str, policies: tuple[str, ...] = (), undocumented: bool = False, of: surface.Surface | None = None
) -> ops.View:
    return ops.View(of or small(), backends or surface.BACKENDS, op_policy.resolved, policies, undocumented)


def _rows(page: str) -> dict[str, list[str]]:
    """The rows of a table by op; two or more blanks part its columns."""
    body = page.split("---\n")[-1].split("\n\n")[0]
    cells = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in body.splitlines())
    return {row[0]: row[1:] for row in cells}


def test_table_has_every_op_with_a_rule() -> None:
    rows = _rows(ops.table(_view("cuda", "cpu", "xpu", "mps")))

    assert rows == {
        "_cudnn_rnn": ["unknown*", "-", "-", "no key"],
        "binary_cross_entropy": ["-", "-", "banned", "no key"],
        "cat": ["-", "widest*", "-", "no key"],
        "exp": ["fp32*", "-", "fp32", "no key"],
        "mm": ["lower", "lower", "lower", "no key"],
        "qr": ["-", "fp32*", "-", "no key"],
        "sum": ["fp32 set", "-", "-", "no key"],
    }


def test_legend_explains_what_the_table_says_and_nothing_else() -> None:
    page = ops.table(_view("cuda", "cpu", policies=("lower_precision",)), width=1000)

    assert page.split("\n\n")[-1].splitlines() == [
        "lower = lower_precision, runs in the amp dtype",
        "the amp dtype, where the region names none: float16 on cuda; bfloat16 on cpu",
    ]
    assert "* = not on PyTorch's page, which lists ops for cuda, cpu" in ops.table(_view("cuda", "cpu", "xpu"))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (_view(policies=("lower_precision",)), ["mm"]),
        (_view(policies=("fp32",)), ["exp", "qr", "sum"]),
        (_view(policies=("fp32_set_dtype",)), ["sum"]),
        (_view(policies=("widest", "banned")), ["binary_cross_entropy", "cat"]),
        (_view("cpu", policies=("fp32",)), ["qr"]),
        (_view("cpu", policies=("unlisted",)), ["_cudnn_rnn", "binary_cross_entropy", "exp", "sum"]),
        (_view("cuda", "cpu", undocumented=True), ["_cudnn_rnn", "cat", "exp", "qr"]),
        (_view("cpu", undocumented=True, policies=("widest",)), ["cat"]),
        (_view("xpu", undocumented=True), ["binary_cross_entropy", "exp", "mm"]),
    ],
)
def test_what_is_asked_narrows_the_rows(view: ops.View, expected: list[str]) -> None:
    assert list(_rows(ops.table(view))) == expected


def test_nothing_of_that_kind_is_said() -> None:
    page = ops.table(_view("mps", policies=("banned",)))

    assert page.endswith("no op is of that kind on mps")
    assert "\n" not in page


@pytest.mark.parametrize(
    ("overloads", "backends", "said"),
    [
        (["exp"], ["cuda", "cpu"], "exp: float32 on cuda; unlisted on cpu: runs in the type of its inputs."),
        (["exp"], ["cuda"], "exp: float32 on cuda."),
        (["exp"], ["cpu", "xpu"], "exp: float32 on xpu; unlisted on cpu: runs in the type of its inputs."),
        (["relu"], ["cpu", "xpu"], "relu: unlisted on cpu, xpu: runs in the type of its inputs."),
        (["relu"], ["cpu", "mps"], "relu: unlisted on cpu: runs in the type of its inputs; no autocast on mps in this"),
        (["mul", "add"], ["cpu"], "mul, add: unlisted on cpu: runs in the type of its inputs."),
        (["qr"], ["cpu", "xpu"], "qr: float32 on cpu; unlisted on xpu: runs as the ops that it is made of."),
        (["sum"], ["cuda"], "sum: float32 on cuda, unless the call names a dtype."),
        (["mm"], ["cuda", "cpu", "xpu"], "mm: the amp dtype on cuda, cpu, xpu."),
        (["cat"], ["cpu"], "cat: the widest type of its inputs on cpu."),
        (["binary_cross_entropy"], ["xpu"], "binary_cross_entropy: an error on xpu."),
        (["_cudnn_rnn"], ["cuda"], "_cudnn_rnn: a rule on cuda that could not be observed."),
        (["_cudnn_rnn"], ["cuda"], "_cudnn_rnn on cuda could not be observed: runs on cuDNN alone"),
        (["exp", "exp.out"], ["cuda"], "With out=: unlisted, as is every op in place."),
        (["mm"], ["cuda", "cpu"], "On PyTorch's page: __matmul__ under lower_precision for cuda; mm under lower"),
        (["exp"], ["cuda", "cpu"], "On PyTorch's page: not listed."),
        ([], ["cuda"], "an op: Python code that calls other ops, each of which runs by its own rule"),
    ],
)
def test_answer_says_plainly_what_it_means(overloads: list[str], backends: list[str], said: str) -> None:
    asked = ops.Asked("an op", tuple(overloads), frozenset({("qr", "xpu")}))
    view = ops.View(small(), tuple(backends), lambda name: ("mm",) if name == "__matmul__" else (name,))

    page = ops.answer(view, asked, width=1000)

    assert any(line.startswith(said) for line in page.splitlines()), page


def test_everywhere_means_every_backend() -> None:
    keys = {
        name: {"key": "K", "amp_dtype": "float16", "overloads": {}, "documented": {}, "undetermined": {}}
        for name in surface.BACKENDS
    }
    page = ops.answer(_view(of=small(("backends", keys))), ops.Asked("relu", ("relu",), frozenset()))

    assert "relu: unlisted everywhere: runs in the type of its inputs." in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "layernorm"], "unknown op 'layernorm'; did you mean layer_norm"),
        (["--op", "LayerNrom"], "unknown op 'LayerNrom'; did you mean"),
        (["--op", "GRUCel"], "unknown op 'GRUCel'; did you mean GRUCell"),
        (["--op", "mm", "--op", "q"], "unknown op 'q'"),
        (["--op", ""], "unknown op ''"),
        (["--op", "zzzzzzzz"], "unknown op 'zzzzzzzz'; nothing in torch has a name like it"),
        (["--backend", "cuad"], "unknown backend 'cuad'; did you mean cuda; there are cuda, cpu, xpu, mps, mtia, maia"),
        (["--backend", "CUDA"], "unknown backend 'CUDA'; did you mean cuda; there are"),
        (["--policy", "fp16"], "unknown policy 'fp16'; there are lower_precision, fp32"),
        (["--policy", "fp32_set"], "unknown policy 'fp32_set'; did you mean fp32_set_dtype"),
    ],
)
def test_unknown_name_gets_one_line_with_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("ops", *words) == 4

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"conformance ops: {said}")
    assert err.count("\n") == 1


def test_live_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--op", "layer_norm", "--op", "relu", "--op", "GRUCell", "--op", "__matmul__"]

    assert exit_status("ops", *words, "--backend", "cuda", "--backend", "cpu") == 0

    lines = capsys.readouterr().out.splitlines()
    assert "layer_norm: float32 on cuda; unlisted on cpu: runs in the type of its inputs." in lines
    assert "relu: unlisted on cuda, cpu: runs in the type of its inputs." in lines
    assert any(line.startswith("gru_cell: the amp dtype on cuda; unlisted on cpu: ") for line in lines)
    assert "matmul: the amp dtype on cuda, cpu." in lines


@pytest.mark.parametrize(
    ("spelling", "stands_for"),
    [
        ("mm", "mm"),
        ("torch.mm", "mm"),
        ("F.layer_norm", "layer_norm"),
        ("torch.nn.LayerNorm", "layer_norm"),
        ("LeakyReLU", "leaky_relu"),
        ("torch.linalg.vector_norm", "linalg_vector_norm"),
        ("sum.dim_IntList", "sum.dim_IntList"),
        ("aten::sum.dim_IntList", "sum.dim_IntList"),
        ("@", "matmul"),
        ("__rpow__", "pow.Scalar"),
        ("cross_entropy", "cross_entropy_loss"),
        ("cross_entropy", "nll_loss"),
        ("LSTM", "_cudnn_rnn"),
        ("torch.special.softmax", "softmax.int"),
        ("arccos", "acos"),
        ("relu_", "relu_"),
    ],
)
def test_spelling_stands_for_an_overload(spelling: str, stands_for: str) -> None:
    assert stands_for in (reader.stands_for(spelling) or ())


def test_python_function_stands_for_no_overload_and_nonsense_for_nothing() -> None:
    assert reader.stands_for("gumbel_softmax") == ()
    assert reader.stands_for("TransformerEncoderLayer") == ()
    assert reader.stands_for("layernorm") is None


def _spelled() -> Iterator[str]:
    yield from reader._spellings()
    for backend in overloads.BACKENDS:
        yield from reader.documented(backend)


@pytest.mark.parametrize("spelling", sorted(set(_spelled())))
def test_every_known_spelling_stands_for_something(spelling: str) -> None:
    assert reader.stands_for(spelling)
