"""The patterns of the AMP examples as programs, parametrised by how regions and scalers are made (`Precision`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

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

ROWS, FEATURES, HIDDEN, OUTPUTS = 8, 12, 16, 4
SCALE, INTERVAL = 2.0**10, 2
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


def typical(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Run typical mixed precision training, with one batch that overflows."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def clipping(amp: Precision, draw: Draw, steps: int, *, unscaled: bool = True) -> Iterator[Step]:
    """Clip gradients by norm and by value, after unscaling or, as a control, while they are scaled."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.125)
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(), norm.detach()), scaler.get_scale(), values(model=model))


def accumulation(amp: Precision, draw: Draw, steps: int, *, parts: tuple[int, ...] = (8, 4, 3, 1)) -> Iterator[Step]:
    """Accumulate gradients over micro-batches of different sizes, each weighted by its rows."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    total = sum(parts)
    for inputs, goal in batches(draw, steps, rows=total):
        optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.split(parts), goal.split(parts), strict=True):
            with amp.region():
                loss = functional.mse_loss(model(x), y) * (len(x) / total)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)
        scaler.step(optimizer)
        scaler.update()
        yield Step(tuple(losses), scaler.get_scale(), values(model=model))


def penalty(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Add an L2 gradient penalty, its inner gradients unscaled before they are combined."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        inner = [gradient * inverse for gradient in scaled]
        with amp.region():
            norm = torch.stack([gradient.square().sum() for gradient in inner]).sum().sqrt()
            loss = loss + norm
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(), norm.detach()), scaler.get_scale(), values(model=model))


def several(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train two models with two losses, two optimizers, one of which overflows at one step, and one scaler."""
    models = perceptron(draw), perceptron(draw)
    optimizers = (
        torch.optim.Adam(models[0].parameters(), lr=2.0**-6),
        torch.optim.SGD(models[1].parameters(), lr=2.0**-5, momentum=0.5),
    )
    scaler = amp.scaler(SCALE, INTERVAL)
    for step, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.region():
            outputs = models[0](inputs), models[1](inputs)
            losses = (
                functional.mse_loss(2 * outputs[0] + outputs[1].detach(), goal),
                functional.mse_loss(outputs[0].detach() - outputs[1], goal),
                functional.mse_loss(outputs[0], goal),
            )
        scaler.scale(losses[0]).backward(retain_graph=True)
        # Only the second model's loss overflows.
        scaler.scale(losses[1] * (2.0**120 if step == OUTLIER else 1.0)).backward()
        scaler.scale(losses[2]).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        found = values(first=models[0], second=models[1])
        yield Step(tuple(loss.detach() for loss in losses), scaler.get_scale(), found)


def custom_functions(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train a network with both kinds of custom function inside its regions."""
    first, second = (torch.nn.Parameter(draw(*shape)) for shape in ((FEATURES, HIDDEN), (HIDDEN, OUTPUTS)))
    model = torch.nn.ParameterDict({"first": first, "second": second})
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            hidden = amp.cube(amp.product(inputs, first))
            loss = functional.mse_loss(amp.product(hidden, second), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def evaluation(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train with dropout and batch norm, and an evaluation without gradients in its own region after every step."""
    model = randomized(
        torch.nn.Sequential(
            torch.nn.Linear(FEATURES, HIDDEN),
            torch.nn.BatchNorm1d(HIDDEN),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(HIDDEN, OUTPUTS),
        ),
        draw,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    scaler = amp.scaler(SCALE, INTERVAL)
    held = draw(ROWS, FEATURES)
    for step, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        model.train()
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad(), amp.region():
            output = model(held)
        yield Step((loss.detach(),), scaler.get_scale(), {"evaluation": output.clone(), **values(model=model)})


def averaged(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Keep an exponential moving average of the weights, updated after every step and evaluated in a region."""
    model = perceptron(draw)
    average = AveragedModel(model, avg_fn=lambda mean, now, _: 0.75 * mean + 0.25 * now)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    scaler = amp.scaler(SCALE, INTERVAL)
    held = draw(ROWS, FEATURES)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        with torch.no_grad(), amp.region():
            output = average(held)
        yield Step((loss.detach(),), scaler.get_scale(), {"output": output, **values(model=model, average=average)})


def transfer(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train with a frozen first layer, unfrozen halfway and added to the optimizer as another group."""
    model = perceptron(draw)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for step, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        if step == steps // 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 2.0**-6})
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def adversarial(amp: Precision, draw: Draw, steps: int, *, detach: bool = True) -> Iterator[Step]:
    """Train a generator and a discriminator with an optimizer each and one scaler."""
    generator, discriminator = perceptron(draw, OUTPUTS, FEATURES), perceptron(draw, FEATURES, 1)
    optimizers = {
        "generator": torch.optim.SGD(generator.parameters(), lr=2.0**-6),
        "discriminator": torch.optim.SGD(discriminator.parameters(), lr=2.0**-6),
    }
    scaler = amp.scaler(SCALE, INTERVAL)
    for real, noise in batches(draw, steps, outlier=None):
        optimizers["discriminator"].zero_grad()
        optimizers["generator"].zero_grad()
        with amp.region():
            made = generator(noise)
            given = made.detach() if detach else made
            loss = functional.mse_loss(discriminator(real), real.new_ones(len(real), 1)) + functional.mse_loss(
                discriminator(given), real.new_zeros(len(real), 1)
            )
        scaler.scale(loss).backward()
        between = values(generator=generator, discriminator=discriminator)
        scaler.step(optimizers["discriminator"])
        optimizers["generator"].zero_grad()
        with amp.region():
            second = functional.mse_loss(discriminator(generator(noise)), real.new_ones(len(real), 1))
        scaler.scale(second).backward()
        scaler.step(optimizers["generator"])
        scaler.update()
        found = values(generator=generator, discriminator=discriminator)
        found.update({f"between: {name}": value for name, value in between.items()})
        yield Step((loss.detach(), second.detach()), scaler.get_scale(), found)


def distillation(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train a student on a teacher's outputs, computed without gradients in a region of the other 16-bit dtype."""
    other = torch.bfloat16 if amp.dtype == torch.float16 else torch.float16
    teacher, student = perceptron(draw), perceptron(draw)
    optimizer = torch.optim.SGD(student.parameters(), lr=2.0**-4)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, _ in batches(draw, steps, outlier=None):
        optimizer.zero_grad()
        with torch.no_grad(), amp.region(other):
            said = teacher(inputs)
        with amp.region():
            loss = functional.mse_loss(student(inputs), said)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found = {"the teacher's output": said, **values(teacher=teacher, student=student)}
        yield Step((loss.detach(),), scaler.get_scale(), found)


def scheduled(amp: Precision, draw: Draw, steps: int, *, guarded: bool = True) -> Iterator[Step]:
    """Halve the learning rate with every step taken; a skipped one, detected by the lower scale, does not count."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps, outlier=0):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if not guarded or scaler.get_scale() >= before:
            scheduler.step()
        rate = torch.tensor(optimizer.param_groups[0]["lr"])
        yield Step((loss.detach(),), scaler.get_scale(), {"learning rate": rate, **values(model=model)})


def tied(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train an autoencoder whose decoder uses its encoder's weight."""
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(draw(HIDDEN, FEATURES))})
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, _ in batches(draw, steps):
        optimizer.zero_grad()
        with amp.region():
            hidden = functional.relu(functional.linear(inputs, model["weight"]))
            loss = functional.mse_loss(torch.mm(hidden, model["weight"]), inputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def float64_island(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Compute a part of the model in float64, in a disabled subregion between 16-bit layers."""
    model = perceptron(draw)
    island = torch.nn.Parameter(draw(HIDDEN, HIDDEN).double())
    modules = torch.nn.ParameterDict({"island": island})
    optimizer = torch.optim.SGD([*model.parameters(), island], lr=2.0**-5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps, outlier=None):
        optimizer.zero_grad()
        with amp.region():
            hidden = functional.relu(model[0](inputs))
            with amp.region(enabled=False):
                wide = torch.mm(hidden.double(), island)
            loss = functional.mse_loss(model[2](wide.float()), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), {"wide": wide.detach(), **values(model=model, island=modules)})


def zeroed(amp: Precision, draw: Draw, steps: int, *, set_to_none: bool = False) -> Iterator[Step]:
    """Set gradients to zero between steps instead of to None."""
    model = perceptron(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for inputs, goal in batches(draw, steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def groups(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train two parameter groups with different learning rates and decays; an overflow in one skips both."""
    model = perceptron(draw)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.125},
            {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": 2.0**-4},
        ],
        lr=2.0**-6,
    )
    scaler = amp.scaler(SCALE, INTERVAL)
    for step, (inputs, goal) in enumerate(batches(draw, steps, outlier=None)):
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(inputs), goal)
        scaler.scale(loss).backward()
        if step == OUTLIER:
            model[2].bias.grad[-1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def vision(amp: Precision, draw: Draw, steps: int) -> Iterator[Step]:
    """Train a small channels-last convolutional network with gradient clipping."""
    model = randomized(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 4, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(16, OUTPUTS),
        ),
        draw,
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6, momentum=0.5)
    scaler = amp.scaler(SCALE, INTERVAL)
    for _ in range(steps):
        images = draw(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        goal = draw(4, OUTPUTS)
        optimizer.zero_grad()
        with amp.region():
            loss = functional.mse_loss(model(images), goal)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield Step((loss.detach(),), scaler.get_scale(), values(model=model))


def loaded(amp: Precision, draw: Draw, steps: int, *, workers: int = 0) -> Iterator[Step]:
    """Train on batches of a shuffled DataLoader, with or without workers."""
    model = perceptron(draw)
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
    for epoch in range(2):
        for inputs, goal in loader:
            optimizer.zero_grad()
            with amp.region():
                loss = functional.mse_loss(model(inputs.to(device)), goal.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found = {"epoch": torch.tensor(epoch), "inputs": inputs, **values(model=model)}
            yield Step((loss.detach(),), scaler.get_scale(), found)
