"""The last calls of a rank, as the library writes them when the rank fails (`call_log.h`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from onnxpar_format.records import Check, FormatError, from_json, load_json

COLUMNS = (
    "number",
    "kind",
    "state",
    "name",
    "channel",
    "place",
    "tensors",
    "bytes",
    "signature",
    "begin",
    "met",
    "end",
    "behind",
)
"""The columns of a row of logged calls."""
COLLECTIVE, SEND, RECV, WAIT, SET_UP = "collective", "send", "receive", "wait", "set-up"
"""What a call is: a `wait` is that of the foreground for a call in the background, a `set-up` that
of a group's communicator."""
KINDS = (COLLECTIVE, SEND, RECV, WAIT, SET_UP)
"""By the number of `CallKind`."""
ASKED, TERMINATED = "asked by SIGUSR1", "ended by SIGTERM"
"""Reasons of ranks that have not failed themselves."""
_DONE = 1  # the number of `CallState` for a call that has ended well
_SUFFIX = ".calls.json"
_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class LastCall:
    """A call of a collective, or a message.

    Attributes:
        kind: One of `KINDS`.
        done: Whether it has ended well.
        name: The node, or what the program calls.
        ranks: The members; of a message the sender and the receiver.
        lane: 0 in the foreground, 1 in the background.
        tag: Of a message.
        place: Its number among the calls of this kind, members, lane and tag.
        tensors: Number of tensors; 0 for messages.
        bytes: Bytes of this rank's tensors.
        signature: Of a collective: equal for all members, unless they disagree.
        begin: When it began, in seconds of the wall clock.
        end: When it ended; 0 if it has not.
    """

    kind: str
    done: bool
    name: str
    ranks: tuple[int, ...]
    lane: int
    tag: int
    place: int
    tensors: int
    bytes: int
    signature: int
    begin: float
    end: float


@dataclass(frozen=True)
class RankCalls:
    """The last calls of a rank.

    Attributes:
        rank: The rank.
        size: Number of ranks.
        host: Name of its machine.
        reason: Why they were written.
        time: When, in seconds of the wall clock.
        calls: In the order in which they began.
    """

    rank: int
    size: int
    host: str
    reason: str
    time: float
    calls: Sequence[LastCall]


def calls_file(folder: str | Path, rank: int) -> Path:
    """Returns the file of a rank in a folder."""
    return Path(folder) / f"rank{rank:04d}{_SUFFIX}"


def read_calls(folder: str | Path) -> list[RankCalls]:
    """Returns the last calls of the ranks that have written them to a folder, in order.

    Raises:
        FormatError: A file cannot be read, or there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FormatError(f"{folder}: there is no such folder")
    files = sorted(folder.glob(f"rank*{_SUFFIX}"))
    if not files:
        raise FormatError(
            f"{folder}: expected files such as rank0000{_SUFFIX}, which ranks write when they fail"
        )
    return [_read(file) for file in files]


@dataclass(frozen=True)
class _Channel:
    ranks: tuple[int, ...]
    lane: int
    tag: int


_Row = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class _CallsFile:
    """A file as the library writes it; a row of `calls` has the `COLUMNS`."""

    rank: Annotated[int, Check("0 or more", lambda rank: rank >= 0)]
    size: Annotated[int, Check(f"from 1 to {_MOST_RANKS}", lambda n: 1 <= n <= _MOST_RANKS)]
    host: str
    reason: str
    wall_ns: int
    time_ns: int
    names: tuple[str, ...]
    channels: tuple[_Channel, ...]
    calls: tuple[_Row, ...]


def _read(file: Path) -> RankCalls:
    found = load_json(file, f"{file.name} is missing")
    raw = from_json(
        _CallsFile, found, f"{file}: expected the last calls of a rank, got other contents"
    )
    ahead = raw.wall_ns - raw.time_ns
    try:
        calls = [_call(dict(zip(COLUMNS, row, strict=True)), raw, ahead) for row in raw.calls]
        return RankCalls(raw.rank, raw.size, raw.host, raw.reason, raw.wall_ns * 1e-9, calls)
    except (IndexError, OverflowError) as error:
        raise FormatError(
            f"{file}: expected the last calls of a rank, got other contents: {error}"
        ) from None


def _call(row: dict[str, int], raw: _CallsFile, ahead: int) -> LastCall:
    channel = raw.channels[row["channel"]]
    return LastCall(
        KINDS[row["kind"]],
        row["state"] == _DONE,
        raw.names[row["name"]],
        channel.ranks,
        channel.lane,
        channel.tag,
        row["place"],
        row["tensors"],
        row["bytes"],
        row["signature"],
        (row["begin"] + ahead) * 1e-9,
        (row["end"] + ahead) * 1e-9 if row["end"] else 0.0,
    )
