"""Check what 16-bit results of a region may be passed to after it, or where it is disabled."""

from __future__ import annotations

import pytest
import torch

from ...harness.check import Case, contract
from ...harness.targets import Target
from .ranks_and_options import FAMILIES, Form

pytestmark = pytest.mark.usefixtures("one_thread")


def _error(form: Form, target: Target, dtype: torch.dtype, rng: torch.Generator) -> str | None:
    """Call one form in a disabled region, and backward; return what torch raises."""
    shape, call = form
    x = torch.randn(shape, generator=rng).to(target.device, dtype).requires_grad_()
    try:
        with target.autocast(dtype, enabled=False):
            result = call(x)
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


@contract("AMP-CAST-114", on="cpu")
@pytest.mark.parametrize("family", FAMILIES)
def test_types_do_not_depend_on_rank(case: Case, target: Target, rng: torch.Generator, family: str) -> None:
    forms = FAMILIES[family]
    for dtype in case.supported(target):
        wide = {name: _error(form, target, torch.float32, rng) for name, form in forms.items()}
        case.equal("calls that refuse float32 (control)", {name for name, text in wide.items() if text}, set())
        low = {name: text for name, form in forms.items() if (text := _error(form, target, dtype, rng))}
        taken = [name for name in forms if name not in low]
        case.equal(f"calls that refuse {dtype} where {', '.join(taken[:2])} take it", low if taken else {}, {})
