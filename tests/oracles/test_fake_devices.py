"""Paper devices: numbers as on the CPU, devices as claimed, operands of several refused, moves and reads noted."""

from __future__ import annotations

import pytest
import torch

from conformance.oracles.fake_devices import PaperDevices, PaperTensor
from conformance.workloads.gradients import LAYOUTS, held, holding


def test_operations_compute_and_stay_on_their_device() -> None:
    with PaperDevices() as devices:
        here = devices.tensor([3.0, 4.0], 1)
        norm = torch.linalg.vector_norm(here)
        here.mul_(2.0)
        made = torch.full((), 7.0, device=devices.device(0))

    assert isinstance(norm, PaperTensor)
    assert isinstance(here, PaperTensor)
    assert isinstance(made, PaperTensor)
    assert (norm.device, norm.numbers.item()) == (devices.device(1), 5.0)
    assert (here.device, here.numbers.tolist()) == (devices.device(1), [6.0, 8.0])
    assert (made.device, made.numbers.item()) == (devices.device(0), 7.0)


@pytest.mark.parametrize("other", ["paper", "cpu", "cpu in a foreach kernel"])
def test_operands_of_several_devices_are_refused(other: str) -> None:
    with PaperDevices() as devices:
        here = devices.tensor([1.0, 2.0], 0)
        there = devices.tensor(1.0, 1) if other == "paper" else torch.ones(2 if other == "cpu" else ())

        with pytest.raises(RuntimeError, match="same device"):
            if "foreach" in other:
                torch._foreach_mul_([here], there)
            else:
                here.mul_(there)


def test_scalars_of_the_cpu_are_taken() -> None:
    with PaperDevices() as devices:
        product = devices.tensor([1.0, 2.0], 0) * torch.tensor(3.0)

    assert isinstance(product, PaperTensor)
    assert product.numbers.tolist() == [3.0, 6.0]


def test_moves_and_reads_are_noted() -> None:
    with PaperDevices() as devices:
        here = devices.tensor([1.0], 0)
        there, host, same = here.to(devices.device(1)), here.to("cpu"), here.to(devices.device(0))
        value = there.item()

    assert same is here
    assert (type(host), there.device, value) == (torch.Tensor, devices.device(1), 1.0)
    assert devices.moves == [(devices.device(0), devices.device(1)), (devices.device(0), torch.device("cpu"))]
    assert devices.reads == [devices.device(1)]


def test_outside_of_the_mode_nothing_is_computed() -> None:
    with PaperDevices() as devices:
        here = devices.tensor([1.0], 0)

    with pytest.raises(RuntimeError, match="outside of PaperDevices"):
        here.add(1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_values(layout: str) -> None:
    values = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)

    made = LAYOUTS[layout](values)

    assert torch.equal(made, values)
    assert made.data_ptr() != values.data_ptr()
    assert made.is_contiguous() == (layout in ("contiguous", "part of a flat buffer"))


def test_parameters_hold_the_very_gradients() -> None:
    gradient = torch.ones(3, dtype=torch.float64)

    parameters = holding([gradient, None])

    assert parameters[0].grad is gradient
    assert (parameters[0].dtype, parameters[1].grad) == (torch.float64, None)
    assert [one.tolist() for one in held(parameters)] == [[1.0, 1.0, 1.0]]
