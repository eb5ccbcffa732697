"""Fuzzes parsers by coverage with atheris (libFuzzer), each in a process of its own.

    python -m tests.fuzz.run [TARGET … | all] --inputs 1000000 [--corpus FOLDER] [--out result.json] [--jobs 1]

``--out`` is written after each parser. A parser that has its inputs there, and did not fail, is not run again.

A parser may raise the product's errors only, may take a second of processor time for an input of at most 4 KiB, and no
allocation may be above 64 MiB, nor may the process grow by more than 512 MiB after its imports, which take 0.4 to 1.1
GB, by the build of torch. libFuzzer's own report says which input broke that, and leaves the input in the corpus
folder. Inputs that reach new code are kept there as well, so that a second run begins where the first one ended.
``all``: one process for all parsers; the first byte of an input says which.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ALL = "all"
MAX_INPUT_BYTES = 4096
MAX_ALLOCATION_MIB, MAX_GROWTH_MIB = 64, 512
WORD = re.compile(rb"[A-Za-z_]{2,40}")
"""Words of the first inputs, which the fuzzer puts into others."""
CPU_S = 1.0
ALARM_S = 100
"""libFuzzer's own limit, in wall-clock seconds: a machine may be busy."""
FORKED = ["sh", "-c", '"$@" || exit', "sh"]
"""Starts a program from a small process: Linux counts the memory of whoever starts a program as that program's peak."""


def fuzz(target: str, corpus: Path, inputs: int, seconds: int = 0) -> None:
    """Fuzzes one parser in this process, which libFuzzer ends. seconds: the longest; 0: no limit."""
    import atheris

    with atheris.instrument_imports(include=["fleet_core", "edge_agent", "cloud_server", "firmware_profiles"]):
        from tests.fuzz.targets import TARGETS

        parser, seeds = combined(TARGETS) if target == ALL else (TARGETS[target], TARGETS[target].seeds())
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = corpus.with_suffix(".words")
    words.write_text("".join(f'"{word.decode()}"\n' for word in sorted({*WORD.findall(b" ".join(seeds)), b"null"})))

    limit_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + MAX_GROWTH_MIB

    def once(data: bytes) -> None:
        begun_s = time.process_time()
        parser(data)
        took_s = time.process_time() - begun_s
        if took_s > CPU_S:
            raise TimeoutError(f"{took_s:.1f} s of processor time")

    atheris.Setup([
        sys.argv[0], str(corpus), f"-runs={inputs}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={ALARM_S}",
        f"-max_total_time={seconds}", f"-malloc_limit_mb={MAX_ALLOCATION_MIB}", f"-rss_limit_mb={limit_mib}",
        f"-dict={words}", f"-artifact_prefix={corpus}/broken-", "-print_final_stats=1", "-seed=1",
    ], once)
    atheris.Fuzz()


def combined(targets: Mapping[str, Any]) -> tuple[Callable[[bytes], None], list[bytes]]:
    """(a parser that takes the number of another one as its first byte, its first inputs)."""
    parsers = list(targets.values())

    def parse(data: bytes) -> None:
        if data:
            parsers[data[0] % len(parsers)](data[1:])

    return parse, [bytes([number]) + seed for number, one in enumerate(parsers) for seed in one.seeds()]


def in_child(target: str, folder: Path, inputs: int, seconds: int) -> dict[str, Any]:
    """The outcome of one parser: inputs, kept inputs, seconds with the start, and the last lines of a failure."""
    corpus = folder / target
    begun_s = time.monotonic()
    child = subprocess.run(
        [*FORKED, sys.executable, "-m", "tests.fuzz.run", "--child", target, "--corpus", str(corpus),
         "--inputs", str(inputs), "--seconds", str(seconds)],
        capture_output=True, text=True, errors="replace", check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    said = dict(re.findall(r"^stat::(\w+):\s+(\d+)", child.stderr, re.MULTILINE))
    failed = "" if child.returncode == 0 else child.stderr[max(0, child.stderr.find("ERROR")):][:3000]
    return {"inputs": int(said.get("number_of_executed_units", 0)), "kept": len(list(corpus.glob("[!b]*"))),
            "peak_mb": int(said.get("peak_rss_mb", 0)), "seconds": round(time.monotonic() - begun_s, 1),
            "python": platform.python_version(), "commit": _commit(), "failed": failed}


def _commit() -> str:
    """The commit of the fuzzed code; ends in "+" if files have changed since."""
    said = subprocess.run(["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
                          capture_output=True, text=True, check=False)
    return said.stdout.strip()


def run(names: list[str], folder: Path, inputs: int, seconds: int, jobs: int, out: Path | None) -> dict[str, Any]:
    """Every parser that ``out`` does not have yet; the result is written after each."""
    from fleet_core.base.storage import write_json  # not before: a child instruments what it imports

    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    names = [name for name in names if name not in found or found[name]["failed"] or found[name]["inputs"] < inputs]
    with ThreadPoolExecutor(jobs) as pool:
        one = partial(in_child, folder=folder, inputs=inputs, seconds=seconds)
        for name, result in zip(names, pool.map(one, names), strict=True):
            found[name] = result
            verdict = "FAILED" if result["failed"] else "ok"
            print(f"{name}: {verdict}, {result['inputs']} inputs, {result['kept']} kept", flush=True)
            if out is not None:
                write_json(out, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=0, help="for each parser at most; 0: no limit")
    parser.add_argument("--corpus", type=Path, help="a folder for each parser's inputs; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return fuzz(options.child, options.corpus, options.inputs, options.seconds)
    from tests.fuzz.targets import TARGETS

    unknown = set(options.targets) - TARGETS.keys() - {ALL}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory() as temporary:
        found = run(options.targets or list(TARGETS), options.corpus or Path(temporary), options.inputs,
                    options.seconds, options.jobs, options.out)
    for name, result in found.items():
        if result["failed"]:
            print(f"{name}:\n{result['failed']}", file=sys.stderr)
    sys.exit(any(result["failed"] for result in found.values()))


if __name__ == "__main__":
    main()
