"""Alerts: that so much of a limit is used, or so little credit is left, found from rows and told once."""
