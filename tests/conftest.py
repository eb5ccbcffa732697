"""Shared fixtures, skips for programs that are missing, and no silent skip in CI."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# No time limits for Hypothesis: a busy machine must not fail a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# The libraries' objects are many and stay: the search for cycles among them is a tenth of the processor time.
gc.set_threshold(50_000, 20, 20)

MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30


def _use_memory() -> None:
    """Puts the tests' folders into memory where there is plenty of it: many tests wait for the disk."""
    with contextlib.suppress(OSError, AttributeError, StopIteration, ValueError):
        about = os.statvfs(MEMORY)
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
        runs_programs = os.access(MEMORY, os.W_OK) and not about.f_flag & os.ST_NOEXEC
        if runs_programs and about.f_bavail * about.f_frsize > ROOM_BYTES and available > 1.5 * ROOM_BYTES:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


_use_memory()

if TYPE_CHECKING:
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from tests.support.loopback_board import Board
    from tests.support.programs import Programs

SHARED_VARIABLE = "METAFLEET_SHARED"
NOT_HERE = "reads data that is not in the repository"
LACKING = re.compile(r"needs (\S+), which is not on this machine")
LONGEST = ("benchmarks", "project", "whole")
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
SYSTEM_FOLDERS = os.pathsep.join(["/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/local/sbin"])


@pytest.fixture(scope="session")
def shared() -> Path:
    """Read-only folder of data sets that are not in the repository. Tests that use it are skipped where it is not
    set."""
    folder = Path(os.environ[SHARED_VARIABLE])
    if not folder.is_dir():
        raise pytest.UsageError(f"{SHARED_VARIABLE}={folder} is no folder; unset it to skip its tests")
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``fleet`` after two rounds and the homes of its devices. Copy it before changing it."""
    from tests.support.programs import finished_fleet

    return finished_fleet(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A fleet with certificates and without a model."""
    from tests.support.pki import fleet_without_model

    return fleet_without_model(tmp_path / "fleet")


@pytest.fixture
def ledger(fleet: Fleet) -> Iterator[Ledger]:
    """The ledger of ``fleet``, open."""
    from cloud_server.ledger.ledger import Ledger

    with Ledger(fleet.ledger_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def ssh_machine() -> Iterator[Board]:
    """A machine with an SSH server on loopback, in its own namespaces."""
    from tests.support.loopback_board import board

    with tempfile.TemporaryDirectory(prefix="mf-b-") as folder:
        Path(folder).chmod(0o755)
        with board(Path(folder)) as made:
            yield made


@pytest.fixture
def board(ssh_machine: Board) -> Board:
    """The SSH machine with nothing installed."""
    ssh_machine.as_new()
    return ssh_machine


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Starts programs in the test's folder and ends them after the test."""
    from tests.support.programs import programs_in

    with programs_in(tmp_path) as started:
        yield started


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync: processes may die in the test, but the machine keeps its power."""
    from tests.support.inprocess import without_fsync

    without_fsync(monkeypatch)


@pytest.fixture(scope="module")
def torch_threads() -> Iterator[None]:
    """Trainers and workers set torch's number of threads for the whole process; reset it at the end."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_torch_thread(torch_threads: None) -> None:
    import torch

    torch.set_num_threads(1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker of a whole run first imports files of its own. In a new checkout pytest rewrites the assertions of
    every file and keeps the result on the disk; this way each worker does not do so for all files."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    first, workers = int(worker["workerid"].removeprefix("gw")), int(worker["workercount"])
    root = session.config.rootpath
    for path in sorted(root.glob("tests/**/test_*.py"))[first::workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting the file reports it
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are processors, because many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run. Files with slow tests run first, those of the rooms with the
    longest ones before the others, so that quick tests keep all workers busy at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name not in LONGEST))
    for item in items:
        if not os.environ.get(SHARED_VARIABLE) and "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"{NOT_HERE}: set {SHARED_VARIABLE}"))
            item.add_marker(pytest.mark.allowed_skip(NOT_HERE))
        for program in (name for mark in item.iter_markers("needs") for name in mark.args):
            if not (shutil.which(program) or shutil.which(program, path=SYSTEM_FOLDERS)):
                item.add_marker(pytest.mark.skip(reason=f"needs {program}, which is not on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test counts as failed, unless its ``allowed_skip`` mark names the reason."""
    report = yield
    allowed = [reason for mark in item.iter_markers("allowed_skip") for reason in mark.args]
    if not hasattr(report, "wasxfail") and not any(reason in _reason(report) for reason in allowed):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In CI a test file that skips itself counts as failed."""
    report = yield
    fail_if_skipped(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was not tested on this machine and how to change that."""
    reasons = Counter(_reason(report).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for line in not_tested(reasons, slow_left_out=config.option.markexpr == "not slow"):
        terminalreporter.write_line(line)


def not_tested(reasons: Counter[str], *, slow_left_out: bool) -> list[str]:
    """At most five lines. reasons: skip reason -> number of skipped tests."""
    programs: Counter[str] = Counter()
    data, other = 0, 0
    for reason, count in reasons.items():
        lacking = LACKING.search(reason)
        if lacking:
            programs[lacking[1]] += count
        elif NOT_HERE in reason:
            data += count
        else:
            other += count
    lines = []
    if programs:
        named = ", ".join(f"{program} ({count})" for program, count in programs.most_common())
        lines.append(f"  make tools       installs the missing programs, by tests that need them: {named}")
    if slow_left_out:
        lines.append("  make test-all    runs the slow tests too: whole fleets, crashes, emulated boards")
    if data:
        lines.append(f"  {SHARED_VARIABLE}  names the folder with data sets that {data} tests read")
    if other:
        lines.append(f"  ARGS=-rs         tells why {other} more were skipped")
    skipped = sum(reasons.values())
    return [f"not tested here{f': {skipped} tests were skipped' if skipped else ''}", *lines] if lines else []


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = (
            f"{_reason(report)}\n(a skip is a failure in CI: mend the machine, or mark the test allowed_skip)"
        )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
