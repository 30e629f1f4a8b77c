"""Check calls that the databases of torch lack: flex_attention, causal biases and grouped matrix products."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ...harness.check import Case, contract, deep
from ...harness.targets import Target
from ...oracles.numbers.error_bounds import attention_window, normwise_error
from ...oracles.numbers.formats import FORMATS
from ...oracles.policy.overloads import mode_of, quiet

pytestmark = pytest.mark.usefixtures("one_thread")


def log_sums_of_flex_attention(*tensors: torch.Tensor) -> torch.Tensor | None:
    """Return the log-sum-exp of each row of eager flex_attention's scores, or None where torch cannot return it."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends torch.compile
        found: torch.Tensor = module.flex_attention(*tensors, return_aux=module.AuxRequest(lse=True))[1].lse
    return found


def flex_attention(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return eager flex_attention, whose module takes long to import."""
    from torch.nn.attention import flex_attention as module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends torch.compile
        result: torch.Tensor = module.flex_attention(*tensors, **options)
    return result


OPERANDS = ("query", "key", "value")
LOW = [low for count in range(4) for low in itertools.combinations(OPERANDS, count)]


# The compiler traces the eager call anew for each mix of dtypes, which takes a tenth of a second.
@contract("AMP-CAST-097", on="cpu")
@pytest.mark.parametrize("low", [deep("standard", low, id="-".join(low) or "none") for low in LOW])
def test_flex_attention(
    case: Case, target: Target, amp_dtype: torch.dtype, low: tuple[str, ...], rng: torch.Generator
) -> None:
    tensors = [
        torch.randn(1, 2, 16, 16, generator=rng).to(target.device, amp_dtype if name in low else torch.float32)
        for name in OPERANDS
    ]
    with target.autocast(amp_dtype):
        control = F.scaled_dot_product_attention(*tensors)
        try:
            seen, error = flex_attention(*tensors), None
        except (RuntimeError, ValueError, TypeError) as raised:
            seen, error = control, f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    case.equal("error of flex_attention, where scaled_dot_product_attention has none", error, None)
    case.equal("dtype, against that of scaled_dot_product_attention", seen.dtype, control.dtype)
    exact = F.scaled_dot_product_attention(*(x.double() for x in tensors))
    # Twice the bound: the operands in float32 are rounded as well.
    bound = 2 * attention_window(FORMATS[amp_dtype])[1]
    case.at_most("error by norm", normwise_error(seen, exact), bound)
    case.at_most("error by norm of scaled_dot_product_attention (control)", normwise_error(control, exact), bound)
    if error is None and len(low) in (0, 3):
        with target.autocast(amp_dtype):
            sums = log_sums_of_flex_attention(*tensors)
        if sums is not None:
            query, key, _ = (x.double() / 16**0.25 for x in tensors)
            right = (query @ key.transpose(-1, -2)).logsumexp(-1)
            # Each operand is rounded, and the score: an error of a score is at most that of all, which are summed.
            largest = float((query.abs() @ key.abs().transpose(-1, -2)).max())
            bound = 4 * FORMATS[amp_dtype].unit_roundoff * largest
            case.at_most("error of the log-sum-exp of a row", float((sums.double() - right).abs().max()), bound)


def _before(score: torch.Tensor, _: object, __: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.where(query >= key, score, -float("inf"))


# Options of flex_attention, and those of scaled_dot_product_attention that are to give the same.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped-heads": ({"enable_gqa": True}, {"enable_gqa": True}),
    "scale": ({"scale": 0.75}, {"scale": 0.75}),
    "causal-scores": ({"score_mod": _before}, {"is_causal": True}),
    "causal-scores-of-grouped-heads": ({"score_mod": _before, "enable_gqa": True}, {"is_causal": True}),
}


@contract("AMP-CAST-097", on="cpu")
@pytest.mark.parametrize("name", [deep("standard", name) for name in OPTIONS])
@pytest.mark.parametrize("region", [False, True], ids=["outside", "in-a-region"])
def test_options_of_flex_attention(
    case: Case, target: Target, amp_dtype: torch.dtype, name: str, region: bool, rng: torch.Generator
) -> None:
    ours, theirs = OPTIONS[name]
    heads = 2 if "enable_gqa" in ours else 4
    kind = torch.float32 if region else amp_dtype
    query, key, value = (
        torch.randn(1, count, 16, 16, generator=rng).to(target.device, kind) for count in (4, heads, heads)
    )
    with target.autocast(amp_dtype, enabled=region):
        seen = flex_attention(query, key, value, **ours)
    case.equal("dtype", seen.dtype, amp_dtype)
    repeated = [one.double().repeat_interleave(4 // heads, 1) for one in (key, value)]
    options = {key: one for key, one in theirs.items() if key != "enable_gqa"}
    exact = F.scaled_dot_product_attention(query.double(), *repeated, **options)
    case.at_most("error by norm", normwise_error(seen, exact), 2 * attention_window(FORMATS[amp_dtype])[1])


def _grouped(target: Target, form: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Return float32 operands of a grouped product and the ends of its groups."""

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=target.device)

    ends = torch.tensor([16, 32], dtype=torch.int32, device=target.device)
    return {
        "2d-2d": ((ones(16, 32), ones(16, 32).t()), ends),
        "2d-3d": ((ones(32, 16), ones(2, 16, 16).transpose(1, 2)), ends),
        "3d-2d": ((ones(2, 16, 16), ones(32, 16).t()), ends),
        "3d-3d": ((ones(2, 16, 16), ones(2, 16, 16).transpose(1, 2)), None),
    }[form]


def _grouped_spellings() -> dict[str, Callable[..., Any]]:
    """Return the public function, which came later, and the private one."""
    found = {"functional": getattr(F, "grouped_mm", None), "private": getattr(torch, "_grouped_mm", None)}
    return {name: call for name, call in found.items() if call is not None}


@contract("AMP-CAST-098", on=("cpu", "fake:cuda", "cuda"))
@pytest.mark.parametrize("mixture", ["16-bit", "mixed"])
@pytest.mark.parametrize(
    "form", [deep("standard", "2d-2d"), "2d-3d", deep("standard", "3d-2d"), deep("standard", "3d-3d")]
)
def test_grouped_products(case: Case, target: Target, amp_dtype: torch.dtype, form: str, mixture: str) -> None:
    with mode_of(target), quiet():
        operands, ends = _grouped(target, form)
        low = tuple(x.to(amp_dtype) for x in operands)
        mixes = (
            {"both": low} if mixture == "16-bit" else {"left": (low[0], operands[1]), "right": (operands[0], low[1])}
        )
        found: dict[str, Any] = {}
        for spelling, call in _grouped_spellings().items():
            try:
                call(*low, offs=ends)
            except (RuntimeError, NotImplementedError) as error:
                case.unsupported(f"no grouped product of {amp_dtype} here: {error}")
            for name, mix in mixes.items():
                with target.autocast(amp_dtype):
                    try:
                        found[f"{spelling}, 16-bit: {name}"] = call(*mix, offs=ends).dtype
                    except RuntimeError as error:
                        found[f"{spelling}, 16-bit: {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    case.equal("dtypes of the product", found, dict.fromkeys(found, amp_dtype))


@contract("AMP-CAST-117")
@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_causal_biases(case: Case, target: Target, amp_dtype: torch.dtype, corner: str, rng: torch.Generator) -> None:
    from torch.nn.attention import bias

    wrong, refused, unit = [], [], FORMATS[amp_dtype].unit_roundoff
    for (queries, keys), low in itertools.product(((5, 5), (3, 9), (9, 3), (1, 6)), LOW):
        shapes = {"query": queries, "key": keys, "value": keys}
        given = [torch.randn(1, 2, shapes[name], 8, generator=rng) for name in OPERANDS]
        tensors = [
            one.to(target.device, amp_dtype if name in low else torch.float32).requires_grad_()
            for name, one in zip(OPERANDS, given, strict=True)
        ]
        open_ones = torch.ones(queries, keys, dtype=torch.bool).tril(0 if corner == "upper_left" else keys - queries)
        what = f"{queries} queries, {keys} keys, {' and '.join(low) or 'none'} in 16 bits"
        masks = getattr(bias, f"causal_{corner}")(queries, keys), open_ones.to(target.device)
        with target.autocast(amp_dtype):
            expected_result = F.scaled_dot_product_attention(*tensors, attn_mask=masks[1])
            try:
                result = F.scaled_dot_product_attention(*tensors, attn_mask=masks[0])
            except ValueError as error:
                refused.append(f"{what}: {str(error).splitlines()[0]}")
                continue
        results = result, expected_result
        pairs = [(one, *torch.autograd.grad(one.float().nan_to_num().sum(), tensors)) for one in results]
        for name, seen, expected in zip(("result", *OPERANDS), *pairs, strict=True):
            # Two kernels may round the probabilities and the result each their own way.
            alike = torch.allclose(seen.float(), expected.float(), rtol=16 * unit, atol=16 * unit, equal_nan=True)
            if seen.dtype != expected.dtype or not alike:
                wrong.append(f"{what}: {name}")
    case.equal("what is not as with the mask in a tensor", wrong[:5], [])
    case.equal("calls that are refused, and not with the mask in a tensor", refused[:2], [])
