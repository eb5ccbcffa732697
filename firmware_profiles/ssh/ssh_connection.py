"""One connection to a device by the system's OpenSSH client, shared by all steps (ControlMaster).

The user's ``~/.ssh/config`` applies (jump hosts, keys, aliases). ssh never prompts for a password (BatchMode), and an
unknown host key is refused with its fingerprint (StrictHostKeyChecking). A host key is accepted only if the user names
its fingerprint: it is fetched without logging in, compared, and added to known_hosts.

Options: ssh_config(5). Exit codes: ssh(1), 255 is ssh's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from fleet_core.base.errors import ConfigError, FlashError

CONNECT_S = 15
STEP_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20
SSH_FAILED = 255
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:%-]{0,253}[A-Za-z0-9])?")
SHOW_HOST_KEY = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")

Feed = Callable[[IO[bytes]], None]


class ConnectionLost(FlashError):
    """The connection was lost after it was made, or a step did not end in time."""


@dataclass(frozen=True)
class Target:
    """``ssh://[user@]host[:port]``; ssh chooses what is absent. config: replaces the user's ssh configuration."""

    host: str
    user: str | None = None
    port: int | None = None
    config: Path | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ssh://{self.user + '@' if self.user else ''}{host}{f':{self.port}' if self.port else ''}"

    def command(self, *options: str) -> list[str]:
        """The ssh command line, up to the host."""
        config = ["-F", str(self.config)] if self.config else []
        user = ["-l", self.user] if self.user else []
        port = ["-p", str(self.port)] if self.port else []
        return ["ssh", *config, *options, *user, *port, "--", self.host]


def parse(url: str, config: Path | None = None) -> Target:
    """Raises ConfigError for anything but ``ssh://[user@]host[:port]``."""
    expected = "ssh://user@host or ssh://user@host:port"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"'{url[:80]}' is not an address: {error}", expected=expected) from error
    if parts.password is not None:
        raise ConfigError("a password in an address is visible to others", expected=expected, hint="use an ssh key")
    user = parts.username
    bad_user = user is not None and not USER.fullmatch(user)
    if parts.scheme != "ssh" or bad_user or not HOST.fullmatch(host) or parts.path not in ("", "/"):
        raise ConfigError(f"'{url[:80]}' is not an address of a device", expected=expected)
    if parts.query or parts.fragment or port == 0:
        raise ConfigError(f"'{url[:80]}' is not an address of a device", expected=expected)
    return Target(host, user, port, config)


@dataclass(frozen=True)
class Answer:
    """A command's exit code, output and errors, each at most 1 MiB."""

    code: int
    out: str
    errors: str


@dataclass(frozen=True)
class HostKey:
    """A host's key. kind: its type. line: for a known_hosts file."""

    kind: str
    fingerprint: str
    line: str


@dataclass
class Connection:
    """An open connection; a context manager. accept: fingerprint of the host key to accept if the host is unknown; a
    key that has changed is refused all the same."""

    target: Target
    accept: str | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> Connection:
        """Raises FlashError if there is no connection."""
        if shutil.which("ssh") is None:
            raise FlashError("there is no ssh on this machine", hint="install OpenSSH's client (openssh-client)")
        self._folder = tempfile.TemporaryDirectory(prefix="mf-ssh-")  # short: a socket's path has 104 characters
        try:
            self._open()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._folder is not None
        self._close()
        self._folder.cleanup()

    def run(self, command: str, *, what: str, feed: Feed | bytes = b"", timeout_s: float = STEP_S) -> Answer:
        """Runs a shell command on the device; the caller checks its exit code.

        what: the step, for messages. feed: bytes for the standard input, or a function that writes them.
        Raises ConnectionLost, also after ``timeout_s``, and FlashErrors of ``feed``.
        """
        answer = _run([*self._command(), command], what, self.target.url, feed, timeout_s)
        if answer.code == SSH_FAILED:
            raise ConnectionLost(f"the connection was lost: {what}: {last_line(answer.errors)}", where=self.target.url,
                                 hint="run the same command again: it goes on from there")
        return answer

    def reopen(self) -> None:
        """Connects again after the connection was lost. Raises FlashError if there is none."""
        self._close()
        self._open()

    def _close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(self._command("-O", "exit"), capture_output=True, timeout=5, check=False)

    def _open(self) -> None:
        answer = self._connect()
        if self.accept is not None and answer.code != 0 and _unknown(answer.errors):
            accept_host_key(self.target, self.accept)
            answer = self._connect()
        if answer.code != 0:
            raise connect_error(self.target, answer.errors)

    def _connect(self) -> Answer:
        options = ("-M", "-N", "-f", "-o", "ControlPersist=60")
        return _run(self._command(*options), "connecting", self.target.url, b"", 3.0 * CONNECT_S)

    def _command(self, *options: str) -> list[str]:
        assert self._folder is not None
        return self.target.command(
            *_options(BatchMode="yes", StrictHostKeyChecking="yes", ConnectTimeout=str(CONNECT_S), LogLevel="ERROR",
                      ServerAliveInterval="5", ServerAliveCountMax="3", ClearAllForwardings="yes", ForwardAgent="no",
                      UpdateHostKeys="no", RequestTTY="no", ControlPath=f"{self._folder.name}/c"),
            *options,
        )


def fetch_host_keys(target: Target) -> list[HostKey]:
    """The keys that the host sends, fetched without logging in."""
    with tempfile.TemporaryDirectory(prefix="mf-ssh-") as folder:
        known = Path(folder, "known_hosts")
        options = _options(BatchMode="yes", StrictHostKeyChecking="accept-new", UserKnownHostsFile=str(known),
                           GlobalKnownHostsFile="/dev/null", PreferredAuthentications="none", ControlPath="none",
                           ConnectTimeout=str(CONNECT_S), UpdateHostKeys="no")
        _run([*target.command(*options), "true"], "fetching the host key", target.url, b"", 2.0 * CONNECT_S)
        lines = known.read_text().splitlines() if known.exists() else []
        return [HostKey(*_fingerprint(line), line) for line in lines if line and not line.startswith("#")]


def accept_host_key(target: Target, fingerprint: str) -> None:
    """Adds the host's key with this fingerprint to the user's known_hosts. Raises ConfigError, FlashError."""
    if not FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError(f"'{fingerprint[:80]}' is not a fingerprint", expected="SHA256: and 43 characters")
    keys = fetch_host_keys(target)
    if not keys:
        raise FlashError("the host shows no key", where=target.url, hint="is it on, and is its address right?")
    accepted = [key for key in keys if key.fingerprint == fingerprint]
    if not accepted:
        raise FlashError(f"the host shows another key: {keys[0].kind} {keys[0].fingerprint}", where=target.url,
                         expected=fingerprint, hint=f"compare with the device's own: {SHOW_HOST_KEY}")
    known_hosts = _known_hosts(target)
    present = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    new = [key.line for key in accepted if key.line not in present]
    if new:
        known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with known_hosts.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in new))


def connect_error(target: Target, errors: str) -> FlashError:
    """The error for ssh's messages at the start, with what the user can do."""
    where, last = target.url, last_line(errors)
    if CHANGED in errors:
        return _changed_key(target, errors)
    if _unknown(errors):
        keys = fetch_host_keys(target)
        shown = f": {keys[0].kind} {keys[0].fingerprint}" if keys else ""
        accept = f"--accept-host-key {keys[0].fingerprint if keys else 'FINGERPRINT'}"
        return FlashError(f"the host key is not known here{shown}", where=where,
                          hint=f"if it is the device's own ({SHOW_HOST_KEY}): {accept}")
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        return FlashError(f"the device refused the login: {last}", where=where,
                          hint=f"put your key there: ssh-copy-id {where}; passwords are never asked for")
    if "Could not resolve hostname" in errors:
        return FlashError(f"there is no host of that name: {last}", where=where, hint="try its IP address")
    if re.search(r"No route to host|Network is unreachable|timed out|Connection refused", errors):
        return FlashError(f"no connection: {last}", where=where, hint="is it on, in this network, with ssh allowed?")
    return FlashError(f"no connection: {last}", where=where, hint=f"try: ssh {where} true")


def _changed_key(target: Target, errors: str) -> FlashError:
    known = re.search(r"Offending \S+ key in (\S+):\d+", errors)
    file = known[1] if known else "~/.ssh/known_hosts"
    new = re.search(FINGERPRINT, errors)
    name = f"[{target.host}]:{target.port}" if target.port not in (None, 22) else target.host
    return FlashError(
        f"the host key has changed{f' to {new[0]}' if new else ''}: another machine, or a card written anew",
        where=target.url, hint=f"if you know why: ssh-keygen -R '{name}' -f {file}, then run this again",
    )


def _unknown(errors: str) -> bool:
    return "Host key verification failed" in errors and CHANGED not in errors


def last_line(text: str) -> str:
    """The last line that is not empty, at most 300 characters, without control characters."""
    return _line(text, -1)


def first_line(text: str) -> str:
    """As ``last_line``; a program's first complaint is usually the cause."""
    return _line(text, 0)


def _line(text: str, which: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"[^\x20-\x7e\xa0-\uffff]", "?", lines[which])[:300] if lines else "it said nothing"


def _options(**values: str) -> list[str]:
    return [part for name, value in values.items() for part in ("-o", f"{name}={value}")]


def _fingerprint(line: str) -> tuple[str, str]:
    """(type, fingerprint) of a line of known_hosts."""
    output = subprocess.run(["ssh-keygen", "-lf", "-"], input=line, capture_output=True, text=True, timeout=10,
                            check=False).stdout
    match = re.search(FINGERPRINT, output)
    if match is None:
        raise FlashError("ssh-keygen does not read the host's key", where=line[:80])
    return line.split()[1], match[0]


def _known_hosts(target: Target) -> Path:
    """The file that ssh itself would write to."""
    output = subprocess.run([*target.command("-G")], capture_output=True, text=True, timeout=10, check=False).stdout
    match = re.search(r"^userknownhostsfile (\S+)", output, re.MULTILINE)
    return Path(os.path.expanduser(match[1] if match else "~/.ssh/known_hosts"))


def _run(command: list[str], what: str, where: str, feed: Feed | bytes, timeout_s: float) -> Answer:
    """stderr goes to a file, because an ssh in the background would keep a pipe open."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        assert process.stdout is not None
        output: list[bytes] = []
        feed_errors: list[FlashError] = []
        threads = [threading.Thread(target=_read, args=(process.stdout, output), daemon=True),
                   threading.Thread(target=_write, args=(process.stdin, feed, feed_errors), daemon=True)]
        for thread in threads:
            thread.start()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ConnectionLost(f"no end within {timeout_s:g} s: {what}", where=where,
                                 hint="run the same command again: it goes on from there") from None
        finally:
            process.kill()  # has no effect if it has ended
            process.wait()
            for thread in threads:
                thread.join(5)
        if feed_errors:
            raise feed_errors[0]
        errors.seek(0)
        stderr = errors.read(MAX_OUTPUT_BYTES).decode(errors="replace")
        return Answer(process.returncode, b"".join(output).decode(errors="replace"), stderr)


def _read(stream: IO[bytes], output: list[bytes]) -> None:
    """Reads everything, so that the process is not blocked, and keeps the first MiB."""
    size = 0
    with contextlib.suppress(OSError, ValueError), stream:
        while piece := os.read(stream.fileno(), 65536):
            if size < MAX_OUTPUT_BYTES:
                output.append(piece[: MAX_OUTPUT_BYTES - size])
            size += len(piece)


def _write(stream: IO[bytes], feed: Feed | bytes, errors: list[FlashError]) -> None:
    """Appends a FlashError of ``feed`` to ``errors``."""
    with contextlib.suppress(OSError, ValueError), stream:  # the process may have ended: its exit code says why
        try:
            if isinstance(feed, bytes):
                stream.write(feed)
            else:
                feed(stream)
        except FlashError as error:
            errors.append(error)
