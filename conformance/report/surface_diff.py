"""Two autocast surfaces compared, in words that an engineer who upgrades torch acts on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from . import text
from .surface import BACKENDS, Backend, Surface

_MARGIN = "  "
# What an op does under a policy, and the type that it then runs in. Source: aten/src/ATen/autocast_mode.h, CastPolicy.
_DOES = {
    "lower_precision": "autocasts to the amp dtype",
    "fp32": "autocasts to float32",
    "fp32_set_dtype": "computes in float32 unless the call names a dtype",
    "fp32_append_dtype": "computes in float32, which autocast names as its dtype",
    "widest": "promotes its inputs to the widest type among them",
    "banned": "raises an error",
    "unlisted": "has a kernel that changes nothing: the type of the inputs stays",
    "unknown": "has a rule that the suite could not observe",
}
_PLURAL = {"has": "have"}
_RUNS = {
    "lower_precision": "in the amp dtype",
    "fp32": "in float32",
    "fp32_set_dtype": "in float32, or the dtype that the call names",
    "fp32_append_dtype": "in float32",
    "widest": "in the widest type among its inputs",
    "banned": "not at all: it raises",
    "unlisted": "in the type of its inputs",
    "unknown": "in a type that could not be observed",
}
_OPS_SPOKEN = 8
_TOOLKITS = ("cuda", "hip", "xpu")
_WITHOUT = "in the type of its inputs, or as the ops that it is made of"


class Kind(Enum):
    """How two surfaces differ; members stand in the order in which they are shown."""

    KEY = "Dispatch keys"
    AMP_DTYPE = "Default amp dtype"
    ADDED = "Added: a rule where there was none"
    REMOVED = "Removed: no rule any more"
    MOVED = "Moved: another rule than before"
    PAGE = "PyTorch's page: what it lists"


_EXPLAINED = {
    Kind.ADDED: f"Before, such an op ran {_WITHOUT}.",
    Kind.REMOVED: f"Such an op now runs {_WITHOUT}; or this torch no longer has it.",
}


@dataclass(frozen=True)
class Change:
    """One difference on one backend; `name` is an overload or, for PAGE, a documented name; None is absent."""

    backend: str
    kind: Kind
    name: str
    old: str | None
    new: str | None


def changes(old: Surface, new: Surface) -> list[Change]:
    """Return every difference between two surfaces but those of version and build, backend by backend."""
    there, here = old.backends, new.backends
    return [change for name in BACKENDS for change in of_backend(name, there[name], here[name])]  # type: ignore[index]


def of_backend(name: str, there: Backend, here: Backend) -> Iterator[Change]:
    """Yield every difference between the rules of one backend in two versions of torch."""
    if there.key != here.key:
        yield Change(name, Kind.KEY, "", there.key, here.key)
    if there.amp_dtype != here.amp_dtype and there.key and here.key:
        yield Change(name, Kind.AMP_DTYPE, "", there.amp_dtype, here.amp_dtype)
    for op in sorted({*there.overloads, *here.overloads}):
        before, after = there.overloads.get(op), here.overloads.get(op)
        if before != after:
            kind = Kind.ADDED if before is None else Kind.REMOVED if after is None else Kind.MOVED
            yield Change(name, kind, op, before, after)
    for op in sorted({*there.documented, *here.documented}):
        before, after = there.documented.get(op), here.documented.get(op)
        if before != after:
            yield Change(name, Kind.PAGE, op, before, after)


def render(old: Surface, new: Surface, *, names: tuple[str, str], width: int = 100) -> str:
    """Return the comparison in lines of at most `width`; `names` are what the reader calls the two files."""
    found = changes(old, new)
    sections = ["\n".join(_title(*pair) for pair in (("old", names[0], old), ("new", names[1], new)))]
    sections += [_caveat(old, new, width)]
    sections += [_section(kind, found, width) for kind in Kind]
    return "\n\n".join(section for section in [*sections, text.wrap(conclusion(found), width)] if section)


@dataclass(frozen=True)
class Sentence:
    """What happened alike to the rules of `ops` (none: of the key itself) on some backends."""

    kind: Kind
    backends: tuple[str, ...]
    ops: tuple[str, ...]
    words: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (", ".join(self.backends), ", ".join(self.ops), self.words)))

    @property
    def spoken(self) -> str:
        """The same with the ops first: `rms_norm now autocasts to float32 on cuda, xpu`."""
        where, ops = ", ".join(self.backends), text.some(list(self.ops), _OPS_SPOKEN)
        if self.ops and self.kind in (Kind.ADDED, Kind.REMOVED):
            words, semicolon, rest = self.words.partition("; ")
            verb = f"{'has' if len(self.ops) == 1 else 'have'} " * words.startswith("no rule")
            return f"{ops} {verb}{words} on {where}{semicolon}{rest}"
        return f"{f'{ops} on {where}' if self.ops else where}: {self.words}"


def sentences(found: Iterable[Change]) -> Iterator[tuple[Kind, str]]:
    """Say each change once: what happened alike on several backends, or to several ops, in one sentence."""
    return ((one.kind, str(one)) for one in said(found))


def said(found: Iterable[Change]) -> Iterator[Sentence]:
    """Yield what `sentences` says, in parts."""
    found = list(found)
    turned = {change.backend: change for change in found if change.kind is Kind.KEY}
    yield from _keys(list(turned.values()), found)
    backends: dict[tuple[Kind, str, str | None, str | None], list[str]] = {}
    for change in found:
        if change.kind is not Kind.KEY and not _counted(change, turned.get(change.backend)):
            backends.setdefault((change.kind, change.name, change.old, change.new), []).append(change.backend)
    ops: dict[tuple[Kind, str | None, str | None, tuple[str, ...]], list[str]] = {}
    for (kind, name, before, after), names in backends.items():
        ops.setdefault((kind, before, after, tuple(names)), []).append(name)
    for kind in Kind:
        for (of, before, after, where), alike in ops.items():
            if of is kind:
                yield Sentence(kind, where, tuple(sorted(filter(None, alike))), _says(kind, before, after, len(alike)))


def _counted(change: Change, key: Change | None) -> bool:
    """Whether a rule came or went with its whole key, whose sentence counts it."""
    return key is not None and None in (key.old, key.new) and change.kind in (Kind.ADDED, Kind.REMOVED)


def _keys(turned: list[Change], found: list[Change]) -> Iterator[Sentence]:
    """Keys gained or lost, with the number of rules that came or went with each."""
    alike: dict[str, list[Change]] = {}
    for change in turned:
        if change.old is not None and change.new is not None:
            words = f"the dispatch key is {change.new}, before {change.old}"
        else:
            of = [other for other in found if other.backend == change.backend and _counted(other, change)]
            tally = Counter(other.new or other.old for other in of)
            counts = ", ".join(f"{number} {policy}" for policy, number in sorted(tally.items(), key=str))
            came = f"with {text.count(len(of), 'overload')} ({counts})" if of else "without any overload"
            words = f"the dispatch key is {'new' if change.old is None else 'gone'}, {came}"
        alike.setdefault(words, []).append(change)
    for words, together in alike.items():
        yield Sentence(Kind.KEY, tuple(change.backend for change in together), (), words)


def _says(kind: Kind, old: str | None, new: str | None, number: int) -> str:
    if kind is Kind.AMP_DTYPE:
        return f"torch.autocast without a dtype means {new or 'none'}, before {old or 'none'}"
    if kind is Kind.PAGE:
        return f"{_listed(new)} now, {_listed(old)} before"
    if old is None:
        return f"now {_does(str(new), number)}"
    if new is None:
        if old == "unknown":
            return "no rule any more; the suite could not observe what it was"
        return f"no longer {_does(old, number)}"
    if _RUNS[old] == _RUNS[new]:
        return f"{old} -> {new}: {_RUNS[new]} as before, and so is the result; only the way to it differs"
    return f"{old} -> {new}: now {_RUNS[new]}, before {_RUNS[old]}; the type of the result follows"


def _does(policy: str, number: int) -> str:
    """What one op does, or several do."""
    verb, _, rest = _DOES[policy].partition(" ")
    return f"{verb if number == 1 else _PLURAL.get(verb, verb[:-1])} {rest}"


def _listed(policy: str | None) -> str:
    return "not listed" if policy is None else f"listed under {policy}"


def conclusion(found: list[Change]) -> str:
    """Return the last line: nothing changed, or how much of what."""
    if not found:
        return "NOTHING CHANGED: the same keys, amp dtypes, rules and documented names."
    counts = Counter(change.kind for change in found)
    nouns = {
        Kind.KEY: ("dispatch key", "changed"),
        Kind.AMP_DTYPE: ("default amp dtype", "changed"),
        Kind.ADDED: ("rule", "added"),
        Kind.REMOVED: ("rule", "removed"),
        Kind.MOVED: ("rule", "moved"),
        Kind.PAGE: ("documented name", "changed"),
    }
    parts = (f"{text.count(counts[kind], noun)} {verb}" for kind, (noun, verb) in nouns.items() if counts[kind])
    return f"CHANGED: {', '.join(parts)} (each backend counts)."


def caveats(old: Surface, new: Surface) -> list[str]:
    """Return how two builds differ in what decides which kernels they carry, such as `cuda: without -> with`.

    Which version of a toolkit it is decides nothing.
    """
    there, here = _parts(old), _parts(new)
    words = {False: "without", True: "with"}
    return [f"{name}: {words[there[name]]} -> {words[here[name]]}" for name in there if there[name] != here[name]]


def _parts(surface: Surface) -> dict[str, bool]:
    build = surface.build
    return {**{name: getattr(build, name) is not None for name in _TOOLKITS}, "mkldnn": build.mkldnn}


def _caveat(old: Surface, new: Surface, width: int) -> str:
    found = caveats(old, new)
    if not found:
        return ""
    words = "a build registers only the kernels that it carries, so a change below may come from the build."
    return text.wrap(f"the builds differ ({'; '.join(found)}): {words}", width, "Caveat: ")


def _title(word: str, name: str, surface: Surface) -> str:
    build = vars(surface.build)
    toolkits = [f"{toolkit} {build[toolkit]}" for toolkit in _TOOLKITS if build[toolkit] is not None]
    git = surface.build.git[:8]
    return text.line(f"{word}: {name}, torch {surface.torch} ({', '.join(toolkits) or 'CPU'} build, git {git})")


def _section(kind: Kind, found: list[Change], width: int) -> str:
    said = [words for of, words in sentences(found) if of is kind]
    if not said:
        return ""
    rows = [kind.value, "-" * len(kind.value)]
    rows += [text.wrap(_EXPLAINED[kind], width)] if kind in _EXPLAINED else []
    return "\n".join([*rows, *(text.wrap(words, width, _MARGIN, _MARGIN * 3) for words in said)])
