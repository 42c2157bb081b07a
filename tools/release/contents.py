"""A CycloneDX bill of materials: all dependencies with versions and licences."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpuenergyd import __version__

EXTRAS = ("daemon", "fast", "postgresql", "prove", "trainers")
_CLASSIFIER = "License :: OSI Approved :: "
_MAX_LICENCE_CHARS = 80
"""Longer values are full licence texts rather than names."""


@dataclass(frozen=True, slots=True)
class Component:
    """A distribution; `licence` as declared in its metadata, None if missing."""

    name: str
    version: str
    licence: str | None
    is_expression: bool
    needs: tuple[str, ...]

    @property
    def purl(self) -> str:
        """Return its package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def components(extras: tuple[str, ...] = EXTRAS) -> tuple[Component, ...]:
    """Return the installed dependencies of these extras by name, without the project itself."""
    found: dict[str, Component] = {}
    open_requirements = [Requirement(f"gpuenergyd[{','.join(extras)}]")]
    seen: set[tuple[str, str]] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                installed = distribution(name)
            except PackageNotFoundError:
                continue  # for another platform, or an optional dependency that is not installed
            needed = tuple(_requirements(installed, extra))
            open_requirements += needed
            if name != "gpuenergyd":
                known = found[name].needs if name in found else ()
                names = {*known, *(canonicalize_name(each.name) for each in needed)}
                found[name] = Component(name, installed.version, *_licence(installed), tuple(sorted(names)))
    return tuple(found[name] for name in sorted(found))


def bill_of_materials(made_at_epoch_s: int) -> str:
    """Return the CycloneDX 1.6 document; reproducible for the same environment and instant."""
    listed = components()
    own = f"pkg:pypi/gpuenergyd@{__version__}"
    purl_of = {component.name: component.purl for component in listed}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ' '.join([own, *purl_of.values()]))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made_at_epoch_s, UTC).isoformat().replace("+00:00", "Z"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "gpuenergyd",
                "version": __version__,
                "purl": own,
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": [
            {
                "type": "library",
                "bom-ref": component.purl,
                "name": component.name,
                "version": component.version,
                "purl": component.purl,
                **({"licenses": [_licence_entry(component)]} if component.licence else {}),
            }
            for component in listed
        ],
        "dependencies": [
            {"ref": own, "dependsOn": [purl_of[name] for name in sorted(_direct() & set(purl_of))]},
            *({"ref": c.purl, "dependsOn": [purl_of[name] for name in c.needs if name in purl_of]} for c in listed),
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _licence_entry(component: Component) -> dict[str, object]:
    if component.is_expression:
        return {"expression": component.licence}
    return {"license": {"name": component.licence}}


def _direct() -> set[str]:
    own = distribution("gpuenergyd")
    return {str(canonicalize_name(each.name)) for extra in EXTRAS for each in _requirements(own, extra)}


def _requirements(installed: Distribution, extra: str) -> Iterator[Requirement]:
    for text in installed.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None:
            if not extra:
                yield requirement
        elif requirement.marker.evaluate({"extra": extra}) and ("extra" in str(requirement.marker)) == bool(extra):
            yield requirement


def _licence(installed: Distribution) -> tuple[str | None, bool]:
    """Return a distribution's licence and whether it is an SPDX expression."""
    metadata = installed.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"], True
    classifiers = [c.removeprefix(_CLASSIFIER) for c in metadata.get_all("Classifier", []) if c.startswith(_CLASSIFIER)]
    if classifiers:
        return " and ".join(classifiers), False
    text = metadata["License"].strip() if "License" in metadata else ""
    return (text, False) if text and len(text) <= _MAX_LICENCE_CHARS and "\n" not in text else (None, False)
