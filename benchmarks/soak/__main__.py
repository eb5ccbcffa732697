"""``python -m benchmarks.soak --rounds 300 --minutes 25 --out benchmarks/soak``: result.json, README.md, page.html."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.soak import churn, page
from fleet_core.base import processes, storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=25.0, help="at most; the result says how many rounds were run")
    parser.add_argument("--warm-up", type=int, default=100, help="rounds that no slope is made of")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", action="store_true", help="only write the pages of result.json again")
    options = parser.parse_args()
    target = options.out / "result.json"
    if not options.page:
        os.environ[processes.WITH_PARENT] = str(os.getpid())
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            churn.soak(Path(folder), options.rounds, options.minutes, options.warm_up, partial(print, flush=True),
                       lambda result: storage.write_atomic(target, json.dumps(result).encode()))
    page.write(json.loads(target.read_text()), options.out)
    sys.exit(0)


if __name__ == "__main__":
    main()
