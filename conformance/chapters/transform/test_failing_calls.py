"""Check that functional_call gives a module its own parameters and buffers back when the call fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...harness.check import Case, contract
from ...harness.targets import Target

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch compiles its first jvp with it


class _Stop(BaseException):
    """What stops a call and is no Exception, as an interrupt from the keyboard."""


class _Model(nn.Module):
    """Layers of two levels, a shared weight and buffers; it raises `error` before, between or behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = nn.ModuleDict({"second": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
        self.third = nn.Linear(2, 2)
        self.third.weight = self.first.weight
        self.place, self.error = 0, None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate((self.first, *self.inner.values(), self.third)):
            if self.error is not None and self.place == number:
                raise self.error
            x = layer(x)
        if self.error is not None:
            raise self.error
        return x


Call = Callable[[_Model, dict[str, Tensor], Tensor], Any]


def _plain(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.functional_call(model, given, (x,))


def _grad(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    weights = {name: one for name, one in given.items() if name in dict(model.named_parameters())}
    rest = {name: one for name, one in given.items() if name not in weights}
    return torch.func.grad(lambda some: torch.func.functional_call(model, ({**some}, rest), (x,)).float().sum())(
        weights
    )


def _vmap(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.vmap(lambda one: torch.func.functional_call(model, given, (one,)))(x[None])


def _jvp(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.jvp(lambda one: torch.func.functional_call(model, given, (one,)), (x,), (x,))


class _Outer(nn.Module):
    """A module whose forward calls another one with other weights."""

    def __init__(self, model: _Model, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.model, self.given, (x,))


def _nested(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    halves = {f"model.{name}": one / 2 if one.is_floating_point() else one for name, one in given.items()}
    return torch.func.functional_call(_Outer(model, given), halves, (x,))


def _untied(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    both = {**given, "third.weight": given["first.weight"]}
    return torch.func.functional_call(model, both, (x,), tie_weights=False)


def _strict(model: _Model, given: dict[str, Tensor], x: Tensor) -> Any:
    return torch.func.functional_call(model, given, (x,), tie_weights=True, strict=True)


TRANSFORMS: dict[str, Call] = {"grad": _grad, "vmap": _vmap, "jvp": _jvp}
CALLS: dict[str, Call] = {
    "plain": _plain,
    "tie_weights=False": _untied,
    "strict": _strict,
    "nested": _nested,
    **TRANSFORMS,
}
ERRORS = (
    RuntimeError("no memory"),
    torch.OutOfMemoryError("no memory"),
    AssertionError("own"),
    KeyError("own"),
    _Stop(),
)
# Arguments that are refused: what is given besides, or in place of an input.
REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "an input of another size": ({}, (3, 5)),
    "a name of no module": ({"none.weight": torch.ones(2)}, (3, 2)),
    "the name of a module": ({"inner.norm": torch.ones(2)}, (3, 2)),
    "no tensor": ({"third.bias": "bias"}, (3, 2)),
    "a bias of another size": ({"third.bias": torch.ones(5)}, (3, 2)),
}


def _own(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contract("AMP-TRANSFORM-020")
@pytest.mark.parametrize("region", [False, True], ids=["outside", "in-a-region"])
def test_failing_calls(case: Case, target: Target, amp_dtype: torch.dtype, region: bool) -> None:
    model = _Model().to(target.device)
    model.third.weight = model.first.weight  # moving a module gives some devices a weight for each name
    own = _own(model)
    values = {name: one.detach().clone() for name, one in own.items()}
    x = torch.ones(3, 2, device=target.device)
    wrong: dict[str, Any] = {}

    def judge(what: str, call: Call, given: dict[str, Any], x: Tensor, *expected: type[BaseException]) -> None:
        raised: BaseException | None = None
        try:
            with target.autocast(amp_dtype) if region else contextlib.nullcontext():
                call(model, given, x)
        except (Exception, _Stop) as error:
            raised = error
        if not isinstance(raised, expected or BaseException):
            wrong[f"{what}: error"] = repr(raised)[:80]
        now = _own(model)
        if others := [name for name in {**own, **now} if now.get(name) is not own.get(name)]:
            wrong[f"{what}: the module has others"] = others
            for name, one in own.items():
                holder, _, last = name.rpartition(".")
                entries = model.get_submodule(holder)
                (entries._parameters if last in entries._parameters else entries._buffers)[last] = one
        if changed := [name for name, one in own.items() if not torch.equal(one.detach(), values[name])]:
            wrong[f"{what}: changed values"] = changed

    def given() -> dict[str, Any]:
        found = {name: (-one if one.is_floating_point() else one + 1) for name, one in values.items()}
        if not region:
            found = {name: one.to(amp_dtype) if one.is_floating_point() else one for name, one in found.items()}
        return {name: one.clone() for name, one in found.items() if name != "third.weight"}

    kind = x if region else x.to(amp_dtype)
    for name, call in CALLS.items():
        for number, error in enumerate(ERRORS):
            model.train(name not in TRANSFORMS)  # which refuse updates of running statistics
            model.place, model.error = number, error
            judge(f"{name}, {type(error).__name__} at place {number}", call, given(), kind, type(error))
    model.train()
    model.error = None
    for name, (more, shape) in REFUSED.items():
        replaced = {key: one.to(target.device) if isinstance(one, Tensor) else one for key, one in more.items()}
        judge(name, _plain, {**given(), **replaced}, torch.ones(shape, device=target.device, dtype=kind.dtype))
    some = {name: one for name, one in given().items() if "second" in name}
    judge("names that are missing, strict", _strict, some, kind, RuntimeError)
    case.equal("calls that failed otherwise, or left something in the module", wrong, {})
    with target.autocast(amp_dtype) if region else contextlib.nullcontext():
        result = torch.func.functional_call(model, given(), (kind,))
    case.equal("type of the result of the next call, which succeeds", result.dtype, amp_dtype)
    same = [name for name, one in _own(model).items() if one is own[name]]
    case.equal("what the module has after it", same, list(own))
