"""Child processes send what they find; one that says nothing is given up on."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from conformance.chapters.region.child_process import backend_registration, send_state
from conformance.measure.children import started
from conformance.oracles.region.stack_model import observe

pytestmark = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


def say_nothing(sender: Any) -> None:
    import time

    time.sleep(60)


def tell(sender: Any) -> None:
    sender.send(backend_registration())


def test_a_fork_is_a_copy() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert started("fork", send_state, 60) == observe()


def test_a_child_that_says_nothing() -> None:
    with pytest.raises(TimeoutError, match=r"fork said nothing within 0\.1 s"):
        started("fork", say_nothing, 0.1)


def test_the_story_of_a_backend() -> None:
    story = started("fork", tell, 60)

    assert [story[when][0] for when in ("without a module", "without the function")] == ["AssertionError"] * 2
    assert story["torch.bfloat16"] == (True, torch.bfloat16, [])
    assert story["torch.float16"][0] is False
    assert not hasattr(torch, "conformant")
