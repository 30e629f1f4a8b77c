"""Models of libraries, with random weights and data, as their users plug them in (`--workload PATH:gpt2`)."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def _images(device: torch.device, size: int, count: int, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images of ten kinds, each a pattern with noise."""
    labels = torch.randint(0, 10, (count,))
    images = torch.randn(10, 3, size, size)[labels] + 0.5 * torch.randn(count, 3, size, size)
    return list(zip(images.to(device).split(batch), labels.to(device).split(batch), strict=True))


def _trained(model: torch.nn.Module, batches: list[Any], loss: Any, rate: float) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return {"model": model, "optimizer": optimizer, "loss": loss, "batches": batches, "clip": 1.0}


def resnet18(device: torch.device) -> dict[str, Any]:
    model = importlib.import_module("torchvision").models.resnet18(num_classes=10).to(device)
    return _trained(model, _images(device, 64, 64, 8), torch.nn.functional.cross_entropy, 1e-3)


def vit_tiny(device: torch.device) -> dict[str, Any]:
    timm = importlib.import_module("timm")
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64).to(device)
    return _trained(model, _images(device, 64, 64, 8), torch.nn.functional.cross_entropy, 1e-3)


def gpt2(device: torch.device) -> dict[str, Any]:
    """GPT-2 as published (12 layers, 768 wide); `gpt2_tiny` is of the same class."""
    return _gpt2(device)


def gpt2_tiny(device: torch.device) -> dict[str, Any]:
    return _gpt2(device, n_layer=2, n_embd=32, n_head=2, vocab_size=50)


def _gpt2(device: torch.device, **sizes: int) -> dict[str, Any]:
    transformers = importlib.import_module("transformers")
    config = transformers.GPT2Config(**sizes)
    model = transformers.GPT2LMHeadModel(config).to(device)
    rows = (torch.randint(0, 40, (16, 1)) + torch.arange(24)) % 40
    batches = [({"input_ids": part, "labels": part}, part) for part in rows.to(device).split(4)]
    return _trained(model, batches, lambda output, _: output.loss, 1e-3)


def bert_tiny(device: torch.device) -> dict[str, Any]:
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    model = transformers.BertForSequenceClassification(config).to(device)
    rows = torch.randint(2, 60, (64, 16))
    batches = [
        ({"input_ids": part, "labels": (part[:, 0] > 30).long()}, (part[:, 0] > 30).long())
        for part in rows.to(device).split(8)
    ]
    return _trained(model, batches, lambda output, _: output.loss, 1e-3)


def lightning_module(device: torch.device) -> dict[str, Any]:
    """Plug in a module whose training_step gives the loss, and whose configure_optimizers gives the optimizer."""
    lightning = importlib.import_module("lightning.pytorch")

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            rows, labels = batch
            return torch.nn.functional.cross_entropy(self.layers(rows), labels)

        def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.training_step((rows, labels), 0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Classifier().to(device)
    rows = torch.randn(640, 20, device=device)
    labels = (rows @ torch.randn(20, 5, device=device)).argmax(1)
    batches = [((x, y), y) for x, y in zip(rows.split(32), labels.split(32), strict=True)]
    return {
        "model": module,
        "optimizer": module.configure_optimizers(),
        "loss": lambda loss, _: loss,
        "batches": batches,
    }
