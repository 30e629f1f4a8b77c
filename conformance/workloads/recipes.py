"""The patterns of the AMP examples as programs, parametrised by how regions and scalers are made (`Precision`).

`Parts` says what is done to the parts of a program before they run, for instance that they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from ..measure.pending import run_pending

Draw: TypeAlias = Callable[..., torch.Tensor]
Batches: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


class Precision(Protocol):
    """The interface of mixed precision for a program: `torch.amp`, manual casts and scaling, or float32."""

    dtype: torch.dtype
    """The dtype of its regions."""

    def region(self, dtype: torch.dtype | None = None, *, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return an autocast region."""

    def scaler(self, init_scale: float, growth_interval: int = 2000) -> Any:
        """Return a loss scaler with the methods of `torch.amp.GradScaler`."""

    def product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return a matmul by a custom function that follows the region ("multiple inputs or autocastable ops")."""

    def cube(self, x: torch.Tensor) -> torch.Tensor:
        """Return the cube by a custom function that needs float32 ("functions that need a particular dtype")."""


@dataclass(frozen=True)
class Step:
    """The result of one step: losses, the loss scale after it, and copies of everything that it may change."""

    losses: tuple[torch.Tensor, ...]
    scale: float
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


Recipe: TypeAlias = Callable[[Precision, Draw, int], Iterator[Step]]


def _as_it_is(part: Any) -> Any:
    return part


@dataclass(frozen=True)
class Parts:
    """What is made of a program's models, or the function that stands for one, and of its steps.

    Each gets a module or a function and returns what is called in its place. Models are called inside the regions.
    """

    model: Callable[[Any], Any] = _as_it_is
    step: Callable[[Any], Any] = _as_it_is


PLAIN = Parts()


class Program(Protocol):
    """A recipe whose parts may be replaced."""

    __name__: str

    def __call__(self, amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]: ...


def normal(device: torch.device, seed: int) -> Draw:
    """Return what draws normally distributed tensors of any shape on the device, the same ones on each."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: (0.4 * torch.randn(shape, generator=generator)).to(device)


ROWS, FEATURES, HIDDEN, OUTPUTS = 8, 12, 16, 4
SCALE, INTERVAL = 2.0**10, 2
ACCUMULATED_NORM = 4.0  # to which gradients that were accumulated are clipped
OUTLIER = 2
"""The step whose batch is so large that its gradients overflow in both 16-bit dtypes."""


def perceptron(draw: Draw, features: int = FEATURES, outputs: int = OUTPUTS) -> torch.nn.Sequential:
    """Return two Linear layers with a ReLU between them and random parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(features, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, outputs))
    return randomized(model, draw)


def randomized(model: torch.nn.Sequential, draw: Draw) -> torch.nn.Sequential:
    """Set every parameter of a model from `draw`, on the device of its tensors; return the model."""
    model.to(draw(1).device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(draw(*parameter.shape))
    return model


def batches(draw: Draw, steps: int, *, outlier: int | None = OUTLIER, rows: int = ROWS) -> Batches:
    """Return a batch for each step; that of step `outlier` is 2**100 times larger than the others."""
    made = [(draw(rows, FEATURES), draw(rows, OUTPUTS)) for _ in range(steps)]
    if outlier is not None and outlier < steps:
        made[outlier] = made[outlier][0] * 2.0**100, made[outlier][1]
    return made


def values(**models: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters, buffers and gradients of models, by name."""
    found = {}
    for label, model in models.items():
        for name, parameter in model.named_parameters():
            found[f"{label}.{name}"] = parameter.detach().clone()
            if parameter.grad is not None:
                found[f"gradient of {label}.{name}"] = parameter.grad.detach().clone()
        found.update({f"{label}.{name}": buffer.clone() for name, buffer in model.named_buffers()})
    return found


def finished(losses: tuple[torch.Tensor, ...], scaler: Any, found: Mapping[str, torch.Tensor]) -> Step:
    """Return the result of a step that a lazy device has run to its end, as `optimizer_step` of torch_xla does."""
    for device_type in {loss.device.type for loss in losses}:
        run_pending(device_type)
    return Step(losses, scaler.get_scale(), found)


def typical(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Run typical mixed precision training, with one batch that overflows."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for inputs, goal in batches(draw, steps):
        loss = step(inputs, goal)
        yield finished((loss,), scaler, values(model=model))


def clipping(amp: Precision, draw: Draw, steps: int, *, unscaled: bool = True, parts: Parts = PLAIN) -> Iterator[Step]:
    """Clip gradients by norm and by value, after unscaling or, as a control, while they are scaled."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.125)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm.detach()

    for inputs, goal in batches(draw, steps):
        losses = step(inputs, goal)
        yield finished(losses, scaler, values(model=model))


def accumulation(
    amp: Precision, draw: Draw, steps: int, *, sizes: tuple[int, ...] = (8, 4, 3, 1), parts: Parts = PLAIN
) -> Iterator[Step]:
    """Accumulate gradients over micro-batches of different sizes, each weighted by its rows."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    total = sum(sizes)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.split(sizes), goal.split(sizes), strict=True):
            with amp.region():
                loss = functional.mse_loss(forward(x), y) * (len(x) / total)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), ACCUMULATED_NORM)
        scaler.step(optimizer)
        scaler.update()
        return tuple(losses)

    for inputs, goal in batches(draw, steps, rows=total):
        losses = step(inputs, goal)
        yield finished(losses, scaler, values(model=model))


def penalty(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Add an L2 gradient penalty, its inner gradients unscaled before they are combined."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        inner = [gradient * inverse for gradient in scaled]
        with amp.region():
            norm = torch.stack([gradient.square().sum() for gradient in inner]).sum().sqrt()
            loss = loss + norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), norm.detach()

    for inputs, goal in batches(draw, steps):
        losses = step(inputs, goal)
        yield finished(losses, scaler, values(model=model))


def several(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train two models with two losses, two optimizers, one of which overflows at one step, and one scaler."""
    models = perceptron(draw), perceptron(draw)
    forwards = tuple(parts.model(model) for model in models)
    optimizers = (
        torch.optim.Adam(models[0].parameters(), lr=2.0**-6),
        torch.optim.SGD(models[1].parameters(), lr=2.0**-5, momentum=0.5),
    )
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.region():
            outputs = forwards[0](inputs), forwards[1](inputs)
            losses = (
                functional.mse_loss(2 * outputs[0] + outputs[1].detach(), goal),
                functional.mse_loss(outputs[0].detach() - outputs[1], goal),
                functional.mse_loss(outputs[0], goal),
            )
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.scale(losses[1] * factor).backward()
        scaler.scale(losses[2]).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return tuple(loss.detach() for loss in losses)

    for number, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        # Only the second model's loss overflows.
        losses = step(inputs, goal, goal.new_tensor(2.0**120 if number == OUTLIER else 1.0))
        yield finished(losses, scaler, values(first=models[0], second=models[1]))


def custom_functions(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train a network with both kinds of custom function inside its regions."""
    first, second = (torch.nn.Parameter(draw(*shape)) for shape in ((FEATURES, HIDDEN), (HIDDEN, OUTPUTS)))
    weights = torch.nn.ParameterDict({"first": first, "second": second})
    optimizer = torch.optim.SGD(weights.parameters(), lr=2.0**-8)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.model
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return amp.product(amp.cube(amp.product(inputs, first)), second)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for inputs, goal in batches(draw, steps):
        loss = step(inputs, goal)
        yield finished((loss,), scaler, values(model=weights))


def evaluation(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train with dropout and batch norm, and an evaluation without gradients in its own region after every step."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.BatchNorm1d(HIDDEN),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(HIDDEN, OUTPUTS),
    )
    model = randomized(layers, draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    scaler = amp.scaler(SCALE, INTERVAL)
    held = draw(ROWS, FEATURES)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        model.train()
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for number, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        loss = step(inputs, goal)
        model.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad(), amp.region():
            output = forward(held)
        yield finished((loss,), scaler, {"evaluation": output.clone(), **values(model=model)})


def averaged(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Keep an exponential moving average of the weights, updated after every step and evaluated in a region."""
    model = perceptron(draw)
    forward = parts.model(model)
    average = AveragedModel(model, avg_fn=lambda mean, now, _: 0.75 * mean + 0.25 * now)
    averaged_forward = parts.model(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    scaler = amp.scaler(SCALE, INTERVAL)
    held = draw(ROWS, FEATURES)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for inputs, goal in batches(draw, steps):
        loss = step(inputs, goal)
        average.update_parameters(model)
        with torch.no_grad(), amp.region():
            output = averaged_forward(held)
        yield finished((loss,), scaler, {"output": output, **values(model=model, average=average)})


def transfer(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train with a frozen first layer, unfrozen halfway and added to the optimizer as another group."""
    model = perceptron(draw)
    forward = parts.model(model)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for number, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        if number == steps // 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 2.0**-6})
        loss = step(inputs, goal)
        yield finished((loss,), scaler, values(model=model))


def adversarial(amp: Precision, draw: Draw, steps: int, *, detach: bool = True, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train a generator and a discriminator with an optimizer each and one scaler."""
    generator, discriminator = perceptron(draw, OUTPUTS, FEATURES), perceptron(draw, FEATURES, 1)
    generate, judge = parts.model(generator), parts.model(discriminator)
    optimizers = {
        "generator": torch.optim.SGD(generator.parameters(), lr=2.0**-6),
        "discriminator": torch.optim.SGD(discriminator.parameters(), lr=2.0**-6),
    }
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def discriminator_step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        optimizers["discriminator"].zero_grad()
        optimizers["generator"].zero_grad()
        with amp.region():
            made = generate(noise)
            given = made.detach() if detach else made
            loss = functional.mse_loss(judge(real), real.new_ones(len(real), 1)) + functional.mse_loss(
                judge(given), real.new_zeros(len(real), 1)
            )
        scaler.scale(loss).backward()
        return loss.detach()

    @parts.step
    def generator_step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        scaler.step(optimizers["discriminator"])
        optimizers["generator"].zero_grad()
        with amp.region():
            loss = functional.mse_loss(judge(generate(noise)), real.new_ones(len(real), 1))
        scaler.scale(loss).backward()
        scaler.step(optimizers["generator"])
        scaler.update()
        return loss.detach()

    for real, noise in batches(draw, steps, outlier=None):
        first = discriminator_step(real, noise)
        between = values(generator=generator, discriminator=discriminator)
        second = generator_step(real, noise)
        found = values(generator=generator, discriminator=discriminator)
        found.update({f"between: {name}": value for name, value in between.items()})
        yield finished((first, second), scaler, found)


def distillation(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train a student on a teacher's outputs, computed without gradients in a region of the other 16-bit dtype."""
    other = torch.bfloat16 if amp.dtype == torch.float16 else torch.float16
    teacher, student = perceptron(draw), perceptron(draw)
    teach, learn = parts.model(teacher), parts.model(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=2.0**-4)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        with torch.no_grad(), amp.region(other):
            taught = teach(inputs)
        with amp.region():
            loss = functional.mse_loss(learn(inputs), taught)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), taught

    for inputs, _ in batches(draw, steps, outlier=None):
        loss, taught = step(inputs)
        found = {"the teacher's output": taught, **values(teacher=teacher, student=student)}
        yield finished((loss,), scaler, found)


def scheduled(amp: Precision, draw: Draw, steps: int, *, guarded: bool = True, parts: Parts = PLAIN) -> Iterator[Step]:
    """Halve the learning rate with every step taken; a skipped one, detected by the lower scale, does not count."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not guarded or scaler.get_scale() >= before:
            scheduler.step()
        return loss.detach()

    for inputs, goal in batches(draw, steps, outlier=0):
        loss = step(inputs, goal)
        rate = torch.tensor(optimizer.param_groups[0]["lr"])
        yield finished((loss,), scaler, {"learning rate": rate, **values(model=model)})


def tied(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train an autoencoder whose decoder uses its encoder's weight."""
    weight = torch.nn.Parameter(draw(HIDDEN, FEATURES))
    weights = torch.nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD(weights.parameters(), lr=2.0**-6, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.model
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        return torch.mm(functional.relu(functional.linear(inputs, weight)), weight)

    @parts.step
    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for inputs, _ in batches(draw, steps):
        loss = step(inputs)
        yield finished((loss,), scaler, values(model=weights))


def float64_island(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Compute a part of the model in float64, in a disabled subregion between 16-bit layers."""
    layers = perceptron(draw)
    island = torch.nn.Parameter(draw(HIDDEN, HIDDEN).double())
    modules = torch.nn.ParameterDict({"island": island})
    optimizer = torch.optim.SGD([*layers.parameters(), island], lr=2.0**-5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.model
    def forward(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = functional.relu(layers[0](inputs))
        with amp.region(enabled=False):
            wide = torch.mm(hidden.double(), island)
        return layers[2](wide.float()), wide

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        with amp.region():
            output, wide = forward(inputs)
            loss = functional.mse_loss(output, goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), wide.detach()

    for inputs, goal in batches(draw, steps, outlier=None):
        loss, wide = step(inputs, goal)
        yield finished((loss,), scaler, {"wide": wide, **values(model=layers, island=modules)})


def zeroed(
    amp: Precision, draw: Draw, steps: int, *, set_to_none: bool = False, parts: Parts = PLAIN
) -> Iterator[Step]:
    """Set gradients to zero between steps instead of to None."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for inputs, goal in batches(draw, steps):
        loss = step(inputs, goal)
        yield finished((loss,), scaler, values(model=model))


def groups(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train two parameter groups with different learning rates and decays; an overflow in one skips both."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.125},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 2.0**-4},
        ],
        lr=2.0**-6,
    )
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs), goal)
        scaler.scale(loss).backward()
        model[2].bias.grad[-1] *= factor
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for number, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        loss = step(inputs, goal, goal.new_tensor(float("inf") if number == OUTLIER else 1.0))
        found = values(model=model)
        if number == OUTLIER:
            # An optimizer that unscales inside its step, as fused ones do, leaves a skipped step's gradients scaled.
            found = {name: value for name, value in found.items() if not name.startswith("gradient of ")}
        yield finished((loss,), scaler, found)


def vision(amp: Precision, draw: Draw, steps: int, *, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train a small channels-last convolutional network with gradient clipping."""
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 4, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(16, OUTPUTS),
    )
    model = randomized(layers, draw).to(memory_format=torch.channels_last)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)

    @parts.step
    def step(images: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(images), goal)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for _ in range(steps):
        images = draw(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        loss = step(images, draw(4, OUTPUTS))
        yield finished((loss,), scaler, values(model=model))


def loaded(amp: Precision, draw: Draw, steps: int, *, workers: int = 0, parts: Parts = PLAIN) -> Iterator[Step]:
    """Train on batches of a shuffled DataLoader, with or without workers."""
    model = perceptron(draw)
    forward = parts.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    scaler = amp.scaler(SCALE, INTERVAL)
    device = draw(1).device
    rows = [(draw(FEATURES).cpu(), draw(OUTPUTS).cpu()) for _ in range(steps * ROWS // 2)]
    order = torch.Generator().manual_seed(5)
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        rows,
        batch_size=ROWS,
        shuffle=True,
        num_workers=workers,
        generator=order,
    )

    @parts.step
    def step(inputs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(forward(inputs.to(device)), goal.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for epoch in range(2):
        for inputs, goal in loader:
            loss = step(inputs, goal)
            found = {"epoch": torch.tensor(epoch), "inputs": inputs, **values(model=model)}
            yield finished((loss,), scaler, found)
