"""The collectives and messages that the library has logged (`csrc/collective/call_log.h`)."""

from collections.abc import Callable, Iterator
from typing import Any

from onnxpar_format.calls import COLUMNS, KINDS, RECV
from onnxpar_format.trace import BACKGROUND, CALL, FOREGROUND, WAITING
from onnxpar_runtime.collectives import Rank


def logged(
    rank: Rank, thread: Callable[[str], int]
) -> Iterator[tuple[str, int, str, int, int, dict[str, Any]]]:
    """Returns the kept calls as spans: kind, track, name, start, end, more. They are forgotten.

    Times are those of `time.monotonic_ns`; those of calls on a GPU (`device`) come from events of
    its streams. The wait for the last rank is a span of its own, which begins with its call; on a
    GPU, it is not known from this rank's calls alone.

    Args:
        rank: The rank.
        thread: Returns the track of another thread by its name. Messages in the background have one
            for each sender, because they are received at the same time as others.
    """
    rows, tables = rank.take_calls()
    for values in rows.tolist():
        row = dict(zip(COLUMNS, values, strict=True))
        channel = tables["channels"][row["channel"]]
        kind = KINDS[row["kind"]]
        track = BACKGROUND if row["behind"] else FOREGROUND
        if row["behind"] and kind == RECV:
            track = thread(f"messages from rank {channel['ranks'][0]}")
        more = {
            "op": kind,
            "ranks": channel["ranks"],
            "lane": channel["lane"],
            "tag": channel["tag"],
            "place": row["place"],
            "bytes": row["bytes"],
            "tensors": row["tensors"],
        }
        if row["met"] < 0:
            more["device"] = True
        name = tables["names"][row["name"]]
        yield CALL, track, name, row["begin"], row["end"], more
        if row["met"] > row["begin"]:
            yield WAITING, track, "waiting", row["begin"], row["met"], {}
