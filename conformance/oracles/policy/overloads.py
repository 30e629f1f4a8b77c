"""Find the ATen overloads with an autocast kernel, their policies, and the observed behaviour of their calls."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ...data import fixture, in_force, read_toml
from ...measure.onednn import NO_PRIMITIVE
from ..trace.casts import Cast, arguments, expected_casts, traced_casts
from ..trace.ops import OpTrace
from . import declared
from .declared import followed
from .fake_mode import fake_mode
from .lists import backend_of, wider
from .overload_calls import CALLS, MORE, call
from .overload_options import option_calls
from .samples import Inputs

DISPATCH_KEYS = {
    "cuda": "AutocastCUDA",
    "cpu": "AutocastCPU",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
}
BACKENDS = tuple(DISPATCH_KEYS)
# The keys of device types that torch knows without a policy of their own; a third party's has that of PrivateUse1.
_OTHER_KEYS = {"hpu": "AutocastHPU", "xla": "AutocastXLA", "ipu": "AutocastIPU"}
POLICIES = ("lower_precision", "fp32", "fp32_set_dtype", "fp32_append_dtype", "widest", "banned")
_IN_FP32 = ("fp32", "fp32_set_dtype", "fp32_append_dtype")
# The kinds of calls that tell them apart: all float32, all in the amp dtype, that with a dtype asked for, and mixed;
# and for each policy those that no other policy answers alike.
KINDS = ("high", "low", "asked", "high first", "low first")
DECIDING = {
    "lower_precision": ("high",),
    "fp32": ("low", "asked"),
    "fp32_set_dtype": ("low", "asked"),
    "fp32_append_dtype": ("low",),
    "widest": ("low", "high first", "low first"),
    "banned": ("high",),
}
# The ops of one backend's libraries, which no other backend has, and one that takes memory for that of a CPU.
_OF_ONE_BACKEND = ("cudnn_", "_cudnn_", "miopen_", "mkldnn_", "_grid_sampler_2d_cpu_fallback")
# Ops whose kernels torch registers beside the macros of autocast_mode.h, with which other backends are made: they may
# have them (aten/src/ATen/autocast_mode.cpp of 2.14; neither XPU, MPS, MTIA nor MAIA has).
_BESIDE_THE_MACROS = frozenset({"linalg_matrix_sqrth"})
# Observations other than a policy: a kernel that does nothing, and one of unknown behaviour.
UNLISTED, UNKNOWN = "unlisted", "unknown"
# The overload with a dtype argument for one without (fp32_append_dtype in autocast_mode.h).
_WITH_DTYPE = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # at::Reduction
# Other values of the arguments of an overload that are no tensors, by type.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "bool": (False, True),
    "int": (1, 2),  # not 0: some kernels divide by it, such as by the groups of a convolution, and end the process
    "dim": (0, 1, -1),
    "float": (0.0, 0.5, 2.0),
    "number": (0, 1, 2, 0.5),
    "str": ("nearest", "nuc", "fro", "valid"),
}
_PLACES = 5  # as many as the longest list of tensors has
LACKING = re.compile(rf"{NO_PRIMITIVE}|not (compiled|built) with|LAPACK|MAGMA|CUDA driver version")


class Target(Protocol):
    """The device of a call and its autocast, real or fake."""

    @property
    def device_type(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_fake(self) -> bool: ...
    def __hash__(self) -> int: ...
    def computes_in(self, dtype: torch.dtype) -> bool: ...
    def autocast(self, dtype: torch.dtype, *, enabled: bool = True) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Seen:
    """The record of one call: its arguments, the casts, and its tensors or the exception."""

    call: partial[Any]
    casts: list[Cast]
    outputs: list[torch.Tensor]
    exception: Exception | None

    @property
    def error(self) -> str | None:
        """The first line of what was raised."""
        if self.exception is None:
            return None
        return f"{type(self.exception).__name__}: {(str(self.exception).splitlines() or [''])[0]}"

    @property
    def refused(self) -> bool:
        return self.error is not None and "autocast" in self.error

    @property
    def lacking(self) -> str | None:
        """What was raised because the machine lacks a library or an instruction: no promise of autocast."""
        return self.error if self.error is not None and LACKING.search(self.error) else None


@dataclass(frozen=True)
class Promise:
    """The promise of a policy for a call: argument casts, and the call with manual casts; None where it raises."""

    casts: list[Cast]
    manual: Seen | None


@dataclass(frozen=True)
class Observation:
    """The observed policy of an overload, with the observation where it fits none."""

    policy: str
    detail: str


def registered(backend: str) -> frozenset[str]:
    """Return the overloads ("mm", "sum.dim_IntList") with an autocast kernel of `backend`, as the dispatcher tells.

    A kernel that only falls through to the next key is none; a key that this torch does not know has none. Raises
    AttributeError where a torch no longer has the private functions that tell.
    """
    return frozenset(overload for overload in _listed(dispatch_key(backend)) if is_registered(overload, backend))


def dispatch_key(device_type: str) -> str:
    """Return the dispatch key of the autocast kernels of a device type."""
    return {**_OTHER_KEYS, **DISPATCH_KEYS}.get(device_type, "AutocastPrivateUse1")


def is_registered(overload: str, backend: str) -> bool:
    """Return whether the overload currently has an autocast kernel other than a fallthrough."""
    key, name = dispatch_key(backend), f"aten::{overload}"
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    return has and not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, key)


def _listed(key: str) -> list[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key
    try:
        return [name.removeprefix("aten::") for name in names(key) if name.startswith("aten::")]
    except RuntimeError as error:
        if "could not parse dispatch key" in str(error):
            return []
        raise


def known(backend: str, version: str | None = None) -> dict[str, str]:
    """Return overload -> policy, as is promised of torch `version` (the one at hand) for `backend`.

    From fixtures/autocast_overloads.toml. What belongs to a library that a build may lack is included. A device type
    has the policy of the backend that it declares, less the ops of that backend's libraries and those beside the macros
    that it does not register, or that of its surface.
    """
    found, own = _known(followed(backend), version or torch.__version__), followed(backend) == backend
    kept = found if own else {overload: policy for overload, policy in found.items() if _may_have(backend, overload)}
    return kept if (surface := declared.overloads(backend)) is None else _of_surface(surface, kept)


def _may_have(backend: str, overload: str) -> bool:
    """Return whether a backend that follows another has its rule for an overload."""
    if overload in _BESIDE_THE_MACROS:
        return is_registered(overload, backend)
    return not overload.startswith(_OF_ONE_BACKEND)


def _of_surface(surface: Mapping[str, str], listed: Mapping[str, str]) -> dict[str, str]:
    """Return the policies of a surface: of an overload that it could not observe that of the lists, of no library."""
    policies = {overload: listed.get(overload) if policy == UNKNOWN else policy for overload, policy in surface.items()}
    return {
        overload: policy
        for overload, policy in policies.items()
        if policy not in (None, UNLISTED) and not overload.startswith(_OF_ONE_BACKEND) and _exists(overload)
    }


def other_rules(surface: Mapping[str, str], backend: str) -> frozenset[str]:
    """Return the ops ("mm") of which an overload has another policy in a surface than `backend` has in this torch."""
    return _differing(surface, backend, lambda policy: policy)


def without_lists(backend: str) -> bool:
    """Return whether this is a backend of torch whose rules are in no list of the op reference."""
    return backend in BACKENDS and backend_of(backend) != backend


def own_rules(backend: str) -> tuple[dict[str, str], frozenset[str]]:
    """Return the policies by overload of a backend without lists, and the ops that compute in other types by them.

    A cast to fp32 and a dtype of fp32 are the same. What the lists that hold for it have beside them is UNLISTED.
    """
    lists = backend_of(backend)
    rules = {**dict.fromkeys(_known(lists, torch.__version__), UNLISTED), **_known(backend, torch.__version__)}
    return rules, _differing(rules, lists, lambda policy: "fp32" if policy in _IN_FP32 else policy)


def _differing(surface: Mapping[str, str], backend: str, meaning: Callable[[str], str]) -> frozenset[str]:
    """Return the ops whose overloads have other policies; one more of an op's only policy gives it no other rule."""
    found = _known(backend, torch.__version__)
    listed = {overload: policy for overload, policy in found.items() if not overload.startswith(_OF_ONE_BACKEND)}
    ours, theirs = (
        {one: meaning(rule) for one, rule in rules.items()} for rules in (_of_surface(surface, listed), listed)
    )
    of_op: dict[str, set[str]] = {}
    for one, policy in theirs.items():
        of_op.setdefault(one.split(".")[0], set()).add(policy)
    differ = {one for one in ours.keys() | theirs.keys() if ours.get(one) != theirs.get(one) and _exists(one)}
    further = {one for one in differ - theirs.keys() if of_op.get(one.split(".")[0]) == {ours[one]}}
    return frozenset(one.split(".")[0] for one in differ - further)


def ruled(device_type: str) -> frozenset[str]:
    """Return the ops ("mm") with an autocast rule on a device type, whose own ops autocast leaves alone."""
    return frozenset(overload.split(".")[0] for overload in known(device_type))


def undeclared(device_type: str) -> list[str]:
    """Return the overloads with an autocast kernel of a third party's device that its declaration does not speak of."""
    surface = declared.overloads(device_type) or {}
    named = {overload for overload, policy in surface.items() if policy != UNLISTED} | known(device_type).keys()
    return sorted(one for one in registered(device_type) - named if not one.startswith(_OF_ONE_BACKEND))


@functools.cache
def _exists(overload: str) -> bool:
    name, _, which = overload.partition(".")
    return hasattr(getattr(torch.ops.aten, name, None), which or "default")


@functools.cache
def _known(backend: str, version: str) -> dict[str, str]:
    return {
        overload: table["policy"]
        for table in _tables()["policy"]
        if backend in table["backends"] and in_force(version, _tables()["since"].get(backend))
        for overload in _overloads(table, backend, version)
    }


def mended(backend: str) -> dict[str, str]:
    """Return overload -> the first torch that has its kernel, of those that are promised of every torch."""
    name = followed(backend)
    rows = (row for table in _tables()["policy"] if name in table["backends"] for row in table.get("moved", []))
    return {row["overload"]: row["mended"] for row in rows if "mended" in row}


def moved(backend: str) -> set[tuple[str, str, str]]:
    """Return the overloads that autocast in some versions only: name, first version, version of the end ("": none)."""
    tables = (table for table in _tables()["policy"] if backend in table["backends"])
    rows = (row for table in tables for row in table.get("moved", []) if backend in row.get("backends", [backend]))
    return {(row["overload"], row.get("since", ""), row.get("until", "")) for row in rows}


def built(overload: str) -> bool:
    """Return whether this build of torch has the library of the overload; without it, it is not registered."""
    needs = {
        "cuda": torch.version.cuda is not None,
        "rocm": torch.version.hip is not None,
        "mkldnn": torch.backends.mkldnn.is_available(),
    }
    return all(needs[row["needs"]] for row in _tables()["built"] if overload in row["overloads"])


def uncallable(overload: str) -> str | None:
    """Return why an overload cannot be called here with sample inputs, or None."""
    return next((row["reason"] for row in _tables()["uncallable"] if overload in row["overloads"]), None)


def predicted(policy: str, call: partial[Any], amp_dtype: torch.dtype) -> list[Cast]:
    """Return the casts of arguments that `policy` promises of `call`, in the order of the arguments."""
    if policy == "lower_precision":
        return expected_casts(call, amp_dtype)
    if policy == "fp32":
        return expected_casts(call, torch.float32)
    if policy == "widest":
        return expected_casts(call, _widest(call, amp_dtype))
    return []


def manually_cast(policy: str, overload: str, call: partial[Any], amp_dtype: torch.dtype) -> partial[Any]:
    """Return the equivalent call outside autocast under `policy`: with manual casts, or with dtype=float32."""
    if policy == "fp32_set_dtype":
        asks = _is_eligible(call.args[0]) and call.keywords.get("dtype") is None
        return partial(call, dtype=torch.float32) if asks else call
    if policy == "fp32_append_dtype":
        dtype = torch.float32 if _is_eligible(call.args[0]) else call.args[0].dtype
        packet = getattr(torch.ops.aten, overload.split(".")[0])
        return partial(getattr(packet, _WITH_DTYPE[overload]), *call.args, dtype=dtype)
    return _cast(call, {cast.argument: cast.target for cast in predicted(policy, call, amp_dtype)})


def promise(target: Target, policy: str, overload: str, call: partial[Any], amp_dtype: torch.dtype) -> Promise:
    """Return what `policy` promises of a call: the casts of `predicted`, then the call of `manually_cast`."""
    if policy == "banned":
        return Promise([], None)
    with mode_of(target):
        cast = manually_cast(policy, overload, call, amp_dtype)
    return Promise(predicted(policy, call, amp_dtype), run(target, cast, None))


def needless(target: Target, seen: Seen) -> str | None:
    """Return what a call raised that works in float32 outside any region; None where it works, or cannot.

    Manual casts that raise alike excuse nothing: a region must not refuse what works without it. Not meant are what
    autocast refuses by its policy, and what the device or fake tensors have no kernel for.
    """
    if seen.error is None or seen.refused or seen.lacking is not None or missing(seen) is not None:
        return None
    with mode_of(target):
        wide = _mapped(seen.call, lambda _, tensor: tensor.float() if _is_eligible(tensor) else tensor)
    return seen.error if run(target, wide, None).error is None else None


def difference(promised: Promise, seen: Seen) -> str | None:
    """Return how a call differs from its promise: in casts, error, or dtype, shape and strides of an output."""
    if promised.manual is None:
        return None if seen.refused else f"promised: autocast refuses it; seen: {describe(seen)}"
    if seen.error != promised.manual.error:
        return f"manual casts: {promised.manual.error or 'no error'}; in the region: {seen.error or 'no error'}"
    cast = {one.argument for one in promised.casts}
    # Where autocast cast the caller's argument first, the op's own casts are of another tensor.
    inside = [replace(one, argument=None) if one.argument in cast else one for one in promised.manual.casts]
    wanted = [*promised.casts, *inside]
    if _counted(seen.casts) != _counted(wanted):
        return f"promised: {_casts(wanted)}; seen: {_casts(seen.casts)}"
    ours, theirs = ([_form(leaf) for leaf in one.outputs] for one in (seen, promised.manual))
    return None if ours == theirs else f"promised: outputs {'; '.join(theirs)}; seen: {'; '.join(ours)}"


def _form(leaf: torch.Tensor) -> str:
    strides = tuple(leaf.stride()) if leaf.layout is torch.strided else leaf.layout
    return f"{type_names([leaf.dtype])} of {tuple(leaf.shape)} with strides {strides}"


def mode_of(target: Target) -> contextlib.AbstractContextManager[Any]:
    """Return the mode in which tensors of a fake target are made and used; null for a real one."""
    return fake_mode() if target.is_fake else contextlib.nullcontext()


def sample(target: Target, overload: str, dtypes: Sequence[torch.dtype], seed: int = 0) -> partial[Any]:
    """Return a call of the overload on `target`; `dtypes` are given to its floating inputs in turn, the last to all
    that follow."""
    with mode_of(target):
        return call(overload, Inputs(tuple(dtypes), target.device, seed, target.is_fake))


def run(target: Target, call: partial[Any], amp_dtype: torch.dtype | None, *, traced: bool = True) -> Seen:
    """Run `call` in a region of `amp_dtype`, or outside any where that is None, and record what it did.

    What torch raises is recorded, not raised: a fake tensor shows its casts also where no kernel can follow. While its
    casts are traced, what runs below autocast reads it as off; `traced=False` shows what such code does otherwise.
    """
    trace = OpTrace()
    try:
        with (
            mode_of(target),
            quiet(),
            target.autocast(amp_dtype or torch.float16, enabled=amp_dtype is not None),
            trace if traced else contextlib.nullcontext(),
        ):
            result = call()
    except (RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError) as error:
        return Seen(call, traced_casts(trace, call), [], error)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return Seen(call, traced_casts(trace, call), outputs[: _judged(call)], None)


def _judged(call: partial[Any]) -> int | None:
    """Return the number of meaningful outputs; those that follow are scratch memory."""
    name = str(call.func).removeprefix("aten.").removesuffix(".default")
    outputs: int | None = _tables()["outputs"].get(name)
    return outputs


def missing(seen: Seen) -> str | None:
    """Return the missing support of fake tensors for a call; None where it finished, or failed otherwise."""
    if seen.error is None:
        return None
    return next((row["reason"] for row in _tables()["uncomputed"] if re.search(row["error"], seen.error)), None)


def calls(
    target: Target, overload: str, amp_dtype: torch.dtype, kinds: Sequence[str] = KINDS, seed: int = 0
) -> dict[str, partial[Any]]:
    """Return calls that distinguish policies, by the dtypes of their arguments: the possible ones of `kinds`."""
    high, low = (torch.float32,), (amp_dtype,)
    types = {"high": high, "low": low, "asked": low, "high first": high + low, "low first": low + high}
    made = {}
    for kind in kinds:
        call = sample(target, overload, types[kind], seed)
        if kind != "asked":
            made[type_names(types[kind])] = call
        elif takes_dtype(call) and target.computes_in(torch.float64):
            made[f"{type_names(low)} with dtype=float64"] = partial(call, dtype=torch.float64)
    return made


def optional_arguments(overload: str) -> list[str]:
    """Return the names of the optional tensors of an overload, and its reduction, if it has such."""
    arguments = _own(overload)._schema.arguments
    return [one.name for one in arguments if str(one.type) == "Optional[Tensor]" or one.name == "reduction"]


def optionals(overload: str, call: partial[Any]) -> dict[str, partial[Any]]:
    """Return the call without its optional tensors, and with each reduction that it may take, where it has such."""
    names = optional_arguments(overload)
    absent = [name for name in names if name != "reduction"]
    made = {"without optional tensors": _set(call, dict.fromkeys(absent))} if absent else {}
    reductions = _REDUCTIONS.items() if "reduction" in names else ()
    return made | {f"with reduction {name}": _set(call, {"reduction": value}) for name, value in reductions}


def options(call: partial[Any]) -> dict[str, partial[Any]]:
    """Return the call with each argument that is no tensor set to other values of its type, one at a time.

    Not all of these calls are valid; an invalid one raises the same in a region and with manual casts.
    """
    return {
        f"with {argument.name}={value!r}": _set(call, {argument.name: value})
        for argument in _arguments(call)
        if argument.name != "dtype"
        for value in _OTHERS.get(_kind(argument), ())
    }


def _kind(argument: Any) -> str:
    kind = re.sub(r"^Optional\[(\w+)\]$", r"\1", str(argument.type))
    return "dim" if kind == "int" and argument.name == "dim" else kind


def more_calls(target: Target, overload: str, dtypes: Sequence[torch.dtype]) -> list[partial[Any]]:
    """Return calls of the overload that differ from its sample in the number or shape of their tensors."""
    with mode_of(target):
        given = [make(Inputs(tuple(dtypes), target.device, 0, target.is_fake)) for make in MORE[overload]]
    return [partial(_own(overload), *args, **keywords) for args, keywords in given]


def one_wide(amp_dtype: torch.dtype) -> tuple[tuple[torch.dtype, ...], ...]:
    """Return the dtypes of tensors of which one, each of the first five in turn, is float32 and the others are not."""
    return tuple(
        tuple(torch.float32 if number == place else amp_dtype for number in range(_PLACES)) for place in range(_PLACES)
    )


def calls_with_options(target: Target, overload: str, dtypes: Sequence[torch.dtype]) -> list[partial[Any]]:
    """Return calls of the overload whose options are not the defaults, several at once."""
    with mode_of(target):
        return option_calls(overload, lambda: Inputs(tuple(dtypes), target.device, 0, target.is_fake))


def _arguments(call: partial[Any]) -> list[Any]:
    overload: Any = call.func
    return list(overload._schema.arguments)


def _set(call: partial[Any], values: dict[str, Any]) -> partial[Any]:
    """Put values in the place of arguments, given by place or by name; what is left to its default stays so."""
    places = {argument.name: place for place, argument in enumerate(_arguments(call)) if not argument.kwarg_only}
    args, keywords = list(call.args), dict(call.keywords)
    for name, value in values.items():
        if name in places and places[name] < len(args):
            args[places[name]] = value
        elif name in keywords or value is not None:
            keywords[name] = value
    return partial(call.func, *args, **keywords)


def variants(overload: str) -> list[torch._ops.OpOverload]:
    """Return the overloads that do the same in place (`exp_`), or into tensors that the caller gives (`exp.out`)."""
    own = _own(overload)
    packets = (own.overloadpacket, getattr(torch.ops.aten, f"{overload.split('.')[0]}_", None))
    every = [getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads()]
    return [each for each in every if (_outs(each) or _in_place(each)) and _inputs(each) == _inputs(own)]


def variant_call(target: Target, call: partial[Any], variant: torch._ops.OpOverload) -> partial[Any] | None:
    """Return the call of a variant with the arguments of `call`; None where torch cannot even make that call outside.

    What it writes to is made anew: the first argument is copied, an `out` is a tensor like the plain result.
    """
    outs = _outs(variant)
    if not outs:
        written, *rest = call.args
        with mode_of(target):
            return partial(variant, written.clone(), *rest, **call.keywords)
    plain = run(target, call, None)
    if len(plain.outputs) != len(outs):
        return None
    empty = torch.empty_like if target.is_fake else torch.zeros_like
    with mode_of(target):
        made = {name: empty(leaf) for name, leaf in zip(outs, plain.outputs, strict=True)}
    return partial(variant, *call.args, **call.keywords, **made)


def _own(overload: str) -> torch._ops.OpOverload:
    name, _, which = overload.partition(".")
    own: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, name), which or "default")
    return own


def _in_place(overload: torch._ops.OpOverload) -> bool:
    first = overload._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


def _outs(overload: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments if argument.is_out]


def _inputs(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]


def takes_dtype(call: partial[Any]) -> bool:
    """Return whether the overload accepts a dtype for its result."""
    return any(argument.name == "dtype" for argument in _arguments(call))


def observe(target: Target, overload: str, amp_dtype: torch.dtype) -> Observation:
    """Find the policy that the overload has on `target` by calling it with float32, with the amp dtype, and mixed.

    The policy is one of POLICIES, UNLISTED, or UNKNOWN with what was seen.
    """
    if overload not in CALLS:
        return Observation(UNKNOWN, uncallable(overload) or "no call of it is known to the suite")
    seen = {what: run(target, made, amp_dtype) for what, made in calls(target, overload, amp_dtype).items()}
    for policy in (*POLICIES, UNLISTED):
        if _applies(policy, overload, next(iter(seen.values())).call) and all(
            difference(promise(target, policy, overload, one.call, amp_dtype), one) is None for one in seen.values()
        ):
            return Observation(policy, "")
    return Observation(UNKNOWN, "; ".join(f"{what}: {describe(one)}" for what, one in seen.items()))


def follows(target: Target, overload: str, amp_dtype: torch.dtype, policy: str) -> bool:
    """Return whether the calls that tell `policy` from all others come out as it promises.

    It takes a quarter of the time of `observe`, which makes all calls.
    """
    if overload not in CALLS:
        return False
    made = calls(target, overload, amp_dtype, DECIDING[policy]).values()
    return all(
        difference(promise(target, policy, overload, one, amp_dtype), run(target, one, amp_dtype)) is None
        for one in made
    )


def _applies(policy: str, overload: str, call: partial[Any]) -> bool:
    """Return whether an overload can have the policy: accept a dtype, or have two dtypes to promote."""
    if policy == "fp32_set_dtype":
        return takes_dtype(call)
    if policy == "widest":
        return sum(tensor.is_floating_point() for _, tensor in arguments(call)) > 1
    return policy != "fp32_append_dtype" or overload in _WITH_DTYPE


def describe(seen: Seen) -> str:
    """Return one line with the casts and the outputs."""
    return f"{_casts(seen.casts)}, {seen.error or 'result ' + type_names(leaf.dtype for leaf in seen.outputs)}"


def _counted(casts: Sequence[Cast]) -> Counter[str]:
    return Counter(map(str, casts))


def schema(overload: str) -> str:
    """Return the overload's signature, as torch writes it."""
    name, _, which = overload.partition(".")
    return str(torch._C._get_schema(f"aten::{name}", which))


def on_arguments(seen: Seen) -> list[str]:
    """Return the casts of the caller's arguments as text."""
    return sorted(str(cast) for cast in seen.casts if cast.argument is not None)


def changed(target: Target, call: partial[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> partial[Any]:
    """Return the call with `change` applied to each of its floating-point arguments."""

    def form(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if not target.is_fake:
            return change(tensor)
        # Not every backend can change a fake tensor; shape and strides are computed without one.
        like = change(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        with mode_of(target):
            return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)

    return _mapped(call, form)


def with_leaves(call: partial[Any]) -> tuple[partial[Any], list[torch.Tensor]]:
    """Return the call with floating-point arguments that require a gradient, and these."""
    leaves: list[torch.Tensor] = []

    def leaf(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1]

    return _mapped(call, leaf), leaves


def gradients(seen: Seen, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of a weighted sum of the outputs; None where a leaf has none, or the op no derivative."""
    outputs = [leaf for leaf in seen.outputs if leaf.requires_grad and leaf.grad_fn is not None]
    if not outputs:
        return [None] * len(leaves)
    # The weights differ by element, and are exact in 16 bits.
    weights = [
        (torch.arange(leaf.numel(), device=leaf.device) % 7 - 3).reshape(leaf.shape).to(leaf) for leaf in outputs
    ]
    try:
        return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))
    except (RuntimeError, NotImplementedError):
        return [None] * len(leaves)


def _casts(casts: Sequence[Cast]) -> str:
    return ", ".join(sorted(map(str, casts))) or "no cast"


def _widest(call: partial[Any], amp_dtype: torch.dtype) -> torch.dtype:
    eligible = (tensor.dtype for _, tensor in arguments(call) if _is_eligible(tensor))
    return functools.reduce(wider, eligible, amp_dtype)


def _is_eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(call: partial[Any], casts: dict[str | None, torch.dtype]) -> partial[Any]:
    return _mapped(call, lambda path, tensor: tensor.to(casts[path]) if path in casts else tensor)


def _mapped(call: partial[Any], change: Callable[[str, torch.Tensor], torch.Tensor]) -> partial[Any]:
    """Return the call with `change(path, tensor)` in the place of each tensor that it passes."""

    def walk(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(path, value)
        if isinstance(value, (list, tuple)):
            return type(value)(walk(f"{path}[{index}]", item) for index, item in enumerate(value))
        return value

    args = [walk(str(index), value) for index, value in enumerate(call.args)]
    return partial(call.func, *args, **{key: walk(key, value) for key, value in call.keywords.items()})


def type_names(dtypes: Iterable[torch.dtype]) -> str:
    """Return the names of the types without their prefix: "float32, float16"."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@functools.cache
def _tables() -> dict[str, Any]:
    return read_toml(fixture("autocast_overloads.toml"))


def _overloads(table: dict[str, Any], backend: str, version: str) -> list[str]:
    moved = (row for row in table.get("moved", []) if backend in row.get("backends", table["backends"]))
    return [
        *table["overloads"],
        *(row["overload"] for row in moved if in_force(version, row.get("since"), row.get("until"))),
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging what a fake kernel raises: it is recorded here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
