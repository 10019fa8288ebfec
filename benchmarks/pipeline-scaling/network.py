"""A network between processes that delays every packet.

Each process moves into a network namespace of its own, with one interface: a TUN device, whose
other end is a file that it passes to the relay. The relay, a thread of the parent, reads packets
and writes each to the device of its destination when its delay is over. So the delay is below TCP,
and nothing above it changes. This needs Linux, and the right to make namespaces (root).
"""

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 65000
BUFFER = 2**26  # bytes of a TCP window; a smaller one would limit a long link


def enter_network(rank: int, line: Connection) -> tuple[str, str]:
    """Move this process into the network; return the address of rank 0 and the interface."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
    commands = [
        "link set lo up",
        f"addr add {_address(rank)}/24 dev tun0",
        f"link set tun0 mtu {MTU} txqueuelen 10000 up",
    ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    settings = Path("/proc/sys/net/ipv4")  # of this namespace
    for name in ("tcp_rmem", "tcp_wmem"):
        (settings / name).write_text(f"4096 {BUFFER} {BUFFER}")
    (settings / "tcp_slow_start_after_idle").write_text("0")
    send_handle(line, device, os.getppid())
    os.close(device)
    line.recv()  # wait until all are there
    return _address(0), "tun0"


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


class Relay:
    """Thread that carries packets from device to device.

    Args:
        delay: Seconds that each packet takes.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._devices: list[int] = []
        self._running = True
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def start(self, lines: list[Connection]) -> None:
        """Receive the devices of all processes, and start."""
        self._devices = [recv_handle(line) for line in lines]
        self._thread.start()
        for line in lines:
            line.send("go")

    def stop(self) -> None:
        """Stop, and drop packets in flight."""
        self._running = False
        if self._thread.is_alive():
            self._thread.join()
        for device in self._devices:
            os.close(device)

    def _carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()  # one delay for all: first in, first out
        while self._running:
            now = time.perf_counter()
            pause = min(max(waiting[0][0] - now, 0.0), 0.1) if waiting else 0.1
            ready, _, _ = select.select(self._devices, [], [], pause)
            now = time.perf_counter()
            for device in ready:
                packet = os.read(device, 2**16)
                if packet[0] >> 4 == 4:  # IPv4; the last byte of the destination is the rank
                    waiting.append((now + self._delay, packet[19] - 1, packet))
            while waiting and waiting[0][0] <= now:
                _, rank, packet = waiting.popleft()
                if rank < len(self._devices):
                    os.write(self._devices[rank], packet)
