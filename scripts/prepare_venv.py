"""Prepares .venv for `make demo` and `make test`: pinned, once, and again only when what it installs has changed.

Only the standard library, and syntax that an old Python reads too, so that this can report that Python is too old.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
NEWER_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
ROOT = Path(__file__).resolve().parent.parent
VENV = ".venv"
CONSTRAINTS = "requirements/constraints.txt"
INPUTS = ("pyproject.toml", CONSTRAINTS, "scripts/prepare_venv.py")
EXTRAS = {"all": "operator,dev", "demo": "operator"}
"""What is installed for ``make demo``, which needs none of the tests' packages, and for all else."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
KEEP_PYTHON = "--keep-python"
PROBE_S = 5
MOSQUITTO_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/local/sbin")  # PATH may lack them


class SetupError(Exception):
    """Why the environment cannot be prepared, and a hint."""


def main() -> int:
    """Exit code 0 when .venv is ready, 1 when it is not, 2 when this machine's Python is too old."""
    if sys.version_info < OLDEST:
        return use_a_newer_python()
    try:
        prepare(ROOT, "demo" if "demo" in sys.argv[1:] else "all", keep_python=KEEP_PYTHON in sys.argv[1:])
    except (SetupError, subprocess.CalledProcessError) as error:
        say(f"error: {error if isinstance(error, SetupError) else failed(error)}")
        return 1
    except KeyboardInterrupt:
        say("interrupted: the next `make setup` starts afresh")
        return 130
    return 0


def use_a_newer_python() -> int:
    """Starts this script again under a Python that is new enough; 2 when the machine has none."""
    for name in NEWER_PYTHONS:
        path = shutil.which(name)
        if path and is_new_enough(path):
            os.execv(path, [path, *sys.argv])
    say("error: Python {}.{} or newer is needed, {} is {}".format(*OLDEST, sys.executable, platform.python_version()))
    say("hint: install one (https://www.python.org/downloads), then: make setup PYTHON=/path/to/python3")
    return 2


def is_new_enough(python: str) -> bool:
    """Whether ``python`` starts, which a version manager's stand-in for one that is not chosen does not, and is new
    enough."""
    code = f"import sys; sys.exit(sys.version_info < {OLDEST!r})"
    return subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def prepare(root: Path, purpose: str = "all", keep_python: bool = False) -> None:
    """A .venv under ``root`` that holds what INPUTS ask for; nothing is touched when it already does. purpose: a key of
    EXTRAS; a .venv that holds all stays for the demo. keep_python: whether a .venv of another Python stays, too."""
    venv = root / VENV
    python, stamp, started = venv / "bin" / "python", venv / "setup.json", venv / "setup.started"
    found = json.loads(stamp.read_text()) if stamp.is_file() else {}
    version = "{}.{}".format(*sys.version_info[:2])
    kept = found.get("python", version) if keep_python else version
    usable = not started.exists() and works(python, kept) and found.get("root", str(root)) == str(root)
    wanted = {"python": kept if usable else version, "root": str(root), "inputs": digest(root)}
    extras = found.pop("extras", EXTRAS["all"])
    if usable and found == wanted and extras in (EXTRAS[purpose], EXTRAS["all"]):
        return
    if not usable:
        create(venv)
    started.touch()
    install(root, str(python), EXTRAS[purpose])
    temporary = stamp.with_suffix(".new")
    temporary.write_text(json.dumps({**wanted, "extras": EXTRAS[purpose]}))
    os.replace(temporary, stamp)
    started.unlink()
    say(f"setup: {VENV} is ready")
    suggest_mosquitto()


def digest(root: Path) -> str:
    """One SHA-256 over the files that say what is installed."""
    return hashlib.sha256(b"\0".join((root / name).read_bytes() for name in INPUTS)).hexdigest()


def works(python: Path, version: str) -> bool:
    """Whether ``python`` starts, has pip and is of ``version``: a moved or half-made .venv does not."""
    code = "import sys, pip; sys.exit('{}.{}'.format(*sys.version_info[:2]) != sys.argv[1])"
    try:
        return subprocess.run([str(python), "-c", code, version], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def create(venv: Path) -> None:
    """An empty virtual environment at ``venv`` in place of whatever was there."""
    say(f"setup: creating {VENV} with Python {platform.python_version()}")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, stdout=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        hint = "hint: on Debian and Ubuntu: sudo apt-get install python3-venv"
        raise SetupError(f"no virtual environment can be made with {sys.executable}\n{hint}") from error


def install(root: Path, python: str, extras: str) -> None:
    """torch first, because its source has to be chosen; then the project in place, with everything else."""
    constraints = "--constraint=" + str(root / CONSTRAINTS)
    install_torch(python, constraints)
    say("setup: installing the project, with what its commands" + " and its tests" * ("dev" in extras) + " need")
    run_pip(python, "--quiet", constraints, "--editable", f"{root}[{extras}]")


def install_torch(python: str, constraints: str) -> None:
    """torch as pinned: from the vendor's CPU index where that answers, else from where pip is configured to look.

    On macOS the default index has CPU builds only.
    """
    if has_torch(python, constraints):
        return
    if sys.platform != "darwin" and answers(TORCH_CPU_INDEX, python):
        say(f"setup: installing torch from {TORCH_CPU_INDEX}, about 200 MB")
        try:
            run_pip(python, constraints, "--no-deps", "--index-url", TORCH_CPU_INDEX, "torch")
            return
        except subprocess.CalledProcessError:
            say("setup: that did not work")
    say(f"setup: installing torch from pip's default index, {default_torch_size()}")
    run_pip(python, constraints, "torch")


def has_torch(python: str, constraints: str) -> bool:
    """Whether the pinned torch is installed. Asks pip, which reads the pin and its conditions, and no index."""
    ask = [python, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index", "--no-deps", constraints, "torch"]
    return subprocess.run(ask, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def answers(index: str, python: str) -> bool:
    """Whether ``index`` answers within PROBE_S seconds, the time to find its address included."""
    code = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/torch/')"
    try:
        return subprocess.run([python, "-c", code, index], stderr=subprocess.DEVNULL, timeout=PROBE_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def default_torch_size() -> str:
    """What is known, before the download, of torch's size on an index that holds all builds."""
    if sys.platform == "darwin":
        return "about 100 MB"
    if platform.machine() == "aarch64":
        return "about 100 MB (420 MB installed)"
    return "several GB with its CUDA libraries, unless your pip is configured with a CPU build (about 200 MB)"


def run_pip(python: str, *arguments: str) -> None:
    """``pip install`` with ``arguments``. Raises CalledProcessError."""
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", *arguments], check=True)


def suggest_mosquitto() -> None:
    """The command that would install the broker, when it is absent. It is never run from here."""
    if shutil.which("mosquitto") or any(os.access(os.path.join(f, "mosquitto"), os.X_OK) for f in MOSQUITTO_FOLDERS):
        return
    if shutil.which("brew"):
        command = "brew install mosquitto"
    elif shutil.which("apt-get"):
        command = "sudo apt-get install mosquitto"
    else:
        command = "your system's package manager, package mosquitto"
    say(f"hint: mosquitto is not on this machine, so the embedded broker is used. To install it: {command}")


def failed(error: subprocess.CalledProcessError) -> str:
    """One line on a command that failed; what it printed stands above."""
    return "this failed with exit code {}: {}".format(error.returncode, " ".join(map(str, error.cmd)))


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
