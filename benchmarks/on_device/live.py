"""Memory of a long-running process around one personalization, with the agent's own service.

    python -m benchmarks.on_device.live HOME SAMPLE.npy        prints JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.on_device.measure import status_bytes
from edge_agent.inference import relearn
from edge_agent.inference.service import service_of
from fleet_core.board import allocator
from fleet_core.board.device_settings import settings_of


def main(home: Path, sample: Path) -> None:
    allocator.keep_freed()
    service = service_of(home, settings_of(home))
    service.restore()
    x = np.load(sample)[None]
    service.answers(x)
    before = status_bytes("VmRSS")
    relearn.personalize(service)
    allocator.trim()
    service.answers(x)
    print(json.dumps({"before": before, "peak": status_bytes("VmHWM"), "after": status_bytes("VmRSS"),
                      "personalization": service.answers(x).personalization, "torch": "torch" in sys.modules}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
