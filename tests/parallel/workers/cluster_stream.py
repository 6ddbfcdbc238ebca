"""Sends bytes from the last host to the first over one TCP connection and prints how long they took; no Horovod."""

from __future__ import annotations

import os
import socket
import sys
import time

PORT = 7777
SECONDS = 60.0


def receive(number: int) -> None:
    with socket.create_server(("", PORT)) as server:
        server.settimeout(SECONDS)
        connection, _ = server.accept()
        connection.settimeout(SECONDS)
        with connection:
            begin, left = time.perf_counter(), number
            while left:
                got = len(connection.recv(1 << 20))
                assert got, f"{left} bytes are missing"
                left -= got
            print(time.perf_counter() - begin)


def send(number: int) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            connection = socket.create_connection(("hvdc-1", PORT), SECONDS)
            break
        except ConnectionRefusedError:  # not listening yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        connection.sendall(bytes(number))


if __name__ == "__main__":
    (receive if os.environ["HOROVOD_RANK"] == "0" else send)(int(sys.argv[1]))
