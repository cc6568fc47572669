"""What a device computes, holds and sends: the numbers that the cost model uses.

The link model is latency plus size over bandwidth (Hockney 1994), with the steps and bytes of ring
algorithms (Thakur, Rabenseifner & Gropp 2005), and the delay of the last rank after computing
(process skew: Hoefler, Schneider & Lumsdaine 2010). The device model is the roofline (Williams,
Waterman & Patterson 2009): an operator takes as long as its arithmetic or its memory traffic,
whichever is more, and a fixed time to start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from onnxpar.core.mesh import Mesh


@dataclass(frozen=True)
class Link:
    """What connects the devices of a block of neighbours.

    Attributes:
        devices: Devices of the block, numbered consecutively; 0 means all devices.
        bandwidth: Bytes per second that one device sends while all devices send.
        latency: Seconds that one step of a collective takes in addition to its bytes.
        wait: Seconds that ranks wait for the last of them in a collective that follows computing.
            It is counted once for several collectives in a row.
        overlaps: Whether data travels while the devices compute: through a network or between
            GPUs. In the memory that ranks share, a processor moves it.
    """

    devices: int
    bandwidth: float
    latency: float
    wait: float = 0.0
    overlaps: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine of equal devices.

    Attributes:
        name: Its name in tables.
        flops: Operations per second of one device, by element type ("float32", "bfloat16", …).
        bandwidth: Bytes per second between a device and its memory.
        memory: Bytes of one device.
        overhead: Seconds to start one operator.
        links: From the smallest block of devices to all of them.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    overhead: float
    links: tuple[Link, ...]

    def link(self, mesh: Mesh, atoms: Sequence[int]) -> Link:
        """Returns the link that limits a collective over `atoms`: that of the widest atom.

        Without atoms (a pipeline of one stage has no other to send to), it is the first link.
        """
        span = max((mesh.strides[a] * mesh.atoms[a] for a in atoms), default=1)
        for link in self.links:
            if link.devices == 0 or link.devices >= span:
                return link
        return self.links[-1]

    def levels(self, mesh: Mesh, atoms: Sequence[int]) -> list[tuple[Link, tuple[int, ...]]]:
        """Returns the links of a collective over `atoms`, the inner first, with their atoms."""
        found: dict[Link, list[int]] = {}
        for atom in sorted(atoms, key=lambda a: mesh.strides[a]):
            found.setdefault(self.link(mesh, (atom,)), []).append(atom)
        return [(link, tuple(among)) for link, among in found.items()]

    def rate(self, dtype: str) -> float:
        """Returns the operations per second for an element type; those of float32 by default."""
        return self.flops.get(dtype, self.flops["float32"])


def _gpu(
    name: str,
    float32: float,
    half: float,
    bandwidth: float,
    memory: int,
    links: tuple[Link, Link],
) -> Machine:
    rates = {"float32": float32, "float16": half, "bfloat16": half}
    return Machine(name, MappingProxyType(rates), bandwidth, memory, 5e-6, links)


# Dense peak rates, memory and links from the vendor's data sheets: NVIDIA A100 80GB (2021; float32
# by TF32), H100 SXM5 (2023) and H200 SXM (2024), NVLink 3 and 4 in one direction, InfiniBand HDR
# and NDR with one port for each GPU. Latencies are those of small NCCL collectives. `cpu` is a
# core of a desktop processor with MPI in shared memory; `tools/calibrate` measures the real one.
_A100_LINKS = Link(8, 3.0e11, 4e-6, overlaps=True), Link(0, 25e9, 12e-6, overlaps=True)
_H100_LINKS = Link(8, 4.5e11, 4e-6, overlaps=True), Link(0, 50e9, 10e-6, overlaps=True)
_CPU_RATES = MappingProxyType({"float32": 6e10, "float64": 3e10})
_MACHINES = (
    Machine("cpu", _CPU_RATES, 1.2e10, 8 << 30, 3e-6, (Link(0, 3e9, 2e-6),)),
    _gpu("a100", 1.56e14, 3.12e14, 2.04e12, 80 << 30, _A100_LINKS),
    _gpu("h100", 4.95e14, 9.89e14, 3.35e12, 80 << 30, _H100_LINKS),
    _gpu("h200", 4.95e14, 9.89e14, 4.8e12, 141 << 30, _H100_LINKS),
)
# Ethernet of 10 Gbit/s; the latency is that of a message over TCP (docs/design/0030-wire.md).
NETWORKED = Machine(
    "cpu", _CPU_RATES, 1.2e10, 8 << 30, 3e-6, (Link(0, 1.2e9, 6e-5, overlaps=True),)
)
"""Devices like those of `cpu`, each in a machine of its own."""
PRESETS: Mapping[str, Machine] = MappingProxyType({m.name: m for m in _MACHINES})

WIRE = Machine("wire", MappingProxyType({"float32": inf}), inf, 1 << 62, 0.0, (Link(0, 1.0, 0.0),))
"""Devices of which nothing takes time but sending: a second is a byte that one device sends."""
