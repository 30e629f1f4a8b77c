"""Small models that learn real data to a stated figure: a perceptron, a convolutional net, an LSTM, a transformer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ...workloads.training import Region
from . import digits_data, text_data
from .stacked_models import Stacked, cross_entropies

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MOMENTUM = 0.9
WINDOW, TEST_WINDOWS = 32, 256


@dataclass(frozen=True)
class Data:
    """Rows [n, ...] to train on and to test with, and what each is to be taken for, [n] or [n, characters]."""

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor

    def to(self, device: torch.device) -> Data:
        return Data(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class Task:
    """A model, its data and its schedule: `epochs` of `batches` of `rows`, the learning rate falling to 0 in a line.

    A falling rate ends in one minimum instead of jumping about in it, which makes paired runs end alike. `adam` has
    Adam in the place of SGD with momentum. `offset` is added to the first weights of the last layer.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    rate: float
    epochs: int
    batches: int
    rows: int = 64
    adam: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class Run:
    """What one run came to: the log of the mean training loss of each epoch, and figures of the test rows.

    `test_loss` is their mean cross entropy in nats, `accuracy` the per cent of them classified correctly.
    """

    curve: list[float]
    test_loss: float
    accuracy: float


class Recurrent(nn.Module):
    """An LSTM that reads the rows of a digit from the top, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, batch_first=True)
        self.read = nn.Linear(64, digits_data.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(images.unflatten(1, (8, 8)))
        return self.read(states[:, -1])


class Attention(nn.Module):
    """A pre-norm block of a transformer: causal attention of two heads, then a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(2, (6, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class Transformer(nn.Module):
    """Predicts each next character of a window from those before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        symbols = len(text_data.corpus().symbols)
        self.symbol, self.position = nn.Embedding(symbols, width), nn.Embedding(WINDOW, width)
        self.block = Attention(width)
        self.norm, self.read = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.read(self.norm(self.block(self.symbol(text) + self.position(places)))).transpose(1, 2)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(digits_data.PIXELS, 128), nn.ReLU(), nn.Linear(128, digits_data.CLASSES))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, digits_data.CLASSES)),
    )


def _smooth() -> nn.Module:
    """Return a convolutional net without kinks: strides in the place of pools, GELU in that of ReLU."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU()),
        *(nn.Flatten(), nn.Linear(128, digits_data.CLASSES)),
    )


def _digits() -> Data:
    split = digits_data.split()
    return Data(split.train_images, split.train_labels, split.test_images, split.test_labels)


def _characters() -> Data:
    """Windows of 32 characters that do not overlap, and the characters after each; those to test with evenly spread."""

    def windows(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = (len(text) - 1) // WINDOW
        return text[: count * WINDOW].view(count, WINDOW), text[1 : count * WINDOW + 1].view(count, WINDOW)

    corpus = text_data.corpus()
    inputs, labels = windows(corpus.test)
    some = torch.linspace(0, len(inputs) - 1, TEST_WINDOWS).long()
    return Data(*windows(corpus.train), inputs[some], labels[some])


# A constant on all weights of the last layer adds the same to every logit, which the cross entropy does not see, but it
# leaves a 16-bit weight no room for small steps (as with those of norms, which lie about 1) and a 16-bit logit few
# digits. By dtype, so that half a unit in the last place of the weight is some 2e-3.
FAR = {torch.float16: 4.0, torch.bfloat16: 1.0}

TASKS = {
    task.name: task
    for task in (
        Task("mlp", _perceptron, _digits, rate=0.25, epochs=12, batches=22),
        Task("mlp-shifted", _perceptron, _digits, rate=0.25, epochs=8, batches=22, offset=0.5),
        *(
            Task(f"mlp-far-{offset:g}", _perceptron, _digits, rate=0.01, epochs=6, batches=22, offset=offset)
            for offset in FAR.values()
        ),
        Task("cnn", _convolutional, _digits, rate=0.1, epochs=10, batches=22),
        Task("cnn-smooth", _smooth, _digits, rate=0.1, epochs=10, batches=22),
        Task("lstm", Recurrent, _digits, rate=0.01, epochs=15, batches=22, adam=True),
        Task("transformer", Transformer, _characters, rate=0.01, epochs=10, batches=30, rows=16, adam=True),
    )
}


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw the parameters of linear layers, convolutions, LSTMs and embeddings as torch does, but from `generator`."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            reach = module.weight[0].numel() ** -0.5
        elif isinstance(module, nn.LSTM):
            reach = module.hidden_size**-0.5
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator)
            continue
        else:
            continue
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -reach, reach, generator=generator)


def begin(task: Task, device: torch.device, seed: int) -> tuple[nn.Module, torch.Generator]:
    """The model with the weights that `seed` gives, and the generator that its order of data is to be drawn from."""
    generator = torch.Generator().manual_seed(seed)
    model = task.model()
    _initialise(model, generator)
    if task.offset:
        with torch.no_grad():
            list(model.modules())[-1].weight.add_(task.offset)
    return model.to(device), generator


def learn(
    task: Task,
    device: torch.device,
    seed: int,
    region: Region,
    scaler: torch.amp.GradScaler | None,
    *,
    loss: Loss = F.cross_entropy,
    factor: float = 1.0,
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> Run:
    """Train from the weights and with the order of data that `seed` gives, then test, both in the region.

    Without a `scaler` nothing of AMP has a part in the steps. `loss` stands in the region, on what the model returns.
    With SGD a `factor` on the loss, a power of two, changes no bit of what is learned in exact arithmetic, as the
    learning rate is divided by it. `after_step` may tamper with the model.
    """
    model, generator = begin(task, device, seed)
    data = task.data().to(device)
    rate = task.rate / factor
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)
    if task.adam:
        optimizer = torch.optim.Adam(parameters, lr=rate)
    losses = []
    for number, batch in enumerate(batches(task, len(data.inputs), device, generator)):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - number / (task.epochs * task.batches))
        optimizer.zero_grad()
        with region():
            value = loss(model(data.inputs[batch]), data.labels[batch])
        _step(value * factor, optimizer, scaler)
        after_step(model)
        losses.append(value.detach())
    with torch.no_grad(), region():
        output = model(data.test_inputs)
    curve = _curve(torch.stack(losses).cpu().double().view(task.epochs, task.batches))
    return Run(curve, *_figures(output, data))


def learn_together(
    task: Task,
    device: torch.device,
    seeds: Sequence[int],
    region: Region,
    scaler: torch.amp.GradScaler | None,
    *,
    losses: Loss = cross_entropies,
    factor: float = 1.0,
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> list[Run]:
    """What `learn` gives for each of `seeds`, up to the rounding of the products: all of them in one stacked model.

    For a task whose model is a perceptron and whose optimizer is SGD. A stack has one loss scale, so that all skip a
    step that one skips. `losses` gives the loss of each model, [seeds].
    """
    models, generators = zip(*(begin(task, device, seed) for seed in seeds), strict=True)
    model, data = Stacked(models), task.data().to(device)
    rate = task.rate / factor
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    orders = zip(*(batches(task, len(data.inputs), device, generator) for generator in generators), strict=True)
    seen = []
    for number, rows in enumerate(map(torch.stack, orders)):
        optimizer.param_groups[0]["lr"] = rate * (1 - number / (task.epochs * task.batches))
        optimizer.zero_grad()
        with region():
            values = losses(model(data.inputs[rows]), data.labels[rows])
        _step((values * factor).sum(), optimizer, scaler)
        after_step(model)
        seen.append(values.detach())
    with torch.no_grad(), region():
        outputs = model(data.test_inputs.expand(len(seeds), *data.test_inputs.shape))
    curves = torch.stack(seen, 1).cpu().double().view(len(seeds), task.epochs, task.batches)
    return [Run(_curve(curve), *_figures(output, data)) for curve, output in zip(curves, outputs, strict=True)]


def _step(value: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is None:
        value.backward()
        optimizer.step()
    else:
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()


def batches(task: Task, count: int, device: torch.device, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield the rows of each batch; each epoch goes through the data, or a part of them, in an order of its own."""
    for _ in range(task.epochs):
        order = torch.randperm(count, generator=generator)[: task.batches * task.rows].to(device)
        yield from order.split(task.rows)


def _curve(losses: torch.Tensor) -> list[float]:
    return [math.log(loss) if loss > 0 else math.nan for loss in losses.mean(1).tolist()]


def _figures(output: torch.Tensor, data: Data) -> tuple[float, float]:
    """Return the cross entropy and the accuracy of what a model makes of the test rows."""
    # On the CPU: there are accelerators without float64.
    logits, labels = output.cpu().double(), data.test_labels.cpu()
    right = (logits.argmax(1) == labels).double().mean().item()
    return F.cross_entropy(logits, labels).item(), 100 * right
