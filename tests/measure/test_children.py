"""Check what is told of processes that end before their time."""

from __future__ import annotations

import os
from typing import Any

from conformance.measure.children import told

PATIENCE = 60.0


def _ends(sender: Any) -> None:
    sender.send("one")
    sender.send("two")
    os._exit(7)


def _sends_its_environment(sender: Any) -> None:
    sender.send(os.environ.get("CHILD"))


def test_all_that_was_said_before_the_end_is_told() -> None:
    assert told(_ends, PATIENCE) == (["one", "two"], 7)
    assert told(_ends, PATIENCE, method="spawn") == (["one", "two"], 7)


def test_spawned_process_has_the_environment_of_now(monkeypatch: Any) -> None:
    monkeypatch.setenv("CHILD", "of now")
    assert told(_sends_its_environment, PATIENCE, method="spawn") == (["of now"], 0)
