"""The table of overloads with an autocast kernel: closed, true of this torch, and quick to see what moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from conformance.data import in_force
from conformance.harness.targets import FAKE_DEVICE_TYPES, Target, resolve
from conformance.oracles.policy import overloads
from conformance.oracles.policy.overload_calls import CALLS
from tests.faults.breaking import dropped, kernel

VERSIONS = [f"2.{minor}" for minor in range(6, 16)]
FAKE = [f"fake:{kind}" for kind in FAKE_DEVICE_TYPES]
# What fake tensors cannot finish on torch 2.13; the casts of these calls are seen all the same.
UNFINISHED = {
    "cuda": {"cudnn_convolution", "cudnn_convolution_transpose"},
    "cpu": {"_grid_sampler_2d_cpu_fallback", "ctc_loss.IntList", "ctc_loss.Tensor", "linalg_lstsq"},
    "xpu": {"scaled_dot_product_attention"},
    "mps": {"_mps_convolution", "scaled_dot_product_attention"},
    "mtia": {"_thnn_fused_gru_cell"},
    "maia": {"_thnn_fused_gru_cell"},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("backend", overloads.BACKENDS)
def test_each_known_overload_has_a_call_or_a_reason(backend: str, version: str) -> None:
    known = overloads.known(backend, version)

    assert set(known.values()) <= set(overloads.POLICIES)
    assert {one for one in known if (one in CALLS) == (overloads.uncallable(one) is not None)} == set()


@pytest.mark.parametrize(
    ("backend", "version", "count"),
    # As the dispatchers of these releases list them, with _cudnn_rnn, which a CPU build lacks, and miopen_rnn of ROCm.
    [
        *(("cuda", "2.6", 127), ("cuda", "2.12", 128), ("cuda", "2.13", 121), ("cuda", "2.14", 122)),
        *(("cpu", "2.6", 129), ("cpu", "2.13", 127), ("cpu", "2.15", 126)),
        *(("xpu", "2.6", 123), ("xpu", "2.12", 124), ("xpu", "2.13", 117)),
        *(("mps", "2.6", 99), ("mps", "2.9", 101), ("mps", "2.13", 95)),
        *(("mtia", "2.6", 0), ("mtia", "2.7", 123), ("maia", "2.7", 0), ("maia", "2.8", 123), ("maia", "2.15", 117)),
    ],
)
def test_the_table_counts_what_each_release_registers(backend: str, version: str, count: int) -> None:
    assert len(_expected(backend, version)) == count


def _expected(backend: str, version: str) -> set[str]:
    """Return what torch `version` registers: of what is promised, without what it is known to lack."""
    late = {overload for overload, first in overloads.mended(backend).items() if not in_force(version, first)}
    return set(overloads.known(backend, version)) - late


@pytest.mark.parametrize("backend", FAKE_DEVICE_TYPES)
def test_the_table_is_what_this_torch_registers(backend: str) -> None:
    assert overloads.registered(backend) == set(filter(overloads.built, _expected(backend, torch.__version__)))


@pytest.mark.parametrize("order", [1, 2, "nuc", 9])
def test_a_region_must_not_refuse_what_float32_outside_accepts(order: int | str) -> None:
    target = resolve("fake:cuda")
    overload = "linalg_matrix_norm.str_ord" if isinstance(order, str) else "linalg_matrix_norm"
    with overloads.mode_of(target):
        call = partial(
            getattr(torch.ops.aten.linalg_matrix_norm, overload.partition(".")[2] or "default"),
            torch.empty(3, 4, dtype=torch.float16, device="cuda"),
            order,
        )
    seen = overloads.run(target, call, torch.float16)
    assert (seen.error is not None) is (order != 1)
    # 9 is no order of a matrix norm: that error is right, in a region and outside.
    assert (overloads.needless(target, seen) is not None) is (order in (2, "nuc"))


@pytest.mark.parametrize("name", FAKE)
def test_each_overload_is_seen_to_have_its_policy(name: str) -> None:
    target = resolve(name)
    amp_dtype = torch.get_autocast_dtype(target.device_type)
    known = {one: own for one, own in overloads.known(target.device_type).items() if overloads.built(one)}

    seen = {one: overloads.observe(target, one, amp_dtype).policy for one in known}

    assert seen == {one: own if one in CALLS else overloads.UNKNOWN for one, own in known.items()}


def test_a_call_is_of_that_very_overload() -> None:
    for overload in overloads.known("cuda") | overloads.known("cpu") | overloads.known("mps"):
        if overload in CALLS:
            called = overloads.sample(resolve("fake:cuda"), overload, [torch.float32]).func
            assert str(called) == f"aten.{overload if '.' in overload else f'{overload}.default'}"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list is that of torch 2.13")
@pytest.mark.parametrize("name", FAKE)
def test_what_fake_tensors_cannot_finish(name: str) -> None:
    target = resolve(name)
    unfinished = set()
    for overload in CALLS.keys() & overloads.known(target.device_type).keys():
        call = overloads.sample(target, overload, [torch.float32])
        seen = overloads.run(target, call, torch.get_autocast_dtype(target.device_type))
        if seen.error is not None and not seen.refused:
            assert overloads.missing(seen) is not None, seen.error
            unfinished.add(overload)

    assert unfinished == UNFINISHED[target.device_type]


@pytest.mark.skipif(not hasattr(torch.Tensor, "refine_names"), reason="this torch has no named tensors")
def test_an_overload_is_still_not_called_with_a_name() -> None:
    """The reason why the overloads that take a dimension by name have no call."""
    named = torch.ones(2, 2).refine_names("r", "c")
    seen = overloads.run(resolve("cpu"), partial(torch.ops.aten.softmax.Dimname, named, "c"), None)

    assert "must have a namespace" in str(seen.error) or "Named tensors are currently unsupported" in str(seen.error)


@pytest.mark.skipif("_cudnn_rnn" not in overloads.registered("cuda"), reason="this build has no cuDNN")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is there")
def test_cudnn_still_asks_the_driver() -> None:
    target = resolve("fake:cuda")
    with overloads.mode_of(target):
        made = [torch.empty(shape, device="cuda") for shape in ((12, 4), (12, 3), (12,), (12,))]
        x, state = torch.empty(5, 2, 4, device="cuda"), torch.empty(1, 2, 3, device="cuda")
        call = partial(
            torch.ops.aten._cudnn_rnn.default,
            *(x, made, 4, None, state, state, 2, 3, 0, 1, False, 0.0, False, False, [], None),
        )

    assert "driver" in str(overloads.run(target, call, torch.float16).error)


MM = partial(overloads.observe, resolve("fake:cuda"), "mm", torch.float16)


def test_a_dropped_kernel_is_seen() -> None:
    assert overloads.is_registered("mm", "cuda")
    with dropped("mm", "AutocastCUDA"):
        assert not overloads.is_registered("mm", "cuda")
        assert "mm" not in overloads.registered("cuda")
        assert MM().policy == overloads.UNLISTED

    assert MM().policy == "lower_precision"


@contextmanager
def _moved(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Give mm on CUDA a kernel of Python, below which nothing autocasts."""

    def run(*args: torch.Tensor) -> torch.Tensor:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return function(*args)

    with kernel("mm", run, "AutocastCUDA"):
        yield


@pytest.mark.parametrize(
    ("function", "policy"),
    [
        (lambda x, y: torch.mm(x.half(), y.half()), "lower_precision"),
        (lambda x, y: torch.mm(x.float(), y.float()), "fp32"),
        (lambda x, y: torch.mm(*(t.to(torch.promote_types(x.dtype, y.dtype)) for t in (x, y))), "widest"),
        (lambda x, y: torch.mm(x, y), overloads.UNLISTED),
        # Nothing that torch has: cast back, cast twice, one argument forgotten, another type.
        (lambda x, y: torch.mm(x.half(), y.half()).float(), overloads.UNKNOWN),
        (lambda x, y: torch.mm(x.bfloat16().half(), y.half()), overloads.UNKNOWN),
        (lambda x, y: torch.mm(x.half(), y), overloads.UNKNOWN),
        (lambda x, y: torch.mm(x.bfloat16(), y.bfloat16()), overloads.UNKNOWN),
        (lambda x, y: torch.mm(x.double(), y.double()), overloads.UNKNOWN),
    ],
)
def test_a_moved_kernel_is_seen(function: Callable[..., torch.Tensor], policy: str) -> None:
    with _moved(function):
        assert MM().policy == policy


def test_a_ban_is_seen() -> None:
    def refuse(*args: Any) -> torch.Tensor:
        raise RuntimeError("mm is unsafe to autocast")

    with _moved(refuse):
        assert MM().policy == "banned"


def test_a_cast_that_changes_strides_is_seen() -> None:
    target = resolve("fake:cuda")
    call = overloads.changed(target, overloads.sample(target, "mm", [torch.float32]), lambda x: x.t().contiguous().t())
    with _moved(lambda x, y: torch.mm(x.half(memory_format=torch.contiguous_format), y.half())):
        seen = overloads.run(target, call, torch.float16)

    assert [cast.kept_layout for cast in seen.casts] == [False, True]


def test_types_that_are_not_eligible_are_not_promised_a_cast() -> None:
    target = resolve("fake:cuda")
    call = overloads.sample(target, "addcmul", [torch.float64, torch.float16, torch.float32])

    assert [str(cast) for cast in overloads.predicted("widest", call, torch.float16)] == ["1: float16 to float32"]
    assert [str(cast) for cast in overloads.predicted("lower_precision", call, torch.float16)] == [
        "2: float32 to float16"
    ]


def test_a_gradient_of_a_detached_cast_is_missed() -> None:
    call, leaves = overloads.with_leaves(overloads.sample(resolve("cpu"), "mm", [torch.float32]))
    whole = overloads.run(resolve("cpu"), call, None)
    cut = overloads.run(resolve("cpu"), partial(call.func, call.args[0], call.args[1].detach()), None)

    assert [one is None for one in overloads.gradients(whole, leaves)] == [False, False]
    assert [one is None for one in overloads.gradients(cut, leaves)] == [False, True]


def test_a_maia_region_ends() -> None:
    """Its key is included by hand, fake MAIA tensors carrying none."""
    if "maia" not in FAKE_DEVICE_TYPES:
        pytest.skip("this torch has no autocast for MAIA")
    target: Target = resolve("fake:maia")
    with overloads.mode_of(target):
        x = torch.empty(2, 2, device=target.device)
        with target.autocast(torch.float16):
            inside = torch.mm(x, x).dtype
            with target.autocast(torch.float16, enabled=False):
                disabled = torch.mm(x, x).dtype
        outside = torch.mm(x, x).dtype

    assert (inside, disabled, outside) == (torch.float16, torch.float32, torch.float32)
