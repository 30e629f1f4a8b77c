"""Flags of this process that change what torch computes: the one table, for who reports, sets or restores them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Flag:
    """A flag as a user spells it: an attribute, or a function that returns it, with one that sets it.

    `reduces` names the types whose products may lose precision while it is on. `reported` flags stand in the header of
    a report; `restored` ones are compared and restored after each case.
    """

    name: str
    setter: str | None = None
    reduces: tuple[torch.dtype, ...] = ()
    reported: bool = True
    restored: bool = False

    @property
    def present(self) -> bool:
        """Whether this torch has it."""
        return hasattr(_owner(self.name), self._last)

    def read(self) -> Any:
        """Return its value; raises AttributeError or RuntimeError if this torch lacks it or will not tell it."""
        found = getattr(_owner(self.name), self._last)
        return found() if callable(found) else found

    def write(self, value: Any) -> None:
        """Set it, also where writes to the flags of torch.backends are forbidden."""
        if self.setter is None:
            with writable():
                setattr(_owner(self.name), self._last, value)
        else:
            getattr(_owner(self.setter), self.setter.rpartition(".")[2])(value)

    @property
    def _last(self) -> str:
        return self.name.rpartition(".")[2]


# "CUDA semantics", sections on TF32, on reduced precision reductions in fp16 and bf16 GEMMs, and on fp16 accumulation;
# "Reproducibility"; torch.backends.
_MATMUL, _CUDNN = "torch.backends.cuda.matmul", "torch.backends.cudnn"
FLAGS = (
    Flag(f"{_MATMUL}.allow_tf32", reduces=(torch.float32,), restored=True),
    Flag(f"{_CUDNN}.allow_tf32", reduces=(torch.float32,), restored=True),
    Flag("torch.get_float32_matmul_precision", "torch.set_float32_matmul_precision", restored=True),
    Flag(f"{_MATMUL}.allow_fp16_reduced_precision_reduction", reduces=(torch.float16,), restored=True),
    Flag(f"{_MATMUL}.allow_bf16_reduced_precision_reduction", reduces=(torch.bfloat16,), restored=True),
    Flag(f"{_MATMUL}.allow_fp16_accumulation", reduces=(torch.float16,), restored=True),
    # Whether products may add up parts of a sum apart (split-K), from torch 2.10 on.
    Flag(f"{_MATMUL}.allow_fp16_reduced_precision_reduction_split_k"),
    Flag(f"{_MATMUL}.allow_bf16_reduced_precision_reduction_split_k"),
    Flag(
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    ),
    Flag("torch.cuda.get_allocator_backend"),
    Flag(f"{_CUDNN}.enabled", restored=True),
    Flag(f"{_CUDNN}.benchmark", restored=True),
    Flag(f"{_CUDNN}.deterministic", restored=True),
    Flag("torch.are_deterministic_algorithms_enabled"),
    Flag("torch.is_deterministic_algorithms_warn_only_enabled"),
    Flag("torch.get_num_threads", "torch.set_num_threads", restored=True),
    Flag("torch.get_default_dtype", "torch.set_default_dtype", restored=True),
    Flag("torch.backends.mkldnn.enabled", restored=True),
    # Whether modules of attention compute inference in one op.
    Flag("torch.backends.mha.get_fastpath_enabled", "torch.backends.mha.set_fastpath_enabled", restored=True),
    Flag("torch.backends.cpu.get_cpu_capability"),
    # Whether Module.to and load_state_dict swap tensors, which torch refuses for a weight that something else holds.
    Flag(
        "torch.__future__.get_swap_module_params_on_conversion",
        "torch.__future__.set_swap_module_params_on_conversion",
        restored=True,
    ),
    # torch's newer interface to TF32, from 2.9 on, which refuses the older one where it was used.
    *(
        Flag(f"torch.backends.{backend}fp32_precision", reported=False)
        for backend in (
            *("", "cuda.matmul.", "cudnn.", "cudnn.conv.", "cudnn.rnn."),
            *("mkldnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn."),
        )
    ),
)


def flag(name: str) -> Flag:
    """Return the flag of that name."""
    return next(each for each in FLAGS if each.name == name)


@contextmanager
def kept(*flags: Flag) -> Iterator[None]:
    """Restore at the end those of `flags` that this torch has, in their order."""
    before = [(each, each.read()) for each in flags if each.present]
    try:
        yield
    finally:
        for each, value in before:
            each.write(value)


@contextmanager
def held(name: str, value: Any) -> Iterator[None]:
    """Set the flag of that name, if this torch has it; at the end what it was before holds."""
    one = flag(name)
    with kept(one):
        if one.present:
            one.write(value)
        yield


@contextmanager
def writable() -> Iterator[None]:
    """Allow writes to the flags of torch.backends; at the end what it was before holds.

    torch.backends.disable_global_flags forbids them, which the import of torch.testing._internal.common_utils calls: a
    plugin of the user, or Dynamo in torch 2.6, imports it.
    """
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield


@functools.cache
def _owner(name: str) -> Any:
    return functools.reduce(lambda owner, part: getattr(owner, part, None), name.split(".")[1:-1], torch)
