"""The op lists: complete, consistent, and turned into calls that run."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from conformance.data import fixture, read_toml
from conformance.oracles.policy.lists import BACKENDS, ORIGINS, POLICIES, Listing, listings, resolved, run_dtype
from conformance.oracles.policy.samples import SAMPLES, Inputs, spell

CPU = torch.device("cpu")
TABLES = read_toml(fixture("op_lists.toml"))
# How many names the op reference of a torch has as lower_precision, fp32 and widest, as counted on its page; the fp32
# list of the CPU has one entry more, `inverse` being there twice.
PAGE_COUNTS = {
    "2.6": {"cuda": (23, 51, 10), "xpu": (21, 29, 6), "cpu": (20, 90, 3)},
    "2.11": {"cuda": (23, 51, 10), "xpu": (21, 29, 6), "cpu": (20, 90, 3)},
    "2.13": {"cuda": (23, 51, 10), "xpu": (21, 29, 6), "cpu": (20, 90, 3)},
    "2.14": {"cuda": (23, 51, 10), "xpu": (21, 29, 6), "cpu": (20, 88, 3)},
}


def names(backend: str, policy: str, origin: str, version: str) -> list[str]:
    rows = listings(backend, policy, origin=origin, version=version)
    return list(dict.fromkeys(row.name for row in rows))


@pytest.mark.parametrize("table", TABLES["list"], ids=lambda table: "-".join(map(str, list(table.values())[:3])))
def test_a_list_is_well_formed(table: dict[str, object]) -> None:
    assert set(table) <= {"backend", "policy", "origin", "source", "ops", "moved"}
    assert table["backend"] in BACKENDS
    assert table["policy"] in POLICIES
    assert table["origin"] in ORIGINS
    ops = table["ops"]
    assert isinstance(ops, list)
    assert len(ops) == len(set(ops))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("version", ["2.6", "2.11", "2.13.0+cpu", "2.14", "2.15.0a0+git1"])
def test_no_op_is_on_two_lists(backend: str, version: str) -> None:
    seen = [row.sample for row in listings(backend, version=version)]
    assert len(seen) == len(set(seen))


def test_every_listed_name_has_a_sample() -> None:
    listed = {name for table in TABLES["list"] for name in table["ops"]}
    listed |= {row["op"] for table in TABLES["list"] for row in table.get("moved", [])}
    assert listed <= set(SAMPLES)
    assert {sample for sample in SAMPLES if sample.split(".")[0] not in listed} == set()


@pytest.mark.parametrize("policy", ["lower_precision", "fp32", "widest"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("version", list(PAGE_COUNTS))
def test_the_documented_lists_have_the_length_of_the_page(version: str, backend: str, policy: str) -> None:
    count = PAGE_COUNTS[version][backend][POLICIES.index(policy)]
    assert len(names(backend, policy, "documented", version)) == count


def test_every_release_has_a_page_or_what_its_lists_rest_on() -> None:
    rows = TABLES["documentation"]
    assert [row["torch"] for row in rows] == [f"2.{minor}" for minor in range(6, 16)]
    for row in rows:
        found = {"page", "commit"} if "page" in row else {"rests_on"}
        assert set(row) == {"torch", "file", *found}
        assert row.get("page") in (None, f"https://docs.pytorch.org/docs/{row['torch']}/amp.html")


@pytest.mark.parametrize("version", ["2.6.0", "2.11.0", "2.12.0", "2.13.0+cpu"])
def test_rms_norm_is_promised_of_every_version(version: str) -> None:
    """Though torch has its kernel from 2.12 on: what fails before is waived."""
    assert "rms_norm" in names("cuda", "fp32", "registered", version)


@pytest.mark.parametrize("name", ["cholesky", "qr"])
@pytest.mark.parametrize(("version", "listed"), [("2.13.0", True), ("2.14.0", False), ("2.15.0a0+git1", False)])
def test_removed_decompositions_leave_in_2_14(name: str, version: str, listed: bool) -> None:
    assert (name in names("cpu", "fp32", "documented", version)) is listed


def test_a_name_stands_for_all_its_samples() -> None:
    assert {row.sample for row in listings("cuda") if row.name == "pow"} == {"pow", "pow.scalar", "pow.base"}


@pytest.mark.parametrize(
    ("policy", "dtypes", "expected"),
    [
        ("lower_precision", [torch.float32], torch.float16),
        ("fp32", [torch.float16], torch.float32),
        ("widest", [torch.float16, torch.float16], torch.float16),
        ("widest", [torch.float16, torch.float32], torch.float32),
        ("widest", [torch.float32, torch.float16, torch.float16], torch.float32),
        ("unlisted", [torch.float16], torch.float16),
    ],
)
def test_run_dtype(policy: str, dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    assert run_dtype(policy, dtypes, torch.float16) is expected


def test_documented_aliases_resolve() -> None:
    assert resolved("GRUCell") == ("gru_cell",)
    assert resolved("mm") == ("mm",)


@pytest.mark.parametrize("row", listings("cpu"), ids=lambda row: row.sample)
def test_a_sample_runs_in_float32_and_returns_tensors(row: Listing) -> None:
    result = SAMPLES[row.sample](Inputs((torch.float32,), CPU, seed=1))()
    assert any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))


def test_inputs_have_the_same_values_in_every_type() -> None:
    wide = Inputs((torch.float64,), CPU, seed=3).f(4, 4)
    low = Inputs((torch.float16,), CPU, seed=3).f(4, 4)
    by_hand = Inputs((torch.float32,), CPU, seed=3, cast_to=torch.float16).f(4, 4)
    assert torch.equal(wide.half(), low)
    assert torch.equal(low, by_hand)
    assert not torch.equal(low.double(), wide)
    assert torch.equal(Inputs((torch.float64,), CPU, seed=3, absolute=True).f(4, 4), wide.abs())


def test_types_are_given_in_the_order_of_making() -> None:
    inputs = Inputs((torch.float16, torch.float32), CPU)
    assert [inputs.f(2).dtype, inputs.p(2).dtype, inputs.u(2).dtype] == [torch.float16, torch.float32, torch.float32]
    assert inputs.made == 3


def test_a_call_is_spelled_as_python() -> None:
    call = SAMPLES["addmm"](Inputs((torch.float16,), CPU))
    text = spell(call)
    assert text is not None
    assert text.startswith('torch.addmm(torch.rand((3, 5), dtype=torch.float16, device="cpu"), ')
    assert text.endswith(", beta=0.5, alpha=2.0)")
    assert eval(text, {"torch": torch}).shape == (3, 5)
    assert spell(SAMPLES["index_put"](Inputs((torch.float16,), CPU))) is None
