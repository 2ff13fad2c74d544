"""Command forked from a server of `tests.forks`, in the place of this process.

`python -IS tests/forked_command.py SOCKET MODULE ARGUMENT...` gives it this process's environment,
directory and first three files, and ends with its status. It runs MODULE itself where the server
does not: the environment may change what imports do. It imports little: a shell calls it often.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Run the command."""
    path, module, *arguments = sys.argv[1:]
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": [0, 1, 2],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        message = json.dumps(request).encode() + b"\n"
        if rest := message[socket.send_fds(connection, [message], [0, 1, 2]) :]:
            connection.sendall(rest)
        with connection.makefile() as answer:
            pid, status = answer.readline(), answer.readline()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    # As a shell reports the end by a signal.
    sys.exit(int(status) if int(status) >= 0 else 128 - int(status))


if __name__ == "__main__":
    main()
