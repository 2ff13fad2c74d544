"""What holds for every test: no connection leaves this machine."""

pytest_plugins = ["tests.plugins.loopback_only"]
