"""Whether an exception is about the suite's own code or may come of what torch returned, and where it came up.

A fault of torch often shows as a TypeError or AttributeError in code of the suite: torch returned another type, or
lacks an attribute. A KeyError or ZeroDivisionError of a module of the suite that is no check is its own. Any other
exception is where nothing of torch can be involved: the suite's code raised it, was not called back by other code, and
it is about

- an attribute that a module of the suite or of Python lacks, or a class of the suite that has no base of torch's and no
  method that sets it;
- the arguments of a function of the suite that the line calls by its name, without unpacking any;
- an expression of the suite's constants and the target alone, such as the look-up `TABLE[target.device_type]`, from
  Python 3.11 on, which tells expressions apart;
- a file of the suite.

A local variable may hold what torch returned. What is about one stays torch's failure, and its reason says where in the
suite's code it came up.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from .. import data
from .targets import Target

_SUITE = __name__.split(".")[0]
_PACKAGE = Path(__file__).resolve().parent.parent
_ROOTS = (_SUITE, "pytest", "_pytest", "pluggy", "hypothesis", "xdist", *sys.stdlib_module_names)
# In Python's words: "Model.step() missing 1 required positional argument: 'x'".
_ARGUMENTS = re.compile(r"([\w.<>]+)\(\) (?:missing|takes|got (?:an unexpected|multiple|some)) ")
_OF_PYTHON = (AttributeError, TypeError, LookupError, ValueError, ArithmeticError)
_PLAIN = ("builtins", "types", "collections")
# What a look-up in a table raises: in a module of the suite its table lacks the entry. A check module also looks up
# what torch made, such as an optimizer's state, and torch's own functions raise the rest of Python's exceptions.
_OF_TABLES = (KeyError, ZeroDivisionError)


def is_own(error: BaseException) -> bool:
    """Whether an exception that ended a check is about the suite's own code, by the rule above."""
    if isinstance(error, _OF_TABLES) and _in_no_check(error):
        return True
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return _of_the_suite(error.filename)
    if (found := _innermost(error)) is None or not all(map(_is_plain_frame, _frames(error))):
        return False
    frame, expression, calls = found
    if frame.f_globals.get("__name__") == data.__name__:
        return isinstance(error, OSError)
    if isinstance(error, AttributeError) and _lacks(error.obj, error.name):
        return True
    if isinstance(error, TypeError) and (called := _ARGUMENTS.match(str(error))):
        return _calls_its_own(called[1], calls, frame)
    return isinstance(error, _OF_PYTHON) and expression is not None and _of_constants(expression, frame)


def place(error: BaseException) -> str | None:
    """Return file and line of the suite's code that raised one of Python's own exceptions; None for any other."""
    frame, line = _last(error)
    if (
        frame is None
        or not isinstance(error, (*_OF_PYTHON, AssertionError))
        or not _is_of_the_suite(frame.f_globals.get("__name__"))
    ):
        return None
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_PACKAGE.parent).as_posix() if _of_the_suite(path) else path.name
    return f"{name}:{line}"


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Return the frames from the first of the suite on."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return itertools.dropwhile(lambda frame: not _is_of_the_suite(frame.f_globals.get("__name__")), frames)


def _last(error: BaseException) -> tuple[FrameType | None, int]:
    *_, last = ((None, 0), *traceback.walk_tb(error.__traceback__))
    return last


def _in_no_check(error: BaseException) -> bool:
    """Whether the code that raised is the suite's own, less its check modules."""
    frame, _ = _last(error)
    name = None if frame is None else frame.f_globals.get("__name__")
    return isinstance(name, str) and _is_of_the_suite(name) and not name.split(".")[-1].startswith("test_")


def _is_plain_frame(frame: FrameType) -> bool:
    """Whether it is of the suite, of Python or of pytest, and no handler that torch's dispatcher calls from C++."""
    root = str(frame.f_globals.get("__name__")).split(".")[0]
    return root in _ROOTS and not frame.f_code.co_name.startswith("__torch_")


def _is_of_the_suite(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] == _SUITE


def _of_the_suite(path: str | Path) -> bool:
    places = (_PACKAGE, data.fixture("waivers.toml").parent)
    return any(Path(path).resolve().is_relative_to(folder) for folder in places)


# --- attributes -------------------------------------------------------------------------------------------------


def _lacks(owner: Any, name: str | None) -> bool:
    """Whether an object is the suite's own, or a module of Python, and nothing gives it an attribute of that name."""
    if isinstance(owner, ModuleType):
        return owner.__name__.split(".")[0] in (_SUITE, *sys.stdlib_module_names)
    kind = owner if isinstance(owner, type) else type(owner)
    return name is not None and _is_of_it_alone(kind) and not any(name in _given(base) for base in kind.__mro__)


def _is_of_it_alone(kind: type) -> bool:
    """Whether a class is the suite's, and its bases are the suite's or Python's."""
    roots = {base.__module__.split(".")[0] for base in kind.__mro__}
    return _is_of_the_suite(kind.__module__) and roots <= {_SUITE, *sys.stdlib_module_names}


def _given(kind: type) -> Iterator[str]:
    """Yield the attributes that a class declares, or that one of its methods sets."""
    yield from vars(kind).get("__annotations__", ())
    yield from vars(kind).get("__slots__", ())
    for value in vars(kind).values():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            yield from _stored(inner.__code__)


def _stored(code: CodeType) -> Iterator[str]:
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant)


# --- arguments --------------------------------------------------------------------------------------------------


def _calls_its_own(name: str, calls: Iterable[ast.Call], frame: FrameType) -> bool:
    """Whether all calls of that qualified name on a line are of functions of the suite, with written-out arguments."""
    last = name.removesuffix(".__init__").split(".")[-1]
    found = [call for call in calls if last in (getattr(call.func, "id", None), getattr(call.func, "attr", None))]
    return bool(found) and all(_is_of_the_suite(_home(call.func, frame)) and not _unpacks(call) for call in found)


def _home(called: ast.expr, frame: FrameType) -> str | None:
    """Return the module of a function or class that is spelled by names and attributes, without running any code."""
    found = _named(called, frame)
    found = getattr(found, "__func__", found)
    if isinstance(found, type):
        init = inspect.getattr_static(found, "__init__")
        return found.__module__ if not isinstance(init, FunctionType) else _owner(found, init)
    return found.__module__ if isinstance(found, FunctionType) else None


def _owner(kind: type, function: FunctionType) -> str:
    return next((base.__module__ for base in kind.__mro__ if function in vars(base).values()), "")


def _named(spelled: ast.expr, frame: FrameType) -> Any:
    if isinstance(spelled, ast.Name):
        return frame.f_locals.get(spelled.id, frame.f_globals.get(spelled.id))
    if isinstance(spelled, ast.Attribute) and (owner := _named(spelled.value, frame)) is not None:
        return inspect.getattr_static(owner, spelled.attr, None)
    return None


def _unpacks(call: ast.Call) -> bool:
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


# --- expressions ------------------------------------------------------------------------------------------------


def _innermost(error: BaseException) -> tuple[FrameType, ast.expr | None, list[ast.Call]] | None:
    """Return the suite's frame that raised, what it was computing, and the calls of its line; None for other frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_of_the_suite(trace.tb_frame.f_globals.get("__name__")):
        return None
    frame, line = trace.tb_frame, trace.tb_lineno
    tree = _tree(frame.f_code.co_filename)
    if tree is None:
        return frame, None, []
    around = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and node.lineno <= line <= _end(node)]
    calls = [node for node in around if isinstance(node, ast.Call)]
    return frame, _computed(around, frame.f_code, trace.tb_lasti), calls


def _end(node: ast.expr) -> int:
    return node.lineno if node.end_lineno is None else node.end_lineno


@functools.cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None


def _computed(around: list[ast.expr], code: CodeType, instruction: int) -> ast.expr | None:
    """Return the expression that an instruction computes, which Python tells from 3.11 on."""
    positions: Callable[[], Iterator[Any]] | None = getattr(code, "co_positions", None)
    if positions is None:
        return None
    place = next(itertools.islice(positions(), instruction // 2, None), None)
    return next((node for node in around if _position(node) == place), None)


def _position(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _of_constants(expression: ast.expr, frame: FrameType) -> bool:
    """Whether an expression calls nothing, and all that it names are constants of the suite and its target."""
    allowed = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple)
    nodes = [node for node in ast.walk(expression) if isinstance(node, ast.expr)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return all(isinstance(node, allowed) for node in nodes) and all(_is_constant(name, frame) for name in names)


def _is_constant(name: str, frame: FrameType) -> bool:
    if name in frame.f_locals:
        return isinstance(frame.f_locals[name], Target)
    value = frame.f_globals.get(name)
    if isinstance(value, ModuleType):
        return _is_of_the_suite(value.__name__)
    if isinstance(value, type):
        return _is_of_it_alone(value)
    if isinstance(value, FunctionType):
        return _is_of_the_suite(value.__module__)
    return value is not None and type(value).__module__ in _PLAIN
