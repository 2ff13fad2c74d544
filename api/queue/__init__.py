"""Fair queue in front of an engine: bounded, fair between organizations, with wait estimates. No
I/O.
"""
