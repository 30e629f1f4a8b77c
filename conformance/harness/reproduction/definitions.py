"""The definitions that a piece of code needs, copied from the modules of the suite into one file."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import stand_ins

PACKAGE = __name__.split(".")[0]
_STAND_INS = stand_ins.__name__
# What the run declares of third parties' devices, which no statement of its module says.
_DECLARED = (f"{stand_ins.__name__.split('.')[0]}.oracles.policy.declared", "_DECLARED")
# Modules whose classes and functions have a stand-in, by the same name.
_REPLACED = (f"{PACKAGE}.harness.check", f"{PACKAGE}.harness.targets", f"{PACKAGE}.harness.state", f"{PACKAGE}.data")
# What only pytest can do.
_FOREIGN = ("pytest", "_pytest", "hypothesis", "tabulate")
_DATA_FILE = re.compile(r"\w+\.(?:toml|json|csv)")
_REFERENCE = re.compile(r"__reference_(\d+)__")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class CannotCopy(Exception):
    """Something is needed that stands in no file of the suite, or that torch alone cannot do."""


@dataclass(frozen=True)
class Key:
    """What a name means: a global of a module of the suite, or (`name` is empty) a statement that imports it."""

    module: str
    name: str
    preferred: str


@dataclass
class _Module:
    """The top-level statements of a module, and which of them bind a name."""

    name: str
    package: str
    statements: list[ast.stmt]
    binding: dict[str, list[int]] = field(default_factory=dict)
    imports: dict[str, tuple[ast.stmt, ast.alias]] = field(default_factory=dict)


@functools.cache
def _module(name: str) -> _Module:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise CannotCopy(f"the source of {name}")
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    made = _Module(name, package, [one for one in tree.body if not _for_typing(one)])
    for number, statement in enumerate(made.statements):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                made.imports[alias.asname or alias.name.split(".")[0]] = (statement, alias)
            continue
        for bound in _bound([statement]):
            made.binding.setdefault(bound, []).append(number)
    return made


def _for_typing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _bound(statements: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind in their own scope."""
    found: set[str] = set()
    pending: list[ast.AST] = list(statements)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            pending += node.decorator_list
            continue
        if isinstance(node, _SCOPES):
            # A named expression binds in the function around a comprehension.
            found |= {one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr)}
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif (isinstance(node, ast.ExceptHandler) and node.name) or (
            isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
        ):
            found.add(node.name)
        elif isinstance(node, ast.Global):
            found -= set(node.names)
        pending += ast.iter_child_nodes(node)
    return found - {name for one in statements for node in ast.walk(one) if isinstance(node, ast.Global)
                    for name in node.names}  # fmt: skip


def _locals(node: ast.AST) -> set[str]:
    """Return the local names of a function, lambda or comprehension."""
    if isinstance(node, _FUNCTIONS):
        arguments = node.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        body = [ast.Expr(node.body)] if isinstance(node, ast.Lambda) else node.body
        return {one.arg for one in given if one is not None} | _bound(list(body))
    targets = [generator.target for generator in getattr(node, "generators", ())]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


@dataclass
class _Needs:
    """Which definitions one needs: all, those that it takes when it is run, and whether it calls anything then."""

    all: list[int]
    at_once: list[int]
    runs: bool


class _Rewriter(ast.NodeTransformer):
    """Replace every global name of a module by a reference to what it means there."""

    def __init__(self, file: File, module: _Module) -> None:
        self._file = file
        self._module = module
        self._scopes: list[set[str]] = []
        self._imported: list[dict[str, str]] = []
        self._bodies = 0  # of functions, which run later
        self.needs: list[int] = []
        self.at_once: list[int] = []
        """Those of `needs` that the statement takes when it runs, not when a function of it is called."""

    def reference(self, name: str) -> str | None:
        if any(name in scope for scope in self._scopes):
            for imported in reversed(self._imported):
                if name in imported:
                    return imported[name]
            return None
        number = self._file.number(self._module, name)
        if number is None:
            return None
        self._need(number)
        return f"__reference_{number}__"

    def _need(self, number: int) -> None:
        self.needs.append(number)
        if not self._bodies:
            self.at_once.append(number)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        found = self.reference(node.id)
        return node if found is None else ast.copy_location(ast.Name(found, node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self._file.attributes.add(node.attr)
        if isinstance(node.value, ast.Name) and not any(node.value.id in scope for scope in self._scopes):
            other = self._file.alias(self._module, node.value.id)
            if other is not None:
                number = self._file.number(_module(other), node.attr, elsewhere=True)
                if number is None:
                    raise CannotCopy(f"{other}.{node.attr}")
                self._need(number)
                return ast.copy_location(ast.Name(f"__reference_{number}__", node.ctx), node)
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self.reference(name) or name for name in node.names]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.target = self.visit(node.target)
        node.value = None if node.value is None else self.visit(node.value)
        if self._scopes and node.value is not None:
            return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and _DATA_FILE.fullmatch(node.value):
            self._file.files.add(node.value)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if not self._scopes or not _of_suite(self._module, node):
            return node
        return ast.copy_location(ast.Pass(), node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        if any(alias.name.split(".")[0] in (*_FOREIGN, PACKAGE) for alias in node.names):
            raise CannotCopy(f"import {node.names[0].name}")
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.decorator_list = [self.visit(one) for one in node.decorator_list]
        if not node.decorator_list:  # torch reads those of operators that it registers
            node.returns = None
            for one in ast.walk(node.args):
                if isinstance(one, ast.arg):
                    one.annotation = None
        node.args = self.visit(node.args)
        # A function inside of a check may be looked at, docstring and all.
        if not self._bodies and ast.get_docstring(node) is not None and len(node.body) > 1:
            node.body = node.body[1:]
        with_imports = self._function_imports(node)
        self._scopes.append(_locals(node))
        self._imported.append(with_imports)
        self._file.locals |= self._scopes[-1]
        self._bodies += 1
        node.body = [self.visit(one) for one in node.body]
        self._bodies -= 1
        self._scopes.pop()
        self._imported.pop()
        return node

    def _function_imports(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
        found = {}
        for one in ast.walk(node):
            if isinstance(one, ast.ImportFrom) and _of_suite(self._module, one):
                for alias in one.names:
                    number = self._file.imported(self._module, one, alias)
                    self.needs.append(number)
                    found[alias.asname or alias.name] = f"__reference_{number}__"
        return found

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.args = self.visit(node.args)
        self._scopes.append(_locals(node))
        self._file.locals |= self._scopes[-1]
        self._bodies += 1
        node.body = self.visit(node.body)
        self._bodies -= 1
        self._scopes.pop()
        return node

    def _comprehension(self, node: ast.AST) -> ast.AST:
        self._scopes.append(_locals(node))
        self._file.locals |= self._scopes[-1]
        node = self.generic_visit(node)
        self._scopes.pop()
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node) and len(node.body) > 1:
            node.body = node.body[1:]
        return self.generic_visit(node)


def _of_suite(module: _Module, node: ast.ImportFrom) -> bool:
    return node.level > 0 or (node.module or "").split(".")[0] == PACKAGE


def _origin(module: _Module, node: ast.ImportFrom) -> str:
    """Return the full name of the module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


class File:
    """One file that is made: which definitions it holds, in which order, and how they are called in it."""

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.files: set[str] = set()
        self.locals: set[str] = set()
        self._keys: list[Key] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._renamed: set[int] = set()
        self._statements: dict[int, list[tuple[str, list[int]]]] = {}
        self._emitted: dict[tuple[str, int], None] = {}

    def alias(self, module: _Module, name: str) -> str | None:
        """Return the module of the suite that a name of `module` is, if it is one."""
        if name not in module.imports or name in module.binding:
            return None
        node, alias = module.imports[name]
        if isinstance(node, ast.ImportFrom) and _of_suite(module, node):
            whole = f"{_origin(module, node)}.{alias.name}"
            if whole in sys.modules and _is_module(whole):
                return whole
        return None

    def number(self, module: _Module, name: str, *, elsewhere: bool = False) -> int | None:
        """Return the number of what `name` means in `module`; None for a name that no module binds."""
        if name in module.binding:
            number = self._number(Key(module.name, name, name))
        elif name in module.imports:
            node, alias = module.imports[name]
            if isinstance(node, ast.ImportFrom) and _of_suite(module, node):
                number = self.imported(module, node, alias)
            else:
                number = self._external(node, alias)
        else:
            return None
        if elsewhere or self._keys[number].preferred != name:
            self._renamed.add(number)
        return number

    def imported(self, module: _Module, node: ast.ImportFrom, alias: ast.alias) -> int:
        """Return the number of what an import from the suite binds."""
        origin = _origin(module, node)
        if origin in _REPLACED and alias.name in vars(stand_ins):
            origin = _STAND_INS
        if _is_module(f"{origin}.{alias.name}"):
            raise CannotCopy(f"the module {origin}.{alias.name} as a value")
        number = self.number(_module(origin), alias.name)
        if number is None:
            raise CannotCopy(f"{origin}.{alias.name}")
        if alias.asname:
            self._renamed.add(number)
        return number

    def _external(self, node: ast.stmt, alias: ast.alias) -> int:
        module = node.module if isinstance(node, ast.ImportFrom) else ""
        root = (module or alias.name).split(".")[0]
        if root in _FOREIGN:
            raise CannotCopy(root)
        name = alias.asname or (alias.name if module else alias.name.split(".")[0])
        wanted = f"from {module} import {alias.name}" if module else f"import {alias.name}"
        if module == "__future__":
            raise CannotCopy(wanted)
        return self._number(Key(wanted, "", name))

    def _number(self, key: Key) -> int:
        place = (key.module, key.name or f"as {key.preferred}")
        if place not in self._numbers:
            self._numbers[place] = len(self._keys)
            self._keys.append(key)
        return self._numbers[place]

    def value(self, module: str, name: str) -> str:
        """Return a reference to a global of a module of the suite; raises CannotCopy where it is none."""
        number = self.number(_module(module), name)
        if number is None:
            raise CannotCopy(f"{module}.{name}")
        self._renamed.add(number)
        return f"__reference_{number}__"

    def outside(self, statement: str, name: str) -> str:
        """Return a reference to what an import statement binds."""
        return f"__reference_{self._number(Key(statement, '', name))}__"

    def expression(self, module: str, node: ast.expr) -> str:
        """Return the source of an expression of a module, with references."""
        rewriter = _Rewriter(self, _module(module))
        return ast.unparse(ast.fix_missing_locations(rewriter.visit(_copy(node))))

    def statement(self, module: str, node: ast.stmt) -> str:
        """Return the source of a statement of a module, with references."""
        rewriter = _Rewriter(self, _module(module))
        return ast.unparse(ast.fix_missing_locations(rewriter.visit(_copy(node))))

    def text(self, main: str, at_most: int) -> str:
        """Return the whole file: imports, definitions in the order of need, `main`; raises CannotCopy if it is long."""
        pieces: dict[int, list[str]] = {}
        needs: dict[int, _Needs] = {}
        used = list(map(int, _REFERENCE.findall(main)))
        pending = list(used)
        size = len(main)
        while pending:
            number = pending.pop()
            if number in pieces or not self._keys[number].name:
                continue
            pieces[number], needs[number] = self._copied(number)
            size += sum(map(len, pieces[number]))
            if size > at_most:
                raise CannotCopy(f"more than {at_most} characters")
            pending += needs[number].all
        # Methods of the stand-ins that turned out to be used only now.
        changed = True
        while changed:
            changed = False
            for number in [n for n in pieces if self._keys[n].module == _STAND_INS]:
                again, more = self._copied(number)
                if again != pieces[number]:
                    pieces[number], needs[number], changed = again, more, True
                for other in more.all:
                    if self._keys[other].name and other not in pieces:
                        pieces[other], needs[other] = self._copied(other)
                        changed = True
        order: dict[int, None] = {}
        for number in [*used, *pieces]:
            self._place(number, needs, order, set())
        # The check, which nothing else needs, stands last, where a reader looks first.
        for number in [one for one in order if self._keys[one].name.startswith("test_")]:
            order[number] = order.pop(number)
        for number in [one for need in needs.values() for one in need.all if not self._keys[one].name]:
            order[number] = None
        names = self._names(list(order))
        body = "\n\n\n".join("\n".join(pieces[n]) for n in order if self._keys[n].name)
        imports = sorted({_import(self._keys[n], names[n]) for n in order if not self._keys[n].name}, key=_import_order)
        whole = "\n\n\n".join(
            filter(None, ["\n".join(["from __future__ import annotations", "", *imports]), body, main])
        )
        return _REFERENCE.sub(lambda found: names[int(found[1])], whole)

    def _copied(self, number: int) -> tuple[list[str], _Needs]:
        key = self._keys[number]
        module = _module(key.module)
        if (key.module, key.name) == _DECLARED:
            return self._as_it_is(number)
        texts, needs = [], _Needs([], [], False)
        for place in module.binding[key.name]:
            statement = _copy(module.statements[place])
            if key.module == _STAND_INS and isinstance(statement, ast.ClassDef):
                self._keep_used(statement)
            rewriter = _Rewriter(self, module)
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                statement.name = f"__reference_{number}__"
                if key.name.startswith("test_") or any(_is_fixture(one) for one in statement.decorator_list):
                    statement.decorator_list = []  # they say which cases there are
            texts.append(ast.unparse(ast.fix_missing_locations(rewriter.visit(statement))))
            needs.all += [one for one in rewriter.needs if one != number]
            needs.at_once += [one for one in rewriter.at_once if one != number]
            needs.runs |= not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) or bool(
                statement.decorator_list
            )
        return texts, needs

    def _as_it_is(self, number: int) -> tuple[list[str], _Needs]:
        """Return a global with the value that it has now, in place of its statement."""
        from .literals import source

        key = self._keys[number]
        text = f"__reference_{number}__ = {source(self, getattr(sys.modules[key.module], key.name))}"
        used = [one for one in map(int, _REFERENCE.findall(text)) if one != number]
        return [text], _Needs(used, used, True)

    def _keep_used(self, node: ast.ClassDef) -> None:
        kept = {"__init__"}
        own = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        pending = [name for name in own if name in self.attributes or name in kept]
        kept |= set(pending)
        while pending:
            for one in ast.walk(own[pending.pop()]):
                if isinstance(one, ast.Attribute) and one.attr in own and one.attr not in kept:
                    kept.add(one.attr)
                    pending.append(one.attr)
        node.body = [one for one in node.body if not isinstance(one, ast.FunctionDef) or one.name in kept] or [
            ast.Pass()
        ]
        if (made := own.get("__init__")) is not None:
            made.body = [one for one in made.body if self._is_used(one)] or [ast.Pass()]

    def _is_used(self, node: ast.stmt) -> bool:
        """Whether anything reads the attribute that a statement of a constructor sets."""
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            return True
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return not isinstance(target, ast.Attribute) or target.attr in (self.attributes | {"broken"})

    def _place(self, number: int, needs: dict[int, _Needs], order: dict[int, None], above: set[int]) -> None:
        """Put a definition into the order after all that it takes at once; what it runs has to be complete by then."""
        if number in order or number in above:
            return
        above = above | {number}
        for other in needs[number].at_once if number in needs else ():
            self._place(other, needs, order, above)
        if number in needs and needs[number].runs:
            for other in self._reached(needs[number].at_once, needs):
                self._place(other, needs, order, above)
        order[number] = None

    def _reached(self, numbers: list[int], needs: dict[int, _Needs]) -> list[int]:
        found: dict[int, None] = {}
        pending = list(numbers)
        while pending:
            number = pending.pop()
            if number not in found:
                found[number] = None
                pending += needs[number].all if number in needs else []
        return list(found)

    def _names(self, numbers: list[int]) -> dict[int, str]:
        """Choose a name for each definition: its own, unless another definition or a local variable has it."""
        taken: set[str] = set()
        found = {}
        for number in sorted(numbers):
            preferred = self._keys[number].preferred
            if self._keys[number].module == f"import {preferred}" or self._keys[number].module.startswith(
                f"import {preferred}."
            ):
                found[number] = preferred  # of one package, however many of its modules are imported
                continue
            name, more = preferred, 2
            while name in taken or (number in self._renamed and name in self.locals):
                name, more = f"{preferred}_{more}", more + 1
            taken.add(name)
            found[number] = name
        return found


def _is_fixture(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("pytest.fixture")


def _copy(node: ast.AST) -> ast.AST:
    return ast.parse(ast.unparse(node)).body[0] if isinstance(node, ast.stmt) else ast.parse(
        ast.unparse(node), mode="eval"
    ).body  # fmt: skip


def _import(key: Key, name: str) -> str:
    """Return the import statement that binds `name` to what the key means."""
    bound = (
        key.module.rpartition(" import ")[2] if key.module.startswith("from ") else key.module.split()[1].split(".")[0]
    )
    return key.module if bound == name else f"{key.module} as {name}"


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def functions(module: str) -> Iterator[ast.AST]:
    """Yield every function and lambda in the source of a module."""
    for statement in _module(module).statements:
        yield from (node for node in ast.walk(statement) if isinstance(node, _FUNCTIONS))
