"""Base package of the API, which imports no other part of it: errors, settings, wire values, call
guards."""
