"""Ranks answer, and one that raises, dies or hangs is named within a deadline; none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from conformance.chapters.distributed import processes
from conformance.chapters.distributed.processes import Groups, NoGroup, Raised, RankLost, Ranks
from conformance.measure.children import start_method
from tests.chapters.distributed import ranks
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(processes.lacking() is not None, reason="torch without gloo")


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


def gone(pid: int | None) -> bool:
    """Whether a process has ended; one that waits to be reaped has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_every_rank_answers_and_groups_do_not_disturb_one_another(groups: Groups) -> None:
    other = Ranks(2)
    try:
        assert groups(2).call(ranks.total, 1) == [3.0, 3.0]
        assert groups(4).call(ranks.total, 0) == [6.0] * 4
        assert other.call(ranks.total, 2) == [5.0, 5.0]
        assert groups(2).call(ranks.total, 5) == [11.0, 11.0]
    finally:
        other.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ranks_that_are_not_forked_answer(method: str) -> None:
    group = Ranks(2, method)
    try:
        assert group.call(ranks.total, 1) == [3.0, 3.0]
    finally:
        group.close()


def test_an_exception_is_an_answer_and_ends_the_group(groups: Groups) -> None:
    first = groups(2)
    fine, raised = first.call(ranks.raises, 1)

    assert fine == "fine"
    assert isinstance(raised, Raised)
    assert raised.kinds[:2] == ("KeyError", "LookupError")
    assert "mine" in raised.message
    assert not first.alive
    assert groups(2).call(ranks.total, 0) == [1.0, 1.0]


@pytest.mark.skipif(start_method() != "fork", reason="what is put in place reaches forked ranks only")
def test_ranks_that_cannot_join_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "backend_of", lambda device_type: "no_such_backend")
    group = Ranks(2)

    with pytest.raises(NoGroup, match=r"rank [01] of 2 cannot join a process group: \w+: .*no_such_backend"):
        group.call(ranks.total, 1)
    assert not group.alive


def test_a_rank_that_dies_is_named(groups: Groups) -> None:
    with pytest.raises(RankLost, match=r"rank 1 of 2 was killed by signal 9"):
        groups(2).call(ranks.dies, 1)
    assert groups(2).call(ranks.total, 0) == [1.0, 1.0]


def test_a_rank_that_hangs_is_named(groups: Groups) -> None:
    group = groups(2)
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not answer within 1 s"):
        group.call(ranks.hangs, 1, patience=1.0)
    assert [gone(pid) for pid in group.pids] == [True, True]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(ending: signal.Signals) -> None:
    script = (
        "from conformance.chapters.distributed.processes import Ranks\n"
        "from tests.chapters.distributed import ranks\n"
        "group = Ranks(2)\n"
        "group.call(ranks.total, 0)\n"
        "print(*group.pids, flush=True)\n"
        "group.call(ranks.hangs, 1)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pids = [int(one) for one in parent.stdout.readline().split()]
    os.kill(parent.pid, ending)
    parent.wait()
    parent.stdout.close()

    end = time.monotonic() + 30
    while not all(gone(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 2
    assert [gone(pid) for pid in pids] == [True, True]
