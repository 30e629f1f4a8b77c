"""A torch that words its errors and warnings differently: a pytest plugin, `-p tests.simulation.reworded`.

The class of an error or warning and what it names are promises, its wording is none: the suite must judge this torch
as it judges the original. Import it before torch: the modules below are then compiled with each message passed
through `reworded`. Messages of torch's C++ are reworded where a case reads them.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

MODULES = (
    "torch.amp",
    "torch.cuda.amp",
    "torch.cpu.amp",
    "torch.cuda.graphs",
    "torch.nn.utils.clip_grad",
    "torch.optim",
    "torch.utils.checkpoint",
    "torch._library",
    "torch._jit_internal",
    "torch.jit",
)
# Words that name an argument, a type, a device type or a value, though they are written as plain ones.
_NAMES = re.compile(
    "autocast|backoff|bool|bytes|callable|closure|cpu|cuda|device|double|dtype|float|foreach|fused|grad|growth|half|hpu"
    "|inf|int|lazy|maia|meta|mps|mtia|nan|parameters|precision|privateuseone|scale|str|tensors?|vulkan|xla|xpu",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"(?<!\S)[A-Za-z][a-z]+(?:-[a-z]+)?(?=[.,;:!?]*(?:\s|$))")


def reworded(message: Any) -> Any:
    """Return the message with another word for each plain one, and with what it names as it was."""
    if not isinstance(message, str):
        return message
    return _PLAIN.sub(lambda word: word.group() if _NAMES.fullmatch(word.group()) else "so", message)


class _Messages(ast.NodeTransformer):
    """Pass the messages of `raise`, `assert`, warnings.warn and @deprecated through `reworded`."""

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.exc, ast.Call):
            node.exc.args[:1] = map(_passed, node.exc.args[:1])
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if node.msg is not None:
            node.msg = _passed(node.msg)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) in ("warnings.warn", "warn", "deprecated", "typing_extensions.deprecated"):
            node.args[:1] = map(_passed, node.args[:1])
        return node


def _passed(message: ast.expr) -> ast.expr:
    function = ast.Name("__amp_conformance_reworded__", ast.Load())
    return ast.copy_location(ast.Call(function, [message], []), message)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code of the source, with its messages reworded, and never that of a cached file."""
        path = self.get_filename(fullname)
        tree = ast.fix_missing_locations(_Messages().visit(ast.parse(self.get_data(path))))
        code: types.CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(name == one or name.startswith(f"{one}.") for one in MODULES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def pytest_load_initial_conftests() -> None:
    """Reword torch before anything imports it, and what a case reads of errors that are not Python's."""
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before it could be reworded")
    vars(builtins)["__amp_conformance_reworded__"] = reworded
    sys.meta_path.insert(0, _Finder())


def pytest_collection() -> None:
    """Reword what a case reads, for the errors of torch's C++ and of modules that are not compiled anew."""
    from conformance.harness import check

    named = check._named
    check._named = lambda names, message: named(names, reworded(message))
