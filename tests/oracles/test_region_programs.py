"""Programs of regions: their source, what the model says of written-out ones, and that a broken region is seen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance.oracles.region.programs import (
    WAYS,
    Block,
    Jump,
    Machine,
    Open,
    Player,
    Program,
    Set,
    Sight,
    Token,
    parting,
    predicted,
    program_of,
    restore_state,
)
from conformance.oracles.region.stack_model import Region, observe

CPU = Region("cpu", torch.bfloat16)
OFF = Region("cpu", enabled=False)


@pytest.fixture
def player() -> Iterator[Player]:
    base = observe()
    with Player(Machine(torch.device("cpu"), base, base, absent=frozenset({"cuda"}))) as made:
        yield made


def types(sights: list[Sight]) -> dict[str, torch.dtype | None]:
    return {sight.place: sight.product for sight in sights}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_runs_its_body_once_and_in_the_region(player: Player, way: str) -> None:
    sights = player.played(Program((Open(0, way, CPU, ()),)).code)

    assert [sight.place for sight in sights] == ["in 0", "after 0", "end"]
    assert types(sights) == {"in 0": torch.bfloat16, "after 0": torch.float32, "end": torch.float32}


@pytest.mark.parametrize("way", WAYS)
def test_the_model_leaves_by_every_jump(player: Player, way: str) -> None:
    for kind in ("ValueError", "KeyboardInterrupt", "SystemExit", *(("return",) if WAYS[way].is_function else ())):
        around = Block(0, "try", (Open(1, way, CPU, (Jump(2, kind),)),), catches="BaseException")
        program = Program((around,))

        assert player.mismatch(program) is None
        assert ("caught 0" in types(predicted(program, player.machine))) is (kind != "return")


def test_the_model_of_a_written_out_program(player: Player) -> None:
    inner = Open(2, "with", OFF, (Jump(3, "continue"),))
    program = Program((Open(0, "function", CPU, (Block(1, "loop", (inner,)), Jump(4, "return"))),))
    sights = predicted(program, player.machine)

    assert [sight.place for sight in sights] == ["in 0", "in 1", "in 2", "in 1", "in 2", "after 1", "after 0", "end"]
    assert types(sights)["after 1"] is torch.bfloat16
    assert types(sights)["in 2"] is torch.float32
    assert [sight.state.depth for sight in sights] == [1, 1, 2, 1, 2, 1, 0, 0]
    assert player.mismatch(program) is None


def test_an_instance_is_settled_when_it_is_made(player: Player) -> None:
    program = Program((Open(0, "with", Region("cpu", torch.float16), (Open(1, "with", CPU, (), shared=0),)),), (OFF,))

    assert types(predicted(program, player.machine))["in 1"] is torch.float32
    assert predicted(program, player.machine)[1].state.settings["cpu"].dtype is torch.bfloat16
    assert player.mismatch(program) is None


def test_source_can_be_read() -> None:
    program = Program((Open(0, "with", CPU, (Set(1, "xpu", True), Jump(2, "ValueError"))),))

    assert program.source.splitlines() == [
        "with torch.autocast('cpu', dtype=torch.bfloat16):",
        "    see('in 0')",
        "    torch.set_autocast_enabled('xpu', True)",
        "    see('after 1')",
        "    raise ValueError",
        "see('after 0')",
        "see('end')",
    ]


def test_script_needs_torch_alone(capsys: pytest.CaptureFixture[str]) -> None:
    thread = Block(1, "thread", ())
    exec(Program((Open(0, "function", CPU, (thread,)),)).script("cpu"), {})

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["in 0 True torch.bfloat16 True", f"in 1 False {torch.get_autocast_dtype('cpu')} True"]
    assert lines[-1].startswith("end False")


def test_tokens_that_are_not_legal_are_left_out() -> None:
    def token(op: str, flag: bool = True) -> Token:
        return Token(op, "with", CPU, flag)

    assert program_of([token("end"), token("return"), token("jump")]).statements == ()
    opened = program_of([token("open"), token("raise"), token("end"), token("set", flag=False)]).statements
    assert opened == (Open(0, "with", CPU, (Jump(1, "ValueError"),)), Set(3, "cpu", True))
    nested = program_of([token("reuse"), token("reuse")])
    assert nested == Program((Open(0, "with", CPU, (), shared=1),), (CPU, CPU))


def test_a_broken_region_departs(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((Open(0, "with", CPU, ()),))
    monkeypatch.setattr(torch, "set_autocast_cache_enabled", lambda enabled: None)
    monkeypatch.setattr(torch.autocast, "__exit__", lambda self, *error: False)

    found = player.mismatch(program)

    assert found is not None
    assert "after 0: enabled for cpu is True, not False" in found


def test_parting_tells_a_place_that_is_not_reached() -> None:
    here = Sight("in 0", observe(), torch.float32)

    assert parting([here], [here]) is None
    assert parting([here], [Sight("in 1", here.state, here.product)]) == "in 0 is reached, not in 1"
    assert parting([], [here]) == "0 places are reached, not 1"


def test_everything_is_put_back() -> None:
    before = observe()
    torch.set_autocast_enabled("xpu", True)
    torch.autocast("cpu", cache_enabled=False).__enter__()

    restore_state(before)

    assert observe() == before


def test_an_interrupt_that_is_caught_ends_no_process(root: Path) -> None:
    script = """
from conformance.oracles.region.programs import Jump, Program
try:
    exec(Program((Jump(1, "KeyboardInterrupt"),)).code, {"see": print})
except KeyboardInterrupt:
    pass
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
