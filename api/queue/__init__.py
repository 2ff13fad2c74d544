"""Fair queue before an engine: bounded, fair between organizations, with wait estimates. No I/O."""
