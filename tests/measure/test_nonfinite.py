"""The trace names each injected cause, says nothing of clean runs, and leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from conformance.chapters.parity.overflow_models import CLEAN, INJECTED, Injected
from conformance.measure import nonfinite
from conformance.measure.nonfinite import Trace, diagnosed, trace

CPU = torch.device("cpu")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CASES = [(name, dtype) for name, injected in INJECTED.items() for dtype in injected.dtypes]


def _account(injected: Injected, dtype: str = "fp16", steps: int = 2) -> nonfinite.Account:
    model = injected.model(CPU)
    return trace(
        model,
        injected.optimizer(model),
        injected.loss,
        [injected.batch(CPU)],
        dtype=DTYPES[dtype],
        steps=steps,
        scale=injected.scale,
    )


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_planted_cause_is_named(name: str, dtype: str) -> None:
    injected = INJECTED[name]
    found = _account(injected, dtype).first

    assert found is not None
    assert (found.how, found.phase, found.kind) == (injected.how, injected.phase, injected.kind)
    assert found.module in injected.modules
    assert found.op in injected.ops
    assert found.iteration == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_run_has_no_cause(name: str, dtype: str) -> None:
    account = _account(CLEAN[name], dtype, steps=5)

    assert account.causes == []
    assert account.skipped == []
    assert not account.spoiled


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("large activations", "iteration 0, forward, module '1': mm makes inf in "),
        ("large activations", "float16[16, 16] of 0 to 500, at a loss scale of 1024; float16 ends at 65504"),
        ("attention logits", "; 1e+06, at a loss scale of 1024"),
        (
            "root of zero",
            "backward, module 'root': div in SqrtBackward0 makes inf in 32 of 512 elements of float16[4, 8, 16]",
        ),
        ("division in the loss", "iteration 0, loss, outside the model: div makes inf in 1 of 1 elements of float32[]"),
        ("inf in the batch", "iteration 0, forward: inf was in the batch's inputs already (1 of 512 elements"),
        ("NaN in a weight", "NaN was in the weight middle.weight already (1 of 256 elements)"),
        ("a loss scale too large", "backward, module '1': mm in MmBackward0 makes inf in "),
    ],
)
def test_it_is_told_in_a_sentence(name: str, said: str) -> None:
    assert said in str(_account(INJECTED[name]).first)


def test_forward_value_that_does_no_harm_is_no_cause_although_it_is_infinite() -> None:
    model = CLEAN["an infinity that where leaves out"].model(CPU)
    inputs, target = CLEAN["perceptron"].batch(CPU)
    with Trace(model) as watch:
        loss = nn.functional.mse_loss(model(inputs), target)
        assert watch.cause(loss) is None

    assert "log makes inf" in str(watch.earliest())


def test_a_scale_that_falls_until_it_fits_is_handled() -> None:
    injected = INJECTED["gradients of one sign"]
    account = _account(injected, steps=20)

    assert account.skipped == list(range(len(account.skipped)))
    assert 0 < len(account.skipped) < 20
    assert not account.spoiled
    assert account.scales[0] == injected.scale
    assert account.scales[-1] < injected.scale


def test_a_scale_that_collapses_is_not() -> None:
    account = _account(INJECTED["root of zero"], steps=14)

    assert account.collapsed
    assert account.spoiled
    assert {(cause.module, cause.op) for cause in account.causes} == {("root", "div")}


def test_without_a_scaler_the_weight_that_is_lost_is_named() -> None:
    injected = INJECTED["root of zero"]
    model = injected.model(CPU)
    account = trace(
        model,
        injected.optimizer(model),
        injected.loss,
        [injected.batch(CPU)],
        dtype=torch.bfloat16,
        steps=3,
        scale=None,
    )

    assert account.bad_weight == "first.weight"
    assert len(account.losses) == 1
    assert account.scales == []


def test_an_optimizer_that_overflows_is_seen() -> None:
    injected = CLEAN["perceptron"]
    model = injected.model(CPU)
    account = trace(
        model,
        torch.optim.SGD(model.parameters(), lr=1e38),
        lambda output, target: 1e4 * injected.loss(output, target),
        [injected.batch(CPU)],
        dtype=torch.bfloat16,
        scale=None,
    )

    assert account.first is not None
    assert account.first.phase == "step"
    assert account.bad_weight


@pytest.mark.parametrize("inputs", [(torch.ones(2, 16),), [torch.ones(2, 16)], {"input": torch.ones(2, 16)}])
def test_inputs_by_position_and_by_name(inputs: object) -> None:
    assert nonfinite.called(nn.Linear(16, 3), inputs).shape == (2, 3)


def test_the_largest_value_is_told() -> None:
    peak = _account(CLEAN["the largest of float16"]).peak

    assert peak is not None
    assert peak.value == 60000.0
    assert str(peak) == "6e+04, 0.92 of what float16 holds (mm, forward, module '1', iteration 0)"


def test_hooks_and_modes_are_gone_after_it() -> None:
    model = CLEAN["perceptron"].model(CPU)
    with pytest.raises(RuntimeError, match="spoiled"), Trace(model):
        raise RuntimeError("spoiled")

    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_module_that_raises_leaves_no_name_behind() -> None:
    def fail(inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("inside")

    from conformance.chapters.parity.overflow_models import Function

    broken = Function(fail)
    model = nn.Sequential(broken)
    with Trace(model) as watch:
        with pytest.raises(RuntimeError, match="inside"):
            model(torch.ones(2))
        torch.ones(3) / torch.zeros(3)

    assert watch.earliest().module == ""  # type: ignore[union-attr]


def test_diagnosis_for_a_check_that_fails() -> None:
    model = INJECTED["large activations"].model(CPU)
    said: list[str] = []
    inputs, target = INJECTED["large activations"].batch(CPU)

    with pytest.raises(AssertionError), diagnosed(model, said.append), torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(inputs).float(), target)
        assert math.isfinite(loss)

    assert len(said) == 1
    assert "module '1': mm makes inf" in said[0]


def test_diagnosis_of_a_check_that_holds_says_nothing() -> None:
    said: list[str] = []
    with diagnosed(nn.Linear(1, 1), said.append):
        torch.ones(1).log()

    assert said == []


def test_memory_that_was_never_written_is_no_cause() -> None:
    with Trace(nn.Linear(1, 1)) as watch:
        torch.empty(1000).fill_(float("nan"))
        torch.empty(1000)

    assert watch.earliest() is None


def test_anomaly_detection_does_not_see_an_overflow_in_forward() -> None:
    """What torch has of its own: it looks for NaN, and in backward alone."""
    model = INJECTED["a loss scale beyond the range"].model(CPU)
    inputs, _ = INJECTED["large activations"].batch(CPU)
    with torch.autograd.detect_anomaly(check_nan=True), torch.autocast("cpu", dtype=torch.float16):
        value = (model(inputs) * 1e6).abs().sum()

    assert not math.isfinite(value)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_module_that_a_checkpoint_computes_again_is_named(use_reentrant: bool) -> None:
    """The root of zero in a checkpointed module, whose backward runs inside its recomputation."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = INJECTED["root of zero"].build()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            inputs = inputs.detach().requires_grad_()
            return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=use_reentrant)

    injected = INJECTED["root of zero"]
    model = Checkpointed()
    account = trace(
        model,
        injected.optimizer(model),
        injected.loss,
        [injected.batch(CPU)],
        dtype=torch.float16,
        scale=injected.scale,
    )

    assert account.first is not None
    assert (account.first.module, account.first.phase, account.first.op) == ("inner.root", "backward", "div")


def test_what_is_overwritten_is_no_operand() -> None:
    large = torch.full((3,), 1e30)
    with Trace(nn.Identity()) as watch:
        torch.mul(large, 1e36, out=torch.full((3,), math.nan))

    found = watch.earliest()
    assert found is not None
    assert (found.how, found.op) == ("made", "mul")


def test_amax_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the functionalization of torch_xla, amax without dimensions returns its input."""
    monkeypatch.setattr(torch.Tensor, "amax", lambda self: self)

    assert _account(CLEAN["perceptron"]).first is None
