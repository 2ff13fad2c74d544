"""Base package of the API, which imports no other part of it: errors, settings, conversion of
messages, guards of calls.
"""
