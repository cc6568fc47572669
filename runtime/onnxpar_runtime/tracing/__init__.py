"""What ranks do, and when.

Takes a rank's spans and the calls that the library has logged; gives one trace of all ranks
(`onnxpar_format.trace`). Begin with `recording`; the rest of the runtime only uses `Rank.timeline`.
"""
