"""The chains from elementwise products agree with torch's own ops in float64."""

from __future__ import annotations

import pytest
import torch

from conformance.chapters.backward.exact_chains import EXACT
from conformance.chapters.backward.op_chains import CHAINS, Chain


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if chain.name in EXACT], ids=lambda chain: chain.name)
def test_values_and_gradients(chain: Chain) -> None:
    generator = torch.Generator().manual_seed(5)
    drawn = chain.leaves(lambda shape: torch.randn(shape, generator=generator), torch.device("cpu"))
    ours = {name: leaf.detach().double().requires_grad_() for name, leaf in drawn.items()}
    theirs = {name: leaf.detach().double().requires_grad_() for name, leaf in drawn.items()}

    output, expected = EXACT[chain.name](ours), chain.autocast(theirs)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    output.square().sum().backward()
    expected.square().sum().backward()
    for name, leaf in ours.items():
        torch.testing.assert_close(leaf.grad, theirs[name].grad, rtol=1e-9, atol=1e-9)


def test_every_chain_is_known() -> None:
    assert set(EXACT) <= {chain.name for chain in CHAINS}
