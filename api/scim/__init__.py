"""SCIM 2.0: an identity provider creates, changes and ends the members of an organization."""
