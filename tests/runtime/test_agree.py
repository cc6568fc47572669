"""Ranks go on together or raise together, with the lowest failing rank's message."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.errors import InputError, OnnxparRuntimeError, RankError, SymbolValueError

RANKS = 3


def on_all(action: Callable[[Rank], object]) -> list[object]:
    """Returns each rank's result, or the error that it raised."""

    def caught(rank: Rank) -> object:
        try:
            return action(rank)
        except OnnxparRuntimeError as error:
            return error

    with World.threads(RANKS) as world, ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(caught, [world.rank(r) for r in range(RANKS)]))


def failing_on(*ranks: int) -> Callable[[Rank], None]:
    def action(rank: Rank) -> None:
        agree(rank, InputError(f"mistake of {rank.index}") if rank.index in ranks else None)

    return action


def test_nothing_wrong() -> None:
    assert on_all(failing_on()) == [None] * RANKS


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,), (1, 2), (0, 2)])
def test_some_fail(ranks: tuple[int, ...]) -> None:
    errors = on_all(failing_on(*ranks))
    for error in errors:
        assert isinstance(error, RankError)
        assert (error.rank, error.exit_code, error.agreed) == (ranks[0], 2, True)
        assert str(error) == f"r{ranks[0]} | mistake of {ranks[0]}"


def test_all_fail_with_their_own_errors() -> None:
    errors = on_all(failing_on(0, 1, 2))
    assert [str(e) for e in errors] == ["mistake of 0", "mistake of 1", "mistake of 2"]
    assert all(isinstance(e, InputError) and e.agreed for e in errors)


def test_messages_of_any_text_and_length() -> None:
    for text in ("größer als 5 → no", "x" * 10_000, ""):
        errors = on_all(
            lambda rank, t=text: agree(rank, InputError(t) if rank.index == 1 else None)
        )
        assert {str(e) for e in errors} == {f"r1 | {text[:4096]}"}


def test_values() -> None:
    def compare(values: list[dict[str, int]]) -> list[object]:
        return on_all(lambda rank: agree(rank, None, values[rank.index], ["batch", "seq"]))

    assert compare([{"batch": 4, "seq": 7}] * 3) == [None] * 3
    assert compare([{"batch": 4}, {}, {"batch": 4, "seq": 7}]) == [None] * 3
    for error in compare([{"batch": 4, "seq": 7}, {"batch": 4, "seq": 9}, {"batch": 4}]):
        assert isinstance(error, SymbolValueError) and error.agreed
        assert str(error) == "symbol 'seq': expected one value on all ranks, got values from 7 to 9"


def test_together() -> None:
    def action(rank: Rank) -> int:
        if rank.index == 2:
            raise InputError("no file")
        return 10 * rank.index

    assert on_all(lambda rank: together(rank, lambda: 10 * rank.index)) == [0, 10, 20]
    assert {str(e) for e in on_all(lambda r: together(r, lambda: action(r)))} == {"r2 | no file"}


def test_one_rank_raises_its_own_error() -> None:
    with World.threads(1) as world, pytest.raises(InputError, match=r"^alone$") as caught:
        agree(world.rank(0), InputError("alone"))
    assert caught.value.agreed
