"""Check a server with `scim2-tester`: run by the interpreter of that peer, it prints the failures.

Arguments: the address of the service, and the key. Exits with 1 if a check failed.
"""

from __future__ import annotations

import sys
from collections import Counter

import httpx2
from scim2_client.engines.httpx2 import SyncSCIMClient  # type: ignore[import-not-found]
from scim2_tester import Status, check_server  # type: ignore[import-not-found]

GOOD = {Status.SUCCESS, Status.COMPLIANT, Status.ACCEPTABLE, Status.SKIPPED}


def main(url: str, secret: str) -> int:
    http = httpx2.Client(base_url=url, headers={"authorization": f"Bearer {secret}"}, timeout=30)
    results = check_server(SyncSCIMClient(http))
    for result in results:
        if result.status not in GOOD:
            print(result.status.name, result.title, "|", result.reason)
    counts = Counter(result.status.name for result in results)
    print(dict(counts))
    return 0 if counts["SUCCESS"] > 50 and GOOD.issuperset(r.status for r in results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
