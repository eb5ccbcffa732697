"""The software bill of materials of a program: CycloneDX 1.6 as JSON (https://cyclonedx.org/docs/1.6/json/).

One component for each distribution, with its version, the licence in its metadata, and its package URL if it is from
an index. The same program gives the same bytes: the serial number comes from its version, and the time is
that of its files.
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fleet_core.base.errors import ConfigError

if TYPE_CHECKING:
    from firmware_profiles.package.program import Part

FILE = "sbom.cdx.json"
NOT_TOLD = "not told"
AGENT = "metafleet"


def text(version: str, parts: Sequence[Part], own: Collection[str], made_at_s: int) -> str:
    """The document. version: of the program. own: normalized names of distributions that are the user's and of no
    index. made_at_s: Unix seconds. Raises ConfigError if the library is not installed."""
    try:
        from cyclonedx.contrib.license.factories import LicenseFactory
        from cyclonedx.model.bom import Bom, BomMetaData
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ModuleNotFoundError as error:
        raise ConfigError(f"'{error.name}', which writes the bill of materials, is not installed",
                          hint='pip install "metafleet[flash]"') from error
    licences = LicenseFactory()
    whole = Component(name="edge-agent", version=version, type=ComponentType.APPLICATION, bom_ref="edge-agent")
    components = [
        Component(
            name=part.name, version=part.version, type=ComponentType.LIBRARY, bom_ref=part.name,
            purl=None if _normal(part.name) in (AGENT, *own) else PackageURL("pypi", None, part.name, part.version),
            licenses=[] if part.licence == NOT_TOLD else [licences.make_from_string(part.licence)],
        )
        for part in parts
    ]
    made_at = datetime.datetime.fromtimestamp(made_at_s, datetime.timezone.utc)
    bom = Bom(
        components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"metafleet/program/{version}"),
        metadata=BomMetaData(component=whole, timestamp=made_at),
    )
    bom.register_dependency(whole, components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _normal(name: str) -> str:
    """As own_wheels.package writes a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()
