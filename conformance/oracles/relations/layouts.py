"""Make programs of tensors that are not dense and strided: sparse, nested, complex, expanded, empty, transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .programs import Program, program

SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: x.to_sparse_coo(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}
# Forms of a dense (4, 6) matrix with the same entries, or with none.
_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded-0": lambda x: x.sum().expand(x.shape),
    "subclass": lambda x: torch.nn.Parameter(x, requires_grad=False),
}
_MATRIX_CALLS: dict[str, Callable[..., Any]] = {
    "mm": torch.mm,
    "matmul": torch.matmul,
    "operator": lambda a, b: a @ b,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "linear": lambda a, b: F.linear(a, b.t()),
    "addmm": lambda a, b: torch.addmm(a.new_ones(a.shape[0], b.shape[1]), a, b),
    "mv": lambda a, b: torch.mv(a, b[:, 0]),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "inner": lambda a, b: torch.inner(a, b.t()),
    "chain_matmul": lambda a, b: torch.linalg.multi_dot([a, b]),
    "cdist": lambda a, b: torch.cdist(a, b.t()),
    "sum": lambda a, b: a.sum(1),
    "softmax": lambda a, b: a.softmax(1),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[1:]),
    "cat": lambda a, b: torch.cat([a, b.t()]),
    "exp": lambda a, b: a.exp(),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "mse_loss": lambda a, b: F.mse_loss(a, b.t()),
}
_SPARSE_CALLS: dict[str, Callable[..., Any]] = {
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "operator": lambda s, d: s @ d,
    "matmul": torch.matmul,
    "mv": lambda s, d: torch.mv(s, d[:, 0]),
    "addmm": lambda s, d: torch.addmm(d.new_ones(s.shape[0], d.shape[1]), s, d),
    "sparse.addmm": lambda s, d: torch.sparse.addmm(d.new_ones(s.shape[0], d.shape[1]), s, d),
    "linear": lambda s, d: F.linear(d.t().contiguous(), s),
    "sum": lambda s, d: torch.sum(s),
    "to_dense": lambda s, d: s.to_dense(),
    "times 2": lambda s, d: s * 2.0,
    "relu": lambda s, d: torch.relu(s),
    "sin": lambda s, d: torch.sin(s),
}
_COO_CALLS: dict[str, Callable[..., Any]] = {
    "sparse.sum": lambda s, d: torch.sparse.sum(s, 1),
    "sparse.softmax": lambda s, d: torch.sparse.softmax(s, 1),
    "sparse.log_softmax": lambda s, d: torch.sparse.log_softmax(s, 1),
    "cat": lambda s, d: torch.cat([s, s]),
    "add": lambda s, d: s + s,
    "smm": torch.smm,
    "hspmm": torch.hspmm,
    "bmm": lambda s, d: torch.bmm(torch.stack([s, s]), torch.stack([d, d])),
}
_COMPLEX_CALLS: dict[str, Callable[..., Any]] = {
    **{name: _MATRIX_CALLS[name] for name in ("mm", "matmul", "operator", "einsum", "addmm", "mv", "bmm")},
    "inner": lambda a, b: torch.inner(a, b.t()),
    "prod": lambda a, b: a.prod(1),
    "exp": lambda a, b: a.exp(),
    "pow": lambda a, b: a.pow(2),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "cat with float32": lambda a, b: torch.cat([a, b.t().real]),
    "times float32": lambda a, b: a * b.t().real,
    "linear": lambda a, b: F.linear(a, b.t()),
    "conv1d": lambda a, b: F.conv1d(a[None], b.reshape(3, 4, 2)),
}
_NESTED_CALLS: dict[str, Callable[..., Any]] = {
    "linear": lambda n, w: F.linear(n, w),
    "linear-bias": lambda n, w: F.linear(n, w, w.new_ones(w.shape[0])),
    "matmul": lambda n, w: torch.matmul(n, w.t()),
    "softmax": lambda n, w: torch.softmax(n, -1),
    "layer_norm": lambda n, w: F.layer_norm(n, (w.shape[1],)),
    "relu": lambda n, w: F.relu(n),
    "gelu": lambda n, w: F.gelu(n),
    "exp": lambda n, w: n.exp(),
    "pow": lambda n, w: n.pow(2),
    "sum": lambda n, w: n.sum(-1),
    "add": lambda n, w: n + n,
    "dropout": lambda n, w: F.dropout(n, 0.5),
    "padded": lambda n, w: torch.nested.to_padded_tensor(n, 0.0),
}


def layout_programs() -> dict[str, Callable[[], Iterator[Program]]]:
    """Return makers of float32 programs on the CPU, one per call; each program is of one layout or form."""
    made: dict[str, Callable[[], Iterator[Program]]] = {}
    for kind, make, calls in (
        ("dense", _dense, _MATRIX_CALLS),
        ("complex", _complex, _COMPLEX_CALLS),
        ("nested", _nested, _NESTED_CALLS),
    ):
        made |= {f"{kind}.{name}": partial(make, f"{kind}.{name}", call) for name, call in calls.items()}
    for layout in SPARSE:
        own = _COO_CALLS if layout == "coo" else {}
        for name, call in (_SPARSE_CALLS | own).items():
            made[f"{layout}.{name}"] = partial(_sparse, f"{layout}.{name}", layout, call)
    return made


def _matrices(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape[0], shape[1], generator=generator), torch.randn(shape[1], shape[2], generator=generator)


def _dense(name: str, call: Callable[..., Any]) -> Iterator[Program]:
    for shape in ((4, 6, 4), (0, 6, 4), (4, 0, 4), (1, 1, 1)):
        a, b = _matrices(*shape)
        yield program(name, call, (a, b), {})
        for form in _FORMS.values() if a.numel() else ():
            yield program(name, call, (form(a), b), {})
            yield program(name, call, (a, form(b)), {})


def repeated(x: Tensor) -> Tensor:
    """Return a COO tensor that has each entry twice, half of it each time."""
    once = x.to_sparse_coo().coalesce()
    indices, values = once.indices(), once.values()
    return torch.sparse_coo_tensor(torch.cat([indices, indices], 1), torch.cat([values / 2, values / 2]), x.shape)


def _sparse(name: str, layout: str, call: Callable[..., Any]) -> Iterator[Program]:
    a, b = _matrices(4, 6, 2)
    yield program(name, call, (SPARSE[layout](a * (a > 0)), b), {})
    if layout == "coo":
        yield program(name, call, (repeated(a * (a > 0)), b), {})


def _complex(name: str, call: Callable[..., Any]) -> Iterator[Program]:
    a, b = _matrices(4, 6, 4)
    yield program(name, call, (torch.complex(a, a), torch.complex(b, b)), {})


def _nested(name: str, call: Callable[..., Any]) -> Iterator[Program]:
    a, b = _matrices(9, 6, 5)
    offsets = torch.tensor([0, 2, 9])

    def jagged(values: Tensor, weight: Tensor) -> Any:
        made = call(torch.nested.nested_tensor_from_jagged(values, offsets), weight)
        return made.values() if made.is_nested else made

    yield program(name, jagged, (a, b.t().contiguous()), {})
