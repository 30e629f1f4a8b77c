"""Check the patterns of the AMP examples, step by step, against manual casts and scaling and against float32."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import warnings
from collections.abc import Iterator

import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from ...oracles.float64_step import exact_step
from ...oracles.manual_training import Float32, ManualAmp
from ...oracles.message_names import UNSCALED
from ...oracles.numbers.bits import same
from ...workloads import recipes
from ...workloads.recipes import OUTLIER, Draw, Recipe, Step, normal
from ...workloads.torch_amp import TorchAmp
from .support import dtypes_of, run


def units(target: Target, seed: int) -> Draw:
    """Return random rows of zeros and one 1 or -1, for which sums and products of a first step are exact integers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        rows = torch.zeros(
            shape[0] if len(shape) > 1 else 1, torch.Size(shape[-1:] if len(shape) < 2 else shape[1:]).numel()
        )
        place = torch.randint(rows.shape[1], (len(rows), 1), generator=generator)
        rows.scatter_(1, place, torch.randint(0, 2, (len(rows), 1), generator=generator).float() * 2 - 1)
        return rows.view(shape).to(target.device)

    return draw


def differing(seen: Step, expected: Step) -> list[str]:
    """Return the names of what differs between two steps."""
    found = [f"loss {n}" for n, pair in enumerate(zip(seen.losses, expected.losses, strict=True)) if not same(*pair)]
    found += ["loss scale"] if seen.scale != expected.scale else []
    found += sorted(set(seen.values) ^ set(expected.values))
    common = sorted(set(seen.values) & set(expected.values))
    return found + [name for name in common if not same(seen.values[name], expected.values[name])]


def equals_manual(case: Case, target: Target, recipe: Recipe, *, exact: bool = True) -> dict[torch.dtype, list[Step]]:
    """Compare each step of a recipe with manual casts and scaling, and the first with float32; return the steps."""
    steps = case.samples(quick=4, standard=12, full=60)
    found: dict[torch.dtype, list[Step]] = {}
    for dtype in dtypes_of(case, target):
        ours = found[dtype] = list(
            run(recipe, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), steps)
        )
        theirs = list(run(recipe, ManualAmp(target.device_type, dtype), normal(target.device, case.seed), steps))
        case.equal(f"{dtype}: steps", len(ours), len(theirs))
        for number, (seen, expected) in enumerate(zip(ours, theirs, strict=True)):
            if differs := differing(seen, expected):
                case.equal(f"{dtype}, step {number}: differences from manual casts and scaling", differs, [])
        case.note(f"{dtype}: losses", [[float(loss) for loss in step.losses] for step in ours[:5]])
        case.history(f"{dtype}: loss scale", [recipes.SCALE, *(step.scale for step in ours)])
        case.note(f"{dtype}: tensors compared", sum(len(step.values) + len(step.losses) for step in ours))
        if exact:
            seen = next(run(recipe, TorchAmp(target.device_type, dtype), units(target, case.seed), 4))
            expected = next(run(recipe, Float32(target.device_type, dtype), units(target, case.seed), 4))
            same_scale = Step(expected.losses, seen.scale, expected.values)
            differs = differing(_without_signs_of_zero(seen), _without_signs_of_zero(same_scale))
            case.equal(f"{dtype}: differences from float32 after a step on integers", differs, [])
    return found


def _without_signs_of_zero(step: Step) -> Step:
    """Return a step with 0.0 in place of -0.0: a sum of negative zeros is either, by the number that it starts from.

    On the CPU, since XLA's compiler leaves out the addition of zero.
    """
    values = {name: value.cpu() for name, value in step.values.items()}
    positive = {name: value + 0.0 if value.is_floating_point() else value for name, value in values.items()}
    return Step(tuple(loss.cpu() + 0.0 for loss in step.losses), step.scale, positive)


def moved(steps: list[Step], number: int, model: str = "model") -> bool:
    """Return whether step `number` changed any parameter of that model."""
    before, after = steps[number - 1].values, steps[number].values
    return any(not same(before[name], after[name]) for name in after if name.startswith(f"{model}."))


@contract("AMP-RECIPE-002")
def test_typical_loop(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.typical).items():
        weights = [moved(steps, number) for number in (OUTLIER - 1, OUTLIER, OUTLIER + 1)]
        case.equal(f"{dtype}: weights moved before, at and after the step that overflows", weights, [True, False, True])
        scales = [step.scale / recipes.SCALE for step in steps[:4]]
        case.equal(f"{dtype}: loss scale, relative to the first", scales, [1.0, 2.0, 1.0, 1.0])


@contract("AMP-RECIPE-022")
def test_clipping(case: Case, target: Target) -> None:
    wrong = functools.partial(recipes.clipping, unscaled=False)
    for dtype, steps in equals_manual(case, target, recipes.clipping).items():
        control = next(run(wrong, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 4))
        norm, scaled = float(steps[0].losses[1]), float(control.losses[1])
        case.equal(f"control, {dtype}: the norm of scaled gradients, relative", scaled / norm, recipes.SCALE)
        gradients = [value for name, value in control.values.items() if name.startswith("gradient")]
        size = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        case.at_most(
            f"control, {dtype}: norm of the step's gradients if clipped while scaled", size, 0.51 / recipes.SCALE
        )
        taken = [value for name, value in steps[0].values.items() if name.startswith("gradient")]
        size = float(torch.stack([gradient.norm() for gradient in taken]).norm())
        case.at_least(f"{dtype}: norm of the step's gradients if clipped after unscaling", size, 2 / recipes.SCALE)


@contract("AMP-RECIPE-023")
def test_accumulation(case: Case, target: Target) -> None:
    equals_manual(case, target, recipes.accumulation)
    for dtype in case.supported(target):
        # A gradient of one from each of two backwards; unscaled in between, the second stays scaled.
        weight = torch.zeros(1, 4, device=target.device).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler = torch.amp.GradScaler(target.device_type, init_scale=64.0)
        for part in range(2):
            with target.autocast(dtype):
                loss = torch.nn.functional.linear(torch.ones(1, 4, device=target.device), weight).float().sum()
            scaler.scale(loss).backward()
            if part == 0:
                scaler.unscale_(optimizer)
        assert weight.grad is not None
        case.equal(
            f"control, {dtype}: unscaled before the accumulation is complete", weight.grad.tolist(), [[65.0] * 4]
        )
        again = functools.partial(scaler.unscale_, optimizer)
        case.raises(f"control, {dtype}: and unscaled again", RuntimeError, again, names=(UNSCALED,))


@contract("AMP-RECIPE-024")
def test_gradient_penalty(case: Case, target: Target) -> None:
    found = equals_manual(case, target, recipes.penalty, exact=False)
    case.equal(
        "finite penalties", [bool(steps[0].losses[1].isfinite()) for steps in found.values()], [True] * len(found)
    )


@contract("AMP-RECIPE-025")
def test_several_models(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.several).items():
        case.equal(f"{dtype}: the first model moved where the second overflows", moved(steps, OUTLIER, "first"), True)
        case.equal(f"{dtype}: the second model moved there", moved(steps, OUTLIER, "second"), False)
        case.equal(f"{dtype}: the second model moved before", moved(steps, OUTLIER - 1, "second"), True)
        case.equal(f"{dtype}: scale", steps[OUTLIER].scale / steps[OUTLIER - 1].scale, 0.5)


@contract("AMP-RECIPE-026")
def test_custom_functions(case: Case, target: Target) -> None:
    equals_manual(case, target, recipes.custom_functions)
    for dtype in case.supported(target):
        amp = TorchAmp(target.device_type, dtype)
        x = torch.full((2, 2), 40.0, device=target.device)
        with amp.region():
            product = amp.product(x, x)
            case.equal(f"{dtype}: dtype of the product", product.dtype, dtype)
            cube = amp.cube(product)
            plain = product * product * product
        case.equal(f"{dtype}: dtype of the cube", cube.dtype, torch.float32)
        case.identical(f"{dtype}: the cube", cube, product.float() ** 2 * product.float())
        case.equal(f"control, {dtype}: undecorated, its dtype", plain.dtype, dtype)
        case.true(f"control, {dtype}: and its values", not torch.equal(plain.float(), cube), plain.flatten()[0].item())


@contract("AMP-RECIPE-027")
def test_data_loader(case: Case, target: Target) -> None:
    found = equals_manual(case, target, recipes.loaded, exact=False)
    if case.level == "quick":  # A worker process takes longer to start than all recipes together.
        return
    for dtype, steps in found.items():
        once = functools.partial(recipes.loaded, workers=1)
        seen = list(run(once, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 4))
        control = list(run(recipes.loaded, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 4))
        case.equal(f"{dtype}: steps", len(seen), len(control))
        differs = [differing(*pair) for pair in zip(seen, control, strict=True)]
        case.equal(f"{dtype}: differences with a worker", [names for names in differs if names], [])
        case.note(f"{dtype}: steps without a worker", len(steps))


@contract("AMP-RECIPE-028")
def test_evaluation(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.evaluation, exact=False).items():
        outputs = [step.values["evaluation"] for step in steps]
        case.equal(f"{dtype}: dtypes of the evaluation outputs", {output.dtype for output in outputs}, {dtype})
        case.equal(f"{dtype}: the outputs require grad", any(output.requires_grad for output in outputs), False)
        case.equal(
            f"{dtype}: batches that batch norm counted",
            int(steps[-1].values["model.1.num_batches_tracked"]),
            len(steps),
        )


@contract("AMP-RECIPE-029")
def test_averaged_weights(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.averaged, exact=False).items():
        means = {name: value for name, value in steps[-1].values.items() if name.startswith("average.module")}
        case.equal(f"{dtype}: dtypes of the averages", {mean.dtype for mean in means.values()}, {torch.float32})
        lost = sum(int((mean.to(dtype).float() != mean).sum()) for mean in means.values())
        case.at_least(f"control, {dtype}: elements of the average that are not 16-bit numbers", lost, 16)
        case.equal(f"{dtype}: dtype of the average's output", steps[-1].values["output"].dtype, dtype)


@contract("AMP-RECIPE-030")
def test_transfer_learning(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.transfer).items():
        half = len(steps) // 2
        start = recipes.perceptron(normal(target.device, case.seed)).state_dict()
        wrong = []
        for number, step in enumerate(steps):
            still = all(same(step.values[f"model.{name}"], start[name]) for name in ("0.weight", "0.bias"))
            reached = "gradient of model.0.weight" in step.values
            # A step that overflows moves nothing, so the first layer must have moved only by the last step.
            if (number < half and (reached or not still)) or (number >= half and not reached):
                wrong.append(f"step {number}: unchanged {still}, with a gradient {reached}")
        case.equal(f"{dtype}: steps at which the first layer is wrongly frozen or trained", wrong, [])
        case.equal(f"{dtype}: first layer unchanged after the last step", still, False)


@contract("AMP-RECIPE-031")
def test_adversarial_training(case: Case, target: Target) -> None:
    attached = functools.partial(recipes.adversarial, detach=False)
    for dtype, steps in equals_manual(case, target, recipes.adversarial, exact=False).items():
        name = "between: gradient of generator.0.weight"
        case.equal(f"{dtype}: the generator has a gradient of the discriminator's loss", name in steps[0].values, False)
        control = next(run(attached, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 1))
        case.equal(f"control, {dtype}: without the detach", name in control.values, True)
        case.equal(
            f"{dtype}: both moved", [moved(steps, 1, model) for model in ("generator", "discriminator")], [True] * 2
        )


@contract("AMP-RECIPE-032")
def test_distillation(case: Case, target: Target) -> None:
    types = case.supported(target)
    case.require(target, torch.float16, torch.bfloat16)
    for dtype, steps in equals_manual(case, target, recipes.distillation, exact=False).items():
        other = torch.bfloat16 if dtype == torch.float16 else torch.float16
        case.equal(f"{dtype}: dtype of the teacher's output", steps[0].values["the teacher's output"].dtype, other)
        reached = [name for name in steps[-1].values if name.startswith("gradient of teacher")]
        case.equal(f"{dtype}: gradients of the teacher", reached, [])
        case.equal(f"{dtype}: moved", [moved(steps, 1, model) for model in ("teacher", "student")], [False, True])
    case.note("types of the student", [str(dtype) for dtype in types])


@contract("AMP-RECIPE-033")
def test_learning_rate_schedule(case: Case, target: Target) -> None:
    unguarded = functools.partial(recipes.scheduled, guarded=False)
    with warnings.catch_warnings():
        # The first step is skipped, so torch warns that the schedule was stepped before the optimizer.
        warnings.simplefilter("ignore", UserWarning)
        for dtype, steps in equals_manual(case, target, recipes.scheduled, exact=False).items():
            rates = [float(step.values["learning rate"]) * 8 for step in steps[:4]]
            case.equal(f"{dtype}: learning rates, relative to the first", rates, [1.0, 0.5, 0.25, 0.125])
            control = list(run(unguarded, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), 4))
            rates = [float(step.values["learning rate"]) * 8 for step in control]
            case.equal(f"control, {dtype}: unguarded, a skipped step counts", rates, [0.5, 0.25, 0.125, 0.0625])


@contract("AMP-RECIPE-034")
def test_weight_tying(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.tied, exact=False).items():
        gradient = steps[0].values["gradient of model.weight"]
        case.equal(f"{dtype}: dtype of the gradient of the shared weight", gradient.dtype, torch.float32)


@contract("AMP-RECIPE-035")
def test_float64_island(case: Case, target: Target) -> None:
    case.require_arithmetic(target, torch.float64)
    for dtype, steps in equals_manual(case, target, recipes.float64_island).items():
        names = ("wide", "island.island", "gradient of island.island")
        case.equal(
            f"{dtype}: dtypes in the float64 block", {steps[0].values[name].dtype for name in names}, {torch.float64}
        )
        outside = steps[0].values["gradient of model.0.weight"].dtype
        case.equal(f"{dtype}: dtype of a gradient before it", outside, torch.float32)


@contract("AMP-RECIPE-036")
def test_gradients_set_to_zero(case: Case, target: Target) -> None:
    freed = functools.partial(recipes.zeroed, set_to_none=True)
    for dtype, steps in equals_manual(case, target, recipes.zeroed).items():
        control = list(run(freed, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), len(steps)))
        # After an overflow both are finite again: zeroing removes the inf too.
        differs = [differing(*pair) for pair in zip(steps, control, strict=True)]
        case.equal(f"{dtype}: differences from set_to_none=True", [names for names in differs if names], [])


@contract("AMP-RECIPE-037")
def test_parameter_groups(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.groups).items():
        found = [moved(steps, number) for number in (OUTLIER - 1, OUTLIER, OUTLIER + 1)]
        case.equal(f"{dtype}: any parameter moved before, at and after an inf in one group", found, [True, False, True])


@contract("AMP-RECIPE-038")
def test_convolutional_network(case: Case, target: Target) -> None:
    for dtype, steps in equals_manual(case, target, recipes.vision).items():
        kernel = steps[0].values["gradient of model.0.weight"]
        case.equal(f"{dtype}: dtype of a kernel's gradient", kernel.dtype, torch.float32)
        case.true(
            f"{dtype}: it is channels last", kernel.is_contiguous(memory_format=torch.channels_last), kernel.stride()
        )


def errors(steps: list[Step], target: Target, seed: int, dtype: torch.dtype, rows: int) -> Iterator[tuple[str, float]]:
    """Yield the error of each gradient of each step against float64, in units of its expected 16-bit rounding error."""
    draw = normal(target.device, seed)
    model = recipes.perceptron(draw)
    names = [name for name, _ in model.named_parameters()]
    manual = ManualAmp(target.device_type, dtype)
    for step, (inputs, goal) in zip(steps, recipes.batches(draw, len(steps), rows=rows), strict=True):
        with torch.no_grad(), manual.region():
            passed = model[0](inputs) > 0
        layers = [(model[0].weight, model[0].bias), (model[2].weight, model[2].bias)]
        exact = exact_step(layers, inputs, goal, dtype, scale=recipes.SCALE, masks=[passed])
        gradients = [step.values[f"gradient of model.{name}"].cpu().double() for name in names]
        # Clipping by an infinite norm leaves NaNs and zeros, so steps that overflow are left out, and so are those that
        # are clipped, which a seed may draw.
        norm = math.hypot(*(float(gradient.norm()) for gradient in exact.gradients))
        if norm < 0.9 * recipes.ACCUMULATED_NORM and all(bool(gradient.isfinite().all()) for gradient in gradients):
            for name, seen, true, spread in zip(names, gradients, exact.gradients, exact.spreads, strict=True):
                yield name, float((seen - true).norm() / spread.norm())
        model.load_state_dict({name: step.values[f"model.{name}"] for name in names})


@contract("AMP-RECIPE-045")
def test_gradients_against_float64(case: Case, target: Target) -> None:
    programs: dict[str, tuple[Recipe, int]] = {
        "typical": (recipes.typical, recipes.ROWS),
        "accumulated": (recipes.accumulation, 16),
    }
    count = case.samples(quick=4, standard=12, full=60)
    for dtype, (name, (recipe, rows)) in itertools.product(case.supported(target), programs.items()):
        steps = list(run(recipe, TorchAmp(target.device_type, dtype), normal(target.device, case.seed), count))
        found = list(errors(steps, target, case.seed, dtype, rows))
        weights = [error for which, error in found if which.endswith("weight")]
        biases = [error for which, error in found if which.endswith("bias")]
        # The spread assumes the largest variance of each rounding; correct runs have 0.6 to 1 of it. A bias of four
        # elements scatters around it. Float32 gradients would have a hundredth of it.
        case.between(
            f"{dtype}, {name}: mean error of a weight's gradient", statistics.fmean(weights), 0.3, 1.5, "spreads"
        )
        case.at_most(f"{dtype}, {name}: largest error of a weight's gradient", max(weights), 3.0, "spreads")
        case.at_most(f"{dtype}, {name}: largest error of a bias's gradient", max(biases), 5.0, "spreads")
        case.note(f"{dtype}, {name}: gradients compared", len(found))
