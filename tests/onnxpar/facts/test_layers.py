"""Where the layers of a row of items begin."""

from onnxpar.facts.layers import Layer, find_repetitions

LAYER = "abcdefgh"


def test_far_readers_do_not_move_the_beginning_of_layers() -> None:
    """As in a training graph, the backward pass reads each item of the forward pass."""
    count, begin = 6, 2
    kinds = [*"xy", *LAYER * count, *map(str, range(60))]
    last = begin + len(LAYER) * count
    # Each item reads the one before it, and within a layer also the one before that.
    spans = [(i - 1, i) for i in range(1, last)]
    spans += [(i - 2, i) for i in range(begin, last) if (i - begin) % len(LAYER) > 1]
    layers = [Layer(i, i + len(LAYER)) for i in range(begin, last, len(LAYER))]
    assert find_repetitions(kinds, spans) == layers
    far = [(i, len(kinds) - 1 - i) for i in range(last)]
    assert find_repetitions(kinds, spans + far) == layers
    # The first layer has an item more, so that only a part of it is like the others.
    more = begin + 3
    moved = [(a + (a >= more), b + (b >= more)) for a, b in spans + far]
    found = find_repetitions([*kinds[:more], "m", *kinds[more:]], moved)
    assert found == [Layer(layer.start + 1, layer.stop + 1) for layer in layers[1:]]
