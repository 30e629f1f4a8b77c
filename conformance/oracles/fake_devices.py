"""Several devices on a machine that has none: tensors whose numbers are on the CPU and whose devices are on paper."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

# A device type of PyTorch's core that has no runtime of its own, so that torch tries to start none.
KIND = "maia"


class PaperTensor(torch.Tensor):
    """A tensor that says it is on a device of paper; `numbers` is the CPU tensor that holds its elements."""

    numbers: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device) -> PaperTensor:
        made: PaperTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a paper device outside of PaperDevices")


class PaperDevices(TorchDispatchMode):
    """While entered, tensors can be made on, and moved between, `device(0)`, `device(1)`... and the CPU.

    As on real devices, an operation refuses operands of several (but for CPU scalars and copies). `reads` lists the
    devices from which a number was read back, `moves` the pairs of devices between which a tensor was copied. Values
    and parameters work; backward does not, since autograd would look for the device's threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[torch.device] = []
        self.moves: list[tuple[torch.device, torch.device]] = []

    @staticmethod
    def device(index: int) -> torch.device:
        """The paper device of that number."""
        return torch.device(KIND, index)

    def tensor(self, values: Any, index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Make a tensor of `values` on the paper device of that number."""
        return PaperTensor(torch.tensor(values, dtype=dtype), self.device(index))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        name = func.overloadpacket.__name__
        asked = kwargs.get("device")
        device = self._device(name, tensors) if asked is None else torch.device(asked)
        if name == "_local_scalar_dense":
            self.reads.append(device)
        if name == "_to_copy" and asked is not None and device != tensors[0].device:
            self.moves.append((tensors[0].device, device))
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        papers = {id(each.numbers): each for each in tensors if isinstance(each, PaperTensor)}
        bare, bare_kwargs = tree_map_only(PaperTensor, lambda each: each.numbers, (args, kwargs))
        result = func(*bare, **bare_kwargs)
        if device.type != KIND:
            return result

        def wrap(made: torch.Tensor) -> torch.Tensor:
            return papers[id(made)] if id(made) in papers else PaperTensor(made, device)

        return tree_map_only(torch.Tensor, wrap, result)

    @staticmethod
    def _device(name: str, tensors: list[torch.Tensor]) -> torch.device:
        """The device that an operation runs on, or the error that real devices raise for operands of several."""
        spread = name.startswith(("_foreach", "_amp"))
        owners = [each.device for each in tensors if spread or each.dim() or each.device.type != "cpu"]
        if name == "copy_":
            return tensors[0].device
        if len(set(owners)) > 1:
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found {sorted(map(str, set(owners)))}"
            )
        return (owners or [each.device for each in tensors] or [torch.device("cpu")])[0]
