"""The emulated card as a plugin of pytest (-p tests.emulated.plugin), which the workers of xdist load too."""

from __future__ import annotations

from tests.emulated.loading import load

_card = load()

from tests.emulated import cuda  # noqa: E402  (torch comes after the card)

cuda.install(_card)
