"""Generate random forward passes of 16-bit and float32 parts whose gradients are integers, exact in every dtype."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

SIZE = 4
WEIGHTS = ("a", "b", "c")
KEPT = "kept"
"""A weight for what runs its forward without gradients: before torch 2.11 its cast there is served to what follows."""

MULTIPLIES = ("linear", "mm", "custom float32", "island", "nested", "checkpoint")
"""Instructions that multiply the current tensor by a weight."""
PLAIN = ("relu", "transpose", "float", "save", "residual", "halves")
WITHOUT_GRADIENTS = ("custom", "checkpoint, reentrant")
INSTRUCTIONS = (*MULTIPLIES, *WITHOUT_GRADIENTS, *PLAIN)
RESIDUALS = 2


@dataclass(frozen=True)
class Instruction:
    """One step of a program: the operation on the current tensor, and its weight."""

    kind: str
    weight: str = WEIGHTS[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.weight}" if self.kind in MULTIPLIES else self.kind


Program: TypeAlias = Sequence[Instruction]


def random_program(generator: random.Random) -> list[Instruction]:
    """Return a random program of up to eight instructions, at most two of which add."""
    count = generator.randint(1, 8)
    program = [Instruction(generator.choice(INSTRUCTIONS), generator.choice(WEIGHTS)) for _ in range(count)]
    adds = [place for place, step in enumerate(program) if step.kind == "residual"]
    return [step for place, step in enumerate(program) if place not in adds[RESIDUALS:]]


def simpler(step: Instruction) -> Iterable[Instruction]:
    """Return simpler replacements of an instruction: the first weight, or the simplest product."""
    if step.kind in MULTIPLIES and step.weight != WEIGHTS[0]:
        yield replace(step, weight=WEIGHTS[0])
    if step.kind in MULTIPLIES[1:]:
        yield Instruction("linear")


def leaves(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return input and weights, [4, 4] float32 on the CPU: signed permutations, so that products have one term.

    Each row and column of a signed permutation has one 1 or -1, and a product of two is one. With two residuals the
    current tensor is a sum of at most four of them, and so is its gradient, so a gradient of a weight holds at most
    16 for each of its uses, of which there are eight at the most: whole numbers up to 128, exact in every type.
    """

    def permutation() -> torch.Tensor:
        signs = torch.randint(0, 2, (SIZE,), generator=generator).float() * 2 - 1
        return torch.eye(SIZE)[torch.randperm(SIZE, generator=generator)] * signs

    return {name: permutation() for name in ("x", *WEIGHTS, KEPT, "goal")}


@dataclass(frozen=True)
class Exact:
    """The float64 result of a program: its output, gradients by leaf, and the dtypes that torch.amp promises."""

    output: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    types: tuple[torch.dtype, ...]


def exact(program: Program, given: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Exact:
    """Run a program in float64 without regions or checkpoints, and predict the type of each of its steps.

    Lower precision products give `dtype` in a region, custom functions with cast_inputs and disabled regions float32,
    sums the wider type, everything else the type that it is given (amp.html, Autocast Op Reference).
    """
    wide = {name: tensor.double().requires_grad_(name != "goal") for name, tensor in given.items()}
    current, saved = wide["x"], wide["x"]
    kind, saved_kind = torch.float32, torch.float32
    types = []
    for step in program:
        if step.kind in ("mm", "custom float32"):
            current = current @ wide[step.weight]
        elif step.kind == "custom":
            current = current @ wide[KEPT]
        elif step.kind in MULTIPLIES:
            current = current @ wide[step.weight].T
        elif step.kind == "checkpoint, reentrant":
            current = current @ wide[KEPT].T
        elif step.kind == "relu":
            current = current * (current > 0)
        elif step.kind == "transpose":
            current = current.T
        elif step.kind == "save":
            saved, saved_kind = current, kind
        elif step.kind == "residual":
            current = current + saved
        elif step.kind == "halves":
            current = torch.cat([current[2:], current[:2]])
        kind = predicted(step.kind, kind, saved_kind, dtype)
        types.append(kind)
    (current * wide["goal"]).sum().backward()
    gradients = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in wide.items()
        if tensor.requires_grad
    }
    return Exact(current.detach(), gradients, tuple(types))


def predicted(step: str, kind: torch.dtype, saved: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype after a step, from the dtypes before it, of the saved tensor and of the region."""
    if step in ("custom float32", "island", "float"):
        return torch.float32
    if step in (*MULTIPLIES, *WITHOUT_GRADIENTS):
        return dtype
    if step == "residual":
        return torch.promote_types(kind, saved)
    return kind
