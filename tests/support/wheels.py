"""A folder of nearly empty wheels that replaces the package index when tests build a board's package."""

from __future__ import annotations

import zipfile
from pathlib import Path

WITH_ONNXRUNTIME = ("coloredlogs", "flatbuffers", "packaging", "protobuf", "sympy")
NEEDED = (
    ("numpy", "2.1.0", ()), ("paho_mqtt", "2.1.0", ()), ("safetensors", "0.5.3", ()),
    ("cryptography", "45.0.1", ("cffi",)), ("cffi", "2.1.1", ("pycparser",)), ("pycparser", "3.0", ()),
    ("backports_zstd", "1.0.0", ()), ("tomli", "2.2.1", ()),
    *((name, "1.0", ()) for name in WITH_ONNXRUNTIME),
)


def wheel(folder: Path, name: str, version: str, tag: str = "py3-none-any", requires: tuple[str, ...] = ()) -> Path:
    """One wheel with a module of its name; VERSION and TAG say which wheel it came from."""
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", "License-Expression: MIT"]
    lines += [f"Requires-Dist: {needed}" for needed in requires]
    files = {
        f"{name}/__init__.py": f'VERSION = "{version}"\nTAG = "{tag}"\n',
        f"{info}/METADATA": "Metadata-Version: 2.4\n" + "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return path


def wheel_folder(folder: Path) -> tuple[str, ...]:
    """Wheels of all that the agent needs, for the boards' Pythons and architectures. Returns uv's options for the
    folder."""
    folder.mkdir()
    for name, version, requires in NEEDED:
        wheel(folder, name, version, requires=requires)
    for python in ("cp310", "cp311", "cp313"):
        for arch in ("aarch64", "x86_64"):
            tag = f"{python}-{python}-manylinux_2_28_{arch}"
            for version in ("1.23.2", "1.31.1"):
                wheel(folder, "onnxruntime", version, tag, WITH_ONNXRUNTIME)
            for version, requires in (("2.9.1", ()), ("2.13.0", ("nvidia_cuda; platform_machine == 'aarch64'",))):
                wheel(folder, "torch", version, tag, requires)
    return ("--no-index", "--find-links", str(folder))
