"""The errors of Metafleet.

    FleetError
    ├── ConfigError    what the user wrote: an option, a fleet.toml, a device file      (exit 2)
    ├── DataError      a file of samples                                                 (exit 2)
    ├── LinkError      the broker or the connection to it                                (exit 1)
    ├── MessageError   received bytes that are not a message of the protocol             (exit 1)
    ├── CodecError     a payload that does not decode to the layout                      (exit 1)
    ├── BundleError    a graph, layout or golden file that fails its check               (exit 1)
    ├── StateError     a state file, ledger or checkpoint on disk                        (exit 1)
    ├── RoundError     a round that cannot be opened or closed                           (exit 1)
    ├── PowerError     a power meter that cannot be read                                 (exit 1)
    ├── SourceError    a sensor whose readings become samples, and that cannot be read   (exit 1)
    ├── RevokedError   the fleet has revoked this device                                 (exit 77)
    └── FlashError     an image, card or device that cannot be flashed                   (exit 1)

The command line prints their message on stderr and exits with ``exit_code``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class FleetError(Exception):
    """The base of all errors.

    Args:
        what: the problem in one sentence.
        where: the file, topic, key or device concerned.
        expected: what would have been right.
        hint: what the reader can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, expected: str | None = None, hint: str | None = None):
        self.what, self.where, self.expected, self.hint = what, where, expected, hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected:
            text += f"; expected {self.expected}"
        if self.hint:
            text += f"\nhint: {self.hint}"
        return text


class ConfigError(FleetError):
    exit_code = 2


class DataError(FleetError):
    exit_code = 2


class LinkError(FleetError):
    pass


class MessageError(FleetError):
    pass


class CodecError(FleetError):
    pass


class BundleError(FleetError):
    pass


class StateError(FleetError):
    pass


class RoundError(FleetError):
    pass


class PowerError(FleetError):
    pass


class SourceError(FleetError):
    pass


class RevokedError(FleetError):
    exit_code = 77  # EX_NOPERM of sysexits.h; the systemd unit does not restart the agent after it


class FlashError(FleetError):
    pass


def shortened(items: Sequence[str], most: int = 10) -> list[str]:
    """The first ``most`` items, and ``and N more`` when there are more."""
    return [*items[:most], *([f"and {len(items) - most} more"] if len(items) > most else [])]


@contextlib.contextmanager
def installed(extra: str) -> Iterator[None]:
    """Around an import: raises ConfigError that names the package's ``extra`` if a module is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"'{error.name}' is not installed", hint=f'pip install "metafleet[{extra}]"') from error
