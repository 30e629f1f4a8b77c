"""Why cases were not judged, each cause once: wordings that differ in an op, a type or a number are one cause."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import text
from .values import Case

_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Warning): ")
_NEXT_SENTENCE = re.compile(r"\. (?=[A-Z]).*")
_PARENTHESIS = re.compile(r" \([^()]*\)")
_DTYPE = re.compile(r"(?:torch\.)?(?:b?float\d+\w*|fp\d+|bf16|half|double)")
_NUMBER = re.compile(r"[-+\d.,x]*\d[-+\d.,x]*")
_NAME = re.compile(r"\w+(?:[._]\w+)+")
_VARYING = (_DTYPE, _NUMBER, _NAME)
_PUNCTUATION = ",.;:'\""
_SHOWN = 6


@dataclass(frozen=True)
class Reason:
    """A cause, the cases that it stopped, and in what else of its wordings these differ: `ctc_loss cuda`."""

    words: str
    likewise: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def contracts(self) -> list[str]:
        """The ids of the contracts whose cases it stopped, each once."""
        return list(dict.fromkeys(case.contract for case in self.cases))

    @property
    def line(self) -> str:
        """The cause in one line, with what it applies to besides."""
        return f"{self.words}; likewise {text.some(list(self.likewise), _SHOWN)}" if self.likewise else self.words


def grouped(cases: Iterable[Case]) -> list[Reason]:
    """Return the causes in the reasons of `cases`, in the order in which they first appear."""
    groups: dict[str, dict[str, tuple[str, list[Case]]]] = {}
    for case in cases:
        words = text.line(case.reason)
        core = _NEXT_SENTENCE.sub("", _EXCEPTION.sub("", words))
        template, varying = _template(core, case)
        groups.setdefault(template, {}).setdefault(words, (varying, []))[1].append(case)
    return [_reason(template, members) for template, members in _merged(groups).items()]


_Groups = dict[str, dict[str, tuple[str, list[Case]]]]


def _merged(groups: _Groups) -> _Groups:
    """Join a cause that some other wording ends with, after a colon, to that wording."""
    found: _Groups = {}
    for template, members in groups.items():
        clauses = template.split(": ")
        tails = (": ".join(clauses[start:]) for start in range(len(clauses) - 1, 0, -1))
        cause = next((tail for tail in tails if tail in groups), template)
        for words, (varying, cases) in members.items():
            found.setdefault(cause, {}).setdefault(words, (varying, []))[1].extend(cases)
    return found


def _reason(template: str, members: dict[str, tuple[str, list[Case]]]) -> Reason:
    every = tuple(case for _, cases in members.values() for case in cases)
    if len(members) == 1:
        return Reason(next(iter(members)) or "no reason is given", (), every)
    cores = {words: _NEXT_SENTENCE.sub("", _EXCEPTION.sub("", words)) for words in members}
    shown = min(cores, key=lambda words: len(cores[words].split(": ")))
    first = members[shown][0]
    same = [
        varying.split()
        for words, (varying, cases) in members.items()
        if varying != first and _template(cores[words], cases[0])[0] == template
    ]
    fixed = set(first.split()).intersection(*same)
    others = dict.fromkeys(" ".join(word for word in words if word not in fixed) for words in same)
    return Reason(cores[shown], tuple(filter(None, others)), every)


def _template(words: str, case: Case) -> tuple[str, str]:
    """Return `words` without what is of the case, and what that is."""
    own = {_plain(value) for value in case.parameters.values()} | {_plain(part) for part in case.target.split(":")}
    kept, varying = [], []
    for word in _PARENTHESIS.sub("", words).split():
        bare = word.strip(_PUNCTUATION)
        if bare and (_plain(bare) in own or any(kind.fullmatch(bare) for kind in _VARYING)):
            varying.append(bare)
            word = word.replace(bare, "*")
        kept.append(word)
    return " ".join(kept), " ".join(varying)


def _plain(word: str) -> str:
    return re.sub(r"\W", "_", word)
