"""Check that the suite's table holds every optimizer of torch.optim, and record their forms."""

from __future__ import annotations

import inspect

import torch

from ...harness.check import Case, contract
from ...workloads.optimizer_classes import present
from .optimizer_configs import configs, listed, reached, takes_closure


@contract("AMP-OPTIMIZER-001")
def test_every_optimizer_is_known(case: Case) -> None:
    found = present()
    due = [name for name, since in listed().items() if reached(since)]
    case.equal("optimizers of the table that torch.optim lacks", [name for name in due if name not in found], [])
    case.note("optimizers run with default arguments, not in the table", [n for n in found if n not in listed()])
    case.at_least("optimizers found", len(found), len(due))


@contract("AMP-OPTIMIZER-002")
def test_forms_of_every_optimizer(case: Case) -> None:
    flags = ("foreach", "fused", "capturable", "differentiable")
    known = {"lr", "weight_decay", "maximize", "eps", "betas", "momentum", *flags}
    every = list(configs(implementations=("for-loop", "foreach", "fused", "default")))
    case.note("optimizers", len(present()))
    case.note("optimizers that require a closure", [name for name in present() if takes_closure(name)])
    case.note("optimizers and implementations", len({(kind.optimizer, kind.implementation) for kind in every}))
    case.note("optimizers, implementations and sets of arguments", len(every))
    for flag in flags:
        takers = [name for name in present() if flag in inspect.signature(getattr(torch.optim, name)).parameters]
        case.note(f"optimizers that take {flag}", takers)
    own = {name for kind in every for name in inspect.signature(getattr(torch.optim, kind.optimizer)).parameters}
    case.note("arguments that are specific to one optimizer", sorted(own - known - {"params"}))
