"""Contexts over the state of the thread or process that a mixed-precision step uses, and what they set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn, nnpack
from torch.nn.attention import SDPBackend, sdpa_kernel

Context = contextlib.AbstractContextManager[Any]
HOOKS = "hooks of saved tensors in force"
_KERNELS = {
    "torch.backends.cuda.flash_sdp_enabled": SDPBackend.FLASH_ATTENTION,
    "torch.backends.cuda.math_sdp_enabled": SDPBackend.MATH,
    "torch.backends.cuda.mem_efficient_sdp_enabled": SDPBackend.EFFICIENT_ATTENTION,
    "torch.backends.cuda.cudnn_sdp_enabled": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Setting:
    """A context with its arguments in words; `sets` are the readings inside, by the names of `process_settings`."""

    name: str
    open: Callable[[], Context]
    sets: dict[str, Any] = field(default_factory=dict)
    family: str = "regions"


class SavedBy:
    """Which of several hooks of saved tensors are in force: torch has no getter."""

    def __init__(self) -> None:
        self._packed: list[str] = []
        self._leaf = torch.ones(1, requires_grad=True)

    def hooks(self, label: str) -> Context:
        def pack(x: torch.Tensor) -> torch.Tensor:
            self._packed.append(label)
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept)

    def read(self) -> list[str]:
        """Save a tensor for backward, and return the labels of the hooks that were called."""
        self._packed.clear()
        with torch.inference_mode(False), torch.enable_grad():
            self._leaf.sin()
        return [*self._packed]


@contextlib.contextmanager
def _other_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)
        yield


def random_setting(rng: torch.Generator, saved: SavedBy, family: str) -> Setting:
    """Return a context of a random kind of a family with random arguments."""

    def flag() -> bool:
        return bool(torch.rand((), generator=rng) < 0.5)

    def attention() -> Setting:
        chosen = [kernel for kernel in _KERNELS.values() if flag()] or [SDPBackend.MATH]
        sets = {name: kernel in chosen for name, kernel in _KERNELS.items()}
        return Setting(f"sdpa_kernel({[one.name for one in chosen]})", lambda: sdpa_kernel(chosen), sets)

    def deprecated_attention() -> Setting:
        if not hasattr(cuda, "sdp_kernel"):
            return attention()
        arguments = {name: flag() for name in ("enable_flash", "enable_math", "enable_mem_efficient", "enable_cudnn")}
        return Setting(
            f"sdp_kernel({arguments})",
            lambda: cuda.sdp_kernel(**arguments),
            dict(zip(_KERNELS, arguments.values(), strict=True)),
        )

    def convolutions() -> Setting:
        names = ("enabled", "benchmark", "deterministic", "allow_tf32")
        arguments = {name: flag() for name in names}
        sets = {f"torch.backends.cudnn.{name}": value for name, value in arguments.items()}
        return Setting(f"cudnn.flags({arguments})", lambda: cudnn.flags(**arguments), sets)

    def hooks() -> Setting:
        label = str(int(torch.randint(10**9, (), generator=rng)))
        return Setting(f"saved_tensors_hooks {label}", lambda: saved.hooks(label), {HOOKS: [label]})

    def anomaly() -> Setting:
        checks = flag()
        sets = {"torch.is_anomaly_enabled": True, "torch.is_anomaly_check_nan_enabled": checks}
        return Setting(
            f"detect_anomaly(check_nan={checks})", lambda: torch.autograd.detect_anomaly(check_nan=checks), sets
        )

    def set_anomaly() -> Setting:
        mode, checks = flag(), flag()
        sets = {"torch.is_anomaly_enabled": mode, "torch.is_anomaly_check_nan_enabled": checks}
        return Setting(
            f"set_detect_anomaly({mode}, {checks})", lambda: torch.autograd.set_detect_anomaly(mode, checks), sets
        )

    def of_flag(name: str, make: Callable[[bool], Context], *reads: str) -> Setting:
        value = flag()
        return Setting(f"{name}({value})", lambda: make(value), dict.fromkeys(reads, value))

    kinds: dict[str, tuple[Callable[[], Setting], ...]] = {
        "gradients": (
            lambda: Setting("no_grad", torch.no_grad, {"torch.is_grad_enabled": False}),
            lambda: Setting("enable_grad", torch.enable_grad, {"torch.is_grad_enabled": True}),
            lambda: of_flag("set_grad_enabled", torch.set_grad_enabled, "torch.is_grad_enabled"),
            lambda: of_flag("inference_mode", torch.inference_mode, "torch.is_inference_mode_enabled"),
            lambda: of_flag(
                "set_multithreading_enabled",
                torch.autograd.set_multithreading_enabled,
                "torch._C._is_multithreading_enabled",
            ),
        ),
        "libraries": (
            lambda: of_flag("mkldnn.flags", lambda on: mkldnn.flags(on, not on), "torch.backends.mkldnn.enabled"),
            lambda: of_flag("nnpack.flags", nnpack.flags, "torch._C._get_nnpack_enabled"),
            convolutions,
        ),
        "anomalies": (anomaly, set_anomaly),
        "attention": (attention, deprecated_attention),
        "others": (hooks, hooks, lambda: Setting("fork_rng", _other_random_numbers)),
    }
    of_family = kinds[family]
    return replace(of_family[int(torch.randint(len(of_family), (), generator=rng))](), family=family)


# What the contexts above set, and what some of them set beside.
READ = frozenset(
    {
        *_KERNELS,
        *(f"torch.is_{name}_enabled" for name in ("grad", "inference_mode", "anomaly", "anomaly_check_nan")),
        *(f"torch.backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        "torch._C._is_multithreading_enabled",
        "torch._C._is_fwd_grad_enabled",
        "torch.backends.mkldnn.enabled",
        "torch._C._get_mkldnn_deterministic",
        "torch._C._get_nnpack_enabled",
    }
)
FAMILIES = ("regions", "gradients", "libraries", "anomalies", "attention", "others")
