"""Pipeline stages: where nodes run, what it costs, and the programs of each stage.

Takes a program before partitioning and a partitioned one after; gives virtual stages and programs.
Begin with `stage_programs`, which uses all others; `cut` decides, `split` carries out.
"""
