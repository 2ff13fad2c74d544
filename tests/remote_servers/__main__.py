"""Server of all services: `python -m tests.remote_servers MODEL CERTIFICATES PORT HTTP_PORT`.

It serves until it is killed. A fifth word is the address at which it listens without TLS over gRPC.
"""

from __future__ import annotations

import asyncio
import sys

from tests.remote_servers.serving import serve

if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
