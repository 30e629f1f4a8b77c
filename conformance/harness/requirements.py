"""What must be there before anything of torch can be judged or asked, in the words for who lacks it."""

from __future__ import annotations

import warnings

from ..data import in_force

OLDEST_TORCH = "2.6"
_WHERE = "(https://pytorch.org/get-started/locally/)"


def torch_problem() -> str | None:
    """Import torch; return in one line why it cannot be used, None where it can."""
    try:
        with warnings.catch_warnings():
            # It warns where numpy is not installed, which -W may turn into an error.
            warnings.simplefilter("default")
            import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return f"torch cannot be imported: {error}"
        return (
            "torch is not installed; this suite judges the torch that is there and never installs one. "
            f"Install PyTorch {OLDEST_TORCH} or newer for your machine {_WHERE}"
        )
    except Exception as error:  # half an installation may raise anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"torch is installed but cannot be imported: {first}"
    if not in_force(torch.__version__, since=OLDEST_TORCH):
        return f"torch {torch.__version__} is too old: the suite needs {OLDEST_TORCH} or newer {_WHERE}"
    return None
