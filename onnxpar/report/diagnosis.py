"""Which rank is behind after a hang or a crash, from the last calls of all ranks.

Members of a group make the same calls in the same order. So the calls at one place of a group are
compared, and the first place at which the members made different calls is a mismatch. If there is
none, the search goes from each rank that waits to the ranks that it waits for, until it reaches a
rank that waits for nobody.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.core.errors import OnnxparError
from onnxpar_format.calls import (
    ASKED,
    COLLECTIVE,
    RECV,
    SEND,
    SET_UP,
    TERMINATED,
    WAIT,
    LastCall,
    RankCalls,
    read_calls,
)
from onnxpar_format.records import FormatError
from onnxpar_format.texts import numbered_ranks, ranks_text

_TIME_LIMIT = "ONNXPAR_TIMEOUT"
"""Is in the reason of a rank that waited too long."""
Channel = tuple[str, tuple[int, ...], int, int]
"""Kind, members, lane and tag of calls."""


class DiagnosisError(OnnxparError):
    """A folder has no last calls of ranks."""


@dataclass(frozen=True)
class Diagnosis:
    """What the last calls of ranks say.

    Attributes:
        ranks: The ranks that are behind, or that made another call than the others; several if it
            is not known which of them is wrong.
        findings: What was found, for people.
        last: For each rank, its last call.
    """

    ranks: Sequence[int]
    findings: Sequence[str]
    last: Sequence[str]

    def json(self) -> Mapping[str, Any]:
        """Returns it as plain data."""
        return {"ranks": list(self.ranks), "findings": list(self.findings), "last": list(self.last)}


def diagnose(folder: str | Path) -> Diagnosis:
    """Returns what the last calls of ranks in a folder say.

    Raises:
        DiagnosisError: There are none, or a file cannot be read.
    """
    try:
        found = read_calls(folder)
    except FormatError as error:
        raise DiagnosisError(str(error)) from None
    return _Diagnoser(found).diagnosis()


class _Diagnoser:
    """Compares the last calls of ranks, as they were when the first rank failed."""

    def __init__(self, files: Sequence[RankCalls]) -> None:
        self._files = {file.rank: file for file in files}
        self._size = max(file.size for file in files)
        failed = [file for file in files if file.reason not in (ASKED, TERMINATED)]
        self._first = min(failed, key=lambda file: file.time) if failed else None
        self._now = min(file.time for file in failed or files)
        # Ranks that were stopped may have gone on since then.
        self._calls = {
            file.rank: [call for call in file.calls if call.begin <= self._now] for file in files
        }
        self._at: dict[Channel, dict[int, dict[int, LastCall]]] = defaultdict(dict)
        for rank, calls in self._calls.items():
            for call in calls:
                self._at[_channel(call)].setdefault(rank, {})[call.place] = call

    def diagnosis(self) -> Diagnosis:
        last = [self._last(rank) for rank in range(self._size)]
        first = self._first
        ranks, findings = self._mismatch()
        if not findings and first is not None and _TIME_LIMIT not in first.reason:
            ranks, findings = [first.rank], [f"rank {first.rank} failed: {first.reason}"]
        if not findings:
            ranks, findings = self._behind()
        return Diagnosis(ranks, findings, last)

    # -- calls that differ -----------------------------------------------------------------------

    def _mismatch(self) -> tuple[list[int], list[str]]:
        """Returns the ranks whose call differs at the first place where calls differ."""
        found = []
        for channel, ranks in self._at.items():
            if channel[0] != COLLECTIVE:
                continue
            for place in sorted({place for calls in ranks.values() for place in calls}):
                here = {rank: calls[place] for rank, calls in ranks.items() if place in calls}
                if len({_what(call) for call in here.values()}) > 1:
                    found.append((min(c.begin for c in here.values()), channel, place, here))
                    break
        if not found:
            return [], []
        _, channel, place, here = min(found, key=lambda one: one[0])
        wrong = self._wrong(channel, place, here)
        kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, call in here.items():
            kinds[_what(call)].append(rank)
        group = numbered_ranks(channel[1])
        calls = "; ".join(
            f"{numbered_ranks(ranks)}: {_described(here[ranks[0]])}" for ranks in kinds.values()
        )
        lines = [f"{group} differ in call {place} of their group: {calls}"]
        if len(wrong) < len(here):
            lines += self._explained(channel, place, here, wrong)
        else:
            lines.append("earlier calls do not show which of them is wrong")
        return wrong, lines

    def _wrong(self, channel: Channel, place: int, here: Mapping[int, LastCall]) -> list[int]:
        """Returns the ranks that are not as most are, or else not as all were before."""
        (most, first), (_, second), *_ = Counter(map(_what, here.values())).most_common()
        expected = most if first > second else self._expected(channel, place)
        right = [rank for rank, call in here.items() if _what(call) == expected]
        return [rank for rank in here if rank not in right] if right else list(here)

    def _expected(self, channel: Channel, place: int) -> tuple[str, int] | None:
        """Returns the call that followed, on earlier occasions, the calls before this place."""
        for calls in self._at[channel].values():
            before = _what_at(calls, place - 1)
            for earlier in range(place - 2, min(calls) - 1, -1):
                if before is not None and _what_at(calls, earlier) == before:
                    return _what_at(calls, earlier + 1)
        return None

    def _explained(
        self, channel: Channel, place: int, here: Mapping[int, LastCall], wrong: Sequence[int]
    ) -> list[str]:
        lines = []
        (expected,) = {_what(call) for rank, call in here.items() if rank not in wrong}
        name = next(call.name for rank, call in here.items() if rank not in wrong)
        after = self._follower(channel, expected)
        for rank in wrong:
            call = here[rank]
            if call.name == name:
                lines.append(
                    f"rank {rank} calls {name} with other tensors: {call.bytes:,} bytes in "
                    f"{call.tensors}"
                )
            elif after == _what(call):
                lines.append(f"rank {rank} skipped {name}, and goes on with {call.name}")
            else:
                lines.append(f"rank {rank} calls {call.name} where {name} is expected")
        return lines

    def _follower(self, channel: Channel, what: tuple[str, int]) -> tuple[str, int] | None:
        """Returns the call that followed another on the channel on earlier occasions."""
        for calls in self._at[channel].values():
            for place in sorted(calls):
                if _what(calls[place]) == what and place + 1 in calls:
                    return _what(calls[place + 1])
        return None

    # -- calls that wait -------------------------------------------------------------------------

    def _behind(self) -> tuple[list[int], list[str]]:
        """Returns the ranks for which others wait, and that wait for nobody."""
        waits: dict[int, dict[int, LastCall]] = {}
        for rank, calls in self._calls.items():
            waits[rank] = {}
            for call in calls:
                if not call.done and (not call.end or call.end > self._now):
                    for other in self._missing(call):
                        waits[rank].setdefault(other, call)
        awaited = {other for found in waits.values() for other in found}
        ends = sorted(other for other in awaited if not waits.get(other))
        # Of several, one that gave up waiting was alive, within a call that another has not left.
        ends = [rank for rank in ends if not self._gave_up(rank)] or ends
        if not ends and awaited:
            order = sorted(awaited)
            lines = [
                f"rank {rank} waits for {numbered_ranks(sorted(waits[rank]))} in "
                f"{_described(next(iter(waits[rank].values())))}"
                for rank in order
            ]
            return order, ["ranks wait for one another:", *lines]
        silent = [rank for rank in range(self._size) if rank not in self._files]
        if not ends and silent:
            return silent, [
                f"{numbered_ranks(silent)} wrote no calls: stopped, died, or could not write"
            ]
        if not ends:
            return [], ["no rank waits for another: all members have reached every call that began"]
        return ends, [self._said(rank, waits) for rank in ends]

    def _gave_up(self, rank: int) -> bool:
        """Returns whether a rank ended because it had waited for its time limit."""
        file = self._files.get(rank)
        return file is not None and _TIME_LIMIT in file.reason

    def _missing(self, call: LastCall) -> list[int]:
        """Returns the members that have not made a call."""
        if call.kind in (SEND, WAIT):
            return []  # what is waited for in the background is a call itself
        channel = _channel(call)
        if call.kind == RECV:
            channel = (SEND, *channel[1:3], channel[3])
            sent = {
                place
                for (kind, ranks, _, tag), found in self._at.items()
                if (kind, ranks, tag) == (SEND, call.ranks, call.tag)
                for place in found.get(call.ranks[0], {})
            }
            return [] if sent and max(sent) >= call.place else [call.ranks[0]]
        ranks = self._at[channel]
        return [
            member
            for member in call.ranks
            if member not in ranks or max(ranks[member]) < call.place
        ]

    def _said(self, rank: int, waits: Mapping[int, Mapping[int, LastCall]]) -> str:
        call = next(found[rank] for found in waits.values() if rank in found)
        waiting = sorted(
            r for r in waits if rank in waits[r] and waits[r][rank].ranks == call.ranks
        )
        text = (
            f"rank {rank} is behind: it never reached {_described(call)}, call {call.place} of the "
            f"group {ranks_text(call.ranks)}, in which {numbered_ranks(waiting)} "
            f"{'has' if len(waiting) == 1 else 'have'} waited for {self._now - call.begin:.1f} s"
        )
        file = self._files.get(rank)
        if file is None:
            return f"{text}; it wrote no calls: it was stopped, died, or could not write"
        calls = self._calls[rank]
        if not calls:
            return f"{text}; it has made no calls at all"
        ended = [call for call in calls if call.end and call.end <= self._now]
        if len(ended) < len(calls):
            return f"{text}; it is in {_described(calls[-1])}"
        since = self._now - max(call.end for call in ended)
        return f"{text}; it has made no calls for {since:.1f} s; the last was {calls[-1].name}"

    def _last(self, rank: int) -> str:
        file = self._files.get(rank)
        if file is None:
            return f"rank {rank}: wrote no calls"
        calls = self._calls[rank]
        if not calls:
            return f"rank {rank} on {file.host}: no calls; {file.reason}"
        call = calls[-1]
        ended = call.end and call.end <= self._now
        group = numbered_ranks(call.ranks)
        since = f"ended {self._now - call.end:.1f} s earlier" if ended else "has not ended"
        return (
            f"rank {rank} on {file.host}: call {call.place} of the group of {group}, "
            f"{_described(call)}, {since}; {file.reason}"
        )


def _channel(call: LastCall) -> Channel:
    return call.kind, call.ranks, call.lane, call.tag


def _what(call: LastCall) -> tuple[str, int]:
    """Returns what must be equal for all members of a call."""
    return call.name, call.signature


def _what_at(calls: Mapping[int, LastCall], place: int) -> tuple[str, int] | None:
    return _what(calls[place]) if place in calls else None


def _described(call: LastCall) -> str:
    if call.kind == SET_UP:
        return f"the first call of {call.name}"
    if call.tensors > 1:
        return f"{call.name} ({call.bytes:,} bytes in {call.tensors} tensors)"
    return f"{call.name} ({call.bytes:,} bytes)"
