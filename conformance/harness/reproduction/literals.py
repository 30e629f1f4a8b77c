"""Values as source: the parameters of a case, written as expressions that make them again."""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import importlib
import inspect
import math
import pathlib
import sys
import textwrap
import types
from typing import Any

import torch

from .definitions import PACKAGE, CannotCopy, File, functions

_DEEPEST = 12
_FEW = 64
_NAMESPACES = (
    "torch",
    "torch.nn.functional",
    "torch.Tensor",
    "torch.optim",
    "torch.nn",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch._C._nn",
    "torch.sparse",
    "operator",
    "math",
    "builtins",
)


def source(file: File, value: Any, depth: int = 0) -> str:
    """Return an expression that makes `value` again; raises CannotCopy for a value that none can be written for."""
    if depth > _DEEPEST:
        raise CannotCopy("a value that is nested too deeply")
    if value is None or (isinstance(value, (bool, int, str, bytes, complex)) and type(value).__module__ == "builtins"):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, enum.Enum):
        return f"{_named(file, type(value))}.{value.name}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return f"{file.outside('import torch', 'torch')}.{str(value).removeprefix('torch.')}"
    if isinstance(value, torch.device):
        return f"{file.outside('import torch', 'torch')}.device({str(value)!r})"
    if isinstance(value, torch.Size):
        return f"{file.outside('import torch', 'torch')}.Size({list(value)!r})"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{file.outside('import torch', 'torch')}.ops.{str(value).replace('::', '.')}"
    if type(value) is torch.Tensor and _few(value):
        numbers = f"{source(file, value.tolist())}, dtype={source(file, value.dtype)}"
        return f"{file.outside('import torch', 'torch')}.tensor({numbers})"
    made = _container(file, value, depth)
    return _object(file, value, depth) if made is None else made


def _few(value: torch.Tensor) -> bool:
    """Whether a tensor is a few numbers on the host, with nothing else to be made again."""
    plain = value.device.type == "cpu" and value.layout is torch.strided and not value.requires_grad
    return plain and value.numel() <= _FEW


def _container(file: File, value: Any, depth: int) -> str | None:
    def inner(part: Any) -> str:
        return source(file, part, depth + 1)

    if type(value) is tuple:
        return f"({''.join(f'{inner(part)}, ' for part in value)})"
    if type(value) is list:
        return f"[{', '.join(map(inner, value))}]"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(map(inner, value)))}])"
    if isinstance(value, types.MappingProxyType):
        return f"{file.outside('from types import MappingProxyType', 'MappingProxyType')}({inner(dict(value))})"
    if type(value) in (dict, collections.OrderedDict):
        return f"{{{', '.join(f'{inner(key)}: {inner(part)}' for key, part in value.items())}}}"
    if isinstance(value, (slice, range)):
        parts = (value.start, value.stop, value.step)
        return f"{type(value).__name__}({', '.join(map(inner, parts))})"
    if isinstance(value, functools.partial):
        words = [inner(value.func), *map(inner, value.args), *(f"{k}={inner(v)}" for k, v in value.keywords.items())]
        return f"{file.outside('from functools import partial', 'partial')}({', '.join(words)})"
    if isinstance(value, pathlib.Path):
        raise CannotCopy("a path")
    return None


def _object(file: File, value: Any, depth: int) -> str:
    if isinstance(value, types.MethodType):
        return f"{source(file, value.__self__, depth + 1)}.{value.__name__}"
    if isinstance(value, types.FunctionType) and value.__module__.split(".")[0] == PACKAGE:
        return _function(file, value, depth)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return _named(file, value)
    if (reference := _global(file, value)) is not None:
        return reference
    if dataclasses.is_dataclass(value):
        given = [
            f"{one.name}={source(file, getattr(value, one.name), depth + 1)}"
            for one in dataclasses.fields(value)
            if one.init
        ]
        return f"{_named(file, type(value))}({', '.join(given)})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{_named(file, type(value))}({', '.join(source(file, part, depth + 1) for part in value)})"
    raise CannotCopy(f"a value of {type(value).__name__}")


def _named(file: File, value: Any) -> str:
    """Return how a class or function is called, by the module that it says it is of."""
    module: str | None = getattr(value, "__module__", None)
    last: str = value.__name__
    name: str = getattr(value, "__qualname__", last)
    root = (module or "").split(".")[0]
    if module is not None and root == PACKAGE:
        first, *rest = name.split(".")
        if "<locals>" in name:
            raise CannotCopy(f"a local {name}")
        return ".".join([file.value(module, first), *rest])
    for space in _NAMESPACES:
        if getattr(_space(space), last, None) is value:
            if space == "builtins":
                return last
            return f"{file.outside(f'import {_importable(space)}', space.split('.')[0])}{_rest(space)}.{last}"
    first, *inner = name.split(".")
    if (
        module is not None
        and (root == "torch" or root in sys.stdlib_module_names)
        and _at(_space(module), name) is value
    ):
        return ".".join([file.outside(f"from {module} import {first}", first), *inner])
    raise CannotCopy(f"{module}.{name}")


def _space(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        root, *rest = name.split(".")
        holder: Any = importlib.import_module(root)
        return _at(holder, ".".join(rest))


def _importable(space: str) -> str:
    return space if space in ("operator", "math") or not space.startswith(("torch.Tensor", "torch._C")) else "torch"


def _rest(space: str) -> str:
    return space.removeprefix(space.split(".")[0])


def _at(holder: Any, path: str) -> Any:
    for part in path.split("."):
        holder = getattr(holder, part, None)
    return holder


def _global(file: File, value: Any) -> str | None:
    """Return a reference to the global of the suite that is this very object, if there is one."""
    module = importlib.import_module(type(value).__module__) if type(value).__module__.startswith(PACKAGE) else None
    if module is None:
        return None
    name = next((name for name, found in vars(module).items() if found is value), None)
    return None if name is None else file.value(module.__name__, name)


def _function(file: File, value: types.FunctionType, depth: int) -> str:
    """Return a function of the suite: by its name, or for a local one or a lambda its source with what it encloses."""
    if "<locals>" not in value.__qualname__ and "<lambda>" not in value.__qualname__:
        return _named(file, value)
    if (wrapped := getattr(value, "__wrapped__", None)) is not None and wrapped is not value:
        raise CannotCopy(f"the decorated local {value.__qualname__}")
    node = _node(value)
    text = file.expression(value.__module__, node) if isinstance(node, ast.Lambda) else None
    names = value.__code__.co_freevars
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    enclosed = dict(zip(names, cells, strict=True))
    if text is None:
        raise CannotCopy(f"the local function {value.__qualname__}")
    if not enclosed:
        return f"({text})"
    given = ", ".join(f"{name}={source(file, part, depth + 1)}" for name, part in enclosed.items())
    return f"(lambda {', '.join(enclosed)}: {text})({given})"


def _node(value: types.FunctionType) -> ast.expr:
    """Return the lambda in the source of its module that has the same code."""
    line = value.__code__.co_firstlineno
    for node in functions(value.__module__):
        if isinstance(node, ast.Lambda) and node.lineno <= line <= (node.end_lineno or line):
            if node.lineno != line and inspect.getsource(value) is None:
                continue
            args = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = value.__code__.co_argcount + value.__code__.co_kwonlyargcount
            if args == list(value.__code__.co_varnames[:count]) and _same_code(node, value):
                return node
    raise CannotCopy(f"the source of {value.__qualname__}")


def _same_code(node: ast.Lambda, value: types.FunctionType) -> bool:
    """Whether the names that a lambda uses are those of the compiled one."""
    free = list(value.__code__.co_freevars)
    wrapped = textwrap.dedent(f"def around({', '.join(free)}):\n    return {ast.unparse(node)}")
    around = next(part for part in compile(wrapped, "", "exec").co_consts if isinstance(part, types.CodeType))
    code = next((part for part in around.co_consts if isinstance(part, types.CodeType)), None)
    return code is not None and (code.co_names, code.co_consts[1:]) == (
        value.__code__.co_names,
        value.__code__.co_consts[1:],
    )
