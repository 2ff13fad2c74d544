"""What api, inference and metering share and none of them owns: incidents, and what child processes inherit."""
