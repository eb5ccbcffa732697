"""Installs or updates the agent of a running device over SSH, so that it can only end well or as it was.

Upload beside what runs; verify every file; rename; arm the way back *on the device*; flip the link; restart; wait for
the device to say that it is back; disarm. A device that loses its network, or whose operator is gone, returns to the
version before by itself, and so does one that is started anew in between. A run that was cut off leaves the old
version; running it again goes on from there.
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
"""The device waits for so much longer than the operator before it returns by itself."""
POLL_S = 1.0
SLOWEST_BYTES_PER_S = 50_000
SETUP_S = CHANGE_S = 120.0
SPARE_BYTES = 64 << 20

Tell = Callable[[str, str], None]
"""Told what is being done, and how far it is (or nothing)."""


class Watch(Protocol):
    """Sees whether the device is back."""

    def before(self) -> None:
        """Called before the restart."""

    def missing(self, version: str) -> str:
        """What is still missing for the program ``version``, started since ``before``, to be back; empty when it is.
        Must not take much longer than a second."""

    def well(self) -> bool:
        """Whether the agent is there now."""


class OnDevice:
    """Asks the device itself: its systemd, and the note that the agent writes when it has reached its broker."""

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
        return _well(self._remote.health())


@dataclass(frozen=True)
class Outcome:
    """What was done. previous: the version that ran before, or empty. changed: False where all was there already."""

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
    """What ``install`` would do. runs: the version there now, or empty. send_bytes: of the program, at most; what the
    device has of it in another version is not sent. settings: {path: content} of what would be replaced, the token's
    among them, with stars in place of secrets.
    unconfirmed: a version of an earlier run that was cut off, or empty."""

    version: str
    runs: str
    enrolled: bool
    send_bytes: int
    settings: dict[str, str]
    unconfirmed: str


def plan(remote: Remote, release_for: Callable[[bool], Release]) -> Plan:
    """Writes nothing. release_for: as for ``install``; it is asked for no token where the device needs none."""
    facts = remote.facts()
    release = release_for(not facts.own).for_device(facts.own)
    size = 0 if _is_there(facts, release) else sum(size for _, size in release.content.files.values())
    settings = {setting.path: setting.shown for setting in _changed(facts, release)}
    return Plan(release.version, facts.health.current, bool(facts.own), size, settings, facts.armed)


def install(
    remote: Remote, release_for: Callable[[bool], Release], tell: Tell, *, watch: Watch | None = None,
    patience_s: int = PATIENCE_S, margin_s: int = MARGIN_S,
) -> Outcome:
    """Makes the device run the release, which fits it (``remote.refuse``).

    release_for: gives it, told whether with a token; a token is asked for once, when all else is there and the device
    is not enrolled. watch: None to ask the device itself. patience_s: how long to wait for it to be back; margin_s: how
    much longer the device waits, before it returns by itself. Raises FlashError; where the device did not come back,
    after it has returned to what it ran before.
    """
    watch = watch or OnDevice(remote)
    facts = remote.facts()
    release = release_for(False).for_device(facts.own)
    if _as_wanted(facts, release) and watch.well():
        return Outcome(release.device, release.version, facts.health.current, False)
    remote.begin()
    if facts.armed and not _flipped(facts, release):
        remote.step("back", "an earlier run was cut off", what="returning from an earlier run")
        facts = remote.facts()
    sent = 0
    if not _is_there(facts, release):
        sent = _upload(remote, release, facts, tell)
    watch.before()
    tell("restarting", "")
    if facts.armed:
        verb, settings = "again", list[Setting]()
    else:
        complete = release if facts.own else release_for(True)
        verb, settings = "change", _changed(facts, complete)
    seconds = str(patience_s + margin_s)
    try:
        remote.step(verb, release.version, remote.run, seconds, what="changing over", feed=packed(settings),
                    timeout_s=CHANGE_S)
    except ConnectionLost as error:
        raise _left_alone(remote, release, error) from error
    except FlashError as error:
        with contextlib.suppress(FlashError):
            remote.step("back", str(error)[:200].replace("\n", " "), what="returning")
        raise
    return _wait(remote, release, facts, watch, tell, patience_s, sent)


def _upload(remote: Remote, release: Release, facts: Facts, tell: Tell) -> int:
    """The files that the device lacks; returns their bytes."""
    tell("comparing", "")
    content, version = release.content, release.version
    timeout_s = 60 + sum(size for _, size in content.files.values()) / 1e6  # a card reads some MB a second
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
    """Until the device is back; else it is made to return. A connection that breaks meanwhile is taken up again."""
    tell("waiting for it to be back", "")
    end = time.monotonic() + patience_s
    while True:
        try:
            while missing := watch.missing(release.version):
                if time.monotonic() > end:
                    raise _returned(remote, release, patience_s, missing, tell)
                tell("waiting for it to be back", missing)
                time.sleep(POLL_S)
            remote.step("confirm", remote.run, what="confirming")
        except ConnectionLost as error:
            _take_up(remote, release, error, end, tell)
            continue
        except NotArmed as error:
            if not _confirmed(remote.facts(), release):
                raise FlashError(f"{release.version} was back too late: the device has returned", where=remote.where,
                                 hint="run the same command again") from error
        return Outcome(release.device, release.version, facts.health.current, True, sent)


def _take_up(remote: Remote, release: Release, lost: ConnectionLost, end: float, tell: Tell) -> None:
    """Connects again. Raises FlashError when there is no connection by ``end``: the device goes its own way then."""
    while True:
        tell("the connection was lost: connecting again", "")
        try:
            return remote.connection.reopen()
        except FlashError as error:
            if time.monotonic() > end:
                raise _left_alone(remote, release, lost) from error
        time.sleep(POLL_S)


def _confirmed(facts: Facts, release: Release) -> bool:
    """The answer to "confirm" was lost, and not the question."""
    return facts.health.current == release.version and not facts.armed and not facts.last_return


def _left_alone(remote: Remote, release: Release, error: ConnectionLost) -> FlashError:
    return FlashError(f"{error.what}; {release.version} was not confirmed: the device returns by itself",
                      where=remote.where, hint=error.hint)


def _returned(remote: Remote, release: Release, patience_s: int, missing: str, tell: Tell) -> FlashError:
    tell("returning to the version before", "")
    with contextlib.suppress(NotArmed):  # it did so itself
        remote.step("back", f"not back within {patience_s} s", what="returning")
    now = remote.health()
    if now.current:
        ended = f"the device is back on {now.current}, whose unit is {now.active}"
    else:
        ended = "nothing ran there before, and nothing runs now"
    return FlashError(f"{release.version} did not come back within {patience_s} s: {missing}; {ended}",
                      where=remote.where, hint="on the device: journalctl -u metafleet -n 50")


def _as_wanted(facts: Facts, release: Release) -> bool:
    return (
        facts.health.current == release.version and not facts.armed and _well(facts.health)
        and _is_there(facts, release) and not _changed(facts, release)
    )


def _flipped(facts: Facts, release: Release) -> bool:
    """An earlier run for the same release got as far as to change over."""
    return (facts.armed == release.version == facts.health.current and _is_there(facts, release)
            and not _changed(facts, release))


def _is_there(facts: Facts, release: Release) -> bool:
    manifest = hashlib.sha256(release.content.manifest).hexdigest()
    return facts.placed.get(release.version) == manifest and release.version in facts.ready


def _changed(facts: Facts, release: Release) -> list[Setting]:
    return [setting for setting in release.settings if facts.files.get(setting.path) != setting.sum]


def _well(health: Health) -> bool:
    return health.active == "active" and health.boot != ""

