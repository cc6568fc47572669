"""Collectives between machines, by messages, beside those in shared memory, in one job.

A world sends messages if ONNXPAR_SHARED_MEMORY=0 when it makes its groups. With
ONNXPAR_RANKS_PER_MACHINE=2, each two ranks share memory, as if they had a machine of their own, and
send messages to the others.
"""

import re

import pytest

from tests.runtime.launching import mpirun
from tests.tiers import FULL

HEAD = """
import functools
import os
import numpy as np
from tests.runtime.collectives.teams import feed, same_everywhere, session
from tests.runtime.collectives.test_values import FLOATS, TYPES, values
from onnxpar_runtime.collectives import World

# Integers of other sizes are reduced and sent by the same code; `test_values.py` has them all.
KINDS = TYPES if os.environ.get("ONNXPAR_FULL") else ["float", "bfloat16", "int32", "bool"]

def connect(memory, ranks_per_machine):
    # The environment decides when a group is made, here the one of all ranks.
    os.environ["ONNXPAR_SHARED_MEMORY"] = memory
    os.environ["ONNXPAR_RANKS_PER_MACHINE"] = ranks_per_machine
    world = World.mpi()
    rank = world.rank(world.local_ranks[0])
    rank.all_reduce(np.ones(1))
    return rank

memory = connect("1", "0")
size, me = memory.world.size, memory.index
PAIRS = ",".join(f"{r},{size - 1 - r}" for r in range(size))
OPS = {
    "AllReduce": "",
    "ReduceScatter": "axis=0",
    "AllGather": "axis=0",
    "AllToAll": "split_axis=0, concat_axis=0",
    "Broadcast": f"root={size - 1}",
    "Permute": f"pairs=[{PAIRS}]",
    "Permute of one": f"pairs=[0, {size - 1}]",
}

def program(rank, op, kind, reduction=None):
    attributes = [OPS[op]] * bool(OPS[op]) + [f'reduction="{reduction}"'] * bool(reduction)
    node = f"onnxpar.{op.split()[0]} " + f"<{', '.join(attributes)}>" * bool(attributes)
    # The second AllReduce is in place.
    then = f"z, u = {node} (y, t)" if op == "AllReduce" else "z = Identity (y)"
    return session(rank, f"g ({kind}[n] x) => ({kind}[m] z) {{ y, t = {node} (x) {then} }}")

@functools.cache
def data(kind, count, rank=me):
    # Sums of floats depend on their order.
    if kind in FLOATS:
        drawn = np.random.default_rng([rank, count]).random(count, np.float32)
        return (2 * drawn - 1).astype(FLOATS[kind], copy=False)
    return values(kind, (count,), rank)

# Elements of a member's block: around those of one message, and of all that are under way at once.
PIECE = 8192  # float32 in 32 KiB
ALL = max(16, 128 // (size - 1)) * PIECE
BLOCKS = [0, 1, 5, PIECE // (size - 1) + 1, PIECE - 1, PIECE, PIECE + 1, ALL, ALL + PIECE + 3]
if not os.environ.get("ONNXPAR_FULL"):
    BLOCKS = BLOCKS[::2]
"""

VALUES = """
messages = connect("0", "0")
count = 0

def compare(op, kind, reduction, blocks):
    global count
    one, other = (program(rank, op, kind, reduction) for rank in (memory, messages))
    for block in blocks:
        x = data(kind, block * size + (3 if op in ("AllReduce", "Broadcast") else 0))
        want, got = feed(one, {"x": x})[0], feed(other, {"x": x})[0]
        assert want.tobytes() == got.tobytes(), (op, kind, reduction, block)
        count += 1

for kind in KINDS:
    for op in OPS:
        compare(op, kind, None, BLOCKS if kind in ("float", "bfloat16") else [7, 2 * PIECE + 1])
    for reduction in ("max", "min", "prod"):
        for op in ("AllReduce", "ReduceScatter"):
            compare(op, kind, reduction, [7, PIECE + 1])
print("equal", count)
"""


@pytest.mark.parametrize("ranks", [2, 3, 4] if FULL else [3])
def test_messages_give_the_bits_of_shared_memory(ranks: int) -> None:
    result = mpirun(ranks, ["-c", HEAD + VALUES], limit=100)
    assert result.code == 0, result.text
    assert re.findall(r"equal (\d+)", result.text) == ["436" if FULL else "146"] * ranks


NESTED = """
import itertools
nested = connect("1", "2")
count = 0

def by_machines(kind, reduction, inputs):
    # Reduced in the order of a machine's ranks, then of the machines, 16-bit floats as float32.
    wide = np.float32 if kind in ("float16", "bfloat16") else inputs[0].dtype
    f = {"sum": np.add, "prod": np.multiply}[reduction]
    pairs = [f(a.astype(wide), b.astype(wide)) for a, b in zip(inputs[::2], inputs[1::2])]
    return list(itertools.accumulate(pairs, f))[-1].astype(inputs[0].dtype)

for kind in KINDS:
    every = {"float": BLOCKS, "bfloat16": BLOCKS[:-2]}.get(kind, [7, 2 * PIECE + 1])
    for op in OPS:
        both = [program(rank, op, kind) for rank in (memory, nested)]
        for block in every:
            x = data(kind, block * size + (3 if op in ("AllReduce", "Broadcast") else 0))
            want, got = (feed(one, {"x": x})[0] for one in both)
            if kind not in FLOATS or op not in ("AllReduce", "ReduceScatter"):
                assert want.tobytes() == got.tobytes(), (op, kind, block)
            count += 1
    if kind not in FLOATS:
        continue
    # The last is more than what is reduced at once.
    most = [1 << 20] if kind == "float" else []
    for reduction in ("sum", "prod"):
        attributes = f'<reduction="{reduction}">'
        text = f"g ({kind}[n] x) => ({kind}[m] y) {{ y, t = onnxpar.AllReduce {attributes} (x) }}"
        scatters, reduces = program(nested, "ReduceScatter", kind, reduction), session(nested, text)
        for block in every + most:
            inputs = [data(kind, block * size, rank) for rank in range(size)]
            want = by_machines(kind, reduction, inputs)
            got = feed(scatters, {"x": inputs[me]})[0]
            mine = want[me * block : (me + 1) * block]
            assert mine.tobytes() == got.tobytes(), ("ReduceScatter", kind, reduction, block)
            inputs = [np.append(x, x[:3]) for x in inputs]
            want = by_machines(kind, reduction, inputs)
            got = feed(reduces, {"x": inputs[me]})[0]
            assert want.tobytes() == got.tobytes(), ("AllReduce", kind, reduction, block)
            count += 1
print("equal", count)
"""


def test_machines_with_several_ranks() -> None:
    """All but sums have the bits of shared memory; sums are added in the order of the machines."""
    result = mpirun(4, ["-c", HEAD + NESTED], limit=100)
    assert result.code == 0, result.text
    assert re.findall(r"equal (\d+)", result.text) == ["308" if FULL else "102"] * 4


BOTH_LANES = """
rank = connect("{memory}", "{ranks_per_machine}")
text = '''g (float[n] big, float[m] small) => (float[n] sum, float[m] y3) {{
    h, t0 = onnxpar.Start <op="AllReduce"> (big)
    y1, t1 = onnxpar.AllReduce <reduction="max"> (small, t0)
    y2, t2 = onnxpar.AllReduce <reduction="max"> (y1, t1)
    y3, t3 = onnxpar.AllReduce <reduction="sum"> (y2, t2)
    sum = onnxpar.Wait <op="AllReduce"> (h, big) }}'''
both = session(rank, text)
for n in (1_000_003, 3, 300_007):
    big, small = (np.arange(k, dtype=np.float32) + me for k in (n, 40_000))
    sum, y = feed(both, {{"big": big, "small": small}})
    assert (sum == size * np.arange(n, dtype=np.float32) + size * (size - 1) // 2).all()
    assert (y == size * (np.arange(40_000, dtype=np.float32) + size - 1)).all()
print("done")
"""
WAYS = {"messages": ("0", "0"), "nested": ("1", "2")}
ways = pytest.mark.parametrize("way", ["nested", pytest.param("messages", marks=pytest.mark.full)])


@ways
def test_background_and_foreground_at_once(way: str) -> None:
    memory, ranks_per_machine = WAYS[way]
    body = BOTH_LANES.format(memory=memory, ranks_per_machine=ranks_per_machine)
    result = mpirun(4, ["-c", HEAD + body], limit=100)
    assert result.code == 0 and result.text.count("done") == 4, result.text


DISAGREE = """
rank = connect("{memory}", "{ranks_per_machine}")
x = np.ones(4, np.float32)
calls = [dict(op="max", array=x), dict(array=np.ones(30_000, np.float32))]
for odd in [[0], [1], [3], [0, 2], [0, 3], [2, 3]]:
    for call in calls:
        try:
            rank.all_reduce(**(call if me in odd else dict(array=x)))
        except Exception as error:
            print("caught", me, str(error).replace("\\n", " "))
        assert rank.all_reduce(x).tolist() == [size] * 4  # the refused call has no later effect
gathers = "g (float[n] x) => (float[m] y) {{ y, t = onnxpar.AllGather <axis=0> (x) }}"
attributes = "<split_axis=0, concat_axis=0>"
exchanges = f"g (float[n] x) => (float[m] y) {{{{ y, t = onnxpar.AllToAll {{attributes}} (x) }}}}"
try:
    feed(session(rank, gathers if me < 2 else exchanges), {{"x": x}})
except Exception as error:
    print("caught", me, str(error).replace("\\n", " "))
"""


@ways
def test_every_rank_learns_of_a_disagreement(way: str) -> None:
    """Of ranks of one machine, of machines, and of both."""
    memory, ranks_per_machine = WAYS[way]
    body = DISAGREE.format(memory=memory, ranks_per_machine=ranks_per_machine)
    result = mpirun(4, ["-c", HEAD + body], limit=100)
    assert result.code == 0, result.text
    for rank in range(4):
        caught = re.findall(
            rf"^caught {rank} .*: disagrees with rank [0-3]: got .*, where rank [0-3] calls .*",
            result.text,
            re.MULTILINE,
        )
        assert len(caught) == 13, result.text


def test_a_rank_that_dies_ends_a_transfer() -> None:
    body = """
rank = connect("0", "0")
x = np.ones(1 << 24, np.float32)
if me == 1:
    import signal
    signal.setitimer(signal.ITIMER_REAL, 1)  # kills the process
while True:
    rank.all_reduce(x)
"""
    result = mpirun(2, ["-c", HEAD + body], limit=60)
    assert result.code != 0 and result.seconds < 20, result.text
