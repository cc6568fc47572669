"""The files that the transformer writes and the runtime reads and writes: their records and sizes.

Takes the JSON of a manifest or a checkpoint, and gives frozen dataclasses, and back; an error names
the file, the place in it, what is expected and what is there. It also has the arithmetic that both
sides share: sizes as expressions in symbols, and which elements of a sharded tensor a rank holds.
It imports neither side, and nothing but numpy and its bfloat16 (`ml_dtypes`). Begin with `manifest`
and `checkpoint`; `records` turns their dataclasses into JSON and back, `boxes` has shards,
`expressions` sizes, `dtypes` element types.
"""
