"""The wire beside the sides of tools/bench/two_nodes.py: a step sends bytes both ways at once."""

import os
import socket
import sys
import threading
import time

from started_script import expect_driver
from step_cases import Batch, Job, serve

BYTES = 32 << 20
ADDRESS = ("10.77.0.1", 5998)
"""Of the first node of tools/two-nodes."""


def exchange(connection: socket.socket, memory: memoryview) -> None:
    """Sends as many bytes as the memory has, while it receives as many into it."""
    sender = threading.Thread(target=connection.sendall, args=(bytes(len(memory)),))
    sender.start()
    received = 0
    while received < len(memory):
        count = connection.recv_into(memory[received:])
        if not count:
            raise ConnectionError(f"the other node closed after {received} bytes")
        received += count
    sender.join()


def main(text: str) -> None:
    """Serves a job."""
    job, rank = Job.read(text), int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rank == 0:
        with socket.create_server(ADDRESS) as server:
            connection = server.accept()[0]
    else:
        connection = connect()
    memory = memoryview(bytearray(BYTES))
    with connection:

        def step(number: int, batch: Batch) -> float:
            exchange(connection, memory)
            return 0.0

        serve(job, rank, step)


def connect(patience: float = 60.0) -> socket.socket:
    """Returns a connection to the first node, as soon as it listens."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(ADDRESS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    expect_driver("tools/bench/two_nodes.py")
    main(sys.argv[1])
