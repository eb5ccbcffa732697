"""Preparing .venv, the pinned versions, and no silent skips in CI."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.arm64 import scene
from cloud_server.commands import start
from tests.support import bare
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

SCRIPT = ROOT / "scripts" / "prepare_venv.py"
ENVIRONMENTS = [
    {"platform_machine": machine, "python_version": version, "extra": ""}
    for machine in ("x86_64", "aarch64", "arm64")
    for version in ("3.11", "3.12", "3.13", "3.14")
]


# Preparation, with a Python that logs what it is asked to do.


@pytest.fixture
def prepare_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkout:
    """A folder whose .venv has a Python that logs its arguments and fails if they contain ``failing``."""

    def __init__(self, root: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch):
        self.root, self.script = root, script
        self.created = 0
        self.fail_when()
        for name in script.INPUTS:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        monkeypatch.setattr(script, "create", self.create)
        monkeypatch.setattr(script, "suggest_mosquitto", lambda: None)

    def create(self, venv: Path) -> None:
        self.created += 1
        shutil.rmtree(venv, ignore_errors=True)
        (venv / "bin").mkdir(parents=True)
        python = venv / "bin" / "python"
        python.write_text(f'#!/bin/sh\necho "$@" >> "{self.root}/log"\nexec /bin/sh "{self.root}/verdict" "$@"\n')
        python.chmod(0o755)

    def fail_when(self, *failing: str) -> None:
        cases = "".join(f'  *"{part}"*) echo "no" >&2; exit 1;;\n' for part in failing)
        (self.root / "verdict").write_text(f'case "$*" in\n{cases}esac\n')

    def prepare(self, purpose: str = "all", **how: bool) -> list[str]:
        """The installations that preparing requested."""
        log = self.root / "log"
        log.unlink(missing_ok=True)
        self.script.prepare(self.root, purpose, **how)
        return self.installs()

    def installs(self) -> list[str]:
        lines = (self.root / "log").read_text().splitlines()
        return [line for line in lines if " install " in line and "--dry-run" not in line]


@pytest.fixture
def checkout(tmp_path: Path, prepare_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    (tmp_path / "here").mkdir()
    return Checkout(tmp_path / "here", prepare_venv, monkeypatch)


def test_a_checkout_is_prepared_once(checkout: Checkout) -> None:
    (install,) = checkout.prepare()
    assert "--editable" in install
    assert "operator,dev" in install
    assert "--constraint=" in install
    assert checkout.prepare() == []
    assert checkout.created == 1


def test_the_demo_gets_no_packages_of_the_tests_and_they_come_when_they_are_needed(checkout: Checkout) -> None:
    (install,) = checkout.prepare("demo")
    assert install.endswith("[operator]")
    assert checkout.prepare("demo") == []
    (install,) = checkout.prepare()
    assert install.endswith("[operator,dev]")
    assert checkout.prepare("demo") == checkout.prepare() == []
    assert checkout.created == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements/constraints.txt"])
def test_changed_dependencies_are_installed_in_place(checkout: Checkout, name: str) -> None:
    checkout.prepare()
    (checkout.root / name).write_text("changed")
    assert len(checkout.prepare()) == 1
    assert checkout.created == 1


def test_an_interrupted_preparation_starts_afresh(checkout: Checkout) -> None:
    checkout.fail_when("--editable")
    with pytest.raises(subprocess.CalledProcessError):
        checkout.prepare()
    checkout.fail_when()
    assert len(checkout.prepare()) == 1
    assert checkout.created == 2
    assert checkout.prepare() == []


def test_a_moved_checkout_is_prepared_again(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.root = checkout.root.rename(checkout.root.with_name("there"))
    assert len(checkout.prepare()) == 1
    assert checkout.created == 2


def test_a_venv_of_another_python_is_made_anew(checkout: Checkout) -> None:
    checkout.prepare()
    checkout.fail_when("import sys, pip")
    checkout.prepare()
    assert checkout.created == 2


def test_a_venv_of_another_python_stays_unless_one_is_named(checkout: Checkout) -> None:
    checkout.prepare()
    stamp = checkout.root / ".venv" / "setup.json"
    stamp.write_text(stamp.read_text().replace("{}.{}".format(*sys.version_info[:2]), "3.99"))
    assert checkout.prepare(keep_python=True) == []
    (checkout.root / "pyproject.toml").write_text("changed")
    assert len(checkout.prepare(keep_python=True)) == 1
    assert json.loads(stamp.read_text())["python"] == "3.99"
    assert len(checkout.prepare()) == 1
    assert json.loads(stamp.read_text())["python"] == "{}.{}".format(*sys.version_info[:2])


@pytest.mark.needs("make")
@pytest.mark.parametrize(("named", "kept"), [((), True), (("PYTHON=python3",), False)])
def test_make_keeps_the_python_of_the_venv_unless_it_is_given_one(named: tuple[str, ...], kept: bool) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    done = subprocess.run(["make", "-n", "setup", *named], cwd=ROOT, env=outside, capture_output=True, text=True,
                          check=True)
    assert ("--keep-python" in done.stdout) is kept


def test_torch_comes_from_the_cpu_index_where_that_answers(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    checkout.fail_when("--dry-run")
    torch, _ = checkout.prepare()
    assert torch.endswith("--no-deps --index-url https://download.pytorch.org/whl/cpu torch")
    assert "about 200 MB" in capfd.readouterr().err


@pytest.mark.parametrize("failing", ["urllib", "--index-url"])
def test_torch_comes_from_the_default_index_otherwise(
    checkout: Checkout, failing: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    checkout.fail_when("--dry-run", failing)
    *_, torch, _ = checkout.prepare()
    assert torch.endswith("constraints.txt torch")
    assert "default index, " + checkout.script.default_torch_size() in capfd.readouterr().err


def test_a_probe_that_hangs_is_given_up(
    prepare_venv: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "never")
    silent = tmp_path / "python"
    silent.write_text(f'#!/bin/sh\nread line < "{tmp_path}/never"\n')
    silent.chmod(0o755)
    monkeypatch.setattr(prepare_venv, "PROBE_S", 0.2)
    assert not prepare_venv.answers("https://example.invalid", str(silent))


def test_an_old_python_says_so(
    prepare_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    monkeypatch.setattr(prepare_venv.shutil, "which", lambda name: None)
    assert prepare_venv.main() == 2
    assert "Python 3.11 or newer is needed" in capsys.readouterr().err


def test_an_old_python_hands_over_to_a_newer_one_that_starts(
    prepare_venv: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = []
    monkeypatch.setattr(sys, "version_info", (3, 9, 6))
    broken = tmp_path / "python3.13"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(prepare_venv.shutil, "which", {"python3.13": str(broken), "python3.12": sys.executable}.get)
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append((path, arguments[0])))
    prepare_venv.main()
    assert started == [(sys.executable, sys.executable)]


def test_an_old_python_can_read_the_script() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"mosquitto", "apt-get"}, ""),
        ({"apt-get", "sudo"}, "sudo apt-get install mosquitto"),
        ({"brew"}, "brew install mosquitto"),
        (set(), "package mosquitto"),
    ],
)
def test_the_command_that_would_install_mosquitto_is_printed_and_not_run(
    prepare_venv: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: set[str],
    said: str,
) -> None:
    monkeypatch.setattr(prepare_venv, "MOSQUITTO_FOLDERS", ())
    monkeypatch.setattr(prepare_venv.shutil, "which", lambda name: name if name in installed else None)
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    prepare_venv.suggest_mosquitto()
    printed = capsys.readouterr().err.rstrip()
    assert printed.endswith(said)
    assert bool(printed) is bool(said)


@pytest.mark.needs("make")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_prepares_first_and_passes_options_on(target: str) -> None:
    outside_make = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", target, "ARGS=--devices 3"]
    done = subprocess.run(command, cwd=ROOT, env=outside_make, capture_output=True, text=True, check=True)
    plan = done.stdout.splitlines()
    assert "prepare_venv.py" in plan[0]
    assert plan[-1].endswith("--devices 3")


# What is pinned.


def project() -> dict[str, list[str]]:
    """{extra: requirements}; '' holds the base requirements."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": table["dependencies"], **table["optional-dependencies"]}


def pins() -> list[Requirement]:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def version_of(name: str, environment: dict[str, str]) -> str:
    """The version that the constraints give ``name`` in ``environment``."""
    named = [pin for pin in pins() if canonicalize_name(pin.name) == canonicalize_name(name)]
    (pin,) = (pin for pin in named if not pin.marker or pin.marker.evaluate(environment))
    (clause,) = pin.specifier
    assert clause.operator == "=="
    return clause.version


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: f"{e['platform_machine']}-{e['python_version']}")
def test_every_dependency_is_pinned_once_and_within_its_bounds(environment: dict[str, str]) -> None:
    wanted = [Requirement(line) for lines in project().values() for line in lines]
    third_party = [r for r in wanted if r.name != "metafleet" and (not r.marker or r.marker.evaluate(environment))]
    assert len(third_party) > 10
    assert [str(r) for r in third_party if not r.specifier.contains(version_of(r.name, environment))] == []


@pytest.mark.parametrize(("extra", "name", "version"), [("train", "torch", "2.9.1"), ("", "onnxruntime", "1.23.2")])
def test_the_versions_for_boards_are_within_bounds_and_pinned_on_arm64(extra: str, name: str, version: str) -> None:
    board = {"platform_machine": "aarch64", "python_version": "3.13", "extra": ""}
    found = [Requirement(line) for line in project()[extra] if Requirement(line).name == name]
    (here,) = (r for r in found if not r.marker or r.marker.evaluate(board))
    assert here.specifier.contains(version)
    assert version_of(name, board) == version


def test_a_device_needs_no_more_than_this_and_aggregating_a_command_line() -> None:
    names = {extra: {canonicalize_name(Requirement(line).name) for line in lines} for extra, lines in project().items()}
    assert names[""] == {"numpy", "onnxruntime", "paho-mqtt", "safetensors", "cryptography", "backports-zstd", "tomli"}
    assert names["server"] == set(start.LIBRARIES)


def test_an_operator_gets_the_accountant_of_private_updates_only_when_it_is_asked_for() -> None:
    """It brings scipy, 35 MB, and few fleets are private."""
    def brought(extra: str) -> set[str]:
        named = [Requirement(line) for line in project()[extra]]
        inner = set().union(*(one.extras for one in named if one.name == "metafleet"))
        return {one.name for one in named}.union(*map(brought, inner))

    assert "torch" in brought("operator")
    assert "dp-accounting" not in brought("operator")
    assert "dp-accounting" in brought("dev") & brought("privacy")


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    names = {Requirement(line).name for lines in project().values() for line in lines} - {"metafleet"}
    assert [name for name in sorted(names) if f"| {name} |" not in page] == []


# Programs besides Python.


def tools() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("install_tools")
    finally:
        sys.path.pop(0)


@pytest.mark.slow
def test_every_program_that_a_test_needs_can_be_installed() -> None:
    calls = (
        node
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "needs"
    )
    named = {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)} | set(scene.PROGRAMS)
    assert "mosquitto" in named
    assert named <= set(tools().TOOLS), "name the package in scripts/install_tools.py"


@pytest.mark.parametrize(
    ("system", "root", "planned"),
    [
        ("apt", False, ["sudo apt-get update --quiet",
                        "sudo apt-get install --yes --no-install-recommends mosquitto fdisk"]),
        ("apt", True, ["apt-get update --quiet", "apt-get install --yes --no-install-recommends mosquitto fdisk"]),
        ("dnf", False, ["sudo dnf install --assumeyes mosquitto util-linux"]),
        ("brew", False, ["brew install mosquitto"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_installed_by_the_systems_own_packages(
    system: str, root: bool, planned: list[str]
) -> None:
    made = tools()
    wanted = made.packages(["mosquitto", "sfdisk"], system)
    assert [" ".join(command) for command in made.commands(wanted, system, root=root)] == planned


def test_nothing_is_installed_without_consent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tools()
    monkeypatch.setattr(made, "missing", lambda: ["mosquitto"])
    monkeypatch.setattr(made, "manager", lambda: "brew")
    monkeypatch.setattr(made.subprocess, "run", pytest.fail)
    assert made.main([]) == 1
    assert "brew install mosquitto" in capsys.readouterr().out


def test_nothing_is_asked_where_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tools()
    monkeypatch.setattr(made, "missing", list)
    assert made.main([]) == 0
    assert "every program that the tests need is on this machine" in capsys.readouterr().out


def test_a_bare_path_has_python_and_coreutils_alone(tmp_path: Path) -> None:
    path = bare.bare_path(tmp_path)
    assert shutil.which("ls", path=path)
    assert shutil.which("python3", path=path)
    assert [name for name in ("sh", "git", "make", "mount", "mosquitto") if shutil.which(name, path=path)] == []


# Skips.

SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="no broker here")
def test_one(): pass

@pytest.mark.skip(reason="Linux only")
@pytest.mark.allowed_skip("Linux")
def test_two(): pass

@pytest.mark.needs("env", "no-such-program")
def test_three(): pass

@pytest.mark.xfail
def test_four(): raise OSError

def test_five(shared): pass

@pytest.mark.skip(reason="no tool")
@pytest.mark.allowed_skip("Linux")
def test_six(): pass
"""


def run_pytest(folder: Path, text: str, **environment: str) -> str:
    """pytest's output for one test file with our conftest.py and the options."""
    (folder / "test_it.py").write_text(text)
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "METAFLEET_SHARED")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)],
        cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1, 2, 4, 5), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_skips_are_reported_outside_ci(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, SKIPS)
    assert "5 skipped, 1 xfailed" in out
    head, programs, data, others, *_ = out[out.index("not tested here") :].splitlines()
    assert head == "not tested here: 5 tests were skipped"
    assert programs.endswith("by tests that need them: no-such-program (1)")
    assert "METAFLEET_SHARED  names the folder with data sets that 1 tests read" in data
    assert "3 more were skipped" in others


def test_a_skip_without_allowed_skip_fails_in_ci(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, SKIPS, CI="true")
    assert "2 skipped, 1 xfailed, 3 errors" in out
    assert "a skip is a failure in CI" in out


@pytest.mark.slow
def test_a_file_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    text = "import pytest\npytest.importorskip('no_such_module')\n"
    assert "1 skipped" in run_pytest(tmp_path, text)
    assert "1 error" in run_pytest(tmp_path, text, CI="1")


def test_a_shared_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    out = run_pytest(tmp_path, "def test_it(shared): pass", METAFLEET_SHARED="/no/such/folder")
    assert "METAFLEET_SHARED=/no/such/folder is no folder" in out
