"""The agent's systemd unit: a separate user, write access to the agent's state only, restarts after growing pauses.

``systemd.exec(5)``, ``systemd.service(5)``. The agent notifies systemd that it is ready and that it is alive
(``sd_notify(3)``). The unit works with systemd 237 (Ubuntu 18.04) and newer:

* the program's ``bin/pause`` makes the pauses between starts grow, because RestartSteps needs 254;
* system calls are denied by group, never allowed by group: an older systemd ignores groups that it does not know, so
  that ``@system-service`` (239) alone would allow next to nothing there;
* an older systemd ignores keys that it does not know, with a line in the journal, and confines less: OOMPolicy and
  ProtectHostname, RestrictSUIDSGID (242, 243), ProtectKernelLogs (244), ProtectClock (245).
"""

from __future__ import annotations

import re

from firmware_profiles.package.board_needs import Machine
from fleet_core.base.errors import ConfigError, RevokedError
from fleet_core.board.profile import MEMORY_MAX

NAME = "metafleet.service"
USER = "metafleet"
PROGRAMS = "/opt/metafleet"
STATE = "/var/lib/metafleet"
CONFIG = "/etc/metafleet"
WATCHDOG_S = 300
"""Long, because a slow board may personalize for minutes."""

TEXT = """[Unit]
Description=Metafleet agent
Wants=network-online.target
After=network-online.target time-sync.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
User={user}
Group={user}
Environment=PYTHONPYCACHEPREFIX=/var/cache/metafleet HOME={state}
ExecStartPre=-{programs}/current/bin/pause before
ExecStart={programs}/current/bin/edge-agent run --home {state} --connect-s 31536000
ExecStopPost=-{programs}/current/bin/pause stopped
WorkingDirectory={state}
Restart=always
RestartPreventExitStatus={revoked}
RestartSec=5
WatchdogSec={watchdog_s}
TimeoutStartSec=infinity
TimeoutStopSec=60
OOMPolicy=continue
MemoryMax={memory_max}
MemorySwapMax=infinity
TasksMax=256
Nice=5

StateDirectory=metafleet
StateDirectoryMode=0700
RuntimeDirectory=metafleet
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=restart
CacheDirectory=metafleet
CacheDirectoryMode=0700
ConfigurationDirectory=metafleet
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
DevicePolicy=closed
{devices}ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=~@clock @cpu-emulation @debug @keyring @module @mount @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""

UPDATE = {
    "metafleet-update.path": f"""[Unit]
Description=Metafleet: a program was fetched

[Path]
PathExists={STATE}/update/ready

[Install]
WantedBy=multi-user.target
""",
    "metafleet-update.service": f"""[Unit]
Description=Metafleet: install the program that was fetched
ConditionPathExists={STATE}/update/ready

[Service]
Type=oneshot
ExecStart=/bin/sh {PROGRAMS}/current/bin/update pull
TimeoutStartSec=1h
Nice=5
PrivateTmp=yes
""",
}
"""The units that install a program which the agent has fetched into its own folder; root checks it."""


def text(machine: Machine) -> str:
    """The unit for ``machine``. Raises ConfigError for a memory limit or device that systemd would not accept."""
    if not re.fullmatch(MEMORY_MAX, machine.memory_max):
        raise ConfigError(f"'{machine.memory_max}' is not a memory limit", where=machine.board,
                          expected="as 80% or 400M")
    for device in machine.devices:
        if not re.fullmatch(r"/dev/[A-Za-z0-9/_.-]+", device):
            raise ConfigError(f"'{device}' is not a device", where=machine.board, expected="as /dev/vcio")
    devices = "".join(f"DeviceAllow={device} rw\n" for device in machine.devices)
    return TEXT.format(user=USER, programs=PROGRAMS, state=STATE, watchdog_s=WATCHDOG_S, devices=devices,
                       memory_max=machine.memory_max, revoked=RevokedError.exit_code)


def texts(machine: Machine) -> dict[str, str]:
    """{name: text} of all units of a device."""
    return {NAME: text(machine), **UPDATE}
