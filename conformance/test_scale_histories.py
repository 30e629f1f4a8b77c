"""Loss scaling: random histories of calls, each compared with a model of GradScaler's rules."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import torch

from conformance.harness.check import Case, contract
from conformance.harness.targets import Target
from conformance.oracles.scaler_history import departure, histories

# Shorter histories that are tried once one has departed from the model; what was found by then is reported.
SHRINK_ATTEMPTS = 200


@contract("AMP-SCALE-150")
def test_histories(case: Case, target: Target) -> None:
    try:
        torch.zeros(1, dtype=torch.float64, device=target.device)
    except (RuntimeError, TypeError) as error:  # mps has no fp64, in which the reciprocal is taken
        case.unsupported(f"{target.device_type} has no {torch.float64} tensors: {error}")
    settings = hypothesis.settings(
        max_examples=case.samples(quick=25, standard=60, full=300),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    calls: list[int] = []
    departing: list[Any] = []
    attempts = 0

    def departs(history: Any) -> bool:
        nonlocal attempts
        attempts += bool(departing)
        if attempts > SHRINK_ATTEMPTS:
            return history in departing
        calls.append(len(history.calls))
        if departure(history, target.device) is None:
            return False
        departing.append(history)
        return True

    try:
        history = hypothesis.find(
            histories(),
            departs,
            settings=settings,
            random=random.Random(case.seed),
        )
    except hypothesis.errors.NoSuchExample:
        case.note("random histories", len(calls))
        case.note("calls compared", sum(calls))
        case.equal("histories that depart from the model", 0, 0)
        return
    found = departure(history, target.device)
    case.true("the shortest history found that departs from the model", False, f"{history.settings}: {found}")
