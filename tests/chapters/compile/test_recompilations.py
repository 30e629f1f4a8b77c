"""Check that code which is no longer compiled is an error in the checks of compiled programs, and not beyond them."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.compile import support
from conformance.harness.catalogue import load
from conformance.harness.check import Case
from conformance.measure.compilers import without_torch_compile

pytestmark = pytest.mark.skipif(bool(without_torch_compile()), reason="torch.compile does not work here")
LIMIT = 2


def _compiled_for(sizes: int) -> None:
    double = torch.compile(lambda x: x + x, backend="eager", dynamic=False)
    for size in range(2, 2 + sizes):
        double(torch.ones(size))


def test_code_beyond_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "RECOMPILATIONS", LIMIT)
    case = Case(load().contracts["AMP-COMPILE-001"], level="quick", seed=0, substitutions={})

    with support.compiler(case):
        _compiled_for(LIMIT)
    with support.compiler(case), pytest.raises(Exception, match="limit"):
        _compiled_for(LIMIT + 2)


def test_limit_of_the_user_is_put_back() -> None:
    before = torch._dynamo.config.cache_size_limit
    case = Case(load().contracts["AMP-COMPILE-001"], level="quick", seed=0, substitutions={})

    with support.compiler(case):
        assert torch._dynamo.config.cache_size_limit == support.RECOMPILATIONS

    assert torch._dynamo.config.cache_size_limit == before
