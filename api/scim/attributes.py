"""Description of an attribute over SCIM, by which documents are read and `/Schemas` is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attribute:
    """Attribute of a resource, or sub-attribute. `sub` has those of a complex one."""

    name: str
    description: str
    type: str = "string"
    sub: tuple[Attribute, ...] = ()
    is_multiple: bool = False
    is_required: bool = False
    is_exact: bool = False
    mutability: str = "readWrite"
    uniqueness: str = "none"
    references: tuple[str, ...] = ()

    def find(self, name: str) -> Attribute | None:
        return next((each for each in self.sub if each.name.lower() == name.lower()), None)

    def shown(self) -> dict[str, Any]:
        """Return its description in `/Schemas`."""
        found: dict[str, Any] = {
            "name": self.name,
            "type": self.type,
            "multiValued": self.is_multiple,
            "description": self.description,
            "required": self.is_required,
            "caseExact": self.is_exact,
            "mutability": self.mutability,
            "returned": "default",
            "uniqueness": self.uniqueness,
        }
        if self.references:
            found["referenceTypes"] = list(self.references)
        if self.sub:
            found["subAttributes"] = [each.shown() for each in self.sub]
        return found


def read_only(name: str, description: str, **more: Any) -> Attribute:
    return Attribute(name, description, mutability="readOnly", **more)
