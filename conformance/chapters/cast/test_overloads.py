"""Check every autocast kernel of every backend against the policy that it is registered with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...harness.check import Case, contract, deep, per_target
from ...harness.targets import FAKE_DEVICE_TYPES, Target
from ...measure.precision import repeatable_convolutions
from ...oracles.numbers.error_bounds import normwise_distance
from ...oracles.policy import declared, overloads
from ...oracles.policy.lists import BACKENDS, listings, repeatable, resolved
from ...oracles.policy.overload_calls import CALLS, MORE
from ...oracles.policy.samples import Inputs, spell
from ...oracles.relations.programs import operator_database
from ...oracles.trace.casts import arguments
from ...oracles.trace.fake_kernels import call_op
from ...oracles.trace.ops import CAST
from . import opinfo_sweep
from .support import channels_last, check_same

pytestmark = pytest.mark.by_rules

ANY = ("cpu", "accelerator", "fake")


def _callable(
    policy: str | None, *quick: str, without: str = "", real: str = "standard"
) -> Callable[[Target], Iterator[Any]]:
    """Return a function that lists the overloads of a policy (None: of any but `without`) on a target.

    With `quick`, the other overloads start at the level `real` on real targets, at standard on fake CUDA, and at full
    on the fake targets that are near copies of CUDA, which are omitted at quick.
    """

    def of(target: Target) -> Iterator[Any]:
        shallow, level = ("standard", "full") if _is_copy(target) else ("quick", "standard" if target.is_fake else real)
        for overload, own in overloads.known(target.device_type).items():
            if policy in (None, own) and own != without and overload in CALLS and overloads.built(overload):
                if not quick:
                    yield overload
                else:
                    yield deep(shallow if overload in quick else level, overload)

    return of


def _amp_dtypes(case: Case, target: Target) -> Sequence[torch.dtype]:
    """Return the amp dtypes to test, of those of the run that the target supports.

    At quick that is the backend's default, and at standard too on the fake targets that are near copies of CUDA.
    """
    dtypes = case.supported(target)
    usual = torch.bfloat16 if target.device_type == "cpu" else torch.float16
    if case.level == "full" or (case.level == "standard" and not _is_copy(target)):
        return dtypes
    return [usual if usual in dtypes else dtypes[0]]


def _is_copy(target: Target) -> bool:
    """Return whether the target's table of overloads equals CUDA's but for a few rows."""
    return target.is_fake and target.device_type not in ("cuda", "cpu")


def _policy(target: Target, overload: str) -> str:
    return overloads.known(target.device_type)[overload]


def _judge(
    case: Case,
    target: Target,
    overload: str,
    what: str,
    call: partial[Any],
    amp_dtype: torch.dtype,
    *,
    values: bool = True,
    eligible: bool = True,
) -> overloads.Seen:
    """Check casts, dtypes and layout of one call against its policy and, on a real target, every bit.

    `values=False` omits the bits, for inputs without a well-defined result, such as a singular matrix.
    `eligible=False` is for dtypes that autocast leaves alone, whose errors float32 says nothing about.
    """
    with repeatable_convolutions():
        seen = overloads.run(target, call, amp_dtype)
        promise = overloads.promise(target, _policy(target, overload), overload, call, amp_dtype)
    with _reproduced(case, target, call, amp_dtype, promise):
        case.equal(
            f"{overload} of {what} in a region of {overloads.type_names([amp_dtype])}",
            overloads.difference(promise, seen) or "as promised",
            "as promised",
        )
        if eligible and seen.error is not None:
            needless = overloads.needless(target, seen)
            case.equal(f"error of {overload} of {what} that float32 does not raise", needless, None)
        if values and promise.manual is not None and seen.error is None and not target.is_fake:
            for index, (ours, theirs) in enumerate(zip(seen.outputs, promise.manual.outputs, strict=True)):
                check_same(case, _is_repeatable(overload), f"output {index} of {overload} of {what}", ours, theirs)
    return seen


def _is_repeatable(overload: str) -> bool:
    return repeatable(overload.split(".")[0])


# The snippet sets the autocast state directly: torch.autocast disables itself without the hardware.
_SNIPPET = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.set_autocast_dtype("{kind}", {amp_dtype})
torch.set_autocast_enabled("{kind}", True)
with FakeTensorMode(), torch.no_grad(){guard}:
    seen = {call}
dtypes = [leaf.dtype for leaf in torch.utils._pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)]
print(dtypes, "promised: {promised}")
"""
# Where the outputs are promised, and neither an error nor a refusal.
_JUDGEMENT = """\
if dtypes != {promised}:
    raise SystemExit("the outputs have other dtypes")
"""
_MAIA = ', torch._C._IncludeDispatchKeyGuard(torch._C._dispatch_key_parse("AutocastMAIA"))'


@contextlib.contextmanager
def _reproduced(
    case: Case, target: Target, call: partial[Any], amp_dtype: torch.dtype, promise: overloads.Promise
) -> Iterator[None]:
    """Set the failing call as the snippet of the case."""
    try:
        yield
    except AssertionError:
        manual = promise.manual
        promised = "autocast refuses the call" if manual is None else manual.error or [x.dtype for x in manual.outputs]
        kind = target.device_type
        guard = _MAIA if kind == "maia" else ""
        text = _SNIPPET + (_JUDGEMENT if isinstance(promised, list) else "")
        case.reproduce(text.format(kind=kind, amp_dtype=amp_dtype, guard=guard, call=spell(call), promised=promised))
        raise


def _check_policy(case: Case, target: Target, overload: str) -> None:
    """Check that the overload has its kernel, and follows its policy for float32, the amp dtype and both."""
    with contextlib.suppress(AttributeError):  # the calls below judge it also without these private functions
        case.equal("an autocast kernel is registered", overloads.is_registered(overload, target.device_type), True)
    kinds = overloads.DECIDING[_policy(target, overload)] if case.level == "quick" else overloads.KINDS
    for amp_dtype in _amp_dtypes(case, target):
        for what, call in overloads.calls(target, overload, amp_dtype, kinds, case.seed).items():
            _finished(case, target, _judge(case, target, overload, what, call, amp_dtype))


def _finished(case: Case, target: Target, seen: overloads.Seen) -> None:
    """Check that the call returned a result, unless autocast refuses it or fake tensors do not support it."""
    if seen.error is None or seen.refused:
        return
    if not target.is_fake and seen.lacking is not None:
        case.unsupported(seen.lacking)
    case.true("fake tensors lack what the call needs", overloads.missing(seen) is not None, seen.error)


@contract("AMP-CAST-038", on=ANY)
@per_target("overload", _callable("lower_precision"))
def test_lower_precision(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-039", on=ANY)
@per_target("overload", _callable("fp32"))
def test_fp32(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-040", on=ANY)
@per_target("overload", _callable("fp32_set_dtype"))
def test_fp32_set_dtype(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-041", on=ANY)
@per_target("overload", _callable("fp32_append_dtype"))
def test_fp32_append_dtype(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-042", on=ANY)
@per_target("overload", _callable("widest"))
def test_widest(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


@contract("AMP-CAST-043", on=ANY)
@per_target("overload", _callable("banned"))
def test_banned(case: Case, target: Target, overload: str) -> None:
    _check_policy(case, target, overload)


def _registered(case: Case, backend: str) -> frozenset[str]:
    try:
        return overloads.registered(backend)
    except AttributeError as error:
        case.untestable(f"this torch does not tell its autocast registrations: {error}")
        raise


@contract("AMP-CAST-035")
@pytest.mark.parametrize("backend", BACKENDS)
def test_documented_ops_are_registered(case: Case, backend: str) -> None:
    registered = {overload.split(".")[0] for overload in _registered(case, backend)}
    rows = listings(backend, origin="documented")
    names = list(dict.fromkeys(row.name for row in rows if overloads.built(row.name)))
    case.note("documented names", len(names))
    missing = [name for name in names if not registered.issuperset(resolved(name))]
    case.equal("documented names without an autocast kernel", missing, [])


@contract("AMP-CAST-036")
@pytest.mark.parametrize("backend", FAKE_DEVICE_TYPES)
def test_overloads_are_registered(case: Case, backend: str) -> None:
    known = set(filter(overloads.built, overloads.known(backend))).difference(overloads.mended(backend))
    case.equal("known overloads without an autocast kernel", sorted(known - _registered(case, backend)), [])


@contract("AMP-CAST-036")
@pytest.mark.parametrize(
    ("backend", "overload"), [(backend, one) for backend in FAKE_DEVICE_TYPES for one in overloads.mended(backend)]
)
def test_late_overloads_are_registered(case: Case, backend: str, overload: str) -> None:
    if not overloads.known(backend):
        case.unsupported(f"this torch has no autocast for {backend}")
    case.true(f"{overload} has an autocast kernel", overload in _registered(case, backend))


@contract("AMP-CAST-037")
@pytest.mark.parametrize("backend", FAKE_DEVICE_TYPES)
def test_every_kernel_is_accounted_for(case: Case, backend: str) -> None:
    registered = _registered(case, backend)
    strange = sorted(registered.difference(overloads.known(backend)))
    case.note("overloads registered", len(registered))
    case.note("overloads called", len(registered.intersection(CALLS)))
    for overload in strange:
        case.note("new", overloads.schema(overload))
    case.equal("overloads with an autocast kernel that the suite does not know", strange, [])


def _declarations(target: Target) -> list[str]:
    declaration = declared.declaration(target.device_type)
    own = declaration is None or declaration.backend == target.device_type
    return [] if declaration is None or own or target.is_fake else [declaration.backend]


@contract("AMP-CAST-037", on="accelerator")
@per_target("followed", _declarations)
def test_every_kernel_is_declared(case: Case, target: Target, followed: str) -> None:
    registered = _registered(case, target.device_type)
    case.note("overloads registered", len(registered))
    strange = overloads.undeclared(target.device_type)
    case.equal(f"overloads with an autocast kernel of {target.device_type} that are not declared", strange, [])


class _Failed(RuntimeError):
    """What an op raises that is made to fail."""


class _Failing(TorchDispatchMode):
    """Raise once, in place of the first op, or of the first that is no cast."""

    def __init__(self, *, in_a_cast: bool) -> None:
        super().__init__()
        self.in_a_cast, self.failed = in_a_cast, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.failed and (self.in_a_cast or func._schema.name != CAST):
            self.failed = True
            raise _Failed(str(func))
        return call_op(func, args, kwargs or {})


def _casting_policies(target: Target) -> list[str]:
    known = overloads.known(target.device_type)
    return [policy for policy in dict.fromkeys(known.values()) if policy in overloads.DECIDING and policy != "banned"]


def _types_of(call: Callable[[], Any]) -> str:
    """Return the types of the results of a call, or what it raises."""
    try:
        leaves = torch.utils._pytree.tree_leaves(call())
    except (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}" if str(error) else type(error).__name__
    return overloads.type_names([leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)])


@contract("AMP-CAST-116", on=ANY)
@per_target("policy", _casting_policies)
def test_rules_after_an_exception(case: Case, target: Target, policy: str) -> None:
    """An op fails in a region, below its rule; the region goes on."""
    names = [name for name, own in overloads.known(target.device_type).items() if own == policy and name in CALLS]
    for amp_dtype in _amp_dtypes(case, target):
        failed, unlike = 0, {}
        for overload in filter(overloads.built, names):
            for what, call in overloads.calls(
                target, overload, amp_dtype, overloads.DECIDING[policy], case.seed
            ).items():
                for in_a_cast in (False, True):
                    with overloads.mode_of(target), overloads.quiet(), target.autocast(amp_dtype):
                        square = torch.ones(2, 2, device=target.device)
                        before = (_types_of(call), _types_of(partial(torch.mm, square, square)))
                        failing = _Failing(in_a_cast=in_a_cast)
                        with contextlib.suppress(_Failed), failing:
                            call()
                        after = (_types_of(call), _types_of(partial(torch.mm, square, square)))
                    failed += failing.failed
                    if before != after:
                        place = "its cast" if in_a_cast else "the op"
                        unlike[f"{overload} of {what}, {place} failed"] = f"{' and '.join(after)}, before {before[0]}"
        case.at_least(f"{amp_dtype}: calls that failed (control)", failed, 1)
        case.equal(f"{amp_dtype}: types of the call, and of a product, after it failed in the region", unlike, {})


# Not eligible: float64, integers, booleans and complex numbers; float32 next to float64 stays eligible.
_UNTOUCHED = {
    "float64": (torch.float64,),
    "float64 then float32": (torch.float64, torch.float32),
    "float32 then float64": (torch.float32, torch.float64),
    "int64": (torch.int64,),
    "bool": (torch.bool,),
    "complex64": (torch.complex64,),
}


@contract("AMP-CAST-044", on=ANY)
@per_target(
    "overload", _callable(None, "mm", "exp", "sum.dim_IntList", "norm.Scalar", "index_put", "cat", real="quick")
)
def test_types_that_are_not_eligible(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    for what, dtypes in _UNTOUCHED.items():
        if all(target.computes_in(dtype) for dtype in dtypes):
            call = overloads.sample(target, overload, dtypes, case.seed)
            _judge(case, target, overload, what, call, amp_dtype, eligible=False)


def _strided(x: torch.Tensor) -> torch.Tensor:
    view = x.new_empty((*x.shape, 2))[..., 0]
    return view.copy_(x)


# Dense tensors keep their strides when they are cast (torch.Tensor.to, memory_format=torch.preserve_format).
_DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed inputs": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "channels-last inputs": channels_last,
}
_FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **_DENSE,
    "strided inputs": _strided,
    "expanded inputs": lambda x: x.narrow(0, 0, 1).expand_as(x) if x.dim() else x,
    "empty inputs": lambda x: x.narrow(0, 0, 0) if x.dim() else x,
    "zero-dimensional inputs": lambda x: x.flatten()[0],
    "one dimension fewer": lambda x: x.select(0, 0) if x.dim() else x,
    "one dimension more": lambda x: x.unsqueeze(0),
}
_OF_OTHER_RANKS = ("zero-dimensional inputs", "one dimension fewer", "one dimension more")


def _indexes(call: partial[Any]) -> bool:
    """Return whether the call passes integers, which may be indices into another argument."""
    return any(not tensor.is_floating_point() for _, tensor in arguments(call))


@contract("AMP-CAST-045", on=ANY)
@per_target("overload", _callable(None, "conv2d", "exp", "prod", "stack"))
def test_views_of_every_form(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    kinds = overloads.DECIDING[_policy(target, overload)]
    for what, call in overloads.calls(target, overload, amp_dtype, kinds, case.seed).items():
        for form, change in _FORMS.items():
            if form == "empty inputs" and _indexes(call) and target.device_type != "cpu" and not target.is_fake:
                continue  # an index out of bounds fails a device assertion, which ends the process
            if form in _OF_OTHER_RANKS and overload.startswith("cudnn_") and not target.is_fake:
                continue  # these read sizes at places that other ranks do not have, which can end the process
            formed = overloads.changed(target, call, change)
            # replication_pad with an extra dimension leaves its result unwritten on torch 2.6, in a region or not.
            written = form != "one dimension more" or not overload.startswith("replication_pad")
            defined = written and (form in _DENSE or _is_repeatable(overload))
            seen = _judge(case, target, overload, f"{form} of {what}", formed, amp_dtype, values=defined)
            if form in _DENSE:
                moved = [str(cast) for cast in seen.casts if cast.argument and not cast.kept_layout]
                case.equal(f"casts of {form} that lose the layout", moved, [])


@contract("AMP-CAST-046", on=("cpu", "accelerator"))
@per_target(
    "overload",
    _callable(None, "linear", "conv2d", "exp", "sum.dim_IntList", "mse_loss", "prelu", "cat", without="banned"),
)
def test_gradients_pass_every_cast(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    policy = _policy(target, overload)
    kind = overloads.DECIDING[policy][-1:] if policy == "widest" else overloads.DECIDING[policy][:1]
    ((what, _),) = overloads.calls(target, overload, amp_dtype, kind, case.seed).items()

    def gradients(manual: bool) -> tuple[list[torch.Tensor | None], list[torch.Tensor], str | None]:
        ((_, call),) = overloads.calls(target, overload, amp_dtype, kind, case.seed).items()
        call, leaves = overloads.with_leaves(call)
        made = overloads.manually_cast(policy, overload, call, amp_dtype) if manual else call
        seen = overloads.run(target, made, None if manual else amp_dtype)
        return overloads.gradients(seen, leaves), leaves, seen.error

    with repeatable_convolutions():
        (ours, leaves, error), (theirs, _, expected) = gradients(False), gradients(True)
    case.equal(f"error of {overload} of {what} that require gradients", error, expected)
    case.equal(
        "inputs that get a gradient",
        [index for index, one in enumerate(ours) if one is not None],
        [index for index, one in enumerate(theirs) if one is not None],
    )
    for index, (seen, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if seen is not None and wanted is not None:
            case.equal(f"type of the gradient of input {index}", seen.dtype, leaves[index].dtype)
            name = f"gradient of input {index}"
            if target.device_type == "cpu":
                check_same(case, _is_repeatable(overload), name, seen, wanted)
            else:  # the order of a sum may differ in each run, with one rounding each in the dtype of the op
                ran = amp_dtype if policy == "lower_precision" else seen.dtype
                case.at_most(
                    f"distance of the {name} by norm", normwise_distance(seen, wanted), 64 * torch.finfo(ran).eps
                )


def _combinations(target: Target, overload: str, amp_dtype: torch.dtype, other: bool) -> dict[str, partial[Any]]:
    """Return calls with every combination of dtypes in three inputs, with or without the other 16-bit dtype."""
    strange = torch.float16 if amp_dtype is torch.bfloat16 else torch.bfloat16
    dtypes = (torch.float32, amp_dtype, strange) if other else (torch.float32, amp_dtype)
    return {
        overloads.type_names(both): overloads.sample(target, overload, both)
        for both in itertools.product(dtypes, repeat=3)
        if (strange in both) == other
    }


@contract("AMP-CAST-047", on=ANY)
@per_target("overload", _callable("widest", "addcmul", "cat", "index_put", "bilinear"))
def test_every_combination_widens(case: Case, target: Target, overload: str) -> None:
    for amp_dtype in _amp_dtypes(case, target):
        for what, call in _combinations(target, overload, amp_dtype, other=False).items():
            _judge(case, target, overload, what, call, amp_dtype)


@contract("AMP-CAST-048", on=ANY)
@per_target("overload", _callable("widest", "dot", "stack"))
def test_other_16_bit_type_widens(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    for what, call in _combinations(target, overload, amp_dtype, other=True).items():
        _judge(case, target, overload, what, call, amp_dtype)


def _database(target: Target) -> list[Any]:
    """Return the parameter of the sweep, which takes seconds a target and therefore does not run at quick."""
    return [deep("full" if _is_copy(target) else "standard", "database")]


def _with_optionals(target: Target) -> Iterator[Any]:
    """Return the overloads with an optional tensor or a reduction."""
    for value in _callable(None, "linear", "group_norm", "mse_loss")(target):
        if overloads.optional_arguments(value.values[0]):
            yield value


@contract("AMP-CAST-053", on=ANY)
@per_target("overload", _with_optionals)
def test_optional_arguments(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    kinds = overloads.DECIDING[_policy(target, overload)]
    for what, call in overloads.calls(target, overload, amp_dtype, kinds, case.seed).items():
        for how, changed in overloads.optionals(overload, call).items():
            _judge(case, target, overload, f"{what} {how}", changed, amp_dtype)


def _twin(case: Case, target: Target) -> Target:
    """Return the fake target of the same device type, where no call can read tensors out of bounds."""
    return target if target.is_fake else replace(target, name=f"fake:{target.device_type}", is_fake=True)


@contract("AMP-CAST-055", on=ANY)
@per_target("overload", _callable(None, "addmm", "sum.dim_IntList", "softmax.int", "logsumexp", "pow.Tensor_Scalar"))
def test_options(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    twin, kinds = _twin(case, target), overloads.DECIDING[_policy(target, overload)]
    for what, call in overloads.calls(twin, overload, amp_dtype, kinds, case.seed).items():
        _judge(case, twin, overload, what, call, amp_dtype)
        for how, changed in overloads.options(call).items():
            _judge(case, twin, overload, f"{what} {how}", changed, amp_dtype)


# Input dtypes for which no other policy has the same result.
_TELLING: dict[str, Callable[[torch.dtype], tuple[tuple[torch.dtype, ...], ...]]] = {
    "lower_precision": lambda amp_dtype: ((torch.float32,),),
    "fp32": lambda amp_dtype: ((amp_dtype,), (amp_dtype, torch.float32), (torch.float32, amp_dtype)),
    "fp32_set_dtype": lambda amp_dtype: ((amp_dtype,),),
    "fp32_append_dtype": lambda amp_dtype: ((amp_dtype,),),
    "widest": overloads.one_wide,
    "banned": lambda amp_dtype: ((torch.float32,),),
}


def _policies(target: Target) -> Iterator[Any]:
    """Return the policies of the target's overloads, at quick on real targets and fake CUDA, and the late overloads."""
    level = "standard" if _is_copy(target) else "quick"
    for policy in dict.fromkeys(overloads.known(target.device_type).values()):
        yield deep(level, policy)
    for overload in overloads.mended(target.device_type):
        if overload in overloads.known(target.device_type):
            yield deep(level, overload)


@contract("AMP-CAST-055", on=ANY)
@per_target("policy", _policies)
def test_options_together(case: Case, target: Target, policy: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    known, late = overloads.known(target.device_type), overloads.mended(target.device_type)
    chosen = [policy] if policy in late else [one for one, own in known.items() if own == policy and one not in late]
    for overload in filter(overloads.built, chosen):
        policy, done = known[overload], set()
        for dtypes in dict.fromkeys((*_TELLING[policy](amp_dtype), (torch.float32,))):
            for place, call in enumerate(overloads.calls_with_options(target, overload, dtypes)):
                # Calls of fewer tensors than there are dtypes have the same ones several times.
                given = (place, *(tensor.dtype for _, tensor in arguments(call)))
                if given in done:
                    continue
                done.add(given)
                what = f"{overloads.type_names(dtypes)}, options {place}"
                _finished(case, target, _judge(case, target, overload, what, call, amp_dtype))


def _with_more(target: Target) -> Iterator[Any]:
    return (one for one in _callable(None)(target) if one in MORE)


@contract("AMP-CAST-056", on=ANY)
@per_target("overload", _with_more)
def test_other_numbers_and_shapes(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    widest = _policy(target, overload) == "widest"
    mixed = overloads.one_wide(amp_dtype) if widest else ((amp_dtype, torch.float32),)
    for dtypes in ((torch.float32,), (amp_dtype,), *mixed):
        for place, call in enumerate(overloads.more_calls(target, overload, dtypes)):
            what = f"{overloads.type_names(dtypes)}, call {place}"
            _finished(case, target, _judge(case, target, overload, what, call, amp_dtype))
            for how, changed in overloads.optionals(overload, call).items():
                _judge(case, target, overload, f"{what} {how}", changed, amp_dtype)


@contract("AMP-CAST-057", on=ANY)
@per_target("overload", _callable(None, "linear", "exp", "prod", "cat"))
def test_grad_modes(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    policy = _policy(target, overload)
    for what, call in overloads.calls(target, overload, amp_dtype, overloads.DECIDING[policy], case.seed).items():
        with torch.no_grad():
            _judge(case, target, overload, f"{what} under no_grad", call, amp_dtype)
        wanted = overloads.promise(target, policy, overload, call, amp_dtype).manual
        with torch.inference_mode():  # where a trace records other ops
            seen = overloads.run(target, call, amp_dtype, traced=False)
        if wanted is None:
            case.true(f"{what} is refused under inference_mode", seen.refused, seen.error)
        elif wanted.error is None and not (target.is_fake and seen.error):  # fewer fake kernels exist without the trace
            case.equal(f"types of the outputs of {what} under inference_mode", _types(seen), _types(wanted))
        else:
            case.note(f"{what} under inference_mode: not run", wanted.error or seen.error)


@contract("AMP-CAST-054", on=("cpu", "accelerator"))
@per_target("overload", _callable("lower_precision", "conv2d", "linear", "bmm"))
def test_weights_are_cast_once_a_region(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    call, _ = overloads.with_leaves(overloads.sample(target, overload, (torch.float32,), case.seed))
    with repeatable_convolutions(), target.autocast(amp_dtype):
        first = overloads.run(target, call, amp_dtype)
        second = overloads.run(target, call, amp_dtype)
    if first.lacking is not None:
        case.unsupported(first.lacking)
    case.at_least("casts of arguments in the first call", len(overloads.on_arguments(first)), 1)
    case.equal("casts of arguments in the second call", overloads.on_arguments(second), [])
    for index, (ours, theirs) in enumerate(zip(second.outputs, first.outputs, strict=True)):
        case.equal(f"type of output {index} of the second call", ours.dtype, theirs.dtype)


def _with_variants(target: Target) -> Iterator[Any]:
    """Return the overloads with an in-place variant or one with `out`.

    There are none on fake CPU tensors, which compute in 16 bits what a CPU cannot, such as a condition number.
    """
    if target.is_fake and target.device_type == "cpu":
        return
    for value in _callable(None, "addmm", "exp", "pow.Tensor_Scalar", "prod.dim_int", "addcmul", "stack")(target):
        if overloads.variants(value.values[0]):
            yield value


@contract("AMP-CAST-052", on=ANY)
@per_target("overload", _with_variants)
def test_variants_are_left_alone(case: Case, target: Target, overload: str) -> None:
    (amp_dtype, *_) = _amp_dtypes(case, target)
    for variant, dtype in itertools.product(overloads.variants(overload), (torch.float32, amp_dtype)):
        call = overloads.sample(target, overload, (dtype,), case.seed)
        with repeatable_convolutions():
            made = [overloads.variant_call(target, call, variant) for _ in range(2)]
            if made[0] is None or made[1] is None:
                case.note(f"{variant} of {dtype}", "cannot be called outside a region")
                continue
            outside, inside = overloads.run(target, made[0], None), overloads.run(target, made[1], amp_dtype)
        difference = overloads.difference(overloads.Promise([], outside), inside)
        case.equal(f"{variant} of {dtype}, against outside a region", difference or "the same", "the same")
        if not target.is_fake:
            for index, (ours, theirs) in enumerate(zip(inside.outputs, outside.outputs, strict=True)):
                check_same(case, _is_repeatable(overload), f"output {index} of {variant} of {dtype}", ours, theirs)
    if not any(evidence.judged for evidence in case.evidence):
        case.unsupported(f"{target.name} can call no variant of {overload} outside a region")


@contract("AMP-CAST-049", on=ANY)
@per_target("entries", _database)
def test_unlisted_ops_of_the_database(case: Case, target: Target, entries: str) -> None:
    try:
        database = operator_database()
    except ImportError as error:
        case.untestable(f"PyTorch's operator database cannot be imported: {error}")
        raise
    (amp_dtype, *_) = _amp_dtypes(case, target)
    swept = opinfo_sweep.sweep(target, amp_dtype, database, case.samples(quick=1, standard=1, full=8))
    case.note("ops swept", swept.ops)
    case.note("calls", swept.calls)
    strange = {name: how for name, how in swept.changed.items() if not opinfo_sweep.explained(name, target.device_type)}
    case.equal("unlisted ops that autocast", strange, {})
    case.at_least("listed ops that autocast, of those swept", len(swept.changed), 1)


@contract("AMP-CAST-050", on=("cpu", "accelerator"))
@per_target("overload", _callable(None))
def test_fake_tensors_tell_the_same(case: Case, target: Target, overload: str) -> None:
    fake = _twin(case, target)
    for amp_dtype in _amp_dtypes(case, target):
        for what, call in overloads.calls(target, overload, amp_dtype, seed=case.seed).items():
            real = overloads.run(target, call, amp_dtype)
            on_fake = overloads.run(fake, overloads.calls(fake, overload, amp_dtype)[what], amp_dtype)
            case.equal(f"casts of arguments, {what}", overloads.on_arguments(on_fake), overloads.on_arguments(real))
            if on_fake.error is None and real.error is None:
                # A result that was not asked for is None on a device, and a tensor on a fake one.
                seen = _types(on_fake)[: len(real.outputs)]
                case.equal(f"types of the outputs, {what}", seen, _types(real))
            else:
                case.note(f"not compared, {what}", on_fake.error or real.error)


def _types(seen: overloads.Seen) -> list[str]:
    return [str(leaf.dtype) for leaf in seen.outputs]


_BY_NAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, "c"),
    "prod": lambda x: torch.prod(x, "c"),
    "cumsum": lambda x: torch.cumsum(x, "c"),
    "cumprod": lambda x: torch.cumprod(x, "c"),
    "softmax": lambda x: torch.softmax(x, "c"),
    "log_softmax": lambda x: torch.log_softmax(x, "c"),
}
_BY_NUMBER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: torch.sum(x, 1),
    "prod": lambda x: torch.prod(x, 1),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
}


@contract("AMP-CAST-051", on=("cpu", "cuda"))
@pytest.mark.parametrize("op", list(_BY_NAME))
def test_named_dimension(case: Case, target: Target, amp_dtype: torch.dtype, op: str, rng: torch.Generator) -> None:
    x = Inputs((amp_dtype,), target.device, rng.initial_seed()).p(3, 4)
    case.require_call(target, "name the dimensions of a tensor", lambda: x.refine_names("r", "c"))
    with target.autocast(amp_dtype):
        seen, wanted = _BY_NAME[op](x.refine_names("r", "c")).rename(None), _BY_NUMBER[op](x)
    case.identical(f"{op} over a dimension by its name, against its number", seen, wanted)
