"""Mutants: torch's own Python sources of AMP, changed in one place, each put in the place of what it is made from."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODULES = (
    "torch.amp.grad_scaler",
    "torch.amp.autocast_mode",
    "torch.nn.utils.clip_grad",
    "torch.cuda.amp.grad_scaler",
    "torch.cpu.amp.grad_scaler",
    "torch.cuda.amp.autocast_mode",
    "torch.cpu.amp.autocast_mode",
)

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
}
# Members of one kind, of which another one is put in the place of each.
_KIN = (("READY", "UNSCALED", "STEPPED"), ("float16", "float32", "bfloat16", "float64"), ("int32", "int64"))

Change = Callable[[], None]


@dataclass(frozen=True)
class Source:
    """The tree that all mutants of a module share, and what makes one of them of it and undoes that."""

    tree: ast.Module
    change: Change
    undo: Change


@dataclass(frozen=True, order=True)
class Mutant:
    """One place of a module changed: the function it is in, the operator, what stood there and what stands there now.

    `where` is the innermost `if`, `for`, `with` or `def` around it; `occurrence` counts what is otherwise alike.
    """

    module: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    where: str
    occurrence: int = 1
    source: Source = field(repr=False, compare=False, kw_only=True)

    def __str__(self) -> str:
        again = "" if self.occurrence == 1 else f" ({self.occurrence})"
        return f"{self.module}.{self.function}: {self.operator}: {self.before} -> {self.after}{again}"

    @property
    def home(self) -> str:
        """The module and the function, by which the contracts that speak of it are found."""
        return f"{self.module}.{self.function}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the changed code in the place of the function's inside the block."""
        self.source.change()
        try:
            tree = ast.fix_missing_locations(copy.deepcopy(self.source.tree))
        finally:
            self.source.undo()
        changed = _codes(compile(tree, f"<mutant of {self.module}>", "exec"))
        defaults = _defaults(tree)
        before = []
        for function in functions(self.module):
            key = (function.__code__.co_name, function.__code__.co_firstlineno)
            if key in changed:
                before.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
                function.__code__ = changed[key]
            if key in defaults:
                _set_defaults(function, defaults[key])
        try:
            yield
        finally:
            for function, code, positional, by_name in before:
                function.__code__, function.__defaults__, function.__kwdefaults__ = code, positional, by_name


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of the functions of a module, in the order of its lines."""
    source = inspect.getsource(importlib.import_module(module))
    tree = ast.parse(source)
    made: list[Mutant] = []
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for function, body in _bodies(tree):
        for node, where in _nodes(body):
            for operator, before, after, change, undo in list(_changes(node)):
                inside = operator == "statement" and not isinstance(node, ast.FunctionDef)
                counts[function, operator, before, after] += 1
                made.append(
                    Mutant(
                        module,
                        function,
                        node.lineno,
                        operator,
                        before,
                        after,
                        _line(node) if inside else where,
                        counts[function, operator, before, after],
                        source=Source(tree, change, undo),
                    )
                )
    return made


@functools.cache
def functions(module: str) -> list[types.FunctionType]:
    """Return every function whose code was compiled from the module's file and that lives now, wrapped ones as well."""
    file = importlib.import_module(module).__file__
    # By type(): isinstance() would ask torch's deprecated stand-ins for their class, which warns.
    return [
        thing for thing in gc.get_objects() if type(thing) is types.FunctionType and thing.__code__.co_filename == file
    ]


# Where code is


def _bodies(tree: ast.AST, outside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the outermost functions with the names by which they are reached; overloads hold no code."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _bodies(node, f"{outside}{node.name}.")
        elif isinstance(node, ast.If):
            yield from _bodies(node, outside)
        elif isinstance(node, ast.FunctionDef) and not any(
            ast.unparse(decorator) == "overload" for decorator in node.decorator_list
        ):
            yield f"{outside}{node.name}", node


def _nodes(function: ast.FunctionDef) -> Iterator[tuple[Any, str]]:
    """Yield the nodes that are run, with the header of the innermost block around each."""

    def walk(node: ast.AST, where: str) -> Iterator[tuple[Any, str]]:
        if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.arguments, ast.expr, ast.stmt, ast.withitem)):
            yield node, where
        if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef)):
            inner = ast.unparse(node).splitlines()
            header = next(line for line in inner if not line.startswith("@"))
            for name, value in ast.iter_fields(node):
                inside = header if name == "body" else f"else of {header}" if name == "orelse" else where
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and name not in ("returns", "decorator_list"):
                        yield from walk(child, inside)
            return
        if isinstance(node, (ast.Raise, ast.Assert)):
            # What a message says in detail is nobody's promise.
            if isinstance(node, ast.Assert):
                yield from walk(node.test, where)
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "cast"):
            return
        for name, child in ast.iter_fields(node):
            if name == "annotation":
                continue
            for part in child if isinstance(child, list) else [child]:
                if isinstance(part, ast.AST):
                    yield from walk(part, where)

    yield function, "module"
    for child in (function.args, *function.body):
        if not _is_docstring(child):
            yield from walk(child, f"def {function.name}")


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _codes(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    found = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found[constant.co_name, constant.co_firstlineno] = constant
            found.update(_codes(constant))
    return found


def _defaults(tree: ast.Module) -> dict[tuple[str, int], ast.arguments]:
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            line = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            found[node.name, line] = node.args
    return found


def _set_defaults(function: types.FunctionType, arguments: ast.arguments) -> None:
    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "<default>", "eval"), function.__globals__)

    if arguments.defaults:
        function.__defaults__ = tuple(map(value, arguments.defaults))
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    if by_name := {name.arg: value(node) for name, node in named if node is not None}:
        function.__kwdefaults__ = by_name


# What is changed

Made = tuple[str, str, str, Change, Change]


def _changes(node: Any) -> Iterator[Made]:
    for kind, change in _CHANGES.items():
        if isinstance(node, kind):
            yield from change(node)


def _replaced(operator: str, node: Any, name: str, value: Any, shown: tuple[str, str] | None = None) -> Made:
    """Return the change that puts `value` in the place of a field of a node; shown as the node before and after."""
    now = getattr(node, name)

    def change() -> None:
        setattr(node, name, value)

    def undo() -> None:
        setattr(node, name, now)

    if shown is None:
        before = _line(node)
        change()
        shown = before, _line(node)
        undo()
    return operator, *shown, change, undo


def _line(node: ast.AST) -> str:
    """The source of a node in one line; of a block its header."""
    lines = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef)):
        return next(line for line in lines if not line.startswith("@"))
    return " ".join(line.strip() for line in lines)


def _of_comparison(node: ast.Compare) -> Iterator[Made]:
    for index, operator in enumerate(node.ops):
        for other in _COMPARISONS[type(operator)]:
            yield _replaced("comparison", node, "ops", [*node.ops[:index], other(), *node.ops[index + 1 :]])


def _of_condition(node: ast.If | ast.IfExp | ast.Assert) -> Iterator[Made]:
    for value in (True, False):
        if not (isinstance(node, ast.Assert) and value is False):
            yield _replaced("condition", node, "test", ast.Constant(value))


def _of_bool(node: ast.BoolOp) -> Iterator[Made]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield _replaced("and, or", node, "op", other)
    neutral = ast.Constant(isinstance(node.op, ast.And))
    for index in range(len(node.values)):
        yield _replaced("operand dropped", node, "values", [*node.values[:index], neutral, *node.values[index + 1 :]])


def _of_not(node: ast.UnaryOp) -> Iterator[Made]:
    if isinstance(node.op, ast.Not):
        yield _replaced("not", node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node.op, ast.USub):
        yield _replaced("sign", node, "op", ast.UAdd())


def _of_arithmetic(node: ast.BinOp | ast.AugAssign) -> Iterator[Made]:
    for other in _ARITHMETIC.get(type(node.op), ()):
        if not _is_text(node):
            yield _replaced("arithmetic", node, "op", other())


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    return any(isinstance(part, (ast.JoinedStr, ast.Constant)) and "'" in ast.unparse(part) for part in ast.walk(node))


def _of_constant(node: ast.Constant) -> Iterator[Made]:
    """None is left alone: what is compared with it is a condition, and as a default it is a name's business."""
    value = node.value
    others: tuple[Any, ...] = ()
    if isinstance(value, bool):
        others = (not value,)
    elif isinstance(value, int):
        others = (value + 1, value - 1)
    elif isinstance(value, float):
        others = (value + 1.0, value * 2.0 if value else -1.0)
    elif isinstance(value, str):
        others = (f"{value}_",)
    for other in others:
        yield _replaced("constant", node, "value", other)


def _of_attribute(node: ast.Attribute) -> Iterator[Made]:
    for kin in _KIN:
        if node.attr in kin:
            for other in kin:
                if other != node.attr:
                    yield _replaced("member", node, "attr", other)


def _of_block(node: Any) -> Iterator[Made]:
    """Each statement of a block left out."""
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for index, statement in enumerate(block):
            if _is_docstring(statement) or isinstance(statement, (ast.Pass, ast.FunctionDef)):
                continue
            if isinstance(statement, ast.Raise) and isinstance(node, ast.If) and len(block) == 1:
                continue  # as the condition that is always false
            # Kept where it never runs, so that a closure goes on holding what it names.
            never = ast.copy_location(ast.If(ast.Constant(False), [statement], []), statement)
            rest = [*block[:index], never, *block[index + 1 :]]
            yield _replaced("statement", node, name, rest, (_line(statement), "nothing"))


def _of_return(node: ast.Return) -> Iterator[Made]:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        nothing = ast.IfExp(ast.Constant(True), ast.Constant(None), node.value)  # for closures, as above
        yield _replaced("result", node, "value", nothing, (_line(node), "return None"))


def _of_raise(node: ast.Raise) -> Iterator[Made]:
    if isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
        yield _replaced(
            "exception", node.exc, "func", ast.Name("LookupError", ast.Load()), (node.exc.func.id, "LookupError")
        )


def _of_loop(node: ast.For) -> Iterator[Made]:
    def taken(text: str) -> ast.expr:
        return ast.Subscript(
            ast.Call(ast.Name("list", ast.Load()), [node.iter], []),
            ast.parse(f"x[{text}]", mode="eval").body.slice,  # type: ignore[attr-defined]
            ast.Load(),
        )

    for text in ("0:0", "1:", ":-1", ":1"):
        yield _replaced("loop", node, "iter", taken(text))


def _of_call(node: ast.Call) -> Iterator[Made]:
    if ast.unparse(node.func) == "isinstance":
        return  # every such change is a TypeError
    for index in range(len(node.keywords)):
        yield _replaced("argument dropped", node, "keywords", node.keywords[:index] + node.keywords[index + 1 :])
    if len(node.args) > 1:
        yield _replaced("argument dropped", node, "args", node.args[:-1])
        yield _replaced("arguments swapped", node, "args", [node.args[1], node.args[0], *node.args[2:]])


def _of_expression(node: ast.expr | ast.stmt) -> Iterator[Made]:
    """A call left out: `f(x)` becomes `x`, `x.f(...)` becomes `x`."""
    for name, value in ast.iter_fields(node):
        if name == "decorator_list":
            continue  # which runs while torch is imported
        parts = value if isinstance(value, list) else [value]
        for index, part in enumerate(parts):
            if not isinstance(part, ast.Call) or isinstance(node, (ast.Raise, ast.withitem)):
                continue
            if ast.unparse(part.func).startswith("super()"):
                continue  # without it the method would hold no class, and its code fit no longer
            kept: list[ast.expr] = []
            if isinstance(part.func, ast.Attribute) and not _is_module(part.func.value):
                kept.append(part.func.value)
            if len(part.args) == 1 and not isinstance(part.args[0], ast.Starred):
                kept.append(part.args[0])
            for inner in kept:
                new = [*parts[:index], inner, *parts[index + 1 :]] if isinstance(value, list) else inner
                yield _replaced("call", node, name, new, (_line(part), _line(inner)))


def _is_module(node: ast.expr) -> bool:
    return ast.unparse(node).split(".")[0] in ("torch", "warnings", "functools", "inspect", "collections", "super()")


_CHANGES: dict[Any, Callable[[Any], Iterator[Made]]] = {
    ast.Compare: _of_comparison,
    (ast.If, ast.IfExp, ast.Assert): _of_condition,
    ast.BoolOp: _of_bool,
    ast.UnaryOp: _of_not,
    (ast.BinOp, ast.AugAssign): _of_arithmetic,
    ast.Constant: _of_constant,
    ast.Attribute: _of_attribute,
    (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef): _of_block,
    ast.Return: _of_return,
    ast.Raise: _of_raise,
    ast.For: _of_loop,
    ast.Call: _of_call,
    (ast.expr, ast.stmt): _of_expression,
}
