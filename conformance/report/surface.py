"""The autocast surface: what one torch registers, documents and does under each dispatch key, as a small JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..invocation import COMMAND
from .document import NewerSchema, ReportError, WrongKind, WrongTypes, decoded, load

KIND = "autocast-surface"
SCHEMA = 1
MAX_BYTES = 4 * 2**20

BackendName = Literal["cuda", "cpu", "xpu", "mps", "mtia", "maia"]
Policy = Literal[
    "lower_precision", "fp32", "fp32_set_dtype", "fp32_append_dtype", "widest", "banned", "unlisted", "unknown"
]
DocumentedPolicy = Literal["lower_precision", "fp32", "widest", "banned"]
BACKENDS: tuple[str, ...] = get_args(BackendName)
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class Build:
    """What decides which kernels a build of torch carries; a toolkit that it was built without is None."""

    cuda: str | None
    hip: str | None
    xpu: str | None
    mkldnn: bool
    git: str


@dataclass(frozen=True)
class Backend:
    """One dispatch key: `overloads` is what is registered, with the policy that each was seen to follow.

    `documented` is what PyTorch's page lists, empty where it has no list. `undetermined` says of each overload of the
    policy unknown why it is. `key` is None in a torch that does not know the key; then nothing is registered and there
    is no amp dtype.
    """

    key: str | None
    amp_dtype: Literal["float16", "bfloat16", "float32"] | None
    overloads: Mapping[str, Policy]
    documented: Mapping[str, DocumentedPolicy]
    undetermined: Mapping[str, str]


@dataclass(frozen=True)
class Surface:
    """A surface file; `torch` is the version with its local part, such as 2.13.0+cpu."""

    kind: str
    schema: int
    torch: str
    build: Build
    backends: Mapping[BackendName, Backend]


def read(path: str | Path) -> Surface:
    """Read the surface file at `path`; raises ReportError with one line that names the file."""
    try:
        return parse(load(Path(path), "a surface", MAX_BYTES))
    except ReportError as error:
        raise type(error)(f"{path}: {error}") from None


def parse(document: Any) -> Surface:
    """Return the surface in `document` (of json.loads); raises WrongKind, NewerSchema, UnknownKeys and WrongTypes."""
    _check_kind(document)
    surface: Surface = decoded(Surface, document)
    if missing := [backend for backend in BACKENDS if backend not in surface.backends]:
        raise WrongTypes(f"backends: the key {missing[0]!r} is missing")
    for name, backend in surface.backends.items():
        if (problem := _contradiction(backend)) is not None:
            raise WrongTypes(f"backends.{name}: {problem}")
    return surface


def _contradiction(backend: Backend) -> str | None:
    if backend.key is None and (backend.overloads or backend.amp_dtype is not None):
        return "overloads or an amp dtype without a dispatch key"
    if backend.key is not None and backend.amp_dtype is None:
        return "a dispatch key without an amp dtype"
    if "" in backend.overloads or "" in backend.documented:
        return "an op without a name"
    unknown = {overload for overload, policy in backend.overloads.items() if policy == "unknown"}
    if strange := sorted(unknown ^ set(backend.undetermined)):
        return f"{strange[0]!r} is in only one of undetermined and the overloads of the policy unknown"
    return None


def render(surface: Surface) -> str:
    """Return the one spelling of a surface: keys sorted, a line for each op, so that two files differ as torches do."""
    return json.dumps(dataclasses.asdict(surface), indent=1, sort_keys=True) + "\n"


def _check_kind(document: Any) -> None:
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise WrongKind(f"not a surface: {_seen(document)}; {COMMAND} surface -o FILE writes one")
    schema = document.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise WrongTypes("schema: must be a whole number from 1 on")
    if schema > SCHEMA:
        written = str(schema)[:9]
        raise NewerSchema(f"written by a newer suite (schema {written}); this one reads schema {SCHEMA}: update it")


def _seen(document: Any) -> str:
    """Return what the file seems to be instead."""
    if not isinstance(document, dict):
        return "a list, not an object" if isinstance(document, list) else "no JSON object"
    if str(document.get("schema", "")).startswith("amp-conformance-report/"):
        return f"this is a report, which {COMMAND} diff compares"
    return f'its "kind" is not {KIND!r}'
