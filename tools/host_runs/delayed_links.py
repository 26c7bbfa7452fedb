"""Carry the packets of one link between two network namespaces, each after a delay.

    python -m tools.host_runs.delayed_links HOST_NAMESPACE eth0 SWITCH_NAMESPACE port0 0.005

Kernels without `sch_netem` cannot delay packets. This process creates a tap interface in each namespace, prints
`ready`, and copies packets between the interfaces until it is killed. The shaping of the interfaces (tc-tbf) stays the
kernel's.
"""

import collections
import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time

# From linux/if_tun.h and linux/sched.h.
_SET_INTERFACE, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_NEW_NETWORK = 0x40000000
_LARGEST_PACKET = 1 << 16
# Fewer, larger packets leave the processors to the clients.
MTU = 9000


def tap(namespace: str, interface: str) -> int:
    """Create a tap interface in a namespace, and return its file descriptor. The process stays in the namespace."""
    entered = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(entered, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.close(entered)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", interface.encode(), _TAP | _NO_HEADER))
    return descriptor


def copy(first: int, second: int, delay: float) -> None:
    """Copy packets in both directions, each `delay` seconds after it came."""
    selector = selectors.DefaultSelector()
    for descriptor in (first, second):
        selector.register(descriptor, selectors.EVENT_READ)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(timeout):
            try:
                while True:
                    packet = os.read(key.fd, _LARGEST_PACKET)
                    waiting.append((time.monotonic() + delay, second if key.fd == first else first, packet))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, to, packet = waiting.popleft()
            try:
                os.write(to, packet)
            except OSError:
                pass  # The other interface is down, or full: a link loses the packet.


def main(host: str, interface: str, switch: str, port: str, delay: str) -> None:
    ends = tap(host, interface), tap(switch, port)
    print("ready", flush=True)
    copy(*ends, float(delay))


if __name__ == "__main__":
    main(*sys.argv[1:])
