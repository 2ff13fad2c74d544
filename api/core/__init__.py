"""Imported by every package of the API, and imports none of them: errors, settings, wire values, guards of calls."""
