"""In what precision ops run: the rules of a surface as a table, and as plain sentences for the ops that were asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tabulate import tabulate

from . import text
from .surface import BACKENDS, Backend, Surface

# What a cell of the table says, and what that means. Source: aten/src/ATen/autocast_mode.h, enum CastPolicy.
_CELLS = {
    "lower_precision": ("lower", "lower_precision, runs in the amp dtype"),
    "fp32": ("fp32", "casts its inputs to float32"),
    "fp32_set_dtype": ("fp32 set", "fp32_set_dtype, computes in float32 unless the call names a dtype"),
    "fp32_append_dtype": ("fp32 app", "fp32_append_dtype, computes in float32, which autocast appends as its dtype"),
    "widest": ("widest", "promotes its inputs to the widest type among them"),
    "banned": ("banned", "raises an error"),
    "unlisted": ("unlisted", "has a kernel that changes nothing"),
    "unknown": ("unknown", "has a kernel whose rule could not be observed"),
}
_NOTHING, _INDIRECT, _NO_KEY = "-", "indirect", "no key"
_LEGEND = {
    **dict(_CELLS.values()),
    _NOTHING: "no rule: runs in the type of its inputs, or as the ops that it is made of",
    _NO_KEY: "this torch has no autocast for that backend",
    "*": "not on PyTorch's page, which lists ops for {listed}",
}
_SAYS = {
    "lower_precision": "the amp dtype {where}",
    "fp32": "float32 {where}",
    "fp32_set_dtype": "float32 {where}, unless the call names a dtype",
    "fp32_append_dtype": "float32 {where}, which autocast appends as its dtype",
    "widest": "the widest type of its inputs {where}",
    "banned": "an error {where}",
    "unlisted": "unlisted {where} in spite of a kernel: runs in the type of its inputs",
    "unknown": "a rule {where} that could not be observed",
    _NOTHING: "unlisted {where}: runs in the type of its inputs",
    _INDIRECT: "unlisted {where}: runs as the ops that it is made of",
    _NO_KEY: "no autocast {where} in this torch",
}
_FP32 = ("fp32", "fp32_set_dtype", "fp32_append_dtype")


@dataclass(frozen=True)
class View:
    """Which rules of a surface to show: no policy means all of them, and fp32 all three ways to it.

    `page_ops` returns the ATen ops that a name on PyTorch's page stands for.
    """

    surface: Surface
    backends: tuple[str, ...]
    page_ops: Callable[[str], Collection[str]]
    policies: tuple[str, ...] = ()
    undocumented: bool = False

    def backend(self, name: str) -> Backend:
        return self.surface.backends[name]  # type: ignore[index]

    def is_undocumented(self, overload: str, name: str) -> bool:
        """Whether PyTorch's page for the backend, where there is one, leaves out a rule that is there."""
        backend = self.backend(name)
        if overload not in backend.overloads or not backend.documented:
            return False
        return not any(_op(overload) in self.page_ops(documented) for documented in backend.documented)

    def shows(self, overload: str) -> bool:
        """Whether a rule on one of the backends is of the kind that was asked for."""
        return any(self._fits(overload, name) for name in self.backends)

    def _fits(self, overload: str, name: str) -> bool:
        backend = self.backend(name)
        if self.undocumented and not (
            self.is_undocumented(overload, name) or (overload in backend.overloads and not backend.documented)
        ):
            return False
        policies = {policy for asked in self.policies for policy in (_FP32 if asked == "fp32" else (asked,))}
        return not policies or backend.overloads.get(overload, "unlisted") in policies


@dataclass(frozen=True)
class Asked:
    """An op that was asked for: the overloads of ATen that it stands for, and (overload, backend) pairs of `indirect`.

    These have no rule themselves and are made of other ops, some of which have one.
    """

    spelling: str
    overloads: tuple[str, ...]
    indirect: frozenset[tuple[str, str]]


def table(view: View, *, width: int = 100) -> str:
    """Return the rules of every op that has one, of the kind that was asked for, with a legend."""
    every = sorted({overload for backend in view.surface.backends.values() for overload in backend.overloads})
    rows = [overload for overload in every if view.shows(overload)]
    heading = f"torch {view.surface.torch}: the rule of each op under autocast, as observed"
    if not rows:
        return text.line(f"{heading}: no op is of that kind on {_and(view.backends)}")
    return f"{_heading(heading)}\n\n{_table(view, rows, width)}"


def answer(view: View, asked: Asked, *, width: int = 100) -> str:
    """Return the rules of one op: a row and a plain sentence for each overload, and what PyTorch's page says of it."""
    listed = [name for name in asked.overloads if any(name in view.backend(on).overloads for on in view.backends)]
    shown = [overload for overload in listed if view.shows(overload)]
    parts = [_heading(f"{asked.spelling} in torch {view.surface.torch}")]
    parts += [_table(view, shown, width)] if shown else []
    words = [*_sentences(view, asked, listed), *_documented(view, asked)]
    return "\n\n".join([*parts, "\n".join(text.wrap(row, width, "", "  ") for row in words)])


def _heading(words: str) -> str:
    words = text.line(words)
    return f"{words}\n{'-' * len(words)}"


def _table(view: View, overloads: list[str], width: int) -> str:
    rows = [[overload, *(_cell(view, overload, name) for name in view.backends)] for overload in overloads]
    said = {cell.rstrip("*") for row in rows for cell in row[1:]} | {"*" for row in rows if "*" in "".join(row[1:])}
    lists = [name for name in view.backends if view.backend(name).documented]
    legend = [f"{word} = {meaning.format(listed=_and(lists))}" for word, meaning in _LEGEND.items() if word in said]
    legend.append(f"the amp dtype, where the region names none: {_amp_dtypes(view)}")
    body = tabulate(rows, headers=["op", *view.backends], disable_numparse=True)
    return text.clean(body) + "\n\n" + "\n".join(text.wrap(row, width, "", "  ") for row in legend)


def _cell(view: View, overload: str, name: str) -> str:
    backend = view.backend(name)
    if backend.key is None:
        return _NO_KEY
    policy = backend.overloads.get(overload)
    if policy is None:
        return _NOTHING
    return _CELLS[policy][0] + "*" * view.is_undocumented(overload, name)


def _amp_dtypes(view: View) -> str:
    alike: dict[str, list[str]] = {}
    for name in view.backends:
        if (amp_dtype := view.backend(name).amp_dtype) is not None:
            alike.setdefault(amp_dtype, []).append(name)
    return "; ".join(f"{amp_dtype} on {_and(names)}" for amp_dtype, names in alike.items()) or "none"


def _sentences(view: View, asked: Asked, listed: list[str]) -> Iterator[str]:
    if not asked.overloads:
        yield f"{asked.spelling}: Python code that calls other ops, each of which runs by its own rule: ask for those."
    variants = [overload for overload in asked.overloads if overload not in listed and overload.endswith("out")]
    alike: dict[str, list[str]] = {}
    for overload in asked.overloads:
        if overload not in variants:
            alike.setdefault(_says(view, asked, overload), []).append(overload)
    for words, overloads in alike.items():
        yield f"{', '.join(overloads)}: {words}."
    if variants:
        yield "With out=: unlisted, as is every op in place."
    for overload in listed:
        for name in view.backends:
            if (why := view.backend(name).undetermined.get(overload)) is not None:
                yield f"{overload} on {name} could not be observed: {why}"


def _says(view: View, asked: Asked, overload: str) -> str:
    where: dict[str, list[str]] = {}
    for name in view.backends:
        backend = view.backend(name)
        none = _INDIRECT if (overload, name) in asked.indirect else _NOTHING
        where.setdefault(_NO_KEY if backend.key is None else backend.overloads.get(overload, none), []).append(name)
    everywhere = "everywhere" if len(view.backends) == len(BACKENDS) else f"on {_and(view.backends)}"
    parts = [
        template.format(where=everywhere if len(where) == 1 else f"on {_and(where[what])}")
        for what, template in _SAYS.items()
        if what in where
    ]
    return "; ".join(parts)


def _documented(view: View, asked: Asked) -> Iterator[str]:
    """What PyTorch's page lists the op as, name by name."""
    ops = {_op(overload) for overload in asked.overloads}
    on: dict[tuple[str, str], list[str]] = {}
    for name in view.backends:
        for documented, policy in view.backend(name).documented.items():
            if documented == asked.spelling or not ops.isdisjoint(view.page_ops(documented)):
                on.setdefault((documented, policy), []).append(name)
    rows = [f"{documented} under {policy} for {_and(names)}" for (documented, policy), names in sorted(on.items())]
    if rows:
        yield f"On PyTorch's page: {'; '.join(rows)}."
    elif asked.overloads:
        yield "On PyTorch's page: not listed."


def _op(overload: str) -> str:
    return overload.split(".")[0]


def _and(names: Collection[str]) -> str:
    return ", ".join(names)
