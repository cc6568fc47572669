"""The files that the transformer writes and the runtime reads and writes: their records and sizes.

Takes the JSON of a manifest or a checkpoint, and gives frozen dataclasses, and back. An error names
the file, the place in it, what was expected and what was found. Both sides also share arithmetic
from here: sizes as expressions in symbols, and which elements of a sharded tensor a rank holds. It
imports neither side, only numpy and its bfloat16 (`ml_dtypes`). Begin with `manifest` and
`checkpoint`; `records` turns their dataclasses into JSON and back, `boxes` has shards,
`expressions` sizes, `dtypes` element types.
"""
