"""The device module of the backend, `torch.toyacc`; importing this module loads the backend into torch."""

from __future__ import annotations

import contextlib
import os
import types

import torch

from conformance.oracles.policy.overloads import known
from tests.simulation.emulated.build import FOLDER, library
from tests.simulation.foreign.variants import FUSED, LACKING, VARIANTS, VARIED, without_drawn_kernels

NAME = "toyacc"
VARIABLE = "TOYACC_VARIANT"  # the name of what is broken or missing, of tests.simulation.foreign.variants
KERNELS = "TOYACC_LACKS"  # a seed and a count, as in 3:120: it lacks so many kernels, which the seed chooses
RULES = "TOYACC_RULES"  # a backend of torch, cuda unless it is given, whose autocast rules the device has


def _module() -> types.ModuleType:
    made = types.ModuleType(f"torch.{NAME}", "A device in the host's memory.")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="toy accelerator"),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "device": lambda index: contextlib.nullcontext(),
        "amp_conformance_lacks": {
            "streams": "it has none",
            "graphs": "it has none",
            "copies that do not wait": "a copy is done when the call returns",
            "pools of memory": "memory that is given back is not used again",
            "child processes": "a process that is started by itself does not load it",
        },
    }
    for name, value in functions.items():
        setattr(made, name, value)
    return made


def load() -> None:
    """Load the backend, give it its autocast rules and register its device module."""
    torch.ops.load_library(str(library(FOLDER.parent / "foreign" / "backend.cpp")))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if (backend := os.environ.get(RULES, "cuda")) == "cuda":
        torch.ops.toyacc.rules_of_cuda()
    else:
        for overload, policy in known(backend).items():
            torch.ops.toyacc.rule(overload, policy)
    if variant := os.environ.get(VARIABLE):
        {**VARIANTS, **LACKING, **FUSED, **VARIED}[variant].apply()
    if lacks := os.environ.get(KERNELS):
        without_drawn_kernels(*map(int, lacks.split(":"))).apply()


load()
