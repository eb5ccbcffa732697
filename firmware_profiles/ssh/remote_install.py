"""Installs or updates the agent of a running device over SSH; if anything fails, the device runs the previous version.

Steps: let the device check the fleet's signature; upload beside the running version; verify every file; rename; arm the
rollback *on the device*; switch the link; restart; wait until the device is back; disarm. A device that loses its
network or its operator, or that restarts in between, rolls back by itself. A run that was cut off leaves the old
version; the same command continues from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from firmware_profiles.ssh.release import Release, Setting, packed
from firmware_profiles.ssh.remote import Facts, Health, NotArmed, Remote
from firmware_profiles.ssh.ssh_connection import ConnectionLost
from fleet_core.base.errors import FlashError

PATIENCE_S = 120
MARGIN_S = 60
"""How much longer than the operator the device waits before it rolls back by itself."""
POLL_S = 1.0
SLOWEST_BYTES_PER_S = 50_000
SETUP_S = CHANGE_S = 120.0
SPARE_BYTES = 64 << 20
CHECKING = "checking the signature"

Tell = Callable[[str, str], None]
"""Called with the current step, and its progress or an empty text."""


class Watch(Protocol):
    """Checks whether the device is back."""

    def before(self) -> None:
        """Called before the restart."""

    def missing(self, version: str) -> str:
        """Why the program ``version``, started after ``before``, is not back yet; empty if it is. Must not take much
        longer than a second."""

    def well(self) -> bool:
        """Whether the agent runs and is connected."""


class OnDevice:
    """Checks on the device itself: its systemd, and the note that the agent writes when it has reached its broker."""

    def __init__(self, remote: Remote):
        self._remote, self._boot = remote, ""

    def before(self) -> None:
        self._boot = self._remote.health().boot

    def missing(self, version: str) -> str:
        now = self._remote.health()
        if now.active != "active":
            return f"its unit is {now.active or 'not there'}"
        if now.boot in ("", self._boot):
            return "the agent has not reached its broker"
        return "" if now.version == version else f"the agent says that it is {now.version or 'of no version'}"

    def well(self) -> bool:
        return _is_well(self._remote.health())


@dataclass(frozen=True)
class Outcome:
    """previous: the version that ran before, or empty. changed: False if nothing had to be done."""

    device: str
    version: str
    previous: str
    changed: bool
    sent_bytes: int = 0

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.version} runs already"
        since = f", {self.previous} before" if self.previous not in ("", self.version) else ""
        return f"{self.version} runs{since}; {self.sent_bytes / 1e6:.1f} MB sent"


@dataclass(frozen=True)
class Plan:
    """What ``install`` would do. runs: the version that runs now, or empty. send_bytes: the most bytes of the program
    that are sent; files that the device has in another version are not sent. settings: {path: content} of the files
    that would be replaced, with stars in place of secrets. unconfirmed: the version of an earlier run that was cut off,
    or empty."""

    version: str
    runs: str
    enrolled: bool
    send_bytes: int
    settings: dict[str, str]
    unconfirmed: str


def plan(remote: Remote, release_for: Callable[[bool], Release]) -> Plan:
    """Writes nothing. release_for: as for ``install``."""
    facts = remote.facts()
    release = release_for(not facts.own).for_device(facts.own)
    size = 0 if _is_placed(facts, release) else sum(size for _, size in release.content.files.values())
    settings = {setting.path: setting.shown for setting in _changed_settings(facts, release)}
    return Plan(release.version, facts.health.current, bool(facts.own), size, settings, facts.armed)


def install(
    remote: Remote, release_for: Callable[[bool], Release], tell: Tell, *, watch: Watch | None = None,
    patience_s: int = PATIENCE_S, margin_s: int = MARGIN_S,
) -> Outcome:
    """Makes the device run the release, which must fit it (``remote.refuse``).

    release_for: gives the release; its argument says whether with a token. A token is requested once, after everything
    else is on a device that is not enrolled. watch: None to check on the device itself. patience_s: how long to wait
    for the device to be back; margin_s: how much longer the device waits before it rolls back by itself. Raises
    FlashError; if the device did not come back, after it has rolled back.
    """
    watch = watch or OnDevice(remote)
    facts = remote.facts()
    release = release_for(False).for_device(facts.own)
    if _runs_already(facts, release) and watch.well():
        return Outcome(release.device, release.version, facts.health.current, False)
    remote.begin()
    if facts.armed and not _is_switched(facts, release):
        remote.step("back", "an earlier run was cut off", what="rolling back an earlier run")
        facts = remote.facts()
    sent = 0 if _is_placed(facts, release) else _upload(remote, release, facts, tell)
    watch.before()
    tell("restarting", "")
    _switch(remote, release, facts, release_for, patience_s + margin_s)
    return _wait(remote, release, facts, watch, tell, patience_s, sent)


def _switch(
    remote: Remote, release: Release, facts: Facts, release_for: Callable[[bool], Release], rollback_s: int
) -> None:
    """Arms the rollback after ``rollback_s`` seconds, replaces the settings, and restarts with the new version."""
    if facts.armed:
        verb, settings = "again", list[Setting]()
    else:
        complete = release if facts.own else release_for(True)
        verb, settings = "change", _changed_settings(facts, complete)
    data = packed(settings)
    remote.step("signed", "settings", what=CHECKING, feed=release.sign_settings(remote.run, data), timeout_s=SETUP_S)
    try:
        remote.step(verb, release.version, remote.run, str(rollback_s), what="changing over", feed=data,
                    timeout_s=CHANGE_S)
    except ConnectionLost as error:
        raise _unconfirmed(remote, release, error) from error
    except FlashError as error:
        with contextlib.suppress(FlashError):
            remote.step("back", str(error)[:200].replace("\n", " "), what="rolling back")
        raise


def _upload(remote: Remote, release: Release, facts: Facts, tell: Tell) -> int:
    """Sends, verifies and places the files that the device lacks; returns their bytes."""
    tell("comparing", "")
    content, version = release.content, release.version
    timeout_s = 60 + sum(size for _, size in content.files.values()) / 1e6  # a card reads some MB a second
    remote.step("signed", "program", what=CHECKING, feed=release.statement, timeout_s=SETUP_S)
    listed = remote.step("want", version, what="comparing", feed=content.manifest, timeout_s=timeout_s).splitlines()
    names = content.files.keys() & set(listed)
    total = sum(content.files[name][1] for name in names)
    if facts.free_kib * 1024 < total + SPARE_BYTES:
        raise FlashError(f"{facts.free_kib >> 10} MiB are free under /opt", where=remote.where,
                         expected=f"{(total + SPARE_BYTES) >> 20} MiB")
    if names:
        done = 0

        def sent(size: int) -> None:
            nonlocal done
            done += size
            tell("uploading", f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

        tell("uploading", "")
        remote.step("take", version, what="uploading", feed=release.send(names, sent),
                    timeout_s=120 + total / SLOWEST_BYTES_PER_S)
    tell("verifying", "")
    remote.step("place", version, what="verifying", feed=release.prepare.encode(), timeout_s=timeout_s + SETUP_S)
    return total


def _wait(
    remote: Remote, release: Release, facts: Facts, watch: Watch, tell: Tell, patience_s: int, sent: int
) -> Outcome:
    """Waits for the device to be back and confirms; else rolls it back. Reconnects if the connection is lost."""
    tell("waiting for it to be back", "")
    end = time.monotonic() + patience_s
    while True:
        try:
            while missing := watch.missing(release.version):
                if time.monotonic() > end:
                    raise _rolled_back(remote, release, patience_s, missing, tell)
                tell("waiting for it to be back", missing)
                time.sleep(POLL_S)
            remote.step("confirm", remote.run, what="confirming")
        except ConnectionLost as error:
            _reconnect(remote, release, error, end, tell)
            continue
        except NotArmed as error:
            if not _is_confirmed(remote.facts(), release):
                raise FlashError(f"{release.version} was back too late: the device has returned to its former "
                                 "version", where=remote.where,
                                 hint="run the same command again") from error
        return Outcome(release.device, release.version, facts.health.current, True, sent)


def _reconnect(remote: Remote, release: Release, lost: ConnectionLost, end: float, tell: Tell) -> None:
    """Raises FlashError if there is no connection by ``end``; the device then rolls back by itself."""
    while True:
        tell("the connection was lost: connecting again", "")
        try:
            return remote.connection.reopen()
        except FlashError as error:
            if time.monotonic() > end:
                raise _unconfirmed(remote, release, lost) from error
        time.sleep(POLL_S)


def _is_confirmed(facts: Facts, release: Release) -> bool:
    """Whether an earlier "confirm" reached the device and only its answer was lost."""
    return facts.health.current == release.version and not facts.armed and not facts.last_return


def _unconfirmed(remote: Remote, release: Release, error: ConnectionLost) -> FlashError:
    return FlashError(f"{error.what}; {release.version} was not confirmed: the device returns to its former version by "
                      "itself",
                      where=remote.where, hint=error.hint)


def _rolled_back(remote: Remote, release: Release, patience_s: int, missing: str, tell: Tell) -> FlashError:
    """Rolls the device back, and says what runs now."""
    tell("returning to the former version", "")
    with contextlib.suppress(NotArmed):  # it has rolled back by itself
        remote.step("back", f"not back within {patience_s} s", what="rolling back")
    now = remote.health()
    if now.current:
        ended = f"the device is back on {now.current}, whose unit is {now.active}"
    else:
        ended = "nothing ran there before, and nothing runs now"
    return FlashError(f"{release.version} did not come back within {patience_s} s: {missing}; {ended}",
                      where=remote.where, hint="on the device: journalctl -u metafleet -n 50")


def _runs_already(facts: Facts, release: Release) -> bool:
    return facts.health.current == release.version and not facts.armed and _is_well(facts.health) \
        and _is_complete(facts, release)


def _is_switched(facts: Facts, release: Release) -> bool:
    """Whether an earlier run for the same release has switched to it without confirming."""
    return facts.armed == release.version == facts.health.current and _is_complete(facts, release)


def _is_complete(facts: Facts, release: Release) -> bool:
    return _is_placed(facts, release) and not _changed_settings(facts, release)


def _is_placed(facts: Facts, release: Release) -> bool:
    """Whether the program's files are on the device and prepared."""
    manifest = hashlib.sha256(release.content.manifest).hexdigest()
    return facts.placed.get(release.version) == manifest and release.version in facts.ready


def _changed_settings(facts: Facts, release: Release) -> list[Setting]:
    return [setting for setting in release.settings if facts.files.get(setting.path) != setting.sha256]


def _is_well(health: Health) -> bool:
    return health.active == "active" and health.boot != ""
