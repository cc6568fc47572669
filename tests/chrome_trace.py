"""What Chrome's "Trace Event Format" demands of a file, and what Perfetto needs to draw it.

The format is described in "Trace Event Format" (D. Duca, D. Sinclair, Google, 2016).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

Event = Mapping[str, Any]
_EVERY = ("name", "ph", "pid", "tid")
_KEYS = {
    "X": ("ts", "dur"),
    "B": ("ts",),
    "E": ("ts",),
    "i": ("ts", "s"),
    "C": ("ts", "args"),
    "M": ("args",),
    **dict.fromkeys("bne", ("ts", "id", "cat")),
    **dict.fromkeys("stf", ("ts", "id", "cat")),
}
"""The keys that an event of each phase must have, besides those of every event."""
_METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
"""The metadata events, and the key of their arguments."""


def complaints(document: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with a trace, read from JSON; nothing if all is well."""
    events = document["traceEvents"]
    found = [f"{number}: {text}" for number, e in enumerate(events) if (text := _wrong(e))]
    if found:
        return found
    tracks: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "XBE":
            tracks[event["pid"], event["tid"]].append(event)
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for (pid, tid), own in tracks.items():
        found += [f"{pid}, {tid}: {text}" for text in (*_disordered(own), *_crossing(own))]
        for what in ("process_name", "thread_name"):
            if not any(
                n == what and p == pid and (t == tid or "process" in n) for n, p, t in named
            ):
                found.append(f"{pid}, {tid}: no {what}")
    return [*found, *_unmatched(events, "bne"), *_unmatched(events, "stf")]


def _wrong(event: Event) -> str:
    """Returns what is wrong with an event by itself, or nothing."""
    phase = event.get("ph")
    if phase not in _KEYS:
        return f"phase {phase!r}"
    for key in (*_EVERY, *_KEYS[phase]):
        if key not in event:
            return f"{phase} without {key}"
    numbers = [event[key] for key in ("ts", "dur") if key in event]
    if not all(type(n) in (int, float) and isfinite(n) and n >= 0 for n in numbers):
        return f"{phase} with the times {numbers}"
    if not all(type(event[key]) is int for key in ("pid", "tid")):
        return f"{phase} of {event['pid']}, {event['tid']}"
    if phase == "M":
        key = _METADATA.get(event["name"])
        return "" if key is not None and key in event["args"] else f"metadata {event}"
    return ""


def _disordered(events: Sequence[Event]) -> list[str]:
    """Returns the events of a track that begin before the one that comes before them."""
    return [f"{b} behind {a}" for a, b in pairwise(events) if b["ts"] < a["ts"]]


def _crossing(events: Sequence[Event]) -> list[str]:
    """Returns the slices of a track that are neither apart from one another nor one in another.

    Perfetto counts in nanoseconds.
    """

    def nanoseconds(time: float) -> int:
        return round(time * 1000)

    found: list[str] = []
    ends: list[tuple[int, Event]] = []  # of the slices that are open
    for event in events:
        begin = nanoseconds(event["ts"])
        if event["ph"] == "E":
            if not ends or ends.pop()[1]["ph"] != "B":
                found.append(f"an end without a beginning: {event}")
            continue
        while ends and ends[-1][1]["ph"] == "X" and ends[-1][0] <= begin:
            ends.pop()
        end = begin + nanoseconds(event.get("dur", 0))
        if ends and ends[-1][1]["ph"] == "X" and end > ends[-1][0]:
            found.append(f"{event} ends {end - ends[-1][0]} ns after {ends[-1][1]}")
        ends.append((end, event))
    return [*found, *(f"a beginning without an end: {e}" for _, e in ends if e["ph"] == "B")]


def _unmatched(events: Sequence[Event], phases: str) -> list[str]:
    """Returns asynchronous slices or flows (first, middle, last phase) that are not complete."""
    own: defaultdict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in phases:
            own[event["cat"], event["id"]].append(event)
    first, _, last = phases
    found = []
    for key, group in own.items():
        order = [e["ph"] for e in sorted(group, key=lambda e: float(e["ts"]))]
        if order[0] != first or order[-1] != last or len({e["name"] for e in group}) > 1:
            found.append(f"{key}: {order}")
    return found
