"""What secure aggregation costs: the whole protocol for 8, 100 and 1,000 devices in one process, every message counted.

    python -m benchmarks.privacy.secure [DEVICES ...] [--tables]

Writes secure.json after each number of devices, then the table of secure.md; numbers that are there are not run again.
Seconds are processor time. One device in twenty vanishes after it has shared. --tables: only writes the page again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from benchmarks import markdown
from cloud_server.identity.certificate_authority import Authority
from fleet_core.base import storage
from fleet_core.privacy import masks
from fleet_core.privacy.secure_collector import Collector
from fleet_core.privacy.secure_participant import Identity, Participant
from fleet_core.privacy.secure_sum import Session
from fleet_core.privacy.settings import PrivacySection
from fleet_core.protocol import certificates, messages
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.secure_messages import SecureRules

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "secure.json", HERE / "secure.md"
DEVICES, VALUES, GONE = (8, 100, 1000), 10_000, 20
SIGNATURE_BYTES = 170
"""Bytes of the line before a signed message, and a little more."""
T = TypeVar("T")


def measure(devices: int) -> dict[str, Any]:
    """Bytes of payload and processor seconds of one sum of ``VALUES`` values."""
    section, now = PrivacySection(), datetime.datetime.now(datetime.UTC)
    names = [f"device-{k:04}" for k in range(devices)]
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.create(Path(folder) / "ca.key", Path(folder) / "ca.pem", "benchmark devices")
    ca = authority.certificate
    rules = SecureRules(
        "0" * 32, section.threshold, section.least, section.neighbours_of(devices), -10, masks.bits_for(devices),
        certificates.certificate_text(ca),
    )
    session, spent = Session("benchmark", 1, rules), dict.fromkeys([*names, "server"], 0.0)
    up, down = dict.fromkeys(names, 0), dict.fromkeys(names, 0)

    def timed(who: str, action: Callable[[], T]) -> T:
        begun = time.process_time()
        made = action()
        spent[who] += time.process_time() - begun
        return made

    def sent(name: str, message: object) -> None:
        up[name] += len(messages.encode(message))

    def asked(name: str) -> Any:
        step = timed("server", lambda: server.step(name))
        if step is not None:
            message = Down("secure", 1, device=name, secure=step)
            down[name] += SIGNATURE_BYTES + len(messages.encode(message, packed=True))
        return step

    made = {}
    for name in names:
        key = certificates.new_key()
        made[name] = Participant(session, Identity(name, authority.client(name, key.public_key()), key))
    server, plain = Collector(session, ca), {}
    for name in names:
        keys = timed(name, made[name].keys)
        sent(name, keys)
        timed("server", partial(server.add_keys, name, keys, now))
    timed("server", server.start_sharing)
    for name in names:
        step = asked(name)
        shares = timed(name, partial(made[name].seal, step.peers, ca, now))
        sent(name, shares)
        timed("server", partial(server.add_shares, name, shares))
    timed("server", server.start_masking)
    masked, draw = {}, np.random.default_rng(0)
    for k, name in enumerate(names):
        step = asked(name)
        if k % GONE == GONE - 1:
            continue
        plain[name] = draw.integers(-127, 128, VALUES).astype(np.int8)
        masked[name] = timed(name, partial(made[name].mask, step.boxes, plain[name]))
        up[name] += masked[name].nbytes
    timed("server", lambda: server.start_unmasking(masked))
    for name in masked:
        step = asked(name)
        revealed = timed(name, partial(made[name].reveal, step))
        sent(name, revealed)
        timed("server", partial(server.add_revealed, name, revealed))
    total = timed("server", lambda: server.total(masked[name] for name in sorted(masked)))
    if not np.array_equal(total, sum(one.astype(np.int64) for one in plain.values())):
        raise SystemExit("the sum is wrong")
    there = list(masked)
    return {
        "devices": devices, "neighbours": rules.neighbours or devices - 1, "gone": devices - len(there),
        "up_bytes": median(up[name] for name in there), "down_bytes": median(down[name] for name in there),
        "masked_bytes": VALUES * rules.bits // 8, "device_s": median(spent[name] for name in there),
        "server_s": spent["server"], "values": VALUES, "machine": platform.machine(),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        (f"{one['devices']:,}", str(one["neighbours"]), str(one["gone"]), f"{one['masked_bytes']:,}",
         f"{one['up_bytes'] - one['masked_bytes']:,.0f}", f"{one['down_bytes']:,.0f}", f"{one['device_s']:.2f}",
         f"{one['server_s']:.1f}")
        for one in sorted(found.values(), key=lambda one: int(one["devices"]))
    ]
    heads = ("devices", "neighbours", "vanish", "masked update, bytes", "besides, up", "besides, down", "device, s",
             "aggregator, s")
    return markdown.table(heads, rows)


def page() -> None:
    text = markdown.filled(PAGE.read_text(encoding="utf-8"), {"secure": table(known())})
    storage.write_atomic(PAGE, text.encode())


def known() -> dict[str, dict[str, Any]]:
    return dict(json.loads(RESULT.read_text())) if RESULT.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", type=int, default=list(DEVICES))
    parser.add_argument("--tables", action="store_true")
    given = parser.parse_args()
    for number in () if given.tables else given.devices:
        if str(number) not in known():
            storage.write_json(RESULT, {**known(), str(number): measure(number)})
    page()


if __name__ == "__main__":
    main()
