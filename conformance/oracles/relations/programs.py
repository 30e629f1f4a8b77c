"""Make programs of PyTorch's own databases of operators and modules (torch.testing), each with many inputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ...measure.flags import writable
from ..policy.overloads import Target

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_SEED = 1234
Spellings = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Program:
    """A function and one set of arguments; `tensors` are the positions of its float32 arguments among `leaves`.

    `inputs` are those of them that a caller passes, as opposed to the parameters and buffers of a module.
    """

    name: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    tensors: tuple[int, ...]
    inputs: tuple[int, ...]

    def call(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return self.function(*args, **kwargs)

    def cast(self, dtypes: dict[int, torch.dtype]) -> Program:
        """Return the program with the arguments at these positions in other dtypes."""
        leaves = (leaf.to(dtypes[i]) if i in dtypes else leaf for i, leaf in enumerate(self.leaves))
        return replace(self, leaves=tuple(leaves))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Program:
        """Return the program with `change` applied to each of its tensors, such as a move to another device."""
        return replace(self, leaves=tuple(change(x) if isinstance(x, torch.Tensor) else x for x in self.leaves))

    def described(self) -> str:
        """Return the dtypes, shapes and other arguments of the call."""
        return ", ".join(_word(leaf) for leaf in self.leaves)


def _word(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    layout = "" if leaf.layout is torch.strided else f" {str(leaf.layout).removeprefix('torch.')}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{layout}{list(leaf.shape)}"


def program(name: str, function: Callable[..., Any], args: Any, kwargs: Any, parameters: int = 0) -> Program:
    """Return a program; the first `parameters` leaves of its arguments are parameters or buffers."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _is_plain(leaf))
    return Program(name, function, tuple(leaves), spec, tensors, tuple(i for i in tensors if i >= parameters))


def _is_plain(leaf: torch.Tensor) -> bool:
    return leaf.dtype is torch.float32


def is_dense(one: Program) -> bool:
    """Return whether every tensor of the program is strided: fake devices have no others."""
    return all(leaf.layout is torch.strided for leaf in one.leaves if isinstance(leaf, torch.Tensor))


def placed_on(target: Target, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the target's device, with its strides; on a fake one without values."""
    if target.is_fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target.device)
    return tensor.to(target.device)


def mixes(one: Program, amp_dtype: torch.dtype, *, every: bool = False) -> dict[str, Program]:
    """Return the program with its float32 arguments in mixes of float32 and `amp_dtype`.

    "float32" and "16-bit" hold one dtype. In the others one argument differs from all else; of a module, its inputs
    from its parameters, and one input from all else. `every` adds the other 16-bit dtype for one argument.
    """
    (other,) = set(SIXTEEN_BIT) - {amp_dtype}
    low = dict.fromkeys(one.tensors, amp_dtype)
    made = {"float32": one, "16-bit": one.cast(low)}
    if len(one.tensors) < 2:
        return made
    single = one.tensors
    if len(one.inputs) < len(one.tensors):
        made["inputs 16-bit"] = one.cast(dict.fromkeys(one.inputs, amp_dtype))
        made["inputs float32"] = one.cast({i: amp_dtype for i in one.tensors if i not in one.inputs})
        single = one.inputs if len(one.inputs) > 1 else ()
    for number, index in enumerate(single):
        made[f"argument {number} 16-bit"] = one.cast({index: amp_dtype})
        made[f"argument {number} float32"] = one.cast({i: amp_dtype for i in one.tensors if i != index})
        if every:
            made[f"argument {number} {other}, others 16-bit"] = one.cast({**low, index: other})
    return made


def vmapped(one: Program, *, gradients: bool = False) -> Program:
    """Return the program under torch.func.vmap over two copies of its float tensors, or its per-sample gradients."""

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(one.leaves)
        for index, tensor in zip(one.tensors, tensors, strict=True):
            leaves[index] = tensor
        return tuple(leaf for leaf in tree_leaves(one.call(leaves)) if isinstance(leaf, torch.Tensor))

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        floating = [leaf.float().sum() for leaf in plain(*tensors) if leaf.is_floating_point()]
        return torch.stack(floating).sum()

    function = torch.func.grad(total, argnums=tuple(range(len(one.tensors)))) if gradients else plain
    batched = torch.func.vmap(function, randomness="same")
    copies = [torch.stack([one.leaves[index]] * 2) for index in one.tensors]
    return program(one.name, batched, tuple(copies), {})


@contextlib.contextmanager
def quiet_database() -> Iterator[None]:
    """Stop the databases from inspecting the caller's stack, which is deep under pytest, for each sample and seed.

    They look for the unittest that asks; and torch.manual_seed notes where it was called for each backend that is not
    started yet, while samples are made on the CPU.
    """
    seed = torch.default_generator.manual_seed
    with mock.patch.object(inspect, "stack", list), mock.patch.object(torch, "manual_seed", seed):
        yield


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seed Python's and torch's generators, from which samples take shapes and values, and restore Python's."""
    before = random.getstate()
    random.seed(0)
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(before)


@functools.cache
def _imported() -> tuple[list[Any], list[Any]]:
    """Import the databases, which takes seconds. Raises ImportError where a package for them is missing.

    The import forbids all later writes to the flags of torch.backends and sets environment variables: both are undone.
    Older versions read the seed of their samples from the command line, where this suite's option has the same name.
    """
    environment = dict(os.environ)
    try:
        with writable(), mock.patch.object(sys, "argv", sys.argv[:1]):
            from torch.testing._internal import common_utils
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
    finally:
        for key in set(os.environ) - set(environment):
            del os.environ[key]
    common_utils.SEED = _SEED  # what it is without a command line, also if something else imported it before
    return list(op_db), list(module_db)


def operator_database() -> list[Any]:
    """Return the entries of op_db. Raises ImportError where a package for it is missing."""
    return _imported()[0]


def name_of(entry: Any) -> str:
    """Return the name of an entry of the operator database with its variant: "norm.nuc"."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


@functools.cache
def operators(device_type: str, amp_dtype: torch.dtype) -> dict[str, Any]:
    """Return the entries of the operator database with float32 and `amp_dtype` kernels on a device type, by name.

    On the CPU, where every call is really made, those without a kernel for `amp_dtype` as well.
    """
    kinds = {torch.float32} if device_type == "cpu" else {torch.float32, amp_dtype}
    return {name_of(one): one for one in operator_database() if kinds <= set(one.supported_dtypes(device_type))}


def operator_programs(entry: Any, samples: int) -> list[Program]:
    """Return float32 programs of an entry's first samples, on the CPU: the same ones in every process."""
    try:
        with _same_random_numbers():
            made = list(itertools.islice(entry.sample_inputs("cpu", torch.float32, requires_grad=False), samples))
    except (RuntimeError, NotImplementedError):  # a build without LAPACK cannot create some samples
        return []
    return [program(name_of(entry), entry.op, (one.input, *one.args), one.kwargs) for one in made]


def routes(entry: Any) -> Spellings:
    """Return the other spellings of an operator that take the same arguments: method, operator, aliases."""
    found = {"method": entry.method_variant, "operator": entry.operator_variant}
    found |= {f"alias {alias.name}": alias.op for alias in entry.aliases}
    return {name: spelling for name, spelling in found.items() if spelling is not None}


def modules() -> dict[str, Any]:
    """Return the public modules of torch.nn that the module database can make, by name."""
    return {info.name: info for info in _imported()[1] if "Lazy" not in info.name}


def module_programs(info: Any, training: bool, samples: int | None) -> list[Program]:
    """Return programs of a module's first samples (None: all) on the CPU.

    Its parameters and buffers are arguments, so that each can be cast.
    """
    made = []
    with _same_random_numbers():
        inputs = info.module_inputs_func(info, "cpu", torch.float32, False, training)
        for one in itertools.islice(inputs, samples):
            if one.forward_input is not None:
                created = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs)
                call = one.forward_input
                made.append(module_program(info.name, created.train(training), call.args, call.kwargs))
    return made


def module_program(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Return the call of a module as a program; buffers are copied in each call, since some modules write to them."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    learned = {key for key, _ in module.named_parameters()}

    def call(values: tuple[torch.Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {k: v if k in learned else v.clone() for k, v in zip(state, values, strict=True)}
        return torch.func.functional_call(module, given, args, kwargs)

    return program(name, call, (tuple(x.detach() for x in state.values()), args, kwargs), {}, len(state))
