"""What `inspect`, `shard` and `ops` show, as plain data.

Takes programs, plans and the table of operators; gives dictionaries that print as JSON.
Begin with `inspect_data`. The reasons of collectives are the conflicts that `propagation` finds.
"""
