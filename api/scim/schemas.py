"""Attributes of users and groups over SCIM, and what the service says about itself (RFC 7643).

`/Schemas` shows the tables of attributes, by which documents are read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.scim.attributes import Attribute, read_only

CORE = "urn:ietf:params:scim:schemas:core:2.0"
MESSAGES = "urn:ietf:params:scim:api:messages:2.0"
USER, GROUP = f"{CORE}:User", f"{CORE}:Group"
LIST, PATCH, ERROR = f"{MESSAGES}:ListResponse", f"{MESSAGES}:PatchOp", f"{MESSAGES}:Error"
SEARCH = f"{MESSAGES}:SearchRequest"
RESULTS_MAX, RESULTS = 200, 100  # of one page
EXTERNAL_ID = Attribute("externalId", "Id at the identity provider.", is_exact=True)
EMAILS = Attribute(
    "emails",
    "E-mail addresses. A person signs in with the primary one, or else the first.",
    "complex",
    (
        Attribute("value", "The address."),
        Attribute("display", "Name to show."),
        Attribute("type", "Such as work or home."),
        Attribute("primary", "Whether it is the one to use; at most one is.", "boolean"),
    ),
    is_multiple=True,
)
NAME = Attribute(
    "name",
    "Parts of the name.",
    "complex",
    (
        Attribute("formatted", "The whole name."),
        Attribute("familyName", "Family name."),
        Attribute("givenName", "Given name."),
    ),
)
GROUPS = read_only(
    "groups",
    "Groups of the user, which change with the groups.",
    type="complex",
    is_multiple=True,
    sub=(
        read_only("value", "Id of the group.", is_exact=True),
        read_only("$ref", "Address of the group.", type="reference", references=("Group",)),
        read_only("display", "Name of the group."),
        read_only("type", "Always direct."),
    ),
)
USER_ATTRIBUTES = Attribute(
    "User",
    "Person whom the identity provider lets in, with the role that its groups give.",
    sub=(
        Attribute(
            "userName", "Name at the identity provider.", is_required=True, uniqueness="server"
        ),
        Attribute("displayName", "Name to show."),
        NAME,
        Attribute(
            "active",
            "Whether the person may act in the organization; true if it is left out.",
            "boolean",
            is_required=True,
        ),
        EMAILS,
        GROUPS,
    ),
)
MEMBERS = Attribute(
    "members",
    "Users in the group.",
    "complex",
    (
        Attribute("value", "Id of the user.", is_exact=True, mutability="immutable"),
        Attribute(
            "$ref",
            "Address of the user.",
            "reference",
            mutability="immutable",
            references=("User",),
            is_exact=True,
        ),
    ),
    is_multiple=True,
)
GROUP_ATTRIBUTES = Attribute(
    "Group",
    "Group of users. The owner of the organization decides by its name which role it gives.",
    sub=(
        Attribute("displayName", "Name of the group.", is_required=True, uniqueness="server"),
        MEMBERS,
    ),
)
# Attributes of RFC 7643 that Weir does not need: they are accepted, and not stored.
NOT_KEPT = frozenset(
    {
        *("nickname", "profileurl", "title", "usertype", "preferredlanguage", "locale", "timezone"),
        *("password", "phonenumbers", "ims", "photos", "addresses", "entitlements", "roles"),
        "x509certificates",
    }
)
OF_NAME_NOT_KEPT = frozenset({"middlename", "honorificprefix", "honorificsuffix"})
COMMON = frozenset({"schemas", "id", "meta"})
RESOURCES: Mapping[str, tuple[str, Attribute]] = {
    "Users": (USER, USER_ATTRIBUTES),
    "Groups": (GROUP, GROUP_ATTRIBUTES),
}


def meta(kind: str, location: str, **more: str) -> dict[str, Any]:
    return {"resourceType": kind, "location": location, **more}


def schemas(base: str) -> list[dict[str, Any]]:
    """Return the resources of `/Schemas`."""
    return [
        {
            "schemas": [f"{CORE}:Schema"],
            "id": urn,
            "name": root.name,
            "description": root.description,
            "attributes": [each.shown() for each in root.sub],
            "meta": meta("Schema", f"{base}/Schemas/{urn}"),
        }
        for urn, root in RESOURCES.values()
    ]


def resource_types(base: str) -> list[dict[str, Any]]:
    """Return the resources of `/ResourceTypes`."""
    return [
        {
            "schemas": [f"{CORE}:ResourceType"],
            "id": root.name,
            "name": root.name,
            "endpoint": f"/{endpoint}",
            "description": root.description,
            "schema": urn,
            "schemaExtensions": [],
            "meta": meta("ResourceType", f"{base}/ResourceTypes/{root.name}"),
        }
        for endpoint, (urn, root) in RESOURCES.items()
    ]


def service_provider_config(base: str) -> dict[str, Any]:
    """Return what the service supports."""
    return {
        "schemas": [f"{CORE}:ServiceProviderConfig"],
        "documentationUri": "https://datatracker.ietf.org/doc/html/rfc7644",
        "patch": {"supported": True},
        "bulk": {"supported": False, "maxOperations": 0, "maxPayloadSize": 0},
        "filter": {"supported": True, "maxResults": RESULTS_MAX},
        "changePassword": {"supported": False},
        "sort": {"supported": True},
        "etag": {"supported": True},
        "authenticationSchemes": [
            {
                "type": "oauthbearertoken",
                "name": "API key",
                "description": "A key with the scope scim, as bearer token.",
                "specUri": "https://datatracker.ietf.org/doc/html/rfc6750",
                "primary": True,
            }
        ],
        "meta": meta("ServiceProviderConfig", f"{base}/ServiceProviderConfig"),
    }
