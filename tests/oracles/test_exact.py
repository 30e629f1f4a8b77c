"""The float64 references agree with torch's own float64 kernels, which they do not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conformance.oracles.numbers import exact


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _integers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=generator).double()


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=["matrix", "batch", "two batches"])
def test_product(generator: torch.Generator, batch: tuple[int, ...]) -> None:
    left, right = _integers(generator, *batch, 5, 7), _integers(generator, *batch, 7, 3)

    assert torch.equal(exact.product(left, right), left @ right)


@pytest.mark.parametrize(("m", "k", "n"), [(400, 3, 2), (2, 400, 3), (3, 2, 400), (70, 60, 50), (1, 1, 1), (0, 3, 2)])
def test_products_of_every_shape(generator: torch.Generator, m: int, k: int, n: int) -> None:
    """Those that are longest in each dimension, and one that is too large for one piece."""
    left, right = _integers(generator, m, k), _integers(generator, k, n)

    assert torch.equal(exact.product(left, right), left @ right)


_CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]] = {
    "1d": ((2, 4, 11), (6, 4, 3), {"padding": 1}),
    "strided": ((2, 4, 9, 10), (6, 4, 3, 2), {"stride": 2, "padding": 2}),
    "dilated and grouped": ((2, 6, 9, 10), (4, 3, 3, 2), {"dilation": 2, "groups": 2}),
    "depthwise": ((2, 6, 5, 4), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
    "3d": ((1, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"padding": 1}),
}


@pytest.mark.parametrize(("image", "weight", "options"), _CONVOLUTIONS.values(), ids=_CONVOLUTIONS)
def test_convolution_and_its_gradients(
    generator: torch.Generator, image: tuple[int, ...], weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    sources = [_integers(generator, *shape) for shape in (image, weight, weight[:1])]
    ours, theirs = ([source.clone().requires_grad_() for source in sources] for _ in range(2))
    seen = exact.convolution(*ours, **options)
    expected = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(image)](*theirs, **options)
    seed = _integers(generator, *expected.shape)
    seen.backward(seed)
    expected.backward(seed)

    assert torch.equal(seen, expected)
    assert all(torch.equal(our.grad, their.grad) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("weight", "options"),
    [((4, 3, 3, 2), {"stride": 2, "padding": 1}), ((4, 3, 2, 2), {"groups": 2, "dilation": 2})],
    ids=["strided", "grouped"],
)
def test_transposed_convolution_and_its_gradients(
    generator: torch.Generator, weight: tuple[int, ...], options: dict[str, Any]
) -> None:
    sources = [_integers(generator, 2, 4, 5, 6), _integers(generator, *weight)]
    ours, theirs = ([source.clone().requires_grad_() for source in sources] for _ in range(2))
    seen = exact.transposed_convolution(*ours, **options)
    expected = F.conv_transpose2d(*theirs, **options)
    seed = _integers(generator, *expected.shape)
    seen.backward(seed)
    expected.backward(seed)

    assert torch.equal(seen, expected)
    assert all(torch.equal(our.grad, their.grad) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_attention(generator: torch.Generator, is_causal: bool) -> None:
    query, key, value = torch.randn(3, 2, 5, 5, 8, generator=generator, dtype=torch.float64).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    torch.testing.assert_close(exact.attention(query, key, value, is_causal=is_causal), expected)


def test_layer_norm(generator: torch.Generator) -> None:
    rows = torch.randn(3, 17, generator=generator, dtype=torch.float64)

    torch.testing.assert_close(exact.layer_norm(rows), F.layer_norm(rows, (17,)))


@pytest.mark.parametrize(
    ("first", "unit", "expected"),
    [(2048.0, 2.0**-11, 2048.0), (256.0, 2.0**-8, 256.0), (1024.0, 2.0**-11, 1034.0)],
    ids=["swamped fp16", "swamped bf16", "in range"],
)
def test_sixteen_bit_sum(first: float, unit: float, expected: float) -> None:
    assert exact.sixteen_bit_sum(first, 1.0, 10, unit) == expected
