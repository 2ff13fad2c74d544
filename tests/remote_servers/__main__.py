"""`python -m tests.remote_servers MODEL CERTIFICATES PORT HTTP_PORT` serves until it is killed."""

from __future__ import annotations

import asyncio
import sys

from tests.remote_servers.serving import serve

if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
