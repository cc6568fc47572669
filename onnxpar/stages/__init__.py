"""Pipeline stages: where nodes run, what it costs, and the programs of each stage.

Takes a program before partitioning and a partitioned one after; gives virtual stages and programs.
Begin with `stage_programs`, which uses the others: `assign_stages` and `cut_chain` decide,
`place_nodes` and `split_program` carry out, `state_buffers` lays out what training keeps.
"""
