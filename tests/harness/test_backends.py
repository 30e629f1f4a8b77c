"""Devices of third parties: what is imported first, the op policy that they declare, and what they lack."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import backends, judge, targets
from conformance.oracles.policy import declared
from conformance.oracles.policy.lists import backend_of, listings
from conformance.report import values
from tests.conftest import Toy, foreign_device

WHERE = "[[waiver]]\ncontract = 'AMP-CAST-000'\ncases = ['*']\nreason = 'known'\nowner = 'us'\nlink = 'https://x.org'\n"
_WAIVER = WHERE + "expires = 2099-12-31\ntarget = ['{target}']\n"
_OPS = """
from conformance.harness.check import per_target
from conformance.oracles.policy.lists import listings
"""
_LISTED = """
@contract("AMP-CAST-000", on=("cpu", "fake:cuda", "cuda"))
def test_listed(case: Case, target: Target) -> None:
    case.equal("lists", len(listings(target.device_type, "fp32")) > 0, {holds})
"""
_OF_CUDA = """
@contract("AMP-CAST-000", on=("cpu", "torch.cuda"))
def test_of_the_module(case: Case, target: Target) -> None:
    case.true("ran", True)

@contract("AMP-CAST-000", on="cuda")
def test_of_the_device(case: Case, target: Target) -> None:
    case.true("ran", True)
"""


@pytest.fixture(autouse=True)
def _npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of a third party's type, with the CPU in its place."""
    foreign_device(monkeypatch)
    monkeypatch.setattr(declared, "_DECLARED", {})


def _package(monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """Let an installed package say this of npu."""

    class Entry(EntryPoint):
        def load(self) -> Any:
            if isinstance(said, Exception):
                raise said
            return said

    found = EntryPoints([Entry("npu", "vendor.amp:DECLARATION", backends.GROUP)])
    monkeypatch.setattr(backends, "entry_points", lambda **chosen: found.select(**chosen))


def _checked(toy: Toy, holds: bool = True) -> Toy:
    toy.contract("AMP-CAST-000")
    toy.checks(_OPS + _LISTED.format(holds=holds))
    return toy


def test_device_is_judged_by_the_lists_that_are_declared(toy: Toy) -> None:
    outcome = _checked(toy).run("--device", "npu", "--op-policy", "like:cuda")

    assert (outcome.status, outcome.report["footer"]["overall"]) == (0, "CONFORMANT")
    assert outcome.report["header"]["options"]["op_policies"] == {"npu": "cuda"}
    assert "npu:0" in outcome.output
    assert "judged by the op lists of cuda" in outcome.output


def test_declaration_ends_with_its_run(toy: Toy) -> None:
    _checked(toy)
    toy.run("--device", "npu", "--op-policy", "npu=like:cuda")
    assert listings("npu")
    toy.run("--device", "cpu")

    assert not listings("npu")
    assert backend_of("npu") == "cuda"  # what other accelerators list most


def test_checks_of_cuda_alone_are_not_about_a_device_like_it(toy: Toy) -> None:
    toy.contract("AMP-CAST-000")
    toy.checks(_OF_CUDA)

    outcome = toy.run("--device", "npu", "--op-policy", "like:cuda")

    assert outcome.report["cases"] == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--op-policy", "cuda"), "'cuda' is not like:BACKEND"),
        (("--op-policy", "=like:cuda"), "is not like:BACKEND"),
        (("--op-policy", "surface:cuda"), "'surface:cuda' is not like:BACKEND"),
        (("--op-policy", "surface:none.json:cuda"), "none.json: there is no such file"),
        (("--op-policy", "like:warp"), "there are no op lists of 'warp'; there are cuda, cpu"),
        (("--op-policy", "xla=like:cuda"), "xla is no device of this run"),
        (("--op-policy", "cpu=like:cuda", "--device", "cpu"), "cpu has lists of its own"),
        (("--import", "no_such_module"), "--import: no_such_module: ModuleNotFoundError"),
        (("--import", "broken_vendor"), "--import: broken_vendor: RuntimeError: no driver"),
    ],
)
def test_wrong_words_are_refused_in_one_line(toy: Toy, options: tuple[str, ...], said: str) -> None:
    (toy.path / "broken_vendor.py").write_text("raise RuntimeError('no driver\\nfound')\n")
    outcome = _checked(toy).run("--device", "npu", *options)

    assert outcome.status == 4
    assert said in outcome.output


def test_declaration_for_no_device_is_refused(toy: Toy) -> None:
    outcome = _checked(toy).run("--device", "cpu", "--op-policy", "like:cuda")

    assert outcome.status == 4
    assert "every device of this run has op lists of its own" in outcome.output


def test_module_is_imported_before_the_devices_are_resolved(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.path / "vendor_of_npu.py").write_text("import torch\ntorch.vendor_was_here = True\n")
    seen: list[bool] = []
    real = targets.resolve

    def resolve(name: str) -> targets.Target:
        seen.append(hasattr(torch, "vendor_was_here"))
        return real(name)

    monkeypatch.setattr(targets, "resolve", resolve)
    try:
        outcome = _checked(toy).run("--device", "cpu", "--import", "vendor_of_npu")
    finally:
        del torch.vendor_was_here

    assert all(seen)
    assert outcome.report["header"]["options"]["imports"] == ["vendor_of_npu"]


def test_installed_package_declares_its_policy_and_waivers(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "known.toml").write_text(_WAIVER.format(target="npu*"))
    _package(monkeypatch, {"op_policy": "like:cuda", "waivers": tmp_path / "known.toml"})

    outcome = _checked(toy, holds=False).run("--device", "npu")

    assert outcome.report["header"]["options"]["op_policies"] == {"npu": "cuda"}
    assert {case["verdict"] for case in outcome.report["cases"]} == {"WAIVED"}
    assert outcome.status == 0


_NEEDS_POOLS = """
from conformance.harness.check import needs

@contract("AMP-CAST-000")
@needs("pools of memory")
def test_pools(case: Case, target: Target) -> None:
    case.equal("one", 1, 1)
"""


def test_installed_package_declares_what_its_device_lacks(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-CAST-000")
    toy.checks(_NEEDS_POOLS)
    _package(monkeypatch, {"capabilities": {"pools of memory": "the allocator has one pool"}})

    outcome = toy.run("--device", "npu")
    (case,) = outcome.report["cases"]

    assert case["verdict"] == "UNSUPPORTED"
    assert case["reason"].endswith("lacks pools of memory: the allocator has one pool")
    assert outcome.report["header"]["targets"][0]["probe"]["lacks"] == ["pools of memory"]
    assert "which declares that it lacks pools of memory" in outcome.output


def test_what_a_package_declares_ends_with_its_run(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.contract("AMP-CAST-000")
    toy.checks(_NEEDS_POOLS)
    _package(monkeypatch, {"capabilities": {"pools of memory": "the allocator has one pool"}})
    toy.run("--device", "npu")
    _package(monkeypatch, {})

    outcome = toy.run("--device", "npu")

    assert [case["verdict"] for case in outcome.report["cases"]] == ["PASS"]
    assert outcome.report["header"]["targets"][0]["probe"]["lacks"] == []


def test_page_lists_every_key_and_every_capability(root: Path) -> None:
    page = (root / "docs" / "backends.md").read_text(encoding="utf-8")
    keys = page[page.index("| key | what it holds |") :].split("\n\n")[0]
    (sentence,) = re.findall(r"The capabilities are (.*?)\.", page, re.DOTALL)

    assert tuple(re.findall(r"^\| `(\w+)` \|", keys, re.M)) == backends._KEYS
    assert tuple(" ".join(name.split()) for name in re.findall(r"`([^`]+)`", sentence)) == tuple(targets.CAPABILITIES)


def test_words_of_the_user_come_before_those_of_the_package(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(monkeypatch, {"op_policy": "like:cuda"})

    outcome = _checked(toy).run("--device", "npu", "--op-policy", "like:xpu")

    assert outcome.report["header"]["options"]["op_policies"] == {"npu": "xpu"}


@pytest.mark.parametrize(
    ("package", "said"),
    [
        (RuntimeError("no driver"), "cannot be loaded: RuntimeError: no driver"),
        ("like:cuda", "is a str and no mapping"),
        ({"policy": "like:cuda"}, "has 'policy', and there are op_policy, capabilities, waivers"),
        ({"capabilities": ["graphs"]}, "capabilities: a list, and no mapping from what the device lacks to the reason"),
        (
            {"capabilities": {"unscaling": "it is slow"}},
            "capabilities: 'unscaling' is no capability; there are streams,",
        ),
        ({"capabilities": {"graphs": False}}, "graphs has 'False' in place of the reason why the device lacks it"),
        ({"capabilities": {"graphs": " "}}, "graphs has ' ' in place of the reason"),
        ({"op_policy": "cuda"}, "op_policy: 'cuda' is not like:BACKEND"),
    ],
)
def test_wrong_package_is_refused_by_its_name(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, package: Any, said: str
) -> None:
    _package(monkeypatch, package)

    outcome = _checked(toy).run("--device", "npu")

    assert outcome.status == 4
    assert f"the entry point npu of {backends.GROUP} (vendor.amp:DECLARATION)" in outcome.output
    assert said in outcome.output


@pytest.mark.parametrize(
    ("target", "verdict"), [("fake:cuda", "WAIVED"), ("*cuda*", "WAIVED"), ("cuda", "FAIL"), ("xpu", "FAIL")]
)
def test_waivers_of_what_stands_above_the_kernels_hold(toy: Toy, tmp_path: Path, target: str, verdict: str) -> None:
    (tmp_path / "known.toml").write_text(_WAIVER.format(target=target))

    outcome = _checked(toy, holds=False).run(
        "--device", "npu", "--op-policy", "like:cuda", "--waivers", str(tmp_path / "known.toml")
    )

    assert {case["verdict"] for case in outcome.report["cases"]} == {verdict}


@pytest.mark.parametrize(("has_kernel", "verdict"), [(False, "WAIVED"), (True, "FAIL")])
def test_waivers_of_torchs_kernels_hold_on_a_device_without_its_own(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kernel: bool, verdict: str
) -> None:
    monkeypatch.setattr(targets, "has_kernel", lambda device_type, operator: has_kernel)
    (tmp_path / "known.toml").write_text(_WAIVER.format(target="cpu") + 'kernels = ["aten::mm"]\n')

    outcome = _checked(toy, holds=False).run(
        "--device", "npu", "--op-policy", "like:cuda", "--waivers", str(tmp_path / "known.toml")
    )

    assert {case["verdict"] for case in outcome.report["cases"]} == {verdict}


@pytest.mark.parametrize(("target", "status"), [("*", 0), ("npu*", 1)])
def test_device_may_keep_what_torch_breaks_elsewhere(toy: Toy, tmp_path: Path, target: str, status: int) -> None:
    (tmp_path / "known.toml").write_text(_WAIVER.format(target=target))

    outcome = _checked(toy).run(
        "--device", "npu", "--op-policy", "like:cuda", "--waivers", str(tmp_path / "known.toml")
    )

    assert outcome.status == status  # a waiver that names the device itself is unneeded


_BY_DISPATCHER = "Could not run 'aten::mm' with arguments from the 'CPU' backend."


@pytest.mark.parametrize(
    ("error", "op"),
    [
        (NotImplementedError(_BY_DISPATCHER), "aten::mm"),
        (NotImplementedError("The operator 'aten::cholesky' is not currently implemented for NPU"), "aten::cholesky"),
        (NotImplementedError("convolution_overrideable not implemented. You are likely"), "convolution_overrideable"),
        (NotImplementedError(_BY_DISPATCHER.replace("CPU", "AutocastPrivateUse1")), None),
        (NotImplementedError("\"mm\" not implemented for 'Half'"), None),
        (RuntimeError(_BY_DISPATCHER), None),
        (None, None),
    ],
)
def test_kernel_that_is_missing_is_read_from_the_error(error: Exception | None, op: str | None) -> None:
    assert judge.lacks_kernel(error) == op


def test_forward_derivative_that_is_missing_is_read_from_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the device has a kernel of its own: torch composes the operator elsewhere."""
    error = NotImplementedError("Trying to use forward AD with linear that does not support it because it has not been")
    assert judge.lacks_tangent(error, "npu") is None
    monkeypatch.setattr(judge, "has_kernel", lambda device_type, name: (device_type, name) == ("npu", "aten::linear"))
    assert judge.lacks_tangent(error, "npu") == "linear"
    assert judge.lacks_tangent(RuntimeError(str(error)), "npu") is None


def test_hook_that_is_missing_is_read_from_the_error() -> None:
    words = "You should register `PrivateUse1HooksInterface`by `RegisterPrivateUse1HooksInterface` and implement "
    assert (
        judge.lacks_hook(NotImplementedError(f"{words}`getNewGenerator` at the same time for PrivateUse1."))
        == "getNewGenerator"
    )
    assert judge.lacks_hook(NotImplementedError("getNewGenerator")) is None
    assert judge.lacks_hook(RuntimeError(f"{words}`getNewGenerator` at the same time for PrivateUse1.")) is None


def test_function_that_a_device_module_lacks_is_read_from_the_error() -> None:
    module = types.ModuleType("torch.npu")
    with pytest.raises(AttributeError) as caught:
        _ = module.device
    assert judge.lacks_function(caught.value, module) == "device"
    assert judge.lacks_function(caught.value, types.ModuleType("torch.npu")) is None
    assert judge.lacks_function(caught.value, None) is None
    assert judge.lacks_function(RuntimeError("device"), module) is None


_WORDS = {torch.float64: "npu has no double", torch.bfloat16: "npu has no brain float"}


def _asked(modules: tuple[str, ...], words: str) -> TypeError:
    """Return the device's refusal of a dtype, raised below code of these modules, the innermost last."""

    def refuse(*rest: Any) -> None:
        raise TypeError(words)  # as an operator in C++, whose frames Python does not see

    call: Any = refuse
    for module in reversed(modules):
        call = types.FunctionType(_calls.__code__, {"__name__": module, "call": call})
    with pytest.raises(TypeError) as caught:
        call()
    return _as_from_an_operator(caught.value)


def _as_from_an_operator(error: TypeError) -> TypeError:
    """Return the error without its innermost frame, as what is raised in C++ has none."""
    places = error.__traceback__
    while places is not None and places.tb_next is not None and places.tb_next.tb_next is not None:
        places = places.tb_next
    assert places is not None
    places.tb_next = None
    return error


def _calls() -> None:
    call()  # type: ignore[name-defined]  # noqa: F821  (each copy has its own)


_BETWEEN = ("torch._compile", "conformance.measure.nonfinite", "torch._ops")


@pytest.mark.parametrize(
    ("modules", "module"),
    [
        (("check", "torch.amp.grad_scaler"), "torch.amp.grad_scaler"),
        (("check", "torch.optim._muon"), "torch.optim._muon"),
        (
            ("torch.amp.grad_scaler", "torch._compile", "conformance.measure.nonfinite", "torch._ops"),
            "torch.amp.grad_scaler",
        ),
        (("check",), None),
        (("check", "torch.nn.modules.linear"), None),
        (("torch.optim.sgd", "check"), None),
        (("check", "conformance.oracles.trace.ops", "torch._ops"), None),
    ],
)
def test_dtype_that_is_asked_for_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], module: str | None
) -> None:
    device = torch.device("cpu")
    refusals = {dtype: frozenset({(TypeError, words)}) for dtype, words in _WORDS.items()}
    monkeypatch.setattr(judge, "dtype_refusals", lambda device, dtype: refusals.get(dtype, frozenset()))

    for dtype, words in _WORDS.items():
        excused = module is not None or dtype == torch.float64  # which no region casts to
        assert judge.lacks_dtype(_asked(modules, words), device) == ((module, dtype) if excused else None)
    assert judge.lacks_dtype(_asked(modules, "expected a double"), device) is None
    assert judge.lacks_dtype(None, device) is None


class _Refusing:
    def to(self, *rest: Any) -> None:
        raise TypeError(_WORDS[torch.bfloat16])

    def mm(self, *rest: Any) -> None:
        raise TypeError(_WORDS[torch.bfloat16])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not know the call that a line is in")
@pytest.mark.parametrize(
    ("asks", "excused"),
    [
        (lambda x: x.to(torch.bfloat16), True),
        (lambda x: [x.to(torch.bfloat16), x.mm(x)], True),
        (lambda x: x.mm(x), False),
        (lambda x: [x.mm(x), x.to(torch.bfloat16)], False),
        (lambda x: x.mm(*(x.to for _ in range(1))), False),
    ],
)
def test_conversion_asks_for_its_dtype_and_an_operation_does_not(
    monkeypatch: pytest.MonkeyPatch, asks: Callable[[Any], object], excused: bool
) -> None:
    refusals = {dtype: frozenset({(TypeError, words)}) for dtype, words in _WORDS.items()}
    monkeypatch.setattr(judge, "dtype_refusals", lambda device, dtype: refusals.get(dtype, frozenset()))
    with pytest.raises(TypeError) as caught:
        asks(_Refusing())

    found = judge.lacks_dtype(_as_from_an_operator(caught.value), torch.device("cpu"))
    assert found == ((None, torch.bfloat16) if excused else None)


@pytest.mark.parametrize(
    ("measured", "op"),
    [
        (f"NotImplementedError: {_BY_DISPATCHER}", "aten::mm"),
        ([repr(f"step 2: {_BY_DISPATCHER}")], "aten::mm"),
        (_BY_DISPATCHER[:30], "aten::mm"),
        ({"linear": "no kernel of aten::mm"}, "aten::mm"),
        ("The operator 'aten::cholesky' is not currently implemented for NPU", "aten::cholesky"),
        (_BY_DISPATCHER.replace("CPU", "AutocastPrivateUse1"), None),
        ([repr(_BY_DISPATCHER.replace("CPU", "AutocastPrivateUse1"))], None),
        ("mm has no float16", None),
    ],
)
def test_kernel_that_is_missing_is_read_from_evidence(measured: Any, op: str | None) -> None:
    note = values.Evidence("what was seen", measured, None, None, "", True)

    assert judge.named_kernel([note]) == op


_NO_KERNEL = """
def _raise():
    raise NotImplementedError("Could not run 'aten::mm' with arguments from the 'CPU' backend.")

@contract("AMP-CAST-000")
def test_a(case: Case, target: Target) -> None:
    {}
"""


@pytest.mark.parametrize(("device", "verdict"), [("npu", "UNSUPPORTED"), ("cpu", "FAIL")])
@pytest.mark.parametrize(
    "body",
    [
        "_raise()",
        "case.raises('the error', ValueError, _raise)",
        "case.equal('the error', [\"step 2: Could not run 'aten::mm' with\"], [])",
        "case.note('left out', 'no kernel of aten::mm'); case.enough(target, 'ops judged', 0)",
    ],
)
def test_only_third_parties_may_lack_kernels(toy: Toy, device: str, verdict: str, body: str) -> None:
    toy.contract("AMP-CAST-000")
    toy.checks(_NO_KERNEL.format(body))

    outcome = toy.run("--device", device)

    assert {case["verdict"] for case in outcome.report["cases"]} == {verdict}
    assert not outcome.report["footer"]["problems"]


def test_too_little_is_judged_without_a_missing_kernel(toy: Toy) -> None:
    toy.contract("AMP-CAST-000")
    toy.checks(_NO_KERNEL.format("case.note('left out', 'it is slow'); case.enough(target, 'ops judged', 0)"))

    outcome = toy.run("--device", "npu")

    assert {case["verdict"] for case in outcome.report["cases"]} == {"FAIL"}


def test_report_names_the_packages_that_extend_torch(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.path / "vendor_torch.py").write_text("")
    (toy.path / "vendor_torch-1.2.dist-info").mkdir()
    (toy.path / "vendor_torch-1.2.dist-info" / "METADATA").write_text("Name: vendor-torch\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(toy.path)

    before = _checked(toy).run("--device", "cpu").report["header"]["environment"]["packages"]
    after = toy.run("--device", "cpu", "--import", "vendor_torch").report["header"]["environment"]["packages"]

    assert "vendor_torch" not in before
    assert after["vendor_torch"] == "1.2"
