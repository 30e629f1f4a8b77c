"""Check torch.func.linearize of modules in a region against torch.func.jvp there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ...harness.check import Case, by_seed, contract, deep
from ...harness.targets import Target

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch compiles its first jvp with it
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # of torch.fx, by linearize
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # of rms_norm
]

# What a module of FEATURES features may put before a product: a normalization, an activation with a weight, products.
FEATURES = 8
MODULES: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "linear": lambda: nn.Linear(FEATURES, FEATURES),
    "conv1d": lambda: nn.Conv1d(4, 4, 3, padding=1),
    "gelu": nn.GELU,
    "softmax": lambda: nn.Softmax(-1),
    "log_softmax": lambda: nn.LogSoftmax(-1),
    "prelu": nn.PReLU,
    "rms_norm": lambda: nn.RMSNorm(FEATURES),
    "local_response_norm": lambda: nn.LocalResponseNorm(2),
    "layer_norm": lambda: nn.LayerNorm(FEATURES),
    "layer_norm_without_bias": lambda: nn.LayerNorm(FEATURES, bias=False),
    "layer_norm_without_weights": lambda: nn.LayerNorm(FEATURES, elementwise_affine=False),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "instance_norm": lambda: nn.InstanceNorm1d(4, affine=True),
    "batch_norm": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "batch_norm_in_eval": lambda: nn.BatchNorm1d(4).eval(),
}
# The dtypes of the module and of what it takes: "low" is the amp dtype, as of the output of another op in the region.
DTYPES = {"float32": (False, False), "low-input": (False, True), "low-weights": (True, False), "low": (True, True)}
QUICK = (("layer_norm", "low-input"), ("rms_norm", "low-input"))
# At standard the seed chooses eight of the others.
PAIRS = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    if (name, kind) in QUICK
    else by_seed("standard", 8, name, kind, id=f"{name}-{kind}")
    for kind in DTYPES
    for name in MODULES
]


def _function(target: Target, dtype: torch.dtype, module: nn.Module, inside: bool) -> Callable[[Tensor], Tensor]:
    """Return the module with a product behind it, as a function; `inside` puts the region into it."""
    last = nn.Linear(FEATURES, 3).to(target.device)

    def plain(x: Tensor) -> Tensor:
        output: Tensor = last(module(x))
        return output

    def own_region(x: Tensor) -> Tensor:
        with target.autocast(dtype):
            return plain(x)

    return own_region if inside else plain


@contract("AMP-TRANSFORM-016", on="cpu")
@pytest.mark.parametrize("inside", [True, deep("full", False)], ids=["region-inside", "region-around"])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_linearize(case: Case, target: Target, rng: torch.Generator, name: str, kind: str, inside: bool) -> None:
    _check(case, target, rng, name, kind, inside)


# Below the full level a region around the call has these float32 modules alone.
@contract("AMP-TRANSFORM-016", on="cpu")
@pytest.mark.parametrize("name", ["nothing", *(deep("standard", name) for name in ("conv1d", "gelu", "softmax"))])
def test_linearize_in_a_region(case: Case, target: Target, rng: torch.Generator, name: str) -> None:
    _check(case, target, rng, name, "float32", inside=False)


def _check(case: Case, target: Target, rng: torch.Generator, name: str, kind: str, inside: bool) -> None:
    """Compare linearize with jvp: the region is in the function, or around the transform."""
    low_weights, low_input = DTYPES[kind]
    compared = 0
    dtypes = case.supported(target)
    for dtype in dtypes if case.level == "full" else dtypes[-1:]:
        module = MODULES[name]().to(target.device, dtype if low_weights else torch.float32)
        function = _function(target, dtype, module, inside)
        given = dtype if low_input else torch.float32
        x, tangent = (torch.randn(2, 4, FEATURES, generator=rng).to(target.device, given) for _ in range(2))
        try:
            with target.autocast(dtype, enabled=not inside):
                output, expected = torch.func.jvp(function, (x,), (tangent,))
        except (RuntimeError, NotImplementedError) as error:
            case.note(f"{dtype}: jvp raises", str(error).splitlines()[0])
            continue
        compared += 1
        with target.autocast(dtype, enabled=not inside):
            seen = _linearized(function, x, tangent)
        case.equal(f"{dtype}: exception of linearize where jvp works", seen if isinstance(seen, str) else None, None)
        if not isinstance(seen, str):
            case.identical(f"{dtype}: output", seen[0], output)
            case.identical(f"{dtype}: tangent", seen[1], expected)
    if not compared:
        case.unsupported(f"jvp of {name} raises for {kind} in every dtype")


def _linearized(function: Callable[[Tensor], Tensor], x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor] | str:
    """Return the output and the tangent, or what linearize or the function that it returns raises."""
    try:
        output, push = torch.func.linearize(function, x)
        return output, push(tangent)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
