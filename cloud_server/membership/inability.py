"""Why a device cannot take part in rounds."""

from __future__ import annotations

from cloud_server.records.fleet_settings import LinkSection
from fleet_core.algorithms.interface import Method
from fleet_core.board.device_settings import Demands
from fleet_core.model import choose_codec
from fleet_core.protocol import messages
from fleet_core.protocol.device_messages import Presence


def inability(
    presence: Presence, *, method: Method, link: LinkSection, parameters: int, parts: bool = False, graph: bool = True,
    private: bool = False, secure: bool = False, numbers: bool = False, noise: float = 0.0,
) -> str | None:
    """The reason, or None. parameters: the model's number of parameters. parts: a round
    may train a part of the model. graph: the fleet has a graph for training without torch. private: updates are
    clipped, and may get noise. secure, numbers: updates are masked, and numbers beside them. noise: what devices add
    themselves, over the clip."""
    if presence.proto != messages.PROTOCOL:
        return f"speaks protocol {presence.proto}, this is {messages.PROTOCOL}"
    if not presence.train:
        return f"does not train: {presence.cannot}" if presence.cannot else "does not train"
    if presence.engines and not graph and "torch" not in presence.engines:
        return f"does not train: it has no torch, and the fleet no graph for training with {method.name}"
    if 0 < presence.most < parameters:
        return f"does not train: {parameters} parameters are over its board's {presence.most}"
    if presence.methods.get(method.name) != method.version:
        return f"lacks {method.name} version {method.version}"
    keeps = method.client.keeps
    needed = [choose_codec.possible("up", link.up, keeps)[0], *choose_codec.possible("down", link.down, keeps)]
    if not set(needed) <= set(presence.codecs):
        return f"lacks codec {' or '.join(dict.fromkeys(needed))}"
    if parts and not presence.parts:
        return "cannot train a part of the model: its agent is too old"
    if private and not presence.private:
        return "cannot clip and hide its updates, as [privacy] asks: its agent is too old"
    if secure and not presence.secure:
        return ("cannot mask its updates, as secure_aggregation asks: its agent is too old, or device.toml names no "
                "certificate of this fleet ('metafleet flash' gives one)")
    if numbers and not presence.numbers:
        return "cannot mask the numbers beside its updates: its agent is too old"
    unmet = Demands(presence.demands_secure, presence.demands_noise).unmet(secure=secure, noise=noise)
    return f"its [privacy] keeps it out: {unmet}" if unmet else None
