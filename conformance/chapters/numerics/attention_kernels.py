"""Run attention on the kernel that torch selects, and on every other that accepts the same inputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DECLINED = "none"
_OPERATION = re.compile(r"^_scaled_dot_product_(?:fused_)?(?:attention_)?(\w+?)(?:_attention)?(?:_for_\w+)?$")

T = TypeVar("T")


class Attended(TorchDispatchMode):
    """Notes, while it is entered, the kernel that attention ran on; "math" where it is composed of other operations."""

    kernel = "math"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if "backward" not in name and (found := _OPERATION.match(name)) is not None:
            self.kernel = found[1]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """What was measured on one kernel, or what it raised; neither where it declines the inputs."""

    kernel: str
    found: T | None = None
    raised: RuntimeError | None = None


def attempts(measure: Callable[[], T], device_type: str) -> Iterator[Attempt[T]]:
    """Measure on the kernel that torch chooses and, on CUDA, on each other one alone, as far as it takes the inputs."""
    chosen = _attempt(measure)
    yield chosen
    for name in KERNELS if device_type == "cuda" else ():
        if name != chosen.kernel:
            yield attempt_on(name, measure)


def attempt_on(kernel: str, measure: Callable[[], T]) -> Attempt[T]:
    """Measure on one kernel of KERNELS alone; neither result nor error where it declines the inputs."""
    with sdpa_kernel(KERNELS[kernel]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch gives its reasons to decline as warnings
        found = _attempt(measure)
    return found if found.kernel == kernel else Attempt(kernel)


def _attempt(measure: Callable[[], T]) -> Attempt[T]:
    with Attended() as attended:
        try:
            found = measure()
            return Attempt(attended.kernel, found)
        except RuntimeError as error:
            if declines(error):
                return Attempt(DECLINED)
            return Attempt(attended.kernel, raised=error)


def declines(error: RuntimeError) -> bool:
    """Whether an error says that no kernel takes the inputs."""
    return re.search("No (viable|available)", str(error)) is not None
