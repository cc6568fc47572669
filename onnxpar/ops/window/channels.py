"""The channels in a convolution's rule: input and output channels share the factor of groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxpar.core.errors import NodeError
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.local_node import LocalNode

BATCH, GROUP, FEW, MANY = "N", "G", "C", "M"


@dataclass(frozen=True)
class Channels:
    """The channel dims in the text of a rule; a factor of one element is left out.

    Attributes:
        image: Channels of the image that a convolution slides over, groups major.
        results: Channels of its results, groups major.
        few: Channels of the image in one group, which are a dim of the weights.
        sizes: Sizes of the factors of merged dims.
        group: Number of groups.
    """

    image: str
    results: str
    few: str
    sizes: Mapping[str, Dim]
    group: int

    @property
    def summed(self) -> str:
        """The clause for the channels that a convolution sums over."""
        return f"; sum: {FEW}" if self.few != "1" else ""

    @property
    def gathered(self) -> str:
        """The clause for the channels that a transposed convolution sums over."""
        return f"; sum: {MANY}" if MANY in self.results else ""

    def local_group(self, node: LocalNode) -> Dim:
        """Number of groups on one device."""
        return node.local_size(GROUP) if self.group > 1 else 1


def channels(view: NodeView, few: Dim, many: Dim, group: int) -> Channels:
    """Returns the channel dims in the text of a rule.

    Args:
        view: The node.
        few: Channels of the image, in all groups.
        many: Channels of the results, in all groups.
        group: Number of groups.

    Raises:
        ModelError: A number of channels is unknown.
        NodeError: The groups do not divide it.
    """
    if not isinstance(few, int) or not isinstance(many, int):
        raise view.fail(f"sharding needs constant numbers of channels, got {few} and {many}")
    if group < 1 or few % group or many % group:
        raise view.fail(f"expected {group} groups to divide {few} and {many} channels", NodeError)
    sizes: dict[str, Dim] = {}
    image, one = channel_dims(sizes, group, FEW, few // group)
    results, _ = channel_dims(sizes, group, MANY, many // group)
    return Channels(image, results, one, sizes, group)


def channel_dims(sizes: dict[str, Dim], group: int, name: str, size: int) -> tuple[str, str]:
    """Returns a dim of groups times `size`, and a dim of `size` alone, in the text of a rule.

    Args:
        sizes: The sizes of factors of merged dims, to which new ones are added.
        group: Number of groups.
        name: The factor of the channels in one group.
        size: Its size.
    """
    if group == 1:
        return name, name
    sizes[GROUP] = group
    if size == 1:
        return GROUP, "1"
    sizes[name] = size
    return f"({GROUP} {name})", name
