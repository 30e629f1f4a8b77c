"""Check that losses are float32 in dtype and value in a region, with gradients in the dtype of the logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from ...data import in_force
from ...harness.check import Case, by_rules, contract
from ...harness.targets import Target
from ...oracles.numbers.loss_reference import gradient_bound, reference, reference_gradient, references
from ...oracles.numbers.running_error import Rounded
from ...oracles.policy.overloads import mode_of
from ...oracles.trace.ops import OpTrace
from .loss_inputs import Call, Loss, Program, draw, losses

TABLE = losses()
LISTED = [loss for loss in TABLE if "fp32" in loss.policies.values()]
COMPOSITE = [loss for loss in TABLE if "composite" in loss.policies.values()]

# A control must exceed its bound by more than the second-order terms that the bound omits.
EXCESS = 2.0
# Data for which a 16-bit evaluation happens to be right are replaced by new ones, at worst two times in three.
DRAWS = 64


def by_name(rows: list[Loss]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loss", rows, ids=str)


def programs(case: Case, loss: Loss) -> Iterator[Program]:
    """Yield every program, several times with new data at the level full."""
    for _ in range(case.samples(quick=1, standard=1, full=5)):
        yield from loss.programs


def require_listed(case: Case, loss: Loss, target: Target) -> None:
    """End the case as UNSUPPORTED unless the loss is on the device's float32 list."""
    policy = loss.policy(target.device_type)
    if policy != "fp32":
        case.unsupported(f"{loss.name} is not on the float32 list of {target.device_type} (its policy: {policy})")


def worst(seen: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Return the largest distance from the exact value, in units of its bound; 0 of 0 is no error."""
    error = (seen.detach().cpu().double() - exact).abs()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound)
    return float(ratio.max())


def out_of_bounds(
    loss: Loss, program: Program, exact: dict[str, Rounded], given: Call, to: torch.dtype | None
) -> dict[str, float]:
    """Return the errors, by reduction, of the exact value for `given`, rounded to `to`, in bounds of `exact`."""
    found = {}
    for reduction, other in references(loss.name, given.arguments, given.options, exact).items():
        if reduction not in program.exact:
            value = other.value if to is None else other.value.to(to).double()
            found[reduction] = worst(value, exact[reduction].value, exact[reduction].error)
    return found


def discriminating(
    loss: Loss,
    program: Program,
    rng: torch.Generator,
    amp_dtype: torch.dtype,
    first: torch.dtype,
    rest: torch.dtype,
) -> tuple[Call, dict[str, Rounded], dict[str, float]]:
    """Return random data for which 16-bit evaluation is outside the bounds, the exact values, and these errors.

    For 16-bit inputs the control is the best 16-bit evaluation, the exact value rounded once; for float32 ones it is
    the exact value for inputs that were rounded to 16 bit.
    """
    for _ in range(DRAWS):
        call = draw(loss.name, program, rng).cast(first, rest)
        lowered = call.cast(amp_dtype)
        single = first is torch.float32
        exact = references(loss.name, call.arguments, call.options, loss.reductions)
        control = out_of_bounds(loss, program, exact, lowered if single else call, None if single else amp_dtype)
        if all(excess > EXCESS for excess in control.values()):
            break
    return call, exact, control


def check_value(
    case: Case,
    loss: Loss,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    *,
    first: torch.dtype,
    rest: torch.dtype,
) -> None:
    for program in programs(case, loss):
        call, exact_values, control = discriminating(loss, program, rng, amp_dtype, first, rest)
        there = call.to(target.device)
        for reduction, exact in exact_values.items():
            with target.autocast(amp_dtype):
                seen = evaluate(there, reduction)
            what = f"{program.id}, {reduction}"
            case.equal(f"{what}: dtype", seen.dtype, torch.float32)
            case.equal(f"{what}: shape", tuple(seen.shape), tuple(exact.value.shape))
            case.at_most(f"{what}: error", worst(seen, exact.value, exact.error), 1.0, "float32 bounds")
            if reduction in control:
                case.at_least(f"{what}: error of 16 bit", control[reduction], EXCESS, "float32 bounds")


def evaluate(call: Call, reduction: str) -> torch.Tensor:
    """Evaluate the call without the warning of kl_div that its `mean` is not the mathematical mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return call.evaluate(reduction)


@contract("AMP-LOSS-001")
def test_every_loss_is_known(case: Case) -> None:
    there = {name for name in dir(torch.nn.functional) if name.endswith(("_loss", "_entropy", "_with_logits"))}
    there |= {name for name in ("kl_div",) if hasattr(torch.nn.functional, name)}
    known = {loss.name for loss in TABLE if in_force(torch.__version__, loss.since)}
    case.equal("losses that this torch lacks", sorted(known - there), [])
    case.note("losses of torch.nn.functional", len(there))
    if new := sorted(there - {loss.name for loss in TABLE}):
        case.untestable(f"no formula for the new losses {', '.join(new)}: fixtures/losses.toml lacks them")


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-002", on=("real", "fake"))
def test_dtype(case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    require_listed(case, loss, target)
    for program in runnable(case, loss, target):
        call = draw(loss.name, program, rng)
        for first, rest in ((amp_dtype, amp_dtype), (amp_dtype, torch.float32), (torch.float32, amp_dtype)):
            cast = call.cast(first, rest)
            with mode_of(target):
                there = placed(cast, target)
                for reduction in loss.reductions:
                    with target.autocast(amp_dtype):
                        seen = evaluate(there, reduction)
                    case.equal(f"{program.id}, {reduction}, {first} with {rest}", seen.dtype, torch.float32)


def runnable(case: Case, loss: Loss, target: Target) -> list[Program]:
    """Return the programs of `loss` that `target` can run; without one, end the case as UNSUPPORTED."""
    every = list(programs(case, loss))
    found = [program for program in every if program.fake or not target.is_fake]
    for program in every:
        if program not in found:
            case.note(f"{program.id}: not run", "fake tensors cannot run it")
    if not found:
        case.unsupported(f"fake tensors cannot run {loss.name}")
    return found


def placed(call: Call, target: Target) -> Call:
    """Return the call on the target; on a fake one with fake tensors of the same shapes."""
    if not target.is_fake:
        return call.to(target.device)

    def fake(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=target.device)

    arguments = tuple(fake(tensor) for tensor in call.arguments)
    return Call(call.name, arguments, {key: fake(value) for key, value in call.options.items()})


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-003")
def test_value_from_16_bit(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    check_value(case, loss, target, amp_dtype, rng, first=amp_dtype, rest=amp_dtype)


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-004")
def test_value_from_float32(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    check_value(case, loss, target, amp_dtype, rng, first=torch.float32, rest=torch.float32)


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-005")
def test_value_from_mixed(case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    require_listed(case, loss, target)
    check_value(case, loss, target, amp_dtype, rng, first=amp_dtype, rest=torch.float32)


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-006")
def test_equals_cast_by_hand(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    for program in programs(case, loss):
        call = draw(loss.name, program, rng).cast(amp_dtype).to(target.device)
        for reduction in loss.reductions:
            manual = evaluate(call.cast(torch.float32), reduction)
            with target.autocast(amp_dtype):
                seen = evaluate(call, reduction)
            case.identical(f"{program.id}, {reduction}", seen, manual)


@by_name(LISTED)
@contract("AMP-LOSS-007")
def test_gradient_from_16_bit(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    check_gradient(case, loss, target, amp_dtype, rng, logits=amp_dtype)


@by_name(LISTED)
@contract("AMP-LOSS-008")
def test_gradient_from_float32(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    check_gradient(case, loss, target, amp_dtype, rng, logits=torch.float32)


def check_gradient(
    case: Case,
    loss: Loss,
    target: Target,
    amp_dtype: torch.dtype,
    rng: torch.Generator,
    *,
    logits: torch.dtype,
) -> None:
    """Expect a gradient in the dtype of the logits, equal to that of a manual cast and within its bound."""
    for program in programs(case, loss):
        call = draw(loss.name, program, rng).cast(logits)
        for reduction in ("mean", "sum"):
            what = f"{program.id}, {reduction}"
            ours = call.to(target.device).leaf()
            with target.autocast(amp_dtype):
                evaluate(ours, reduction).backward()
            seen = ours.arguments[0].grad
            case.equal(f"{what}: dtype", None if seen is None else seen.dtype, logits)
            theirs = call.to(target.device).leaf()
            evaluate(theirs.cast(torch.float32), reduction).backward()
            manual = theirs.arguments[0].grad
            assert seen is not None
            assert manual is not None
            case.identical(f"{what}: against a manual cast", seen, manual)
            if program.smooth:
                exact = reference_gradient(loss.name, call.arguments, call.options, reduction)
                bound = gradient_bound(exact, call.arguments, call.options, reduction, logits)
                case.at_most(f"{what}: error", worst(seen, exact, bound), 1.0, "bounds")


@by_name(COMPOSITE)
@contract("AMP-LOSS-009")
def test_composite_of_float32(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    for program in programs(case, loss):
        call, exact_values, control = discriminating(loss, program, rng, amp_dtype, torch.float32, torch.float32)
        there = call.to(target.device)
        for reduction, exact in exact_values.items():
            with target.autocast(amp_dtype):
                seen = evaluate(there, reduction)
            what = f"{program.id}, {reduction}"
            case.identical(f"{what}: against no region", seen, evaluate(there, reduction))
            case.at_most(f"{what}: error", worst(seen, exact.value, exact.error), 1.0, "float32 bounds")
            case.at_least(f"{what}: error of 16 bit", control[reduction], EXCESS, "float32 bounds")


@by_name(COMPOSITE)
@contract("AMP-LOSS-010", on="cpu")
def test_composite_of_16_bit_on_cpu(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    for program in programs(case, loss):
        call = draw(loss.name, program, rng).cast(amp_dtype).to(target.device)
        for reduction in loss.reductions:
            plain = evaluate(call, reduction)
            with target.autocast(amp_dtype):
                seen = evaluate(call, reduction)
            case.equal(f"{program.id}, {reduction}: dtype", seen.dtype, amp_dtype)
            case.identical(f"{program.id}, {reduction}: against no region", seen, plain)


@by_name(COMPOSITE)
@contract("AMP-LOSS-011")
def test_composite_of_16_bit_is_told(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    for program in programs(case, loss):
        call, exact_values, _ = discriminating(loss, program, rng, amp_dtype, amp_dtype, amp_dtype)
        there = call.to(target.device)
        for reduction, exact in exact_values.items():
            with target.autocast(amp_dtype):
                seen = evaluate(there, reduction)
            error = worst(seen, exact.value, exact.error)
            case.note(f"{program.id}, {reduction}: dtype", seen.dtype)
            case.note(f"{program.id}, {reduction}: error", error, "float32 bounds")


@by_name([loss for loss in TABLE if loss.module])
@by_rules
@contract("AMP-LOSS-012")
def test_module_equals_function(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    if (policy := loss.policy(target.device_type)) in ("banned", "unlisted"):
        case.unsupported(f"{loss.name} is {policy} under autocast on {target.device_type}")
    for program in programs(case, loss):
        call = draw(loss.name, program, rng).cast(amp_dtype).to(target.device)
        for reduction in loss.reductions:
            module = getattr(torch.nn, str(loss.module))(**call.options, reduction=reduction).to(target.device)
            with target.autocast(amp_dtype):
                case.identical(f"{program.id}, {reduction}", module_result(module, call), evaluate(call, reduction))


def module_result(module: torch.nn.Module, call: Call) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result: torch.Tensor = module(*call.arguments)
    return result


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@contract("AMP-LOSS-013", dtypes=("fp16",))
def test_squares_beyond_fp16(case: Case, reduction: str, target: Target, rng: torch.Generator) -> None:
    case.require(target, torch.float16)
    # 300^2 = 90000 exceeds 65504, the largest finite fp16 number.
    gap = torch.randint(300, 400, (64,), generator=rng)
    x, y = gap.half().to(target.device), torch.zeros(64, dtype=torch.float16, device=target.device)
    with target.autocast(torch.float16):
        seen = torch.nn.functional.mse_loss(x, y, reduction=reduction)
    total = int((gap**2).sum())
    # Integers below 2^24 add up exactly in float32; a mean over 64 divides by a power of two.
    expected = torch.tensor(float(total) if reduction == "sum" else total / 64, dtype=torch.float32)
    case.identical(f"{reduction} of 64 squares beyond 65504", seen.cpu(), expected)
    case.equal("control: the first square in fp16", float((gap[:1] ** 2).half()), float("inf"))


@contract("AMP-LOSS-014")
def test_disabled_subregion(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    x = torch.randn(64, generator=rng).to(target.device, amp_dtype)
    y = torch.randn(64, generator=rng).to(target.device, amp_dtype)
    with target.autocast(amp_dtype):
        with target.autocast(amp_dtype, enabled=False):
            inside = torch.nn.functional.mse_loss(x, y)
        control = torch.nn.functional.mse_loss(x, y)
    case.equal("dtype in the disabled subregion", inside.dtype, amp_dtype)
    case.identical("against no region", inside, torch.nn.functional.mse_loss(x, y))
    case.equal("control: dtype after the subregion", control.dtype, torch.float32)


@contract("AMP-LOSS-015")
def test_linear_cross_entropy(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    functional = torch.nn.functional
    x = torch.randn(12, 16, generator=rng).to(target.device)
    weight = torch.randn(7, 16, generator=rng).to(target.device)
    classes = torch.randint(0, 7, (12,), generator=rng).to(target.device)
    product = functional.linear(x.to(amp_dtype), weight.to(amp_dtype))
    for reduction in ("none", "mean", "sum"):
        with target.autocast(amp_dtype):
            seen = functional.linear_cross_entropy(x, weight, classes, reduction=reduction)
            expected = functional.cross_entropy(product, classes, reduction=reduction)
        case.equal(f"{reduction}: dtype", seen.dtype, torch.float32)
        case.identical(f"{reduction}: against a manually cast linear, then cross_entropy", seen, expected)


@contract("AMP-LOSS-016")
def test_model_to_loss(case: Case, target: Target, amp_dtype: torch.dtype, rng: torch.Generator) -> None:
    weight = torch.randn(7, 16, generator=rng).to(target.device).requires_grad_()
    x = torch.randn(12, 16, generator=rng).to(target.device)
    goal = torch.randn(12, 7, generator=rng).to(target.device)
    with target.autocast(amp_dtype):
        logits = torch.nn.functional.linear(x, weight)
        logits.retain_grad()
        loss = torch.nn.functional.mse_loss(logits, goal)
        case.true("float() of the loss is the loss itself", loss.float() is loss, loss.dtype)
    loss.backward()
    case.equal("dtype of the logits", logits.dtype, amp_dtype)
    case.equal("dtype of the loss", loss.dtype, torch.float32)
    case.equal("dtype of the logits' gradient", None if logits.grad is None else logits.grad.dtype, amp_dtype)
    case.equal("dtype of the weight's gradient", None if weight.grad is None else weight.grad.dtype, torch.float32)
    exact = reference("mse_loss", (logits.detach().cpu(), goal.cpu()), {}, "mean")
    case.at_most("error of the loss, given the logits", worst(loss, exact.value, exact.error), 1.0, "float32 bounds")


@by_name(LISTED)
@by_rules
@contract("AMP-LOSS-017", on=("real", "fake"))
def test_no_op_computes_in_16_bit(
    case: Case, loss: Loss, target: Target, amp_dtype: torch.dtype, rng: torch.Generator
) -> None:
    require_listed(case, loss, target)
    for program in runnable(case, loss, target):
        call = draw(loss.name, program, rng).cast(amp_dtype)
        with mode_of(target):
            there = placed(call, target)
            for reduction in loss.reductions:
                with target.autocast(amp_dtype), OpTrace() as trace:
                    evaluate(there, reduction)
                low = [op.name for op in trace.computing if amp_dtype in op.inputs + op.outputs]
                case.equal(f"{program.id}, {reduction}: ops on {amp_dtype}", low, [])
