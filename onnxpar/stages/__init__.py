"""Pipeline stages: where nodes run, what it costs, and the programs of each stage.

Takes a program, then its partitioned form; gives virtual stages and the programs of each stage.
Begin with `stage_programs`, which uses the others: `assign_stages` and `partition_chain` decide,
`place_nodes` and `split_program` carry out, `state_buffers` lays out what training keeps.
"""
