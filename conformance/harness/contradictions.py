"""Settings of the environment that contradict each other, under which a report would say what did not run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch

from .targets import Target

# Context::checkCuBLASConfigDeterministic in aten/src/ATen/Context.cpp
_DETERMINISTIC = (":4096:8", ":16:8")
_TRUE = ("1", "true", "True", "on", "ON")


def contradictions(targets: Iterable[Target]) -> str | None:
    """Return in one line what contradicts what in this process, for a run that has a CUDA device; None: nothing."""
    if not any(target.device_type == "cuda" and not target.is_fake for target in targets):
        return None
    variables = os.environ
    found = [*_of_tf32(variables), *_of_determinism(variables), *_of_the_allocator(variables)]
    return "; ".join(found) or None


def _of_tf32(variables: Mapping[str, str]) -> Iterable[str]:
    """NVIDIA's libraries never use TF32 under the override of 0, whatever a program asks for."""
    if variables.get("NVIDIA_TF32_OVERRIDE") != "0":
        return
    if variables.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") in _TRUE:
        yield "NVIDIA_TF32_OVERRIDE=0 takes TF32 away, and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE asks for it: unset one"
    elif torch.get_float32_matmul_precision() != "highest":
        asked = torch.get_float32_matmul_precision()
        yield (
            f"NVIDIA_TF32_OVERRIDE=0 takes TF32 away, and torch.set_float32_matmul_precision({asked!r}) asks for it: "
            "unset one"
        )


def _of_determinism(variables: Mapping[str, str]) -> Iterable[str]:
    config = variables.get("CUBLAS_WORKSPACE_CONFIG")
    if torch.are_deterministic_algorithms_enabled() and config not in _DETERMINISTIC:
        yield (
            f"torch.use_deterministic_algorithms is on, and CUBLAS_WORKSPACE_CONFIG is {config or 'not set'}: "
            f"cuBLAS is deterministic with {' or '.join(_DETERMINISTIC)} only"
        )


def _of_the_allocator(variables: Mapping[str, str]) -> Iterable[str]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    configs = {name: variables[name] for name in names if variables.get(name)}
    if len(set(configs.values())) > 1:
        yield " and ".join(f"{name}={value}" for name, value in configs.items()) + " differ: unset the second, an alias"
    for name, value in configs.items():
        options = dict(part.partition(":")[::2] for part in value.replace(" ", "").split(",") if part)
        others = sorted(set(options) - {"backend"})
        if options.get("backend") == "cudaMallocAsync" and others:
            yield f"{name} chooses cudaMallocAsync, which knows nothing of {', '.join(others)}: leave one out"
