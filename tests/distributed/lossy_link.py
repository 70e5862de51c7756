"""A network link between two interfaces, qt_a and qt_b, which delays packets and loses some: a program for slow_network.

python tests/distributed/lossy_link.py SECONDS SHARE    prints a line when the interfaces are there, and runs until it is ended
"""

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h


def interface(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), TAP | NO_HEADER))
    return file


def relay(ends: dict[int, int], delay: float, lost: float) -> None:
    """Pass frames from each end to the other."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number, chance = 0, random.Random(0)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for file in select.select([*ends], [], [], timeout)[0]:
            frame = os.read(file, 1 << 16)
            if chance.random() >= lost:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay, number, ends[file], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, file, frame = heapq.heappop(waiting)
            try:
                os.write(file, frame)
            except OSError:  # the interface is down, or its queue is full: the frame is lost
                continue


if __name__ == "__main__":
    one, other = interface("qt_a"), interface("qt_b")
    print("linked", flush=True)
    relay({one: other, other: one}, float(sys.argv[1]), float(sys.argv[2]))
