"""Examination of engines for `weir doctor`: questions, one observation each, and the report."""
